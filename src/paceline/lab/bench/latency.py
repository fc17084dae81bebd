"""Online latency: requests that arrive over time, each a stream of `AsyncLLM.generate` in this process.

Owns the clock of every request. It starts when the request is due, also when this process was too busy to send it
then; time to first token, gaps between deliveries and the end are counted from what the caller sees. A delivery of
several tokens is one.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.core.sampling import SamplingParams
from paceline.lab.bench.throughput import check_complete, warm_up_requests
from paceline.lab.bench.workloads import BenchWorkload
from paceline.lab.report.summary import Distribution, distribution
from paceline.llm.async_llm import AsyncLLM
from paceline.llm.outputs import RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyResult:
    """What the requests of one workload saw."""

    workload: str
    temperature: float
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float  # from the first moment to the last token
    output_tokens_per_s: float
    requests_per_s: float
    steps: int
    preemptions: int
    ttft_s: Distribution
    itl_s: Distribution
    e2e_s: Distribution
    lateness_s: Distribution  # how late this process sent a request; part of the other times


@dataclass(slots=True)
class ObservedRequest:
    """One request as its caller sees it, in seconds of one clock."""

    due_s: float
    sent_s: float = 0.0
    deliveries_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    output: RequestOutput | None = None

    def take(self, output: RequestOutput, now_s: float) -> None:
        self.output = output
        count = len(output.outputs[0].token_ids)
        if count > self.num_tokens:
            self.num_tokens = count
            self.deliveries_s.append(now_s)


async def warm_up_online(llm: AsyncLLM) -> None:
    prompts, sampling = warm_up_requests(llm.loaded.checkpoint.spec.vocab_size)
    for prompt, own in zip(prompts, sampling, strict=True):
        async for _ in llm.generate(prompt, own, tenant="warm-up"):
            pass


async def run_online(
    llm: AsyncLLM,
    workload: BenchWorkload,
    sampling: Sequence[SamplingParams],
    *,
    on_finish: Callable[[], object] = lambda: None,
) -> LatencyResult:
    """Send every request when it is due, and wait for the last one."""
    gc.collect()
    gc.freeze()  # the prompts of all requests would be elsewhere, not in the engine's process
    engine = llm.loaded.engine
    steps_before = engine.num_submitted
    started_s = time.perf_counter()
    # A prefix belongs to a tenant: a new name is an empty prefix cache.
    tenant = f"bench {workload.name} {time.monotonic_ns()}"
    requests = [ObservedRequest(due_s=started_s + request.arrival_s) for request in workload.requests]

    async def follow(index: int) -> None:
        seen = requests[index]
        await asyncio.sleep(seen.due_s - time.perf_counter())
        seen.sent_s = time.perf_counter()
        async for output in llm.generate(
            workload.requests[index].prompt, sampling[index], f"{tenant} {index}", tenant=tenant
        ):
            seen.take(output, time.perf_counter())
        on_finish()

    try:
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(requests)):
                tasks.create_task(follow(index))
    except BaseExceptionGroup as group:  # the first one ended all others
        raise group.exceptions[0] from None
    finally:
        gc.unfreeze()
    outputs = [seen.output for seen in requests if seen.output is not None]
    check_complete(workload, outputs)
    return summarize(
        workload, requests, started_s, steps=engine.num_submitted - steps_before, sampling=sampling[0]
    )


def summarize(
    workload: BenchWorkload,
    requests: Sequence[ObservedRequest],
    started_s: float,
    *,
    steps: int,
    sampling: SamplingParams,
) -> LatencyResult:
    """Figures from what every caller saw."""
    seconds = max(seen.deliveries_s[-1] for seen in requests) - started_s
    gaps = [np.diff(seen.deliveries_s) for seen in requests]
    metrics = [seen.output.metrics for seen in requests if seen.output is not None]
    return LatencyResult(
        workload=workload.name,
        temperature=sampling.temperature,
        num_requests=len(requests),
        prompt_tokens=workload.num_prompt_tokens,
        output_tokens=workload.num_output_tokens,
        seconds=seconds,
        output_tokens_per_s=workload.num_output_tokens / seconds,
        requests_per_s=len(requests) / seconds,
        steps=steps,
        preemptions=sum(metric.preemptions for metric in metrics if metric is not None),
        ttft_s=distribution(np.array([seen.deliveries_s[0] - seen.due_s for seen in requests])),
        itl_s=distribution(np.concatenate(gaps)),
        e2e_s=distribution(np.array([seen.deliveries_s[-1] - seen.due_s for seen in requests])),
        lateness_s=distribution(np.array([seen.sent_s - seen.due_s for seen in requests])),
    )
