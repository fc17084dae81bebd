"""Which pace keeps streams flowing and works a queue off: the online workloads of the benchmark in the simulator.

Steps cost what an 8B model's took on an H200 (fitted to the constant budget of 1,280 tokens there: TTFT 102/239/391 ms
and ITL p99 40.5 at 20 requests a second), padded to the sizes that are captured. Prints a line per setting and rate.

    python -m benchmarks.pace_study --trace azure2023_conv.csv
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.bench.workloads import ONLINE, make_workload, read_lengths
from paceline.costs.model import StepShape
from paceline.costs.presets import device_spec, model_shape
from paceline.report.summary import summarize
from paceline.sim import Machine, SimConfig, engine_config, simulate
from paceline.workload.model import Workload

OLD_SIZES = (64, 128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 3072, 4096)
SIZES = tuple(sorted((*OLD_SIZES, 1152, 1408, 1664, 1792, 2304, 2560)))
ENGINE = {"max_num_seqs": 1024, "num_blocks": 13_697, "max_model_len": 4096, "depth": 1}
HOST_STEP_S = 6e-4

PACE: dict[str, Any] = {"max_num_batched_tokens": 3072, "step_target_ms": 34.0}
SHORT_FIRST = {**PACE, "scheduling_policy": "short-first", "long_prefill_share": 1.0}
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
}


@dataclass(frozen=True)
class Card:
    """An 8B model on an H200, as far as the benchmark shows it."""

    sizes: tuple[int, ...] = SIZES

    def step_seconds(self, shape: StepShape) -> float:
        tokens = shape.tokens
        if shape.prefill_tokens and tokens <= self.sizes[-1]:
            tokens = self.sizes[bisect_left(self.sizes, tokens)]
        read_s = 31e-9 * shape.decode_context + 2.2e-9 * shape.prefill_context_products
        return max(5e-3, 1e-3 + 21.5e-6 * tokens) + read_s + 5e-6 * shape.logit_rows


def load(name: str, trace: list[tuple[int, int]]) -> Workload:
    """A workload of the benchmark, without its tokens."""
    requests = make_workload(name, ONLINE, trace).requests
    return Workload(
        name=name,
        arrival_s=np.array([request.arrival_s for request in requests]),
        prompt_len=np.array([len(request.prompt) for request in requests], np.int32),
        output_len=np.array([request.num_output for request in requests], np.int32),
        tenant=np.zeros(len(requests), np.int32),
        tenants=("default",),
        prefix_ids=None,
        prefix_block=0,
    )


def run(workload: Workload, options: dict[str, Any]) -> str:
    """Time to first token at p50, p90 and p99, and between tokens at p99, in milliseconds."""
    card = Card() if "step_target_ms" in options else Card(OLD_SIZES)
    machine = Machine.of(model_shape("llama-3.1-8b"), device_spec("h200"), card)
    engine = engine_config(machine, workload, {**ENGINE, **options})
    summary = summarize(
        simulate(SimConfig(machine=machine, engine=engine, host_step_s=HOST_STEP_S), workload)
    )
    ttft, itl = summary.ttft_s, summary.itl_s
    times = (ttft.p50, ttft.p90, ttft.p99, itl.p99)
    return " ".join(f"{1e3 * (seconds or 0.0):9.1f}" for seconds in times)


def main() -> None:
    parser = argparse.ArgumentParser(description="paces in the simulator")
    parser.add_argument("--trace", type=Path, required=True, help="the Azure 2023 conversation trace")
    trace = list(read_lengths(parser.parse_args().trace))
    workloads = [load(name, trace) for name in ("azure-conv@20", "azure-conv@32")]
    print(f"{'':34} {'rate':>5} {'TTFT p50':>9} {'p90':>9} {'p99':>9} {'ITL p99':>9}")
    for label, options in SETTINGS.items():
        for workload in workloads:
            print(f"{label:34} {workload.name[-2:]:>5} {run(workload, options)}", flush=True)


if __name__ == "__main__":
    main()
