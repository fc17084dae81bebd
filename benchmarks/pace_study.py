"""Which pace keeps streams flowing and works a queue off: the online workloads of the benchmark in the simulator.

Steps cost what those of an 8B model took on an H200: fitted to 3,353 steps recorded there with a constant budget of
1,280 tokens, four in five of them predicted within 4 %. Larger steps were not seen and are taken to cost as much per
token. Prints a line per setting and rate. With --others, the mean over ten other parts of the trace with arrivals of
their own: settings chosen on one part of 500 requests, of which five make the p99, may suit that part only.

    python -m benchmarks.pace_study --trace azure2023_conv.csv [--others]
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.costs.model import PiecewiseLinear, StepShape
from paceline.costs.presets import device_spec, model_shape
from paceline.lab.bench.workloads import LONGEST_OUTPUT, LONGEST_PROMPT, ONLINE, make_workload, read_lengths
from paceline.lab.report.summary import summarize
from paceline.lab.sim import Machine, SimConfig, engine_config, simulate
from paceline.lab.workload.model import Workload

OLD_SIZES = (64, 128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 3072, 4096)
SIZES = tuple(sorted((*OLD_SIZES, 1152, 1408, 1664, 1792, 2304, 2560)))
ENGINE = {"max_num_seqs": 1024, "num_blocks": 13_697, "max_model_len": 4096, "depth": 1}
HOST_STEP_S = 6e-4
# Steps with prompts by their number of tokens, contexts left out.
MIXED_MS = PiecewiseLinear(
    (128, 256, 384, 512, 640, 768, 1024, 1280), (6.3, 8.2, 10.2, 12.7, 16.5, 18.3, 23.5, 29.9), 23.3e-3
)

PACE: dict[str, Any] = {"max_num_batched_tokens": 3072, "step_target_ms": 34.0}
SHORT_FIRST = {**PACE, "scheduling_policy": "shortest", "output_handicap_ms": 0.0, "long_prefill_share": 1.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "1,280 tokens": {"max_num_batched_tokens": 1280},
    "33 ms, never stretched": {**PACE, "step_target_ms": 33.0, "step_stretch": 1.0},
    "58 ms, never stretched": {**PACE, "step_target_ms": 58.0, "step_stretch": 1.0},
    "34 to 58 ms": PACE,
    "34 to 58 ms, patience 0.15 s": {**PACE, "step_patience_s": 0.15},
    "34 to 58 ms, whole prompts": {**PACE, "long_prefill_share": 1.0},
    "34 to 58 ms, short first, halves": {**SHORT_FIRST, "long_prefill_share": 0.5},
    "34 to 58 ms, short first": SHORT_FIRST,
    "34 to 58 ms, short first by 0.2": {**SHORT_FIRST, "prompt_handicap_ms": 0.2},
    "32.5 to 57 ms, short first": {**SHORT_FIRST, "step_target_ms": 32.5, "step_stretch": 1.75},
}


@dataclass(frozen=True)
class Card:
    """An 8B model on an H200, as far as the benchmark shows it."""

    sizes: tuple[int, ...] = SIZES

    def step_seconds(self, shape: StepShape) -> float:
        tokens = shape.tokens
        if not shape.prefill_tokens:
            return 4.84e-3 + 11.6e-6 * tokens + 29.4e-9 * shape.decode_context
        if tokens <= self.sizes[-1]:
            tokens = self.sizes[bisect_left(self.sizes, tokens)]
        read_s = 33.9e-9 * shape.decode_context + 1.62e-9 * shape.prefill_context_products
        return 1e-3 * MIXED_MS(tokens) + read_s


def load(name: str, trace: list[tuple[int, int]]) -> Workload:
    """A workload of the benchmark, without its tokens."""
    requests = make_workload(name, ONLINE, trace).requests
    sizes = [(len(request.prompt), request.num_output) for request in requests]
    return _workload(name, [request.arrival_s for request in requests], sizes)


def load_others(rate: int, count: int, trace: list[tuple[int, int]]) -> list[Workload]:
    """Other requests of the trace, in ten parts that may overlap."""
    loads = []
    for part in range(10):
        gaps = np.random.default_rng(100 + part).exponential(1.0 / rate, count)
        first = 6000 + 800 * part
        cut = [
            (min(prompt, LONGEST_PROMPT), min(output, LONGEST_OUTPUT))
            for prompt, output in trace[first : first + count]
        ]
        loads.append(_workload(f"others@{rate}", np.cumsum(gaps).tolist(), cut))
    return loads


def _workload(name: str, arrivals: list[float], sizes: list[tuple[int, int]]) -> Workload:
    return Workload(
        name=name,
        arrival_s=np.array(arrivals),
        prompt_len=np.array([prompt for prompt, _ in sizes], np.int32),
        output_len=np.array([output for _, output in sizes], np.int32),
        tenant=np.zeros(len(sizes), np.int32),
        tenants=("default",),
        prefix_ids=None,
        prefix_block=0,
    )


def run(workload: Workload, options: dict[str, Any]) -> list[float]:
    """Time to first token at p50, p90 and p99, and between tokens at p99, in milliseconds."""
    card = Card() if "step_target_ms" in options else Card(OLD_SIZES)
    machine = Machine.of(model_shape("llama-3.1-8b"), device_spec("h200"), card)
    engine = engine_config(machine, workload, {**ENGINE, **options})
    summary = summarize(
        simulate(SimConfig(machine=machine, engine=engine, host_step_s=HOST_STEP_S), workload)
    )
    ttft, itl = summary.ttft_s, summary.itl_s
    return [1e3 * (seconds or 0.0) for seconds in (ttft.p50, ttft.p90, ttft.p99, itl.p99)]


def main() -> None:
    parser = argparse.ArgumentParser(description="paces in the simulator")
    parser.add_argument("--trace", type=Path, required=True, help="the Azure 2023 conversation trace")
    parser.add_argument("--others", action="store_true", help="ten other parts of the trace instead")
    arguments = parser.parse_args()
    trace = list(read_lengths(arguments.trace))
    groups = [[load(name, trace)] for name in ("azure-conv@20", "azure-conv@32")]
    if arguments.others:
        groups = [load_others(20, 500, trace), load_others(32, 800, trace)]
    print(f"{'':34} {'rate':>5} {'TTFT p50':>9} {'p90':>9} {'p99':>9} {'ITL p99':>9}")
    for label, options in SETTINGS.items():
        for group in groups:
            means = np.mean([run(workload, options) for workload in group], axis=0)
            shown = " ".join(f"{milliseconds:9.1f}" for milliseconds in means.tolist())
            print(f"{label:34} {group[0].name[-2:]:>5} {shown}", flush=True)


if __name__ == "__main__":
    main()
