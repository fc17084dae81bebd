"""Which policy a seed's engine has, and when it is changed. Draws from a separate stream."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from paceline.config.engine import POLICIES, EngineConfig, PreemptionCosts
from paceline.scheduler.scheduler import Scheduler


def draw_policy(seed: int, config: EngineConfig) -> EngineConfig:
    """Half of the engines have one of the policies that few others do."""
    rng, config = random.Random(seed + 3), _draw_preemption(random.Random(seed + 5), config)
    if rng.random() < 0.5:
        return config
    name = rng.choice(("fair", "fair", "deadline", "shortest", "tail"))
    return replace(config, scheduler=replace(config.scheduler, scheduling_policy=name, **_options(rng)))


def _options(rng: random.Random) -> dict[str, Any]:
    return {
        "output_handicap_ms": rng.choice((0.1, 5.0)),
        "first_token_s": rng.choice((0.02, 100.0)),
        "tenant_weights": rng.choice(("", "tenant-0=2,tenant-1=0.5")),
        "output_token_cost": rng.choice((0.0, 2.0)),
        "flood_tokens": rng.choice((20, 8192)),
    }


def _draw_preemption(rng: random.Random, config: EngineConfig) -> EngineConfig:
    """Half of the engines choose the kind of each preemption by costs, which may be anything."""
    if rng.random() < 0.5:
        return config
    costs = PreemptionCosts(
        token_s=rng.choice((0.0, 1e-4, 1e-2)),
        product_s=rng.choice((0.0, 1e-6)),
        block_s=rng.choice((0.0, 1e-3, 1.0)),
        step_s=rng.choice((1e-5, 2e-3)),
    )
    known = costs if rng.random() < 0.8 else None
    return replace(config, scheduler=replace(config.scheduler, preemption="auto", preemption_costs=known))


class PolicyChanges:
    """Now and then another policy, in a few of the runs."""

    def __init__(self, seed: int, scheduler: Scheduler) -> None:
        self._rng = random.Random(seed + 4)
        self._chance = self._rng.choice((0.0, 0.0, 0.0, 0.02))
        self._scheduler = scheduler

    def perhaps(self) -> None:
        if self._rng.random() < self._chance:
            self._scheduler.set_policy(self._rng.choice(POLICIES), **_options(self._rng))
