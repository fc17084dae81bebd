"""Evicts the blocks that are least likely to be hit soon, by what was learned from hits so far.

The index of a cached block is the number of hits it will bring for each second it is kept. It depends on the block's
class, which is how often it was used lately, and on its age, the time since it was set free:

    class      uses, each fading with a half-life of 300 s, when the block was set free: below 1.4, 2, 2.8, or more
    age        17 bins, from 12 s wide to everything beyond 1,300 s
    rate       hits of a class at an age / block-seconds spent at that age, both fading with a half-life of 30 minutes
    index      the best over later ages j: chance of a hit until j / seconds the block is expected to be kept until then

Blocks that were evicted still count: their keys are remembered, and one that is computed again is a hit that was missed
and keeps its uses. Without that memory a small cache never learns that users come back after minutes.

Blocks wait in releases: a run that was let go of at one moment and has one class, leaf first. A release lies in the
queue of its class and age, so that what is sorted are 68 queues, every four seconds, and never blocks. A queue hands
out its oldest release first. Blocks that the first waiting requests will hit are kept aside and go last; those of a
tenant that has more than its share go before all.

What is learned is kept in whole numbers, and in doubles made of them by + - * / in a fixed order: every machine decides
alike, and a replay repeats it. Knows blocks and the names of keys; reads no clock.
Decision: docs/decisions/0043-eviction.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from paceline.kv.block_pool import Blocks, EvictionOrder
from paceline.kv.block_time import MICROSECONDS, BlockTime

Counts = NDArray[np.int64]

EPOCH_S = 4  # ages are counted in these, and indices made anew once in each
EPOCH_US = EPOCH_S * MICROSECONDS
# Where the bins of ages begin, in epochs. The first is wide: in a narrow one little time is spent, and the block that
# all requests share would make every fresh release look precious.
BINS = (0, 3, 5, 8, 11, 15, 20, 25, 33, 43, 55, 75, 100, 138, 188, 250, 325)
LAST_BIN = len(BINS) - 1
OLD = BINS[LAST_BIN]  # epochs after which age no longer matters
OLD_S = 1300.0  # seconds that blocks in the last bin are thought to be kept for
BIN_OF = np.array([sum(age >= start for start in BINS) - 1 for age in range(OLD + 1)])
WIDTHS_S = (*(float((end - start) * EPOCH_S) for start, end in pairwise(BINS)), OLD_S)

ONE_USE = 1024
STEPS = (ONE_USE * 14 // 10, ONE_USE * 2, ONE_USE * 28 // 10)  # uses at which the next class begins
NUM_CLASSES = len(STEPS) + 1
# Uses fade in 64 steps to a half.
FADE_US = 300 * MICROSECONDS // 64
FADED = np.array([round(65_536 * 0.5 ** (step / 64)) for step in range(64)])
GONE = 64 * 24  # steps after which nothing is left

TABLE_FADE = 0.998460830  # of what was counted, in an epoch: a half in 30 minutes
FORGOTTEN = 16_384  # epochs after which nothing of the tables is left
# Block-seconds that a class is thought to have been like the lowest; the lowest, like the guess.
PRIOR_BLOCK_S = 3_000.0
# The older, the less likely: least recently freed, to begin with.
GUESS = tuple(0.02 / (1.0 + start) for start in BINS)
REMEMBERED_TIMES = 8  # keys of evicted blocks that are remembered, for each block of the pool
SPARE_ENTRIES = 1024
WINDOW = 64  # entries of a release that are looked at together
RETURNED = -1  # instead of the epoch in which a block was set free: it is hit, or will be, and is at no risk
NOT_WAITING, ASIDE, HURRIED = 0, -1, -2  # instead of the number of a release


class Release:
    """Blocks that were set free together and have one class, in the order they go; those before `next` have gone.

    An entry is stale once its block has left: `ReuseOrder._release_of` then has another number for it.
    """

    __slots__ = ("blocks", "epoch", "next", "number", "queue")

    def __init__(self, number: int, queue: int, epoch: int, blocks: Blocks) -> None:
        self.number = number
        self.queue = queue
        self.epoch = epoch
        self.blocks = blocks
        self.next = 0


class Uses:
    """Columns of what is known of blocks, or of remembered keys."""

    def __init__(self, size: int) -> None:
        self.uses: Counts = np.zeros(size, np.int64)  # as of the time beside them
        self.used_us: Counts = np.zeros(size, np.int64)
        self.kind: Counts = np.zeros(size, np.int64)  # class when it was set free last
        self.freed: Counts = np.full(size, RETURNED, np.int64)  # epoch of that

    def left(self, at: Counts, now_us: int) -> Counts:
        """What is left of the uses."""
        return faded(self.uses[at], now_us - self.used_us[at])


class ReuseOrder(EvictionOrder):
    """Cached blocks that no row holds, by expected hits per block-second."""

    def __init__(self, num_blocks: int, time: BlockTime) -> None:
        self._time = time
        self._epoch = -1  # of the last look at the time; -1: none yet
        self._blocks = Uses(num_blocks)
        self._release_of: Counts = np.zeros(num_blocks, np.int64)  # number of the release a block waits in
        self._num_waiting = 0
        self._last_release = 0
        # Blocks some waiting request will hit; those of them that are free wait in `_aside`, not in a queue.
        self._is_wanted: NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self._aside: dict[int, None] = {}
        # Blocks that go before all others, and those of them that are free.
        self._is_hurried: NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self._hurried: dict[int, None] = {}
        # Keys of evicted blocks: a ring, and the place of each name in it.
        self._evicted: dict[bytes, int] = {}
        self._ring = Uses(REMEMBERED_TIMES * num_blocks)
        self._ring_names: list[bytes] = [b""] * (REMEMBERED_TIMES * num_blocks)
        self._ring_next = 0
        # Blocks that were entered since the last look: rows publish one by one, all of a step are taken in together.
        self._new_blocks: list[int] = []
        self._new_names: list[bytes] = []
        self._new_us = 0
        # Releases by class and bin, and how many entries they have, stale ones too.
        self._queues: list[deque[Release]] = [deque() for _ in range(NUM_CLASSES * len(BINS))]
        self._entries = 0
        # What is learned: by queue, hits and block-seconds. Blocks at risk, with evicted ones, by class and epoch: the
        # columns are a ring, and one more for the old.
        self.hits = np.zeros(len(self._queues))
        self.risk = np.zeros(len(self._queues))
        self._at_risk: Counts = np.zeros((NUM_CLASSES, OLD + 1), np.int64)
        self.index = [0.0] * len(self._queues)
        self._ranked: list[int] = []  # queues, lowest index first
        self._rank = [0] * len(self._queues)
        self._hand = 0  # queues before it in `_ranked` are empty
        self._make_index()

    # -- what happens to blocks ----------------------------------------------------------------------------

    def entered(
        self, blocks: Sequence[int], names: Sequence[bytes], uses: Sequence[int] | None = None
    ) -> None:
        """Computed blocks can be hit from now on, or blocks that were copied from another level, with their uses."""
        if self._new_blocks and (uses is not None or self._new_us != self._time.now_us):
            self._take_in()
        self._new_us = self._time.now_us
        self._new_blocks += blocks
        self._new_names += names
        if uses is not None:
            self._take_in()
            self._blocks.uses[blocks] = uses

    def uses(self, blocks: Blocks) -> list[int]:
        return self._blocks.left(blocks, self._time.now_us).tolist()  # type: ignore[no-any-return]

    def used(self, blocks: Sequence[int]) -> None:
        """A request hits blocks, free ones and such as other rows hold."""
        self._look()
        hit, known, now_us = np.array(blocks, np.int64), self._blocks, self._time.now_us
        known.uses[hit] = ONE_USE + known.left(hit, now_us)
        known.used_us[hit] = now_us
        self._return(known, hit[self._release_of[hit] > NOT_WAITING])
        self._is_hurried[hit] = False

    def add(self, blocks: Sequence[int] | Blocks) -> None:
        self._look()
        freed, known = np.asarray(blocks, np.int64), self._blocks
        uses = known.left(freed, self._time.now_us)
        kinds = (uses >= STEPS[0]).astype(np.int64) + (uses >= STEPS[1]) + (uses >= STEPS[2])
        known.kind[freed] = kinds
        known.freed[freed] = self._epoch
        self._num_waiting += len(freed)
        wanted = self._is_wanted[freed]
        if np.count_nonzero(wanted):
            aside = freed[wanted]
            known.freed[aside] = RETURNED
            self._release_of[aside] = ASIDE
            self._aside.update(dict.fromkeys(aside[::-1].tolist()))
            freed, kinds = freed[~wanted], kinds[~wanted]
        hurried = self._is_hurried[freed]
        if np.count_nonzero(hurried):
            self._put_first(freed[hurried])
            freed, kinds = freed[~hurried], kinds[~hurried]
        for kind, count in enumerate(np.bincount(kinds, minlength=NUM_CLASSES).tolist()):
            if count:
                self._enqueue(kind, freed if count == len(freed) else freed[kinds == kind])
        if self._entries > 2 * self._num_waiting + SPARE_ENTRIES:
            self._drop_stale()

    def remove(self, blocks: Sequence[int] | Blocks) -> None:
        self._look()
        gone = np.asarray(blocks, np.int64)
        self._take_out(gone)
        self._count(self._blocks, gone, -1)

    def pick(self, count: int) -> list[int]:
        self._look()
        picked = list(self._hurried)[:count]
        if picked:
            self._take_out(np.array(picked, np.int64))
        while len(picked) < count and self._hand < len(self._ranked):
            queue = self._queues[self._ranked[self._hand]]
            if queue:
                picked += self._pick_from(queue, count - len(picked))
            else:
                self._hand += 1
        if len(picked) < count:  # those wanted last, by the request that came last
            aside = list(self._aside)[len(picked) - count :][::-1]
            self._take_out(np.array(aside, np.int64))
            picked += aside
        return picked

    def evicted(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """What was picked is remembered by key, and is at risk like the rest, until later ones take its place."""
        gone, ring, memory = np.array(blocks, np.int64), self._ring, self._evicted
        places = (self._ring_next + np.arange(len(gone))) % len(self._ring_names)
        self._ring_next = (self._ring_next + len(gone)) % len(self._ring_names)
        self._count(ring, places, -1)
        for place, name in zip(places.tolist(), names, strict=True):
            before = self._ring_names[place]
            if memory.get(before) == place:
                del memory[before]
            self._ring_names[place] = name
            memory[name] = place
        known = self._blocks
        for column, of_block in (
            (ring.uses, known.uses),
            (ring.used_us, known.used_us),
            (ring.kind, known.kind),
            (ring.freed, known.freed),
        ):
            column[places] = of_block[gone]
        self._is_wanted[gone] = self._is_hurried[gone] = False

    # -- what waiting requests will hit --------------------------------------------------------------------

    def want(self, blocks: Sequence[int]) -> None:
        """They go last, and have returned as far as learning is concerned."""
        self._look()
        wanted = np.array(blocks, np.int64)
        self._is_wanted[wanted] = True
        self._is_hurried[wanted] = False
        release = self._release_of[wanted]
        waiting = wanted[(release > NOT_WAITING) | (release == HURRIED)]
        for block in wanted[release == HURRIED].tolist():
            del self._hurried[block]
        self._return(self._blocks, waiting)
        self._release_of[waiting] = ASIDE
        self._aside.update(dict.fromkeys(waiting.tolist()))

    def miss(self, names: Sequence[bytes]) -> None:
        """A waiting request would have hit blocks of these names; what was evicted of them has returned too."""
        if not self._evicted:
            return
        self._look()
        places = [place for name in names if (place := self._evicted.get(name)) is not None]
        self._return(self._ring, np.array(places, np.int64))

    def unwant(self, blocks: Sequence[int]) -> None:
        """No waiting request will hit them any more: as if they were set free now."""
        self._look()
        left = np.array(blocks, np.int64)
        self._is_wanted[left] = False
        waiting = left[self._release_of[left] == ASIDE]
        if len(waiting):
            self._take_out(waiting)
            self.add(waiting)

    def hurry(self, blocks: Sequence[int]) -> None:
        self._look()
        over = np.array(blocks, np.int64)
        self._is_hurried[over] = True
        waiting = over[self._release_of[over] > NOT_WAITING]
        self._take_out(waiting)
        self._num_waiting += len(waiting)
        self._count(self._blocks, waiting, -1)
        self._put_first(waiting)

    def _put_first(self, blocks: Blocks) -> None:
        """Nothing is learned of them: they are not kept long enough to return."""
        self._blocks.freed[blocks] = RETURNED
        self._release_of[blocks] = HURRIED
        self._hurried.update(dict.fromkeys(blocks.tolist()))

    def num_wanted(self) -> int:
        return int(np.count_nonzero(self._is_wanted))

    # -- over restarts -------------------------------------------------------------------------------------

    def learned(self) -> tuple[float, ...]:
        return (*self.hits.tolist(), *self.risk.tolist())

    def learn(self, values: Sequence[float]) -> None:
        tables = np.array(values, np.float64)
        if len(tables) == 2 * len(self._queues) and np.isfinite(tables).all() and tables.min() >= 0.0:
            self.hits, self.risk = tables[: len(self._queues)].copy(), tables[len(self._queues) :].copy()
            self._make_index()

    # -- for checks ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[int]:
        yield from list(self._hurried)
        for number in self._ranked:
            for release in self._queues[number]:
                entries = release.blocks[release.next :]
                yield from entries[self._release_of[entries] == release.number].tolist()
        yield from reversed(self._aside)

    @property
    def num_remembered(self) -> int:
        """Keys of evicted blocks."""
        return len(self._evicted)

    # -- queues --------------------------------------------------------------------------------------------

    def _enqueue(self, kind: int, blocks: Blocks) -> None:
        """A release begins, in the queue of its class and of the youngest."""
        self._last_release += 1
        queue = kind * len(BINS)
        self._release_of[blocks] = self._last_release
        self._queues[queue].append(Release(self._last_release, queue, self._epoch, blocks))
        self._entries += len(blocks)
        self._at_risk[kind, self._epoch % OLD] += len(blocks)
        self._hand = min(self._hand, self._rank[queue])

    def _pick_from(self, queue: deque[Release], most: int) -> list[int]:
        """At most this many blocks of the oldest release; none where all it has are stale."""
        release = queue[0]
        entries = release.blocks[release.next : release.next + max(WINDOW, 2 * most)]
        live = np.flatnonzero(self._release_of[entries] == release.number)[:most]
        passed = int(live[-1]) + 1 if len(live) == most else len(entries)
        picked = entries[live]
        self._release_of[picked] = NOT_WAITING
        self._num_waiting -= len(picked)
        self._entries -= passed
        release.next += passed
        if release.next == len(release.blocks):
            queue.popleft()
        return picked.tolist()  # type: ignore[no-any-return]

    def _take_out(self, blocks: Blocks) -> None:
        self._num_waiting -= len(blocks)
        if self._aside:
            for block in blocks[self._release_of[blocks] == ASIDE].tolist():
                del self._aside[block]
        if self._hurried:
            for block in blocks[self._release_of[blocks] == HURRIED].tolist():
                del self._hurried[block]
        self._release_of[blocks] = NOT_WAITING

    def _drop_stale(self) -> None:
        """Releases keep only blocks that still wait in them: entries never outgrow the pool."""
        self._entries = 0
        for number, queue in enumerate(self._queues):
            kept: deque[Release] = deque()
            for release in queue:
                entries = release.blocks[release.next :]
                release.blocks, release.next = entries[self._release_of[entries] == release.number], 0
                if len(release.blocks):
                    kept.append(release)
                    self._entries += len(release.blocks)
            self._queues[number] = kept

    def _age(self) -> None:
        """Releases move on to the queues of their age. A queue is in order of time, so only its front is looked at."""
        for kind in range(NUM_CLASSES):
            for at in range(LAST_BIN - 1, -1, -1):
                queue, until = self._queues[kind * len(BINS) + at], self._epoch - BINS[at + 1]
                while queue and queue[0].epoch <= until:
                    release = queue.popleft()
                    release.queue = kind * len(BINS) + int(BIN_OF[min(self._epoch - release.epoch, OLD)])
                    self._queues[release.queue].append(release)

    # -- learning ------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Take in what is new. Once in an epoch: count the time, age the releases, make the index anew."""
        if self._new_blocks:
            self._take_in()
        epoch = self._time.now_us // EPOCH_US
        if epoch != self._epoch:
            self._pass_time(epoch)

    def _take_in(self) -> None:
        """What was entered has one use, and those from before if it is remembered: then it would have been a hit."""
        blocks, names = np.array(self._new_blocks, np.int64), self._new_names
        self._new_blocks, self._new_names = [], []
        if self._new_us // EPOCH_US != self._epoch:
            self._pass_time(self._new_us // EPOCH_US)
        known, memory = self._blocks, self._evicted
        known.uses[blocks] = ONE_USE
        known.used_us[blocks] = self._new_us
        self._is_wanted[blocks] = self._is_hurried[blocks] = False
        back = [at for at, name in enumerate(names) if name in memory] if memory else []
        if back:
            places = np.array([memory.pop(names[at]) for at in back], np.int64)
            known.uses[blocks[back]] += self._ring.left(places, self._new_us)
            self._return(self._ring, places)

    def _pass_time(self, epoch: int) -> None:
        if self._epoch < 0:
            self._epoch = epoch
        for _ in range(min(epoch - self._epoch, OLD)):
            self._pass_epochs(1)
        if epoch > self._epoch:  # after a long pause all blocks are old
            self._pass_epochs(epoch - self._epoch)
        self._age()
        self._make_index()

    def _pass_epochs(self, count: int) -> None:
        """One epoch, or many in which every block is old already."""
        self._epoch += count
        factor = 1.0
        for _ in range(min(count, FORGOTTEN)):
            factor *= TABLE_FADE
        at, at_risk = self._epoch % OLD, self._at_risk
        at_risk[:, OLD] += at_risk[:, at]
        at_risk[:, at] = 0
        # By age: the ring backwards from this epoch, then the old.
        by_age = at_risk[:, [*range(at, -1, -1), *range(OLD - 1, at, -1), OLD]]
        spent = np.add.reduceat(by_age, BINS, axis=1) * (EPOCH_S * count)
        self.hits = self.hits * factor
        self.risk = self.risk * factor + spent.reshape(-1)

    def _count(self, known: Uses, at: Counts, change: int) -> None:
        """So many more of these are at risk: those that have not returned."""
        epochs, kinds = known.freed[at], known.kind[at]
        columns = np.where(self._epoch - epochs < OLD, epochs % OLD, OLD)
        risky = epochs != RETURNED
        np.add.at(self._at_risk, (kinds[risky], columns[risky]), change)

    def _return(self, known: Uses, at: Counts) -> None:
        """These are hit, or would have been: they have returned, at their age, and are at risk no more."""
        at = at[known.freed[at] != RETURNED]
        if len(at):
            self._count(known, at, -1)
            ages = np.minimum(self._epoch - known.freed[at], OLD)
            numbers = known.kind[at] * len(BINS) + BIN_OF[ages]
            self.hits += np.bincount(numbers, minlength=len(self.hits))
            known.freed[at] = RETURNED

    def _make_index(self) -> None:
        """Rates of all classes and ages, from them the index, and the order of the queues."""
        hits, risk = self.hits.tolist(), self.risk.tolist()
        below: Sequence[float] = GUESS
        for base in range(0, len(hits), len(BINS)):
            rates = [
                (hits[base + at] + PRIOR_BLOCK_S * below[at]) / (risk[base + at] + PRIOR_BLOCK_S)
                for at in range(len(BINS))
            ]
            self.index[base : base + len(BINS)] = index_of(rates)
            below = below if base else rates
        # Equal ones: the older first.
        self._ranked = sorted(
            range(len(hits)), key=lambda number: (self.index[number], -(number % len(BINS)))
        )
        for rank, number in enumerate(self._ranked):
            self._rank[number] = rank
        self._hand = 0


def faded(uses: Counts, passed_us: Counts) -> Counts:
    """What is left of `uses` after a time."""
    steps = np.minimum(passed_us // FADE_US, GONE)
    left: Counts = uses * FADED[steps & 63] >> (16 + (steps >> 6))
    return left


def index_of(rates: Sequence[float]) -> list[float]:
    """For each bin the best ratio of hits to seconds over all moments at which a block could be given up.

    A block at the start of bin k that is kept until the end of bin j is hit with the chance 1 - left, and is kept for
    `kept_s` seconds on average. Inside a bin the rate is constant: seconds are the chance of a hit over the rate.
    """
    bins = []
    for rate, width_s in zip(rates, WIDTHS_S, strict=True):
        stays = 1.0 / (1.0 + rate * width_s)
        bins.append((stays, width_s * stays))
    found = []
    for first in range(len(bins)):
        left, kept_s, best = 1.0, 0.0, 0.0
        for stays, mean_s in bins[first:]:
            kept_s += left * mean_s
            left *= stays
            best = max(best, (1.0 - left) / kept_s)
        found.append(best)
    return found
