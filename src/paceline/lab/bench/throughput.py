"""Offline throughput: a workload through `LLM.generate`, all requests at once.

Owns what is measured: the clock runs from the call until it has returned every token, the prefix cache is empty
before, and every request must have got exactly its tokens. Prints nothing.
"""

from __future__ import annotations

import gc
import importlib
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from paceline.core.sampling import SamplingParams
from paceline.errors import EngineFailed
from paceline.lab.bench.workloads import LARGEST_TOKEN, BenchWorkload
from paceline.lab.report.summary import Distribution, distribution
from paceline.llm.llm import LLM
from paceline.llm.outputs import RequestOutput

Loaded = TypeVar("Loaded")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputResult:
    """What one workload took."""

    workload: str
    mode: str
    temperature: float
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int  # of the prompts: what requests of this workload found of each other
    seconds: float
    steps: int
    preemptions: int
    e2e_s: Distribution  # of its requests, from when they were added
    padded_share: float  # of all tokens computed: what static and dynamic batching fill up
    output_tokens_per_request: int | None  # where all have the same, and a step is one token of each

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_tokens_per_s(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.seconds

    @property
    def requests_per_s(self) -> float:
        return self.num_requests / self.seconds

    @property
    def ms_per_step(self) -> float | None:
        """The whole time, prompts included, over the tokens of one request."""
        count = self.output_tokens_per_request
        return None if count is None else self.seconds / count * 1e3


def load(make: Callable[..., Loaded], options: Mapping[str, Any]) -> tuple[Loaded, float]:
    """What `make` makes, and the seconds that took; whatever it imports is imported before."""
    import_engine()
    started_s = time.perf_counter()
    made = make(**options)
    return made, time.perf_counter() - started_s


def release_memory() -> None:
    """Free what a deleted engine held: two may not fit beside each other."""
    gc.unfreeze()  # objects that lived through the capture of graphs are hidden from the collector
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def import_engine() -> None:
    """Import what loading a model would import, so that start-up is the engine's own."""
    for name in ("torch", "paceline.models.load", "paceline.runner.cpu", "paceline.models.files.open"):
        importlib.import_module(name)
    with suppress(ImportError):  # its kernels need what only machines with a GPU have
        importlib.import_module("paceline.runner.gpu.build")


def sampling_of(workload: BenchWorkload, temperature: float | None, seed: int) -> list[SamplingParams]:
    """Sampling for each request: its number of tokens exactly, and a separate seed."""
    chosen = workload.temperature if temperature is None else temperature
    return [
        SamplingParams(
            temperature=chosen,
            max_tokens=request.num_output,
            ignore_eos=True,
            detokenize=False,
            seed=seed + index if chosen > 0 else None,
        )
        for index, request in enumerate(workload.requests)
    ]


def warm_up_requests(vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """A few requests with tokens that no workload has: greedy and sampled, short and longer."""
    draw = random.Random(5)
    lengths = (16, 16, 100, 100)
    prompts = [[draw.randrange(LARGEST_TOKEN + 1, vocab_size) for _ in range(count)] for count in lengths]
    sampling = [
        SamplingParams(temperature=temperature, max_tokens=8, ignore_eos=True, detokenize=False, seed=index)
        for index, temperature in enumerate((0.0, 0.6, 0.0, 0.6))
    ]
    return prompts, sampling


def warm_up(llm: LLM) -> None:
    prompts, sampling = warm_up_requests(llm.loaded.checkpoint.spec.vocab_size)
    llm.generate(prompts, sampling, use_tqdm=False)


def run_workload(
    llm: LLM, workload: BenchWorkload, sampling: Sequence[SamplingParams], *, show_progress: bool = False
) -> tuple[ThroughputResult, list[RequestOutput]]:
    """Run it once, on an empty prefix cache."""
    prompts = [request.prompt for request in workload.requests]
    llm.reset_prefix_cache()
    gc.collect()
    engine = llm.loaded.engine
    steps_before = engine.num_submitted
    counters = engine.scheduler.state.counters
    computed, padding = counters.computed_tokens, counters.padding_tokens
    started_s = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=show_progress)
    seconds = time.perf_counter() - started_s
    check_complete(workload, outputs)
    result = ThroughputResult(
        workload=workload.name,
        mode=llm.loaded.config.scheduler.mode,
        temperature=sampling[0].temperature,
        num_requests=len(outputs),
        prompt_tokens=workload.num_prompt_tokens,
        output_tokens=workload.num_output_tokens,
        cached_tokens=sum(output.num_cached_tokens for output in outputs),
        seconds=seconds,
        steps=engine.num_submitted - steps_before,
        preemptions=sum(output.metrics.preemptions for output in outputs if output.metrics is not None),
        e2e_s=distribution(np.array([_seconds_of(output) for output in outputs])),
        padded_share=(counters.padding_tokens - padding) / max(1, counters.computed_tokens - computed),
        output_tokens_per_request=workload.requests[0].num_output if workload.is_decode else None,
    )
    return result, outputs


def _seconds_of(output: RequestOutput) -> float:
    metrics = output.metrics
    assert metrics is not None and metrics.finished_s is not None
    return metrics.finished_s - metrics.arrival_s


def check_complete(workload: BenchWorkload, outputs: Sequence[RequestOutput]) -> None:
    """Every request got exactly its tokens, or the figures mean nothing."""
    wrong = [
        (index, output.outputs[0])
        for index, (request, output) in enumerate(zip(workload.requests, outputs, strict=True))
        if len(output.outputs[0].token_ids) != request.num_output
    ]
    if wrong:
        index, part = wrong[0]
        raise EngineFailed(
            f"{workload.name}: {len(wrong)} of {len(outputs)} requests did not get their tokens; request {index} "
            f"has {len(part.token_ids)} of {workload.requests[index].num_output} and ended with "
            f"{part.error or part.finish_reason}"
        )
