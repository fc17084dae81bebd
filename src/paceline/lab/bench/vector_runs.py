"""Vectors under load: clients that ask for one after the other, texts of two lengths, in this process.

Owns the texts, which are random token ids, and the clock of each request.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.lab.report.summary import Distribution, distribution
from paceline.llm.async_llm import AsyncLLM

WARM_UP = 16  # texts


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedResult:
    """What the texts of one run saw."""

    workload: str
    num_texts: int
    num_tokens: int
    seconds: float  # from the first request to the last vector
    steps: int
    latency_s: Distribution

    @property
    def texts_per_s(self) -> float:
        return self.num_texts / self.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def make_texts(count: int, short: int, long: int, share: float, vocab_size: int) -> list[list[int]]:
    """Token ids; a `share` of the texts is long."""
    rng = np.random.default_rng(0)
    is_long = rng.random(count) < share
    return [rng.integers(0, vocab_size, long if each else short).tolist() for each in is_long.tolist()]


async def run_embed(
    llm: AsyncLLM, texts: Sequence[list[int]], clients: int, on_finish: Callable[[], object] = lambda: None
) -> EmbedResult:
    """Each of the clients asks for the next vector once it has one."""
    await asyncio.gather(*(llm.embed(text) for text in texts[:WARM_UP]))
    gc.collect()
    engine, waiting, taken_s = llm.loaded.engine, iter(texts), []
    steps_before, started_s = engine.num_submitted, time.perf_counter()

    async def client() -> None:
        for text in waiting:
            sent_s = time.perf_counter()
            await llm.embed(text)
            taken_s.append(time.perf_counter() - sent_s)
            on_finish()

    await asyncio.gather(*(client() for _ in range(clients)))
    return EmbedResult(
        workload=f"{clients} client{'s' * (clients > 1)}",
        num_texts=len(texts),
        num_tokens=sum(map(len, texts)),
        seconds=time.perf_counter() - started_s,
        steps=engine.num_submitted - steps_before,
        latency_s=distribution(np.array(taken_s)),
    )
