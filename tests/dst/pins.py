"""The pins of a seed: which requests want one, and which come for nothing else. Draws from a separate stream."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

from paceline.config.engine import EngineConfig
from paceline.core.events import Finished
from paceline.core.parameters import Pin
from paceline.core.request import FinishReason, account_of
from paceline.core.sampling import SamplingParams
from paceline.scheduler.invariants import InvariantViolation
from paceline.scheduler.scheduler import Scheduler
from tests.dst.watch import Expectation

NAMES = ("ctx_a", "ctx_b", "ctx_c")


def has_pins(seed: int) -> bool:
    return random.Random(seed + 37).random() < 0.25


def draw_pins(seed: int, config: EngineConfig) -> EngineConfig:
    """How much of the cache may be pinned; the longest request has to fit beside it."""
    if not has_pins(seed):
        return config
    rng = random.Random(seed + 38)
    most = rng.choice((0.1, 0.5, 0.5, 1.0))
    scheduler = replace(
        config.scheduler, max_pinned_fraction=most, max_pinned_fraction_per_key=most * rng.choice((0.5, 1.0))
    )
    return replace(config, scheduler=scheduler)


class Pins:
    """What the requests of a world pin."""

    def __init__(self, seed: int, scheduler: Scheduler, counts: Counter[str]) -> None:
        self._rng = rng = random.Random(seed + 39)
        self._scheduler, self._counts = scheduler, counts
        config = scheduler.state.config
        self._can_compute = scheduler.state.kv.caching and config.mode == "continuous"
        self._share = rng.choice((0.3, 0.8)) if has_pins(seed) else 0.0
        self._delete = rng.choice((0.0, 0.02, 0.1)) if self._share else 0.0

    def sampling(self, sampling: SamplingParams) -> SamplingParams:
        rng = self._rng
        if not self._share or rng.random() >= self._share:
            return sampling
        is_named = rng.random() < 0.5
        is_plain = sampling.pooling is None and sampling.structured_outputs is None
        computes = rng.random() < 0.4 and is_plain and self._can_compute
        wanted = Pin(
            ttl_s=rng.choice((1, 2, 20)),
            name=rng.choice(NAMES) if is_named else "",
            num_tokens=rng.choice((None, None, rng.randint(1, 40))),
            computes=computes,
        )
        changes: dict[str, Any] = (
            {"n": 1, "on_stop": "end", "max_tokens": 1, "min_tokens": 0} if computes else {}
        )
        return replace(sampling, pin=wanted, **changes)

    @staticmethod
    def computes(sampling: SamplingParams) -> bool:
        """Whether a request comes for its pin alone."""
        return sampling.pin is not None and sampling.pin.computes

    def perhaps(self) -> None:
        """A pin is deleted, or one that never was."""
        if self._delete and self._rng.random() < self._delete:
            pins = list(self._scheduler.state.kv.pins)
            if pins:
                pin = self._rng.choice(pins)
                self._scheduler.unpin(pin.tenant, pin.name)
                self._counts["pin deleted"] += 1
            self._scheduler.unpin("no tenant", "no name")

    def ended(self, client: Expectation, ending: Finished) -> None:
        """A request that came for a pin alone ends without a token."""
        if not self.computes(client.sampling):
            return
        if client.tokens or ending.reason is FinishReason.LENGTH:
            raise InvariantViolation("K4", f"request {ending.request} generates although it came for a pin")
        self._counts["pin computed"] += bool(ending.cost.pinned)

    def let_go(self) -> None:
        """At the end of a world: as if the time of all of them were over."""
        pins = self._scheduler.state.kv.pins
        self._counts["pinned at the end"] += len(pins)
        for pin in list(pins):
            assert account_of(pin.tenant) == pin.tenant
            self._scheduler.unpin(pin.tenant, pin.name)
