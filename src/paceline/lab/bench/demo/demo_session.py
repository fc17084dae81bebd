"""The three runs of the demonstration, one after the other: the same model, sizes, requests and machine.

Owns the order, the sizes, and how fast requests come: somewhat faster than continuous batching can serve them here,
which is found by a short run before. Shows nothing; a watcher is called for what begins, and for every step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import ModelConfig
from paceline.factory import LoadedModel
from paceline.lab.bench.demo.run import Driver, ModeRun, load_mode
from paceline.lab.bench.machine import BUDGETS, engine_sizes
from paceline.lab.bench.shapes import write_shape
from paceline.lab.bench.throughput import release_memory
from paceline.lab.workload import Workload, load_workload
from paceline.watch.trace import Watch

# The traffic of the demonstration: bursts of requests whose lengths are those of recorded chats, or smaller.
#
# Owns lengths, arrivals and how many requests fill a given time. The same seed gives the same requests, down to the
# token ids, so that every mode does the same work. Knows no engine.


SOURCE = "azure-conv"
ON_S, OFF_S = 2.0, 3.0  # seconds of requests, seconds of none
WHOLE_BURSTS_S = 7.0  # of traffic: in less time there would be only one burst of that length
LEAST_SHARE = 0.001  # of the length of a burst


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Parts of the recorded lengths, and the longest."""

    prompt_part: int
    output_part: int
    longest_prompt: int
    longest_output: int

    @property
    def longest(self) -> int:
        return self.longest_prompt + self.longest_output

    def of(self, workload: Workload) -> Workload:
        prompts, outputs = workload.prompt_len // self.prompt_part, workload.output_len // self.output_part
        return replace(
            workload,
            name="bursts of chats",
            prompt_len=np.clip(prompts, 4, self.longest_prompt).astype(np.int32),
            output_len=np.clip(outputs, 4, self.longest_output).astype(np.int32),
        )


# What a small model on a CPU answers in the time there is; and whole chats, but for the very longest.
LENGTHS = {
    "cpu": Lengths(prompt_part=32, output_part=8, longest_prompt=96, longest_output=80),
    "cuda": Lengths(prompt_part=1, output_part=1, longest_prompt=2048, longest_output=1024),
}


def burst_traffic(num_requests: int, rate: float, seed: int, lengths: Lengths) -> Workload:
    """So many requests in bursts, with a mean of `rate` a second. Little traffic has short bursts: if all of it came in
    the first one, it would come faster and be over sooner than was asked for."""
    share = min(1.0, max(LEAST_SHARE, num_requests / rate / WHOLE_BURSTS_S))
    arrivals = f"onoff:{ON_S * share:g},{OFF_S * share:g}"
    return lengths.of(
        load_workload(SOURCE, num_requests=num_requests, seed=seed, rate=rate, arrivals=arrivals)
    )


def at_once(num_requests: int, seed: int, lengths: Lengths) -> Workload:
    """The like, all there from the start: to see how much a machine can do."""
    return lengths.of(load_workload(SOURCE, num_requests=num_requests, seed=seed, arrivals="all-at-once"))


def prompt_tokens(workload: Workload, vocab_size: int, seed: int) -> list[NDArray[np.int32]]:
    """Random ids, so that no request finds anything of another in the prefix cache."""
    random = np.random.default_rng(seed)
    return [random.integers(0, vocab_size, int(count), dtype=np.int32) for count in workload.prompt_len]


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
    span_s: float  # time of all requests at the mean rate; the last of them may come sooner or later


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
