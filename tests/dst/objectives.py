"""The objectives and service levels of a seed's requests. Draws from separate streams."""

from __future__ import annotations

import random
from dataclasses import replace

from paceline.core.sampling import ON_INFEASIBLE, SamplingParams
from paceline.core.service_class import CLASSES, DEFAULT_CLASS, SPOT, ServiceLevel
from paceline.errors import DeadlineImpossible, DeadlineInfeasible, NeverFits, QueueFull

REFUSALS = (QueueFull, NeverFits, DeadlineInfeasible, DeadlineImpossible)


class Objectives:
    """In one run of five, half of the requests want something. Classes of service: all alike, some or half spot work,
    or everything."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed + 9)
        self._chance = self._rng.choice((0.0, 0.0, 0.0, 0.0, 0.5))
        self._class_rng = random.Random(seed + 6)
        few = (DEFAULT_CLASS,) * 19 + (SPOT,)
        self._classes = self._class_rng.choice(((DEFAULT_CLASS,), few, (DEFAULT_CLASS, SPOT), CLASSES))

    def of(self, sampling: SamplingParams) -> SamplingParams:
        rng = self._rng
        if rng.random() >= self._chance:
            return sampling
        return replace(
            sampling,
            deadline_ms=rng.choice((None, None, 20, 500, 20_000)),
            ttft_slo_ms=rng.choice((None, 1, 30, 1000)),
            itl_slo_ms=rng.choice((None, 1, 5, 1000)),
            on_infeasible=rng.choice(ON_INFEASIBLE),
        )

    def service_level(self, priority: int) -> ServiceLevel:
        return ServiceLevel(self._class_rng.choice(self._classes), priority)
