"""The contexts of a seed: texts that prompts place instead of computing them. Draws from a separate stream."""

from __future__ import annotations

import random
from collections import Counter

from paceline.config.engine import EngineConfig
from paceline.core.parameters import Pin
from paceline.core.stretch import ModulePart
from paceline.scheduler.scheduler import Scheduler
from tests.dst.pins import NAMES, has_pins
from tests.dst.settings import Trouble
from tests.dst.watch import WatchedRunner
from tests.reference_output import Placed, placed_of


def has_contexts(seed: int) -> bool:
    return random.Random(seed + 41).random() < 0.25


class Contexts:
    """What contexts the requests of a world place."""

    def __init__(
        self, seed: int, config: EngineConfig, trouble: Trouble, scheduler: Scheduler, counts: Counter[str]
    ) -> None:
        self._rng = rng = random.Random(seed + 42)
        self._scheduler, self._counts = scheduler, counts
        kv, is_continuous = scheduler.state.kv, config.scheduler.mode == "continuous"
        self.is_on = has_contexts(seed) and kv.caching and is_continuous and not kv.windowed
        # A module whose keys stand for other tokens never gets into the cache.
        self.is_on &= not trouble.same_keys
        self._share = rng.choice((0.3, 0.7, 1.0))
        self._longest = config.scheduler.max_model_len // rng.choice((2, 3, 6))
        self._pins = has_pins(seed)
        self._recompute = rng.choice((0, 1, 4, 16))
        size = config.kv.block_size
        texts = [[rng.randrange(1000) for _ in range(self._longest)] for _ in range(2)]
        lengths = [
            max(1, min(self._longest, rng.choice((size + 1, 2 * size, 5 * size, 40)))) for _ in range(4)
        ]
        self._texts = [rng.choice(texts)[:length] for length in lengths]  # some begin like others

    def begin(self, runner: WatchedRunner, allowed: bool) -> None:
        self.is_on &= allowed
        runner.placed_of = self.placed_of

    def draw(self, prompt: list[int]) -> list[ModulePart]:
        """Contexts of a prompt, which grows by them."""
        rng, parts = self._rng, []
        if not self.is_on or rng.random() >= self._share:
            return []
        at = rng.choice((0, 0, rng.randrange(len(prompt) + 1)))
        for _ in range(rng.choice((1, 1, 2, 3))):
            text = rng.choice(self._texts)
            if len(prompt) + len(text) > self._longest:
                continue
            prompt[at:at] = text
            parts.append(ModulePart(at, len(text), self._recompute, self._pin()))
            at = min(len(prompt), at + len(text) + rng.choice((0, 0, 1, 5)))
        self._counts["contexts"] += len(parts)
        return parts

    def _pin(self) -> Pin | None:
        """That what is placed brings along, in worlds that pin."""
        rng = self._rng
        if not self._pins or rng.random() < 0.5:
            return None
        return Pin(ttl_s=rng.choice((1, 2, 20)), name=rng.choice(NAMES))

    def text(self) -> list[int]:
        """One of them, to be computed for its pin."""
        return list(self._rng.choice(self._texts))

    def placed_of(self, row: int) -> Placed:
        """What the request on a row places."""
        request = self._scheduler.state.rows.requests[row]
        return () if request is None else placed_of(request)
