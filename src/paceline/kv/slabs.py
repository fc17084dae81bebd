"""Which model has which part of the memory that models share: slabs, and what becomes of them.

One allocation is cut into slabs of one size. A slab belongs to the KV of one model, or is a part of the home of one
whose weights lie there, or is free. Slabs change owners between steps, without a driver call. Slab 0 is never given: it
takes writes that are never read, of every model. Numbers only: knows no memory, engine or time
(docs/decisions/0052-slabs.md).

    slab        0     1     2     3     4     5     6     7
    owner     null | home of a | KV a  KV b | home of b | free
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.counters import SlabUse
from paceline.kv.block_pool import ABSENT, Blocks
from paceline.kv.group import LayerGroup

NULL_SLAB = 0
FREE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A model as the market knows it: how many slabs its KV has at least while it is awake, and at most."""

    name: str
    share: float = 1.0  # of what is there beside the floors
    floor: int = 1
    ceiling: int
    home: range = range(0)  # where its weights are while it is awake, and behind them
    num_adapter_slabs: int = 0  # its adapters


class SlabMarket:
    """Who has what. All methods speak of owners by number."""

    def __init__(self, num_slabs: int, owners: Sequence[Owner], slab_bytes: int = 1) -> None:
        self.num_slabs, self.slab_bytes = num_slabs, slab_bytes
        self.owners = tuple(owners)
        self._kv_of = [FREE] * num_slabs  # the owner that has a slab for KV
        self._home_of = [FREE] * num_slabs  # the owner whose home it is
        for number, owner in enumerate(self.owners):
            for slab in owner.home:
                assert self._home_of[slab] == FREE and slab != NULL_SLAB, "homes do not overlap"
                self._home_of[slab] = number
        self._is_home = [True] * len(self.owners)  # weights are where they belong
        self._free: list[int] | None = None  # as `free` found them last

    def slabs(self, owner: int) -> list[int]:
        """Those its KV has."""
        return [slab for slab, found in enumerate(self._kv_of) if found == owner]

    def owner(self, slab: int) -> int:
        """The owner of a slab, for KV or for weights; FREE: none."""
        if self._kv_of[slab] != FREE:
            return self._kv_of[slab]
        home = self._home_of[slab]
        return home if home != FREE and self._is_home[home] else FREE

    def use(self, owner: int) -> SlabUse:
        """What it has of all slabs but the null slab."""
        model, is_home = self.owners[owner], self._is_home[owner]
        adapters = model.num_adapter_slabs if is_home else 0
        weights = len(model.home) - adapters if is_home else 0
        return SlabUse(self._kv_of.count(owner), weights, adapters, self.num_slabs - 1)

    def free(self) -> list[int]:
        """Free slabs, homes of sleepers last: they have to be given back."""
        if self._free is None:
            found = [slab for slab in range(1, self.num_slabs) if self.owner(slab) == FREE]
            self._free = sorted(found, key=lambda slab: (self._home_of[slab] != FREE, slab))
        return self._free

    def take(self, owner: int, *, lent: bool = True) -> int | None:
        """A free slab for its KV, unless it has all it may have. `lent`: one of a sleeper's home will do."""
        if not self.may_take(owner):
            return None
        for slab in self.free():
            if lent or self._home_of[slab] == FREE:
                self._kv_of[slab], self._free = owner, None
                return slab
        return None

    def may_take(self, owner: int) -> bool:
        """Whether its KV may have one more."""
        return self._kv_of.count(owner) < self.owners[owner].ceiling

    def give(self, slab: int) -> None:
        """The KV that had a slab has it no more."""
        assert self._kv_of[slab] != FREE, "only what a model has can be given"
        self._kv_of[slab], self._free = FREE, None

    def above_floor(self, owner: int) -> int:
        """Slabs its KV could lose."""
        return self._kv_of.count(owner) - self.owners[owner].floor

    def donors(self, owner: int, is_short: Callable[[int], bool]) -> list[int]:
        """Owners that may give a slab for the KV of another: those furthest above their share first. One that is short
        itself gives only what it has above its share, and only to one that is below its own."""
        own_excess = self._excess(owner)
        found = []
        for other in range(len(self.owners)):
            if other == owner or self.above_floor(other) <= 0:
                continue
            if not is_short(other) or (self._excess(other) >= 1 and own_excess < 0):
                found.append(other)
        return sorted(found, key=lambda other: -self._excess(other))

    def _excess(self, owner: int) -> float:
        """Slabs its KV has above its share of all those that KV has."""
        total = sum(found != FREE for found in self._kv_of) + len(self.free())
        parts = sum(self.owners[number].share for number in {*self.awake(), owner})
        return self._kv_of.count(owner) - total * self.owners[owner].share / parts

    def awake(self) -> list[int]:
        """Owners whose weights are where they belong."""
        return [number for number, is_home in enumerate(self._is_home) if is_home]

    # -- homes ---------------------------------------------------------------------------------------------

    def leave_home(self, owner: int) -> None:
        """Its weights have gone: other models may use where they were. Its KV has nothing by then."""
        assert owner not in self._kv_of, "a sleeper has no KV"
        self._is_home[owner], self._free = False, None

    def in_the_way(self, owner: int) -> list[int]:
        """Slabs of its home that KV of others has."""
        return [slab for slab in self.owners[owner].home if self._kv_of[slab] != FREE]

    def come_home(self, owner: int) -> None:
        """Its weights can be brought back; nothing is in the way."""
        assert not self.in_the_way(owner), "a home is given back before weights come"
        self._is_home[owner], self._free = True, None


class HeldSlabs:
    """The slabs of one model: a slab has the same block numbers in every layer group. Knows what holds blocks, and
    decides nothing.

    `size` 0: all blocks are there for good, and only `least_usable` may be asked. `under_way`: what steps and copies
    hold of a group.
    """

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
