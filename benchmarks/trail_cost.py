"""What the decision trail costs: the same work without it, with the ring, and with the logs, as ratios of one run.

Two kinds of work. *Churn*: a device that costs nothing, 1,024 rows of which 32 leave and 32 join in every step, some
14,000 requests a second, so that nothing but the host is measured. *Model*: a real model on this machine with short
answers. The variants take turns, so that a machine that slows down slows all of them. "bare" makes no decisions at all
and is what the others are divided by; "cpu" is the time of all threads of the process, the writers' among them,
"engine" that of the thread that steps, "wall" has what other programs took as well.

    python -m benchmarks.trail_cost [--rounds 7] [--model FOLDER|FILE] [--requests 96] [--skip-churn] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.step_cost import PROMPT, NoOpRunner
from paceline.audit.trail import INTERVAL_S
from paceline.config.engine import Capacity, EngineConfig, KVConfig, ModelConfig, SchedulerConfig
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.factory import build_engine, load_model

ROWS, CHURN, CHURN_STEPS = 1024, 32, 700
MODEL_ROWS = 16
Figures = dict[str, float]


def variants(folder: Path) -> dict[str, dict[str, Any]]:
    """Options of the engine by the name of what they keep."""
    return {
        "bare": {"decision_ring": 0},
        "ring": {},
        "decision log": {"decision_log": str(folder / "decisions")},
        "run log": {"run_log": str(folder / "run.jsonl")},
        "both logs": {"decision_log": str(folder / "both"), "run_log": str(folder / "both.jsonl")},
    }


def without_decisions(engine: Engine) -> Engine:
    """Nothing is put on record: what a scheduler would cost that explains nothing."""
    state = engine.scheduler.state
    state.decide = lambda *args, **more: None  # type: ignore[method-assign]
    return engine


class Clocks:
    """Time that passes while something runs."""

    def __init__(self) -> None:
        self.wall = self.engine = self.outside = 0.0
        self._process, self._thread = time.process_time(), time.thread_time()

    def run(self, work: Callable[[], object]) -> None:
        wall, engine = time.perf_counter(), time.thread_time()
        work()
        self.engine += time.thread_time() - engine
        self.wall += time.perf_counter() - wall

    def figures(self) -> Figures:
        """Work outside `run` is not counted, what other threads did is, and what they had not come to yet."""
        time.sleep(2.5 * INTERVAL_S)
        others = (time.process_time() - self._process) - (time.thread_time() - self._thread)
        return {"cpu": self.engine + max(0.0, others), "engine": self.engine, "wall": self.wall}


# -- churn -------------------------------------------------------------------------------------------------


def churn_work(options: dict[str, Any]) -> tuple[Engine, Callable[[], Figures]]:
    config = EngineConfig(
        kv=KVConfig(block_size=16, num_blocks=ROWS * 96),
        scheduler=SchedulerConfig(
            max_num_seqs=ROWS, max_num_batched_tokens=ROWS + 64 * PROMPT, max_model_len=1024, max_queue=10_000
        ),
        depth=0,  # a row that has ended is not computed again, so that as many leave as join
        check_every=0,
        **options,
    )
    runner = NoOpRunner(Capacity.of(config).num_rows)
    engine = build_engine(config, runner)
    rng = np.random.default_rng(0)

    def add(count: int) -> None:
        for index in range(count):
            prompt = rng.integers(0, 32000, PROMPT + index % 16).astype(np.int32)
            engine.add(prompt, SamplingParams(max_tokens=512))

    def work() -> Figures:
        clocks = Clocks()
        for _ in range(CHURN_STEPS):
            add(CHURN)
            clocks.run(engine.step)
        return clocks.figures()

    add(ROWS)
    for _ in range(80):
        engine.step()
    runner.leaving = CHURN
    return engine, work


# -- a real model ------------------------------------------------------------------------------------------


def model_work(
    model: str | None, requests: int, options: dict[str, Any]
) -> tuple[Engine, Callable[[], Figures]]:
    given = {"max_num_seqs": MODEL_ROWS, "max_model_len": 512, "num_blocks": 640, "check_every": 0, **options}
    engine = load_model(ModelConfig(model=model, device="cpu"), given).engine
    rng = np.random.default_rng(0)

    def work() -> Figures:
        clocks = Clocks()
        for _ in range(requests):
            prompt = rng.integers(100, 30_000, 16).astype(np.int32)
            engine.add(
                prompt, SamplingParams(max_tokens=int(rng.integers(4, 17)), ignore_eos=True, temperature=0)
            )
        while engine.has_requests:
            clocks.run(engine.step_overlapped)
        return clocks.figures()

    return engine, work


# -- in turn -----------------------------------------------------------------------------------------------


def measure(
    make: Callable[[dict[str, Any]], tuple[Engine, Callable[[], Figures]]], rounds: int
) -> dict[str, Figures]:
    """The median over rounds of each variant's time, divided by that of the bare one in the same round."""
    with tempfile.TemporaryDirectory(prefix="paceline-trail-") as folder:
        made = {name: make(options) for name, options in variants(Path(folder)).items()}
        without_decisions(made["bare"][0])
        for _, work in made.values():
            work()
        gc.collect()
        gc.freeze()
        gc.disable()
        seen = [{name: work() for name, (_, work) in made.items()} for _ in range(rounds)]
        gc.enable()
        gc.unfreeze()
        for engine, _ in made.values():
            engine.close()
    return {
        name: {
            clock: statistics.median(each[name][clock] / each["bare"][clock] for each in seen)
            for clock in seen[0][name]
        }
        | {"seconds": statistics.median(each[name]["cpu"] for each in seen)}
        for name in made
    }


def show(title: str, found: dict[str, Figures]) -> None:
    print(f"{title:<24}{'cpu':>9}{'engine':>9}{'wall':>9}{'cpu seconds':>14}")
    for name, figures in found.items():
        ratios = "".join(f"{figures[clock] - 1:>+9.1%}" for clock in ("cpu", "engine", "wall"))
        print(f"  {name:<22}{ratios}{figures['seconds']:>14.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", help="folder or file of a model; SmolLM2-135M-Instruct if none is named")
    parser.add_argument("--requests", type=int, default=96, help="of the model, in each round")
    parser.add_argument("--skip-churn", action="store_true")
    parser.add_argument("--skip-model", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    print(f"{platform.machine()}, Python {platform.python_version()}, {arguments.rounds} rounds")
    found: dict[str, dict[str, Figures]] = {}
    if not arguments.skip_churn:
        found["churn"] = measure(churn_work, arguments.rounds)
        show("churn", found["churn"])
    if not arguments.skip_model:
        make = partial(model_work, arguments.model, arguments.requests)
        found["model"] = measure(make, arguments.rounds)
        show("model", found["model"])
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
