"""Preempted rows on the card: the same tokens with every kind of preemption, after every step.

A row that has just got a token is preempted, so each step undoes what it can. Swapped blocks come and go in a stream of
their own while other rows go on.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from paceline.core.request import RequestId
from tests.gpu.engine_cases import GREEDY, NUM_NEW, PROMPTS, engine, first_gaps, reference

CLOSE = 2e-2


class Disturbed:
    """An engine whose rows are preempted on purpose."""

    def __init__(self, engine: Any, kind: str, every: int) -> None:
        self._engine, self._kind, self._every = engine, kind, every
        self.tokens: dict[RequestId, list[int]] = {}
        self.counts: Counter[str] = Counter()

    def run(self) -> list[list[int]]:
        for prompt in PROMPTS:
            for request in self._engine.add(prompt, GREEDY):
                self.tokens[request] = []
        while self._engine.has_requests:
            self.counts["steps"] += 1
            assert self.counts["steps"] < 5_000, "the run does not end"
            events = self._engine.step_overlapped()
            assert self._engine.last_error is None, repr(self._engine.last_error)
            for batch in events.tokens:
                for number, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
                    self.tokens[number].append(token)
                    self._preempt(number)
        return list(self.tokens.values())

    def _preempt(self, number: RequestId) -> None:
        if len(self.tokens[number]) == NUM_NEW or (len(self.tokens[number]) + number) % self._every:
            return
        scheduler = self._engine.scheduler
        if self._kind == "pause":
            scheduler.pause(number)
            scheduler.resume(number)
            self.counts["preempted"] += 1
        else:
            swap = {"recompute": False, "swap": True, "auto": None}[self._kind]
            self.counts["preempted"] += scheduler.preempt(number, swap=swap)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("kind", ["recompute", "swap", "auto", "pause"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_every_kind_gives_the_same_tokens(name: str, kind: str, every: int) -> None:
    with engine(
        name, num_host_blocks=64, preemption="auto" if kind == "pause" else kind, max_preemptions=0
    ) as llm:
        disturbed = Disturbed(llm.loaded.engine, kind, every)
        found = disturbed.run()
    gaps = first_gaps(found, reference(name))
    print(name, kind, every, dict(disturbed.counts), len(gaps), max(gaps, default=0.0))
    assert max(gaps, default=0.0) < CLOSE
    assert disturbed.counts["preempted"] >= len(PROMPTS) * NUM_NEW // every // 2
