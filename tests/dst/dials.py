"""Where a seed's dial stands, what it holds, and when it is turned. Draws from a separate stream."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from paceline.config.engine import EngineConfig
from paceline.core.dial import OFF, DialKind, DialSetting
from paceline.scheduler.scheduler import Scheduler
from tests.dst.policies import PolicyChanges, draw_policy

NAMES = {
    DialKind.POSITION: "dial",
    DialKind.ITL: "target_itl_p99_ms",
    DialKind.TTFT: "target_ttft_p99_ms",
}


def draw_setting(rng: random.Random) -> DialSetting:
    """Some can be held and some cannot: steps take one to ten milliseconds."""
    kind = rng.choice((DialKind.POSITION, DialKind.ITL, DialKind.ITL, DialKind.TTFT))
    values: dict[DialKind, tuple[float, ...]] = {
        DialKind.POSITION: (0.0, 0.1, 0.25, 0.6, 1.0),
        DialKind.ITL: (0.2, 2.0, 6.0, 12.0, 200.0),
        DialKind.TTFT: (1.0, 20.0, 100.0, 1000.0),
    }
    return DialSetting(kind=kind, value=rng.choice(values[kind]))


def draw_steering(seed: int, config: EngineConfig) -> EngineConfig:
    """The policy and the dial an engine begins with."""
    return draw_dial(random.Random(seed + 7), draw_policy(seed, config))


def draw_dial(rng: random.Random, config: EngineConfig) -> EngineConfig:
    """Some engines begin with a dial."""
    if rng.random() < 0.85 or config.scheduler.mode != "continuous":
        return config
    setting = draw_setting(rng)
    chosen: dict[str, Any] = {NAMES[setting.kind]: setting.value}
    return replace(config, scheduler=replace(config.scheduler, **chosen))


class Changes:
    """Now and then an operator turns the dial or changes the policy, in some of the runs."""

    def __init__(self, seed: int, scheduler: Scheduler) -> None:
        self._policies = PolicyChanges(seed, scheduler)
        self._rng = random.Random(seed + 8)
        padded = scheduler.state.mode.keeps_finished
        self._chance = 0.0 if padded else self._rng.choice((0.0, 0.0, 0.0, 0.01))
        self._scheduler = scheduler

    def perhaps(self) -> None:
        self._policies.perhaps()
        if self._chance and self._rng.random() < self._chance:
            self._scheduler.set_dial(OFF if self._rng.random() < 0.2 else draw_setting(self._rng))
