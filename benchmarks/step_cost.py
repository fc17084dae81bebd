"""Host time per step: what scheduling costs when the device costs nothing.

Runs the real engine over a runner that answers at once, with rows at uniform phases within their blocks, and
prints mean and p99 over 512 consecutive steps: steady decode at several batch sizes, then 1,024 rows with 32
joining and 32 leaving in every step. Everything is included: block allocation, prefix keys, results, events.
CPU time is what the thread used; wall time also has what other programs on the machine took from it.

    python benchmarks/step_cost.py [--json FILE] [--overlapped]
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.config.engine import Capacity, EngineConfig, KVConfig, SchedulerConfig
from paceline.core.plan import EMPTY, STOPPED, StepPlan, StepResult
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.factory import build_engine

STEPS = 512
PROMPT = 64
SIZES = (1, 16, 64, 256, 1024, 4096)


class NoOpRunner:
    """Answers each plan at once with a token for every row that gets one. `leaving` rows stop in each step."""

    def __init__(self, num_rows: int) -> None:
        self.leaving = 0
        self._decoding = np.zeros(num_rows, np.bool_)
        self._generation = np.zeros(num_rows, np.int32)
        self._left = np.zeros(num_rows, np.int32)  # known tokens still to compute
        self._rows = EMPTY
        self._tokens = np.full((num_rows, 1), 7, np.int32)
        self._ones = np.ones(num_rows, np.int32)
        self._zeros = np.zeros(num_rows, np.uint8)
        self._finite = np.ones(num_rows, np.bool_)

    def reset(self, full: StepPlan) -> None:
        raise AssertionError("nothing fails here")

    def submit(self, plan: StepPlan) -> _Done:
        change = plan.decode_rows
        joins = plan.joins
        self._decoding[plan.leaves] = False
        self._generation[joins.row] = joins.generation
        self._left[joins.row] = joins.num_tokens - joins.num_computed
        if len(change.added) or len(change.removed) or len(plan.leaves):
            self._decoding[change.removed] = False
            self._decoding[change.added] = True
            self._rows = np.flatnonzero(self._decoding).astype(np.int32)
        rows, count = self._rows, self._ones[: len(self._rows)]
        finished = self._zeros[: len(rows)]
        if self.leaving and len(rows) > self.leaving:
            finished = finished.copy()
            finished[: self.leaving] = STOPPED
        spans = plan.spans
        if len(spans.row):
            self._left[spans.row] -= spans.num_scheduled
            rows = np.concatenate([rows, spans.row])
            count = np.concatenate([count, (self._left[spans.row] == 0).astype(np.int32)])
            finished = np.concatenate([finished, self._zeros[: len(spans.row)]])
        return _Done(
            StepResult(
                seq=plan.seq,
                rows=rows,
                generation=self._generation[rows],
                tokens=self._tokens[: len(rows)],
                count=count,
                finished=finished,
                finite=self._finite[: len(rows)],
            )
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Done:
    result: StepResult

    def wait(self) -> StepResult:
        return self.result


def make_engine(num_rows: int, *, depth: int, churn: bool) -> tuple[Engine, NoOpRunner]:
    block_size = 16
    longest = PROMPT + block_size + 3 * STEPS
    config = EngineConfig(
        kv=KVConfig(block_size=block_size, num_blocks=(num_rows + 64) * (longest // block_size + 2)),
        scheduler=SchedulerConfig(
            max_num_seqs=num_rows,
            max_num_batched_tokens=num_rows + (64 * PROMPT if churn else 65536),
            max_model_len=longest,
            max_queue=1_000_000,
        ),
        depth=depth,
    )
    runner = NoOpRunner(Capacity.of(config).num_rows)
    return build_engine(config, runner), runner


def add(engine: Engine, rng: np.random.Generator, phase: int, max_tokens: int) -> None:
    prompt = rng.integers(0, 32000, PROMPT + phase).astype(np.int32)
    engine.add(prompt, SamplingParams(max_tokens=max_tokens))


def measure(num_rows: int, *, depth: int, churn: int = 0) -> dict[str, float]:
    """Mean and p99 microseconds per step, of CPU and of wall time."""
    engine, runner = make_engine(num_rows, depth=depth, churn=bool(churn))
    rng = np.random.default_rng(0)
    step = engine.step_overlapped if depth else engine.step
    for index in range(num_rows):
        add(engine, rng, index % 16, 3 * STEPS - 64)
    for _ in range(80):
        step()
    assert engine.scheduler.state.rows.num_live == num_rows
    runner.leaving = churn
    wall, cpu = np.empty(STEPS), np.empty(STEPS)
    gc.collect()
    gc.freeze()
    gc.disable()
    for index in range(STEPS):
        for phase in range(churn):  # making prompt keys is work outside the step, and is not timed
            add(engine, rng, phase % 16, 3 * STEPS - 64)
        start, start_cpu = time.perf_counter(), time.thread_time()
        step()
        cpu[index] = time.thread_time() - start_cpu
        wall[index] = time.perf_counter() - start
    gc.enable()
    gc.unfreeze()
    assert engine.scheduler.state.rows.num_live >= num_rows - 2 * churn
    return {
        "cpu_mean_us": round(float(cpu.mean() * 1e6), 1),
        "cpu_p99_us": round(float(np.percentile(cpu, 99) * 1e6), 1),
        "wall_mean_us": round(float(wall.mean() * 1e6), 1),
        "wall_p99_us": round(float(np.percentile(wall, 99) * 1e6), 1),
    }


def line(name: str, figures: dict[str, float]) -> str:
    return f"{name:>20}" + "".join(f"{value:>14.1f}" for value in figures.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--overlapped", action="store_true", help="one step ahead of the device")
    arguments = parser.parse_args()
    depth = 1 if arguments.overlapped else 0
    figures = {}
    print(f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}, depth {depth}")
    print(
        f"{'rows':>20}"
        + "".join(f"{name:>14}" for name in ("cpu mean us", "cpu p99", "wall mean us", "wall p99"))
    )
    for size in SIZES:
        figures[str(size)] = measure(size, depth=depth)
        print(line(str(size), figures[str(size)]), flush=True)
    slope = (figures["1024"]["cpu_mean_us"] - figures["64"]["cpu_mean_us"]) / 960
    figures["churn"] = measure(1024, depth=depth, churn=32)
    print(line("1024, 32 in 32 out", figures["churn"]))
    print(f"slope from 64 to 1,024 rows: {slope:.3f} us per row (cpu)")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"depth": depth, "slope_us_per_row": slope, **figures}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
