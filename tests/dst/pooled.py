"""The requests of a seed that end with a vector, and what the vector has to be. Draws from a separate stream."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.config.engine import EngineConfig
from paceline.core.events import Finished
from paceline.core.parameters import CHOICE, LAST, MEAN, PoolingParams
from paceline.core.request import FinishReason
from paceline.core.sampling import SamplingParams
from paceline.scheduler.invariants import InvariantViolation
from tests.dst.watch import Expectation
from tests.reference_output import reference_vector

KINDS = (LAST, MEAN, CHOICE)
NAME = "M6"
_NO_OUTPUT: dict[str, Any] = {
    "n": 1,
    "structured_outputs": None,
    "kv_keep": None,
    "on_stop": "end",
    "prediction": (),
}


def _has_pooled(seed: int) -> bool:
    return random.Random(seed + 29).random() < 0.2


def draw_pools(seed: int, config: EngineConfig) -> EngineConfig:
    """Some engines make vectors."""
    if not _has_pooled(seed) or config.scheduler.mode != "continuous":
        return config
    return replace(config, scheduler=replace(config.scheduler, pools=KINDS))


class Pooled:
    """Which requests of a world end with a vector, and whether they get it: M6."""

    def __init__(self, seed: int, config: EngineConfig, counts: Counter[str]) -> None:
        self._rng = random.Random(seed + 30)
        self._counts = counts
        share = self._rng.choice((0.5, 0.9))
        self._share = share if config.scheduler.pools else 0.0

    def sampling(self, sampling: SamplingParams) -> SamplingParams:
        rng = self._rng
        if not self._share or rng.random() >= self._share:
            return sampling
        kind = rng.choice(KINDS)
        wanted = PoolingParams(
            kind=kind,
            dimensions=rng.choice((None, 1, 3)) if kind != CHOICE else None,
            token_ids=tuple(rng.randrange(1000) for _ in range(rng.randint(1, 3))) if kind == CHOICE else (),
        )
        return replace(sampling, pooling=wanted, **_NO_OUTPUT)

    def ended(self, client: Expectation, ending: Finished) -> None:
        """A request has come to its end: with the vector of its prompt if it is pooled and nothing went wrong."""
        wanted, expected = client.sampling.pooling, b""
        if wanted is not None and ending.reason is FinishReason.LENGTH:
            raise InvariantViolation(NAME, f"request {ending.request} ended by its length, not with a vector")
        if wanted is not None and ending.reason is FinishReason.STOP:
            self._counts["vector"] += 1
            self._counts["vector after a preemption"] += bool(ending.preemptions)
            expected = reference_vector(client.prompt, wanted, client.start, client.pictures).tobytes()
        if ending.vector != expected:
            got = np.frombuffer(ending.vector, "<f4").tolist()
            raise InvariantViolation(NAME, f"request {ending.request} ended with {got}: not its vector")
