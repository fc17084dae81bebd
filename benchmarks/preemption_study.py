"""What becomes of KV when a request gives way: always computed again, always swapped, or the cheaper of the two.

An 8B model on a modelled H200 with a small KV pool, so that requests give way all the time, and a host link that is
fast, slow or in between. Each line is one load; the figure is the mean time from arrival to the last token, and the
time until everything is done. The cost-based choice must never be more than 5 % worse than the better of the other two,
and better than both where requests are long and short.

    python -m benchmarks.preemption_study [--requests 400] [--seed 1] [--loads short,mixed]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from paceline.costs.presets import device_spec, model_shape
from paceline.lab.report.record import OUTCOMES
from paceline.lab.sim import Machine, SimConfig, engine_config, simulate
from paceline.lab.workload.model import Workload

KINDS = ("recompute", "swap", "auto")
POOL_TOKENS = 50_000
BLOCK = 16
LINKS_GB_S = (3.0, 10.0, 50.0)
# Prompt and output tokens, each with its share of the requests.
LOADS = {
    "short": ((200, 800, 1.0),),
    "long": ((6_000, 3_000, 1.0),),
    "long outputs": ((300, 2_500, 1.0),),
    "mixed": ((150, 900, 0.8), (16_000, 4_000, 0.2)),
}
FINISHED = OUTCOMES.index("finished")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One run."""

    mean_s: float
    whole_s: float
    preemptions: int


def make_load(name: str, count: int, seed: int) -> Workload:
    """All there from the start but for the first seconds: the pool decides how many run."""
    random = np.random.default_rng(seed)
    prompts, outputs, shares = (np.array(column) for column in zip(*LOADS[name], strict=True))
    kind = random.choice(len(shares), count, p=shares)
    spread = random.uniform(0.5, 1.5, (2, count))
    return Workload(
        name=name,
        arrival_s=np.sort(random.uniform(0.0, 5.0, count)),
        prompt_len=np.maximum(1, prompts[kind] * spread[0]).astype(np.int32),
        output_len=np.maximum(1, outputs[kind] * spread[1]).astype(np.int32),
        tenant=np.zeros(count, np.int32),
        tenants=("default",),
        prefix_ids=None,
        prefix_block=0,
    )


def run(load: Workload, kind: str, link_gb_s: float) -> Found:
    device = replace(device_spec("h200"), host_link_bandwidth=link_gb_s * 1e9)
    machine = Machine.of(model_shape("llama-3.1-8b"), device)
    blocks = POOL_TOKENS // BLOCK + 1
    options = {
        "block_size": BLOCK,
        "num_blocks": blocks,
        "num_host_blocks": 4 * blocks,
        "preemption": kind,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
    }
    config = SimConfig(machine=machine, engine=engine_config(machine, load, options))
    record = simulate(config, load, label=kind)
    done = record.outcome == FINISHED
    return Found(
        mean_s=float((record.finished_s - record.arrival_s)[done].mean()),
        whole_s=float(np.nanmax(record.finished_s)),
        preemptions=int(record.preemptions.sum()),
    )


def lines(names: list[str], count: int, seed: int) -> Iterator[tuple[str, float, dict[str, Found]]]:
    for name in names:
        load = make_load(name, count, seed)
        for link_gb_s in LINKS_GB_S:
            yield name, link_gb_s, {kind: run(load, kind, link_gb_s) for kind in KINDS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--loads", default=",".join(LOADS))
    arguments = parser.parse_args()
    print("| load | link | recompute | swap | auto | auto / better | holds |\n|---|---|---|---|---|---|---|")
    worst = 0.0
    for name, link_gb_s, found in lines(arguments.loads.split(","), arguments.requests, arguments.seed):
        better = min(found["recompute"].mean_s, found["swap"].mean_s)
        ratio = found["auto"].mean_s / better
        worst = max(worst, ratio)
        cells = [
            f"{found[kind].mean_s:.2f} s, {found[kind].whole_s:.1f} s, {found[kind].preemptions:,} gave way"
            for kind in KINDS
        ]
        holds = "yes" if ratio <= 1.05 else "NO"
        print(f"| {name} | {link_gb_s:g} GB/s | {' | '.join(cells)} | {ratio:.3f} | {holds} |", flush=True)
    print(f"\nworst: {worst:.3f}")


if __name__ == "__main__":
    main()
