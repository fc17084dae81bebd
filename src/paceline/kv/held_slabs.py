"""Slabs of one model: blocks that come from other models and go to them, `size` at a time (`kv/slabs.py`).

A slab has the same block numbers in every layer group. Knows what holds blocks, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from paceline.kv.block_pool import ABSENT, Blocks
from paceline.kv.group import LayerGroup


class HeldSlabs:
    """`size` 0: all blocks are there for good, and only `least_usable` may be asked. `under_way`: what steps and copies
    hold of a group."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        size: int,
        least_blocks: int,
        under_way: Callable[[int], list[Blocks]],
    ) -> None:
        self._groups = groups
        self.size = size
        # Blocks that each group has at least, whatever models beside this one do.
        self.least_usable = tuple(least_blocks or group.pool.usable for group in groups)
        self._under_way = under_way

    def numbers(self) -> list[int]:
        """Those that are here."""
        refs = self._groups[0].pool.refs.reshape(-1, self.size)
        return [number for number in (refs[:, -1] != ABSENT).nonzero()[0].tolist() if number]

    def gain(self, slab: int) -> None:
        for group in self._groups:
            group.pool.gain(self._blocks_of(slab))

    def lose(self, slab: int) -> None:
        """What is cached in a slab is forgotten, and its blocks leave. No row, fence or copy holds any of them."""
        blocks = self._blocks_of(slab)
        for group in self._groups:
            group.device.forget(blocks)
            group.pool.lose(blocks)

    def spare(self) -> list[int]:
        """Slabs of which nothing is held, those first whose cached blocks would be evicted first. As many as can go and
        leave what is promised to rows."""
        groups = self._groups
        held = [(group.pool.refs != 0).reshape(-1, self.size).any(1) for group in groups]
        spare = np.flatnonzero(~np.logical_or.reduce(held))
        room = min(group.free_for(None) for group in groups) // self.size
        if not len(spare) or room <= 0:
            return []
        cost = np.zeros(len(held[0]), np.int64)
        for pool in [group.pool for group in groups]:
            waiting = np.fromiter(iter(pool.evictable), np.int64, len(pool.evictable))
            np.add.at(cost, waiting // self.size, np.arange(1, len(waiting) + 1))
        found: list[int] = spare[np.argsort(cost[spare], kind="stable")][:room].tolist()
        return found

    def can_lose(self, slab: int) -> bool:
        """Whether nothing is held in a slab, and enough is left without it for what is promised to rows."""
        blocks = self._blocks_of(slab)
        return all(
            not group.pool.refs[blocks].any() and group.pool.num_free - group.reserved >= len(blocks)
            for group in self._groups
        )

    def holders(self, slab: int) -> tuple[list[int], bool]:
        """Rows that hold blocks of a slab, and whether anything else does: a step or a copy under way."""
        blocks = self._blocks_of(slab)
        found: set[int] = set()
        is_other = False
        for group in self._groups:
            rows = (group.table // self.size == slab).any(1).nonzero()[0]
            found.update(row for row in rows.tolist() if np.isin(group.blocks_of(row), blocks).any())
            is_other |= any(np.isin(each, blocks).any() for each in self._under_way(group.index))
        return sorted(found), is_other

    def _blocks_of(self, slab: int) -> Blocks:
        return np.arange(slab * self.size, (slab + 1) * self.size)
