"""Moves of cached prefixes between levels: down before they are evicted, up when a request asks for them.

Decides which blocks go down, within budgets; whether a request loads is decided in `scheduler/loading.py`. Every move
is a ticket (`kv/swap.py`). Reads no clock and copies nothing. Decision: docs/decisions/0045-levels.md.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.config.engine import PreemptionCosts
from paceline.core.request import BlockKey
from paceline.kv.block_pool import Blocks
from paceline.kv.block_time import MICROSECONDS
from paceline.kv.level import Level
from paceline.kv.manager import KVManager
from paceline.kv.swap import NO_OWNER, Ticket

HOST, DISK = 1, 2
STEPS = 4  # a level keeps room for what this many of the largest steps take
# Once that is short, this part of it more is made: many moves at once cost little more than one.
MORE_SHARE = 4
TOGETHER = (128, 64)  # most blocks of one ticket down, by the level they leave
FETCHED_TOGETHER = 16  # and up from the disk: what has arrived can be used before the rest
BURST_S = 10.0  # of a budget that was not used, kept for later: blocks go in bursts, when a prompt comes
BESIDE_PROMPTS = 4  # a step with prompts leaves the other parts of the link to loads
# Most blocks that a step copies towards the disk through a staging area: beside rows that decode, beside prompts alone,
# and with nothing else to do. Copies to the host are part of a CPU's step, and so is what the threads of the disk take.
AHEAD_BESIDE_ROWS, AHEAD_BESIDE_PROMPTS, AHEAD_ALONE = 2, 16, 32
STAGING_SHARE = 4  # blocks on their way down fill at most this part of the staging area


class Budget:
    """So many blocks a second, and a burst of those that were not used."""

    def __init__(self, block_s: float) -> None:
        self.block_s = block_s
        # None: as many as there are; 0: none.
        self.most: float | None = None if not block_s else 0.0
        if self.most is not None and block_s < math.inf:
            self.most = max(1.0, BURST_S / block_s)
        self._left = self.most or 0.0
        self._last_us = 0

    def left(self, now_us: int, slower: int = 1) -> int:
        """Blocks that may move now."""
        if not self.most:
            return sys.maxsize if self.most is None else 0
        gained = (now_us - self._last_us) / (MICROSECONDS * self.block_s * slower)
        self._left, self._last_us = min(self.most, self._left + gained), now_us
        return int(self._left)

    def spend(self, count: int) -> None:
        """So many of those that may move do."""
        self._left -= count

    def take(self, count: int, now_us: int, slower: int = 1) -> int:
        """As many of `count` as may move now."""
        taken = min(count, self.left(now_us, slower))
        self.spend(taken)
        return taken


class Owed(NamedTuple):
    """What writing a block takes whose successor has left the host already."""

    num_blocks: int  # down to those that need not be written, itself included
    is_paid: bool  # the budget has given them


class Below(NamedTuple):
    """What lower levels hold of a prompt, behind what the device has."""

    num_host: int  # blocks on the host
    num_coming: int  # those behind them that are on the host or on their way there
    due_s: float  # when the last of these should be there
    num_disk: int  # those behind the first `num_host` that are on the host, on their way there or on the disk


class Tiers:
    """Moves between the levels of one manager."""

    def __init__(self, kv: KVManager, costs: PreemptionCosts | None, step_tokens: int) -> None:
        """`step_tokens`: most tokens of a step."""
        self._kv = kv
        self.is_on = kv.keeps_below and costs is not None
        self.has_disk = self.is_on and costs is not None and bool(kv.levels[DISK][0].num_places)
        self._stages = self.has_disk and bool(kv.num_staging)
        if self._stages:
            kv.fresh = deque(maxlen=sum(group.pool.usable for group in kv.groups))
        self._seen_fresh = 0  # `kv.num_fresh` when there was nothing to do about them
        self._staged: list[Ticket] = []  # that have brought blocks to the staging area since the last plan
        steps = STEPS * kv.blocks_for(step_tokens)
        # The host has to take in what comes while the disk writes.
        self._reserves = [
            [
                max(1, min(max(steps, part.pool.usable // 16 if level else 0), part.pool.usable // 4))
                for part in parts
            ]
            for level, parts in enumerate(kv.levels)
        ]
        self.budgets = [] if costs is None else [Budget(costs.block_s), Budget(costs.disk_write_s)]
        self._disk_block_s = 0.0 if costs is None else costs.disk_block_s
        # Blocks of the first group by name: what every request that comes is looked up in.
        self._on_host, self._on_disk = (kv.levels[level][0].cache.by_name for level in (HOST, DISK))
        self._disk_free_s = 0.0  # when the disk should have done all that was asked for
        self._owed: list[dict[bytes, Owed]] = [{} for _ in kv.groups]  # by name, of blocks that follow

    # -- down ----------------------------------------------------------------------------------------------

    def sink(self, num_decoding: int, reads_prompts: bool) -> None:
        """At the end of a plan: what goes next on a level whose reserve is short moves to the level below."""
        if self._kv.num_staging:
            if self.has_disk:
                self._write_staged()
                self._stage(
                    AHEAD_BESIDE_ROWS
                    if num_decoding
                    else AHEAD_BESIDE_PROMPTS
                    if reads_prompts
                    else AHEAD_ALONE
                )
            return
        for above in (0, 1) if self.has_disk else (0,):
            for group, part in enumerate(self._kv.levels[above]):
                reserve = self._reserves[above][group]
                short = reserve - part.pool.num_empty
                if short > 0 and len(part.pool.evictable):
                    short -= self._leaving(above, group)
                if short > 0 and len(part.pool.evictable):
                    slower = BESIDE_PROMPTS if reads_prompts and not above else 1
                    self._sink(above, group, short + reserve // MORE_SHARE, slower)

    def _leaving(self, above: int, group: int) -> int:
        """Blocks of a level that will be empty when their copies are done."""
        return sum(
            len(ticket.blocks[group])
            for ticket in self._kv.tickets.open.values()
            if ticket.level == above and ticket.keys is not None and not ticket.incoming and not ticket.stays
        )

    # Through a staging area: it keeps nothing, and the disk gets what can be hit as soon as its budget allows. So that
    # the device drops what it evicts, and a restart finds what was there.

    def arrived(self, ticket: Ticket) -> None:
        """A copy has completed: what has come down to the staging area goes on with the next plan."""
        if self._stages and ticket.keys is not None and not ticket.level and not ticket.incoming:
            self._staged.append(ticket)

    @property
    def has_news(self) -> bool:
        """A plan may have something to write to the disk, though nothing is computed."""
        return self._stages and (bool(self._staged) or self._seen_fresh != self._kv.num_fresh)

    def _write_staged(self) -> None:
        staged, self._staged = self._staged, []
        for ticket in staged:
            assert ticket.keys is not None
            for group, keys in enumerate(ticket.keys):
                host, disk = self._kv.levels[HOST][group], self._kv.levels[DISK][group]
                here = [
                    at
                    for at, key in enumerate(keys)
                    if host.cache.find(key) == ticket.places[group][at] and disk.cache.find(key) is None
                ][: disk.num_free]
                if not here:
                    continue
                blocks = ticket.places[group][here]
                host.pool.share(blocks)
                self._use_disk(len(here))
                kept = [keys[at] for at in here], [ticket.uses[group][at] for at in here]
                self._move(HOST, group, blocks, disk.take(len(here)), *kept, incoming=False, stays=True)

    def _stage(self, most: int) -> None:
        """Copy what can be hit since lately, and is neither staged nor on the disk, to the staging area."""
        kv, fresh = self._kv, self._kv.fresh
        if not fresh:
            self._seen_fresh = kv.num_fresh
            return
        under_way = sum(
            len(ticket.keys[0]) for ticket in kv.tickets.open.values() if ticket.keys and not ticket.incoming
        )
        host = kv.levels[HOST][0]
        most = min(most, max(1, host.num_places // STAGING_SHARE) - under_way, host.num_free)
        chosen: dict[int, list[int]] = {group.index: [] for group in kv.groups}
        left = most
        while fresh and left > 0:
            group, block = fresh[0]
            if self._is_lacking(group, block) and block not in chosen[group]:
                if not self._may_stage(group, block):
                    break
                chosen[group].append(block)
                left -= 1
            fresh.popleft()
        if not fresh or left > 0:  # there is nothing more to do, or not now
            self._seen_fresh = kv.num_fresh
        for group, blocks in chosen.items():
            if blocks:  # the last of a prompt is let go of first
                self._stage_blocks(group, np.array(blocks[::-1], np.int64))

    def _is_lacking(self, group: int, block: int) -> bool:
        """A block of the device can be hit, and lower levels do not have what it holds."""
        device = self._kv.groups[group]
        if not device.pool.cached[block]:
            return False
        key = device.cache.key_of(block)
        return all(self._kv.levels[level][group].cache.find(key) is None for level in (HOST, DISK))

    def _may_stage(self, group: int, block: int) -> bool:
        device = self._kv.groups[group]
        # While it is copied, a block cannot be handed out.
        if not device.pool.refs[block] and device.free_for(None) <= self._reserves[0][group]:
            return False
        return self.budgets[DISK - 1].take(1, self._kv.block_time.now_us) > 0

    def _stage_blocks(self, group: int, blocks: Blocks) -> None:
        device, host = self._kv.groups[group], self._kv.levels[HOST][group]
        keys = [device.cache.key_of(block) for block in blocks.tolist()]
        uses = device.pool.evictable.uses(blocks)
        device.pool.share(blocks)
        self._move(0, group, blocks, host.take(len(blocks)), keys, uses, incoming=False, stays=True)

    def turn_off_disk(self) -> None:
        """The disk failed too often: nothing is on it any more, and nothing goes there."""
        if not self.has_disk:
            return
        self.has_disk = self._stages = False
        self._staged.clear()
        if self._kv.fresh is not None:
            self._kv.fresh = None
        for part in self._kv.levels[DISK]:
            part.forget(np.array(part.cache.blocks(), np.int64))

    def _sink(self, above: int, group: int, short: int, slower: int) -> None:
        kv = self._kv
        upper, lower = kv.levels[above][group], kv.levels[above + 1][group]
        short = min(short, len(upper.pool.evictable))
        if not above:  # what is promised to rows stays free
            short = min(short, kv.groups[group].free_for(None))
        if short <= 0:
            return
        blocks, keys, uses = upper.give_up(short)
        if above:
            lacking = self._worth_writing(group, keys)[: lower.num_free]
        else:
            lacking = lower.cache.lacking(keys)
            most = self.budgets[above].take(min(len(lacking), lower.num_free), kv.block_time.now_us, slower)
            if most < len(lacking):  # those used most; of a prompt, its beginning
                at = np.array(lacking)
                order = np.lexsort((at, np.array(uses)[at]))
                lacking = np.sort(at[order[len(lacking) - most :]]).tolist()
        if len(lacking) < len(keys):
            dropped = np.ones(len(blocks), np.bool_)
            dropped[lacking] = False
            upper.give_back(blocks[dropped])
            blocks = blocks[lacking]
            keys, uses = [keys[at] for at in lacking], [uses[at] for at in lacking]
        if above:
            self._use_disk(len(keys))
        for start in range(0, len(keys), TOGETHER[above]):
            part = slice(start, start + TOGETHER[above])
            places = lower.take(len(keys[part]))
            self._move(above, group, blocks[part], places, keys[part], uses[part], incoming=False)

    def _worth_writing(self, group: int, keys: Sequence[BlockKey]) -> list[int]:
        """Of blocks that leave the host, those that go to the disk: with all that stands before them, or not at all.

        A prompt leaves from its end, and what is behind a gap is never hit. So the end is written only if the budget
        has the whole of it, down to what the disk or the device holds; that is taken from it at once. Where it has
        less, the end is dropped, until the beginning fits. Where it has nothing, nothing is looked up.
        """
        owed, budget, disk = self._owed[group], self.budgets[DISK - 1], self._kv.levels[DISK][group].cache
        left = affordable = budget.left(self._kv.block_time.now_us)
        chosen = []
        for at, key in enumerate(keys):
            if not left and not owed:
                break
            if (not left and key.key not in owed) or disk.find(key) is not None:
                continue
            known = owed.pop(key.key) if key.key in owed else Owed(self._behind(group, keys, at), False)
            count, is_paid = known
            if not count:
                continue
            if is_paid or count <= left:
                left -= 0 if is_paid else count
                is_paid = True
                chosen.append(at)
            if count > 1 and (is_paid or key.parent not in owed):
                owed[key.parent] = Owed(count - 1, is_paid)
        budget.spend(affordable - left)
        while len(owed) > self._kv.levels[HOST][group].num_places:  # of prompts that were hit on their way
            del owed[next(iter(owed))]
        return chosen

    def _behind(self, group: int, leaving: Sequence[BlockKey], at: int) -> int:
        """How many blocks, this one included, stand behind what disk or device hold of a prompt; 0: behind a gap."""
        device, host, disk = (self._kv.levels[level][group].cache for level in (0, HOST, DISK))
        key, count = leaving[at], 1
        while key.parent and disk.named(key.parent) is None and device.named(key.parent) is None:
            paid = self._owed[group].get(key.parent)
            if paid is not None and paid.is_paid:
                break
            if at + 1 < len(leaving) and leaving[at + 1].key == key.parent:  # a prompt leaves from its end
                key, at, count = leaving[at + 1], at + 1, count + 1
                continue
            place = host.named(key.parent)
            others = (other for other in leaving if other.key == key.parent)
            parent = next(others, None) if place is None else host.key_of(place)
            if parent is None:
                return count if self._is_written(key.parent) else 0
            key, count = parent, count + 1
        return count

    def _is_written(self, name: bytes) -> bool:
        """Whether a block is on its way to the disk."""
        return any(
            name in (key.key for keys in ticket.keys for key in keys)
            for ticket in self._kv.tickets.open.values()
            if ticket.level == HOST and ticket.keys is not None and not ticket.incoming
        )

    # -- up ------------------------------------------------------------------------------------------------

    def has(self, key: BlockKey) -> bool:
        """Whether lower levels may hold a block, or it is on its way."""
        name = key.key
        return name in self._on_host or name in self._kv.fetching or (self.has_disk and name in self._on_disk)

    def look(self, keys: Sequence[BlockKey], start: int, limit: int) -> Below:
        """What lower levels hold of the blocks from `start` to `limit`."""
        host, disk, fetching = self._kv.levels[HOST], self._kv.levels[DISK], self._kv.fetching
        num_host = num_coming = num_disk = 0
        due_s = -math.inf
        is_here, is_coming = True, True
        for key in keys[start:limit]:
            if all(part.cache.find(key) is not None for part in host):
                num_host += is_here
            elif key.key in fetching:
                is_here = False
                due_s = max(due_s, fetching[key.key]) if is_coming else due_s
            elif self.has_disk and all(part.cache.find(key) is not None for part in disk):
                is_here = is_coming = False
            else:
                break
            num_coming += is_coming and not is_here
            num_disk += not is_here
        return Below(num_host, num_coming, due_s, num_disk)

    def load(self, row: int, keys: Sequence[BlockKey], owner: int) -> tuple[int, int]:
        """Copy the blocks of `keys`, which the host has, behind those of a row; returns the ticket, and how many of
        them came from the disk."""
        kv = self._kv
        blocks, places = [], []
        from_disk = 0
        for group, host in zip(kv.groups, kv.levels[HOST], strict=True):
            found = np.array(host.find(keys), np.int64)
            host.hit(found)
            from_disk = max(from_disk, int(np.count_nonzero(host.is_fetched[found])))
            start, taken = group.append(row, len(keys))
            group.pool.share(taken)  # the ticket's own references
            kv.block_time.gained(row, len(keys))
            kv.delta.appends.append((row, group.index, start, taken))
            blocks.append(taken)
            places.append(found)
        ticket = Ticket(
            tuple(blocks), tuple(places), owner, incoming=True, free_places=True, keys=(keys,) * len(blocks)
        )
        number = kv.tickets.issue(ticket)
        for index, (taken, found) in enumerate(zip(blocks, places, strict=True)):
            kv.delta.swap_in.append((number, index, taken, found))
        return number, from_disk

    def makes_room(self, num_blocks: int) -> bool:
        """Whether this many blocks will soon be free on the device without evicting any that the host lacks."""
        if self._kv.num_staging:  # copies leave the device as it is
            return False
        device = zip(self._kv.levels[0], self._reserves[0], strict=True)
        return bool(self._kv.tickets.open) and any(
            part.pool.num_empty < num_blocks <= reserve for part, reserve in device
        )

    def loaded(self, ticket: Ticket) -> None:
        """A row has published what was loaded for it: a host that is full, or keeps itself so for a disk, need not keep
        it too. Where it has room, the copy it keeps spares one later."""
        reserves = self._reserves[HOST]
        for host, reserve, places in zip(self._kv.levels[HOST], reserves, ticket.places, strict=True):
            if self.has_disk or host.pool.num_empty < reserve:
                host.forget(places)

    def fetch_s(self, num_blocks: int) -> float:
        """Seconds until this many more blocks would have come from the disk."""
        return max(0.0, self._disk_free_s - self._now_s) + num_blocks * self._disk_block_s

    def fetch(self, keys: Sequence[BlockKey]) -> int:
        """Ask for those of `keys` that are on the disk and not on the host, in their order; returns how many."""
        kv = self._kv
        asked = 0
        keys = [key for key in keys if key.key not in kv.fetching]
        for index, (host, disk) in enumerate(zip(kv.levels[HOST], kv.levels[DISK], strict=True)):
            wanted = [key for key in keys if host.cache.find(key) is None]
            for start in range(0, len(wanted), FETCHED_TOGETHER):
                asked += self._fetch(index, host, disk, wanted[start : start + FETCHED_TOGETHER])
        return asked

    def _fetch(self, group: int, host: Level, disk: Level, keys: list[BlockKey]) -> int:
        places = np.array(disk.find(keys), np.int64)
        keys = keys[: len(places)]
        if not keys or host.num_free < len(keys):
            return 0
        uses = disk.pool.evictable.uses(places)
        disk.hit(places)
        self._use_disk(len(keys))
        for key in keys:
            self._kv.fetching[key.key] = self._disk_free_s
        self._move(HOST, group, host.take(len(keys)), places, keys, uses, incoming=True)
        return len(keys)

    @property
    def _now_s(self) -> float:
        return self._kv.block_time.now_us / MICROSECONDS

    def _use_disk(self, num_blocks: int) -> None:
        self._disk_free_s = max(self._disk_free_s, self._now_s) + num_blocks * self._disk_block_s

    def _move(
        self,
        above: int,
        group: int,
        blocks: Blocks,
        places: Blocks,
        keys: Sequence[BlockKey],
        uses: Sequence[int],
        *,
        incoming: bool,
        stays: bool = False,
    ) -> None:
        """Issue a ticket of one layer group that holds its blocks and places already."""
        kv, none = self._kv, blocks[:0]
        others = range(len(kv.groups))
        ticket = Ticket(
            tuple(blocks if index == group else none for index in others),
            tuple(places if index == group else none for index in others),
            NO_OWNER,
            incoming=incoming,
            free_places=True,
            level=above,
            keys=tuple(keys if index == group else () for index in others),
            uses=tuple(uses if index == group else () for index in others),
            stays=stays,
        )
        number = kv.tickets.issue(ticket)
        delta = kv.delta
        moves = (delta.fetch if incoming else delta.store) if above else delta.swap_out
        moves.append((number, group, blocks, places))
        if above:
            (delta.fetched_keys if incoming else delta.stored_keys).extend(keys)
            (delta.fetched_uses if incoming else delta.stored_uses).extend(uses)
