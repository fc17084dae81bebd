"""Deciding whether to load a prefix or to compute it again, against always loading and never loading.

Users come back in turn with prompts that the device has evicted and the host still has, in the simulator: links of 1 to
100 GB/s, a small model and a large one on an H200. *apart*: a request every other moment, mean seconds to the first
token. *at once*: all requests are there from the start, seconds until all are done. The columns of the rule and of both
others are followed by how far the rule is behind the better of them.

    python -m benchmarks.load_study [--models qwen3-0.6b,llama-3.1-8b] [--tokens 8192] [--requests 96]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.harness import Benchmark, Found, Given, at_once, flag, rows_of
from paceline.config.engine import EngineConfig, PreemptionCosts
from paceline.costs.presets import device_spec, model_shape
from paceline.lab.sim import Machine, SimConfig, engine_config, simulate
from paceline.lab.workload.workload import Workload

bench = Benchmark(__doc__)
LINKS = (1, 2, 5, 10, 20, 50, 100)  # GB/s
USERS, ON_DEVICE = 24, 8  # prompts that come in turn, and those that the device holds
OUTPUT = 2
BUSY = 0.6  # share of the time that a device which computes all prompts is busy, where requests come apart
DEAR_S = 1e3  # of a token: everything is loaded


def returning_users(tokens: int, requests: int, gap_s: float, block: int) -> Workload:
    """Prompts of equal length; user u's is the same whenever it comes. A last token is never shared."""
    parts = tokens // block
    own = [tuple(1000 * (number % USERS) + part for part in range(parts)) for number in range(requests)]
    random = np.random.default_rng(0)
    gaps = random.exponential(gap_s, requests)
    return Workload(
        name="returning users",
        arrival_s=np.cumsum(gaps),
        prompt_len=np.full(requests, parts * block, np.int32),
        output_len=np.full(requests, OUTPUT, np.int32),
        tenant=np.zeros(requests, np.int32),
        prefix_ids=tuple(own),
        prefix_block=block,
    )


def rules(costs: PreemptionCosts) -> dict[str, PreemptionCosts]:
    """The rule decides by costs: with wrong ones it always does the same."""
    return {
        "decides": costs,
        "always": replace(costs, token_s=DEAR_S),
        "never": replace(costs, token_s=0.0, product_s=0.0),
    }


def engine_of(machine: Machine, workload: Workload, gigabytes_s: float) -> EngineConfig:
    size = machine.block_size
    per_prompt = int(workload.prompt_len[0]) // size + 1
    blocks = {"num_blocks": ON_DEVICE * per_prompt + 1, "num_host_blocks": 2 * USERS * per_prompt}
    engine = engine_config(machine, workload, {**blocks, "eviction": "lru"})
    costs = engine.scheduler.preemption_costs
    assert costs is not None
    costs = replace(costs, block_s=size * machine.kv_bytes_per_token / (1e9 * gigabytes_s))
    return replace(
        engine,
        kv=replace(engine.kv, cache_on_host=True),
        scheduler=replace(engine.scheduler, preemption_costs=costs),
    )


def compared(machine: Machine, tokens: int, requests: int) -> Iterator[Found]:
    block = machine.block_size
    alone = returning_users(tokens, 1, 0.0, block)
    compute_s = simulate(
        SimConfig(machine=machine, engine=engine_config(machine, alone, {})), alone
    ).duration_s
    apart = returning_users(tokens, requests, compute_s / BUSY, block)
    for kind, workload in (("apart", apart), ("at once", at_once(apart))):
        for rate in LINKS:
            engine = engine_of(machine, workload, rate)
            assert engine.scheduler.preemption_costs is not None
            taken: dict[str, float] = {}
            loaded = 0.0
            for name, costs in rules(engine.scheduler.preemption_costs).items():
                ruled = replace(engine, scheduler=replace(engine.scheduler, preemption_costs=costs))
                record = simulate(SimConfig(machine=machine, engine=ruled), workload)
                waits = record.first_token_s - record.arrival_s
                taken[name] = float(waits.mean()) if kind == "apart" else record.duration_s
                if name == "decides":
                    loaded = float(record.cached_tokens.sum() / record.prompt_len.sum())
            behind = taken["decides"] / min(taken["always"], taken["never"]) - 1.0
            yield {
                "model": machine.model.name,
                "requests": kind,
                "GB/s": rate,
                **{f"{name}, s": value for name, value in taken.items()},
                "found": round(loaded, 3),
                "behind, %": round(100 * behind, 1),
            }


@bench.part(
    flag("--models", "qwen3-0.6b,llama-3.1-8b"),
    flag("--tokens", 8192, "of each prompt"),
    flag("--requests", 96),
)
def load_study(given: Given) -> Found:
    """The rule against always and never loading."""
    machines = [Machine.of(model_shape(name), device_spec("h200")) for name in given.models.split(",")]
    rows = rows_of(
        figures for machine in machines for figures in compared(machine, given.tokens, given.requests)
    )
    worst = max(rows, key=lambda found: found["behind, %"])
    print(
        f"the rule is at most {worst['behind, %']} % behind the better of the others ({worst['model']}, "
        f"{worst['requests']}, {worst['GB/s']} GB/s)"
    )
    return {"rows": rows, "worst_behind_percent": worst["behind, %"]}


if __name__ == "__main__":
    bench.main()
