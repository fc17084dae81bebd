"""Fault points: pools that refuse, hooks that raise, keys that collide. All from outside, none in the product."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from paceline.core.request import BlockKey, Request
from paceline.engine.prefix_keys import PrefixKeyHooks
from paceline.kv.block_pool import BlockPool
from paceline.kv.prefix import NO_MARKS, KeyMaker
from paceline.scheduler.state import SchedulerState


class Shortage:
    """Says when pools pretend to be empty; drawn once per step."""

    def __init__(self, rng: random.Random, chance: float) -> None:
        self._rng = rng
        self._chance = chance
        self._pools: list[BlockPool] = []
        self.now = False

    def draw(self) -> None:
        if not self._chance:
            return
        self.now = self._rng.random() < self._chance
        for pool in self._pools:
            pool.withheld = pool.num_blocks if self.now else 0

    def make_pool(self, num_blocks: int, **options: Any) -> BlockPool:
        pool = BlockPool(num_blocks, **options)
        self._pools.append(pool)
        return pool


class HookFault(RuntimeError):
    """Raised by a cursed request's hook."""


class CursedHooks(PrefixKeyHooks):
    """Hooks that raise for chosen requests, at the chosen hook."""

    def __init__(self, maker: KeyMaker) -> None:
        super().__init__(maker)
        self.cursed: dict[int, str] = {}

    def admit(self, request: Request) -> None:
        self._maybe("admit", request)

    def new_keys(self, request: Request) -> Sequence[BlockKey]:
        if request.row >= 0:
            self._maybe("new_keys", request)
        return super().new_keys(request)

    def finish(self, request: Request) -> None:
        self._maybe("finish", request)

    def watch(self, state: SchedulerState) -> None:
        """What is done with the blocks of one row raises for its owner too."""
        kv, owners = state.kv, state.rows.requests
        extend, publish = kv.extend, kv.publish

        def cursed_extend(row: int, num_slots: int) -> None:
            self._maybe("extend", cast(Request, owners[row]))
            extend(row, num_slots)

        def cursed_publish(row: int, keys: Sequence[BlockKey], num_computed: int) -> None:
            self._maybe("publish", cast(Request, owners[row]))
            publish(row, keys, num_computed)

        kv.extend, kv.publish = cursed_extend, cursed_publish  # type: ignore[method-assign]

    def _maybe(self, hook: str, request: Request) -> None:
        if self.cursed.get(request.id) == hook:
            raise HookFault(f"{hook} of {request.id}")


class CollidingKeyMaker(KeyMaker):
    """Every block gets the same key; the payload keeps the true chain."""

    def extend(
        self,
        keys: Sequence[BlockKey],
        tokens: NDArray[np.int32],
        root: bytes,
        marks: Mapping[int, bytes] = NO_MARKS,
    ) -> list[BlockKey]:
        true = [BlockKey(key.payload[-32:], key.payload[:-32]) for key in keys]
        made = super().extend(true, tokens, root, marks)
        return [BlockKey(bytes(32), key.payload + key.key) for key in made]


Maker = Callable[[int], KeyMaker]
