"""Pins: cached beginnings of prompts that stay for a time, whatever else needs room; and sources of copies.

A pin is a number of block names of one tenant. As long as one pin has a name, the block under it has a reference of
its own, so that nothing evicts it:

    pin ctx_a (until 60 s)   names  a b c d         block of a   reference of pins: 1
    pin of a prompt (40 s)   names  a b x           block of b   reference of pins: 1
                                                    at 40 s      x is let go of; a and b stay for ctx_a

Pins take at most `most` blocks of each group together, and `most_of_tenant` of one tenant, both such that the longest
request fits beside them. A block is paid for once, until the last moment that any pin of its tenant has it. A pin whose
blocks cannot be trusted, or leave with their memory, is lost as a whole; the request that needs it next pins again what
it computes. Knows names and blocks, and of requests their numbers.

Sources are held in the same way, by rows: blocks of modules that a row is to copy from. A row holds the blocks of all
modules that it still has to place, from its admission on, so that none of them is evicted under it; what it has placed
it lets go of once the step that copies is done. Requests that wait hold nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from paceline.core.counters import PinUse
from paceline.core.request import BlockKey
from paceline.kv.block_time import MICROSECONDS, BlockTime
from paceline.kv.group import Blocks, LayerGroup

NO_LIMIT = 1 << 62


class Pinned(NamedTuple):
    """One pin."""

    owner: int  # the request that made it
    tenant: str
    name: str
    names: tuple[bytes, ...]  # of its blocks, from the beginning of a prompt on
    until_us: int
    is_named: bool


class Bought(NamedTuple):
    """What a request has got of the pin it wanted."""

    num_blocks: int = 0
    block_us: int = 0  # of time that was not paid for before


class Pins:
    """All pins of a KV cache."""

    def __init__(self, groups: Sequence[LayerGroup], time: BlockTime) -> None:
        self.most = self.most_of_tenant = 0  # blocks of each group
        self.ended: list[tuple[Pinned, bool]] = []  # since they were taken last; True: lost before its time
        self._groups = groups
        self._time = time
        self._pins: dict[tuple[str, str], Pinned] = {}  # by tenant and name
        # By tenant: names of blocks, and how many pins have each.
        self._users: dict[str, dict[bytes, int]] = {}
        self._paid_us: dict[str, dict[bytes, int]] = {}  # the same names: until when they are paid for
        self._blocks: list[dict[bytes, int]] = [{} for _ in groups]  # by group: blocks that are held, by name
        self._next_us = NO_LIMIT  # when the first of them ends

    def __bool__(self) -> bool:
        return bool(self._pins)

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pinned]:
        return iter(self._pins.values())

    @property
    def num_blocks(self) -> int:
        """Names that are pinned: blocks of a group without a window."""
        return sum(map(len, self._users.values()))

    def use(self) -> PinUse:
        return PinUse(len(self), self.num_blocks, self.most, self.most_of_tenant)

    def of_tenant(self, tenant: str) -> int:
        return len(self._users.get(tenant, ()))

    def held(self, group: int) -> Blocks:
        """Blocks of a group that pins hold."""
        found = self._blocks[group]
        return np.fromiter(found.values(), np.int64, len(found))

    def entries(self, group: int) -> dict[bytes, int]:
        """The same by name. For checks."""
        return self._blocks[group]

    def users(self) -> dict[str, dict[bytes, int]]:
        """By tenant: names of blocks, and how many pins have each. For checks."""
        return self._users

    def room_for(self, tenant: str) -> int:
        """Blocks that may still be pinned for a tenant."""
        return max(0, min(self.most - self.num_blocks, self.most_of_tenant - self.of_tenant(tenant)))

    def is_pinned(self, tenant: str, name: str, keys: Sequence[BlockKey]) -> bool:
        """Whether there is a pin of this name, of these blocks."""
        pin = self._pins.get((tenant, name))
        return pin is not None and pin.names == tuple([key.key for key in keys])

    def lacking(self, tenant: str, keys: Sequence[BlockKey]) -> int:
        """Blocks that a pin of these keys would add to those of its tenant."""
        known = self._users.get(tenant, {})
        return sum(key.key not in known for key in keys)

    def pin(
        self, owner: int, tenant: str, name: str, keys: Sequence[BlockKey], ttl_s: int, most: int = NO_LIMIT
    ) -> Bought:
        """Pin cached blocks, from the first on and as far as there is room: of what the limits leave, and of `most`."""
        room = min(self.room_for(tenant), most)
        names = self._take(tenant, keys, room)
        if not names:
            return Bought()
        now_us = self._time.now_us
        until_us = now_us + ttl_s * MICROSECONDS
        at = (tenant, name or names[-1].hex())
        replaced = [each for each in (self._pins.pop(at, None),) if each is not None]
        if not name:  # a prompt that goes on from another: one pin is enough for both
            given = set(names)
            shorter = [pin for pin in self if self._is_within(pin, tenant, given, until_us)]
            replaced += [self._pins.pop((pin.tenant, pin.name)) for pin in shorter]
        until_us = max([until_us, *(pin.until_us for pin in replaced if not name)])
        users = self._users.setdefault(tenant, {})
        for each in names:
            users[each] = users.get(each, 0) + 1
        self._pins[at] = Pinned(owner, tenant, at[1], tuple(names), until_us, bool(name))
        for pin in replaced:
            self._let_go(pin)
        self._next_us = min(self._next_us, until_us)
        return Bought(len(names), self._pay(tenant, names, until_us))

    def price(self, tenant: str, keys: Sequence[BlockKey], ttl_s: int) -> Bought:
        """What a pin of these keys would get if it were made now, and all of them were in the cache."""
        known, room, names = self._users.get(tenant, {}), self.room_for(tenant), []
        for key in keys:
            room -= key.key not in known
            if room < 0:
                break
            names.append(key.key)
        until_us = self._time.now_us + ttl_s * MICROSECONDS
        return Bought(len(names), self._unpaid(tenant, names, until_us))

    def unpin(self, tenant: str, name: str) -> Pinned | None:
        """The end of a pin before its time."""
        pin = self._pins.pop((tenant, name), None)
        if pin is not None:
            self._let_go(pin)
            self.ended.append((pin, False))
        return pin

    def expire(self) -> None:
        """What has been pinned until now is evicted in its turn again."""
        now_us = self._time.now_us
        if now_us < self._next_us:
            return
        self._end([pin for pin in self if pin.until_us <= now_us], is_lost=False)

    def drop_lost(self) -> None:
        """Blocks can be hit no more: pins that need one of them are lost."""
        self._drop([~group.pool.cached[self.held(group.index)] for group in self._groups])

    def leave(self, first: int, end: int) -> None:
        """These blocks are about to leave the pools."""
        held = [self.held(group.index) for group in self._groups]
        self._drop([(blocks >= first) & (blocks < end) for blocks in held])

    def _drop(self, wrong: Sequence[np.ndarray[tuple[int], np.dtype[np.bool_]]]) -> None:
        gone: set[bytes] = set()
        for blocks, are_wrong in zip(self._blocks, wrong, strict=True):
            gone.update(name for name, is_wrong in zip(blocks, are_wrong.tolist(), strict=True) if is_wrong)
        if gone:
            self._end([pin for pin in self if not gone.isdisjoint(pin.names)], is_lost=True)

    def _end(self, pins: Sequence[Pinned], *, is_lost: bool) -> None:
        for pin in pins:
            del self._pins[pin.tenant, pin.name]
            self._let_go(pin)
            self.ended.append((pin, is_lost))
        self._next_us = min((pin.until_us for pin in self), default=NO_LIMIT)

    def _is_within(self, pin: Pinned, tenant: str, names: set[bytes], until_us: int) -> bool:
        """Whether one without a name says nothing that a longer one does not say too."""
        return (
            pin.tenant == tenant and not pin.is_named and pin.names[-1] in names and pin.until_us <= until_us
        )

    def _take(self, tenant: str, keys: Sequence[BlockKey], room: int) -> list[bytes]:
        """Hold the blocks of a beginning of these keys, of which `room` are new; returns its names."""
        known = self._users.get(tenant, {})
        # Blocks that are kept back from outside count: of those a log knows only when the next step is planned.
        free = [group.pool.num_free - group.reserved for group in self._groups]
        new: list[list[tuple[bytes, int]]] = [[] for _ in self._groups]
        names: list[bytes] = []
        for key in keys:
            if key.key not in known:
                found = [group.cache.find(key) for group in self._groups]
                whole = all(
                    block is not None or group.window is not None
                    for block, group in zip(found, self._groups, strict=True)
                )
                if not room or not whole or min(free) <= 0:
                    break
                room -= 1
                for at, (block, group) in enumerate(zip(found, self._groups, strict=True)):
                    if block is not None:
                        new[at].append((key.key, block))
                        free[at] -= not group.pool.refs[block]
            names.append(key.key)
        for held, group, taken in zip(self._blocks, self._groups, new, strict=True):
            held.update(taken)
            group.pool.share(np.array([block for _, block in taken], np.int64))
            group.pinned += len(taken)
        return names

    def _let_go(self, pin: Pinned) -> None:
        users, paid_us = self._users[pin.tenant], self._paid_us[pin.tenant]
        gone = []
        for name in reversed(pin.names):  # the last block first: beginnings stay longest
            users[name] -= 1
            if not users[name]:
                del users[name], paid_us[name]
                gone.append(name)
        if not users:
            del self._users[pin.tenant], self._paid_us[pin.tenant]
        for held, group in zip(self._blocks, self._groups, strict=True):
            blocks = [held.pop(name) for name in gone if name in held]
            group.pinned -= len(blocks)
            group.pool.release(np.array(blocks, np.int64))

    def _pay(self, tenant: str, names: Sequence[bytes], until_us: int) -> int:
        """Block-microseconds of all groups that these names were not paid for before."""
        total, paid_us = self._unpaid(tenant, names, until_us), self._paid_us.setdefault(tenant, {})
        for name in names:
            paid_us[name] = max(until_us, paid_us.get(name, 0))
        return total

    def _unpaid(self, tenant: str, names: Sequence[bytes], until_us: int) -> int:
        paid_us, now_us = self._paid_us.get(tenant, {}), self._time.now_us
        unpaid = sum([max(0, until_us - max(now_us, paid_us.get(name, now_us))) for name in names])
        return unpaid * len(self._groups)


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
