"""The three runs of the demonstration, one after the other: the same model, sizes, requests and machine.

Owns the order, the sizes, and how fast requests come: somewhat faster than continuous batching can serve them here,
which is found by a short run before. Shows nothing; whoever looks on is told what begins, and of every step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.bench.demo.run import Driver, ModeRun, load_mode
from paceline.bench.demo.traffic import LENGTHS, at_once, burst_traffic, prompt_tokens
from paceline.bench.machine import BUDGETS, engine_sizes
from paceline.bench.shapes import write_shape
from paceline.bench.throughput import release_memory
from paceline.config import ModelConfig
from paceline.factory import LoadedModel
from paceline.watch.film import Watch
from paceline.workload import Workload

MODES = ("static", "dynamic", "continuous")
LOAD = 1.1  # of what continuous batching can do: every mode shows how much it gets done
FEWEST = 12  # requests
JUST_WARM = 4  # requests before the first mode where the rate is given and nothing has to be found out
BLOCK = {"cpu": 16, "cuda": 64}
STATIC_FLUSH_S, DYNAMIC_TIMEOUT_S = 1.0, 0.25  # how long a batch that is not full waits


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """What was asked for."""

    model: str | None = None  # None: the default one
    shape: str | None = None  # made-up weights of this shape, instead of a model
    device: str = "cpu"
    rows: int = 8  # in every mode: as many requests as can be in a batch
    seconds: float = 40.0  # over which requests arrive
    warm_up: int = 3  # times a full batch that is there at once, to see what the machine can do
    rate: float | None = None  # requests per second; None: found by the run before
    seed: int = 0
    log_folder: Path | None = None  # where the run logs go


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traffic:
    """Requests with their tokens."""

    workload: Workload
    prompts: list[NDArray[np.int32]]
    span_s: float  # what so many requests take at the mean rate; the last of them may come sooner or later


class DemoViewer(Protocol):
    """Is told what happens."""

    def warming_up(self, num_requests: int) -> None: ...

    def begins(self, mode: str, traffic: Traffic) -> None: ...

    def watching(self, mode: str) -> Watch | None:
        """Makes a further watcher of the run of a mode, if there is to be one."""

    def stepped(self, driver: Driver) -> None: ...

    def ended(self, run: ModeRun) -> None: ...


def run_demo(plan: DemoPlan, viewer: DemoViewer) -> Iterator[ModeRun]:
    """Each mode in turn. What was run stays with the caller, also when Ctrl-C ends the next one."""
    with _model_config(plan) as model:
        loaded = load_mode(model, "continuous", _sizes(plan))
        # The budget follows from a measurement; it must not differ between modes.
        chosen = engine_sizes(loaded)
        sizes = {**_sizes(plan), **{name: chosen[name] for name in BUDGETS}}
        traffic = _traffic(plan, loaded, viewer)
        for mode in MODES:
            del loaded  # two engines need twice the memory
            release_memory()
            with _log_of_a_whole_run(plan, mode) as log:
                loaded = load_mode(model, mode, {**sizes, **log})
                viewer.begins(mode, traffic)
                driver = Driver(loaded, traffic.workload, traffic.prompts, viewer.watching(mode))
                try:
                    run = driver.run(viewer.stepped)
                finally:
                    loaded.engine.close()  # completes its log
            viewer.ended(run)
            yield run


def _traffic(plan: DemoPlan, loaded: LoadedModel, viewer: DemoViewer) -> Traffic:
    vocab_size = loaded.checkpoint.spec.vocab_size
    count = plan.warm_up * plan.rows if plan.rate is None else JUST_WARM
    viewer.warming_up(count)
    lengths = LENGTHS[plan.device]
    warm = at_once(count, plan.seed + 1, lengths)
    run = Driver(loaded, warm, prompt_tokens(warm, vocab_size, plan.seed + 2)).run(viewer.stepped)
    rate = plan.rate if plan.rate is not None else LOAD * _requests_per_s(run)
    workload = burst_traffic(max(FEWEST, round(rate * plan.seconds)), rate, plan.seed, lengths)
    prompts = prompt_tokens(workload, vocab_size, plan.seed + 3)
    return Traffic(workload=workload, prompts=prompts, span_s=len(workload) / rate)


def _requests_per_s(run: ModeRun) -> float:
    """While the batch was full: between a quarter and three quarters of the endings."""
    ends = np.sort(run.record.finished_s)
    first, last = len(ends) // 4, 3 * len(ends) // 4
    return max(1, last - first) / max(float(ends[last] - ends[first]), 1e-6)


def _sizes(plan: DemoPlan) -> dict[str, Any]:
    longest, block = LENGTHS[plan.device].longest, BLOCK[plan.device]
    blocks = -(-longest // block) + 1
    return {
        "max_num_seqs": plan.rows,
        "batch_size": plan.rows,
        "block_size": block,
        "num_blocks": plan.rows * blocks + 1,  # every row has room for the longest request, in every mode
        "max_model_len": longest + 1,
        "static_flush_s": STATIC_FLUSH_S,
        "batch_timeout_s": DYNAMIC_TIMEOUT_S,
        "enable_prefix_caching": False,
    }


@contextmanager
def _log_of_a_whole_run(plan: DemoPlan, mode: str) -> Iterator[dict[str, Any]]:
    """Where the run is logged. After Ctrl-C its file goes: a part of a run stands beside no other mode."""
    if plan.log_folder is None:
        yield {}
        return
    path = plan.log_folder / f"{mode}.jsonl.gz"
    try:
        yield {"run_log": str(path), "run_log_files": 0}
    except KeyboardInterrupt:
        path.unlink(missing_ok=True)
        raise


@contextmanager
def _model_config(plan: DemoPlan) -> Iterator[ModelConfig]:
    """Requests are token ids, so that no tokenizer is needed."""
    if plan.shape is None:
        yield ModelConfig(model=plan.model, device=plan.device, skip_tokenizer_init=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        options = write_shape(plan.shape, Path(folder))
        names = ("model", "load_format", "skip_tokenizer_init")
        yield ModelConfig(device=plan.device, **{name: options[name] for name in names})
