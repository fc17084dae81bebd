"""Sources: blocks of modules that rows are to copy from.

A row holds the blocks of all modules that it still has to place, from its admission on, so that none of them is evicted
under it; what it has placed it lets go of once the step that copies is done. Requests that wait hold nothing. Knows
rows as numbers, and nothing of requests, plans or time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from paceline.core.request import BlockKey
from paceline.kv.group import Blocks, LayerGroup

Found = tuple[Blocks, ...]  # blocks of a module, by group


class Sources:
    """All of a KV cache."""

    def __init__(self, groups: Sequence[LayerGroup]) -> None:
        self._groups = groups
        self.rows: dict[int, dict[int, Found]] = {}  # by row, and by place among the modules of its request

    def find(self, keys: Sequence[BlockKey]) -> Found:
        """The blocks of a module, as far as they are in the cache."""
        return tuple(
            [np.array(group.find(keys, len(keys)), np.int64) for group in self._groups],
        )

    def unheld(self, modules: Iterable[Found]) -> list[int]:
        """Free blocks that holding all of these takes, per group."""
        counts = []
        found = list(modules)
        for group in self._groups:
            blocks = np.unique(np.concatenate([blocks[group.index] for blocks in found]))
            counts.append(int(np.count_nonzero(group.pool.refs[blocks] == 0)))
        return counts

    def hold(self, row: int, module: int, keys: Sequence[BlockKey]) -> None:
        """A row is about to need a module that is in the cache."""
        found = self.find(keys)
        for group, blocks in zip(self._groups, found, strict=True):
            group.pool.evictable.used(blocks.tolist())
            group.pool.share(blocks)
        self.rows.setdefault(row, {})[module] = found

    def take(self, row: int, module: int | None = None) -> list[Found]:
        """A row needs a module no longer, or none; the references pass to the caller."""
        held = self.rows.get(row)
        if held is None:
            return []
        found = list(held.values()) if module is None else [held.pop(module)]
        if module is None or not held:
            del self.rows[row]
        return found

    def held(self, group: int) -> Blocks:
        """Blocks of a group that rows hold, one entry for each reference."""
        parts = [found[group] for modules in self.rows.values() for found in modules.values()]
        return np.concatenate([*parts, np.zeros(0, np.int64)]).astype(np.int64)
