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
out its oldest release first. Blocks that the first waiting requests will hit are kept aside and go last.

All state is whole numbers, or doubles made of them by + - * / in a fixed order: every machine decides alike, and a
replay repeats it. Knows blocks and the names of keys; reads no clock. Decision: docs/decisions/0043-eviction.md.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from paceline.kv.block_pool import EvictionOrder
from paceline.kv.block_time import MICROSECONDS, BlockTime

EPOCH_S = 4  # ages are counted in these, and indices made anew once in each
EPOCH_US = EPOCH_S * MICROSECONDS
# Where the bins of ages begin, in epochs. The first is wide: in a narrow one little time is spent, and the block that
# all requests share would make every fresh release look precious.
BINS = (0, 3, 5, 8, 11, 15, 20, 25, 33, 43, 55, 75, 100, 138, 188, 250, 325)
LAST_BIN = len(BINS) - 1
OLD = BINS[LAST_BIN]  # epochs after which age no longer matters
OLD_S = 1300.0  # seconds that blocks in the last bin are thought to be kept for
BIN_OF = tuple(sum(age >= start for start in BINS) - 1 for age in range(OLD))
WIDTHS_S = (*(float((end - start) * EPOCH_S) for start, end in pairwise(BINS)), OLD_S)

ONE_USE = 1024
STEPS = (ONE_USE * 14 // 10, ONE_USE * 2, ONE_USE * 28 // 10)  # uses at which the next class begins
NUM_CLASSES = len(STEPS) + 1
# Uses fade in 64 steps to a half.
FADE_US = 300 * MICROSECONDS // 64
FADED = tuple(round(65_536 * 0.5 ** (step / 64)) for step in range(64))
GONE = 64 * 24  # steps after which nothing is left

TABLE_FADE = 0.998460830  # of what was counted, in an epoch: a half in 30 minutes
FORGOTTEN = 16_384  # epochs after which nothing of the tables is left
# Block-seconds that a class is thought to have been like the one below it; the lowest, like the guess.
PRIOR_BLOCK_S = 3_000.0
GUESS = tuple(
    0.02 / (1.0 + start) for start in BINS
)  # the older, the less likely: least recently freed, to begin with
REMEMBERED_TIMES = 8  # keys of evicted blocks that are remembered, for each block of the pool
SPARE_ENTRIES = 1024
RETURNED = -1  # instead of the epoch in which a block was set free: it is hit, or will be, and is at no risk


class Release:
    """Blocks that were set free together and have one class; the last entry goes first.

    An entry is stale once its block has left: `ReuseOrder._release_of` then names another release, or none.
    """

    __slots__ = ("blocks", "epoch", "queue")

    def __init__(self, queue: int, epoch: int, blocks: list[int]) -> None:
        self.queue = queue
        self.epoch = epoch
        self.blocks = blocks


class ReuseOrder(EvictionOrder):
    """Cached blocks that no row holds, by expected hits per block-second."""

    def __init__(self, num_blocks: int, time: BlockTime) -> None:
        self._time = time
        self._num_remembered = REMEMBERED_TIMES * num_blocks
        self._epoch = -1  # of the last look at the time; -1: none yet
        # By block: uses as of the time beside them; class and epoch of its release; where it waits.
        self._uses = [0] * num_blocks
        self._used_us = [0] * num_blocks
        self._class = [0] * num_blocks
        self._freed = [0] * num_blocks
        self._release_of: list[Release | None] = [None] * num_blocks
        self._num_waiting = 0
        # Blocks some waiting request will hit, by block; those of them that are free wait in `_aside`, not in a queue.
        self._is_wanted = bytearray(num_blocks)
        self._aside: dict[int, None] = {}
        # Keys of evicted blocks: uses, when, class and epoch.
        self._evicted: OrderedDict[bytes, tuple[int, int, int, int]] = OrderedDict()
        # Releases by class and bin, and how many entries they have, stale ones too.
        self._queues: list[deque[Release]] = [deque() for _ in range(NUM_CLASSES * len(BINS))]
        self._entries = 0
        # What is learned: by queue, hits and block-seconds; blocks at risk by class and epoch, evicted ones too.
        self.hits = [0.0] * len(self._queues)
        self.risk = [0.0] * len(self._queues)
        self._at_risk = [[0] * OLD for _ in range(NUM_CLASSES)]
        self._old_at_risk = [0] * NUM_CLASSES
        self.index = [0.0] * len(self._queues)
        self._ranked: list[int] = []  # queues, lowest index first
        self._rank = [0] * len(self._queues)
        self._hand = 0  # queues before it in `_ranked` are empty
        self._make_index()

    # -- what happens to blocks ----------------------------------------------------------------------------

    def entered(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """Computed blocks can be hit from now on. One that was evicted before would have been a hit."""
        self._look()
        now_us = self._time.now_us
        for block, name in zip(blocks, names, strict=True):
            uses = ONE_USE
            if self._evicted and (known := self._evicted.pop(name, None)) is not None:
                before, used_us, kind, epoch = known
                uses += faded(before, now_us - used_us)
                self._returns(kind, epoch)
            self._uses[block] = uses
            self._used_us[block] = now_us
            self._is_wanted[block] = 0

    def used(self, blocks: Sequence[int]) -> None:
        """A request hits blocks, free ones and such as other rows hold."""
        self._look()
        now_us = self._time.now_us
        for block in blocks:
            self._uses[block] = ONE_USE + faded(self._uses[block], now_us - self._used_us[block])
            self._used_us[block] = now_us
            if self._release_of[block] is not None:
                self._returns(self._class[block], self._freed[block])
                self._freed[block] = RETURNED

    def add(self, blocks: Iterable[int]) -> None:
        self._look()
        now_us = self._time.now_us
        runs: list[list[int]] = [[] for _ in range(NUM_CLASSES)]
        wanted: list[int] = []
        for block in blocks:
            self._num_waiting += 1
            uses = faded(self._uses[block], now_us - self._used_us[block])
            kind = (uses >= STEPS[0]) + (uses >= STEPS[1]) + (uses >= STEPS[2])
            self._class[block] = kind
            if self._is_wanted[block]:
                self._freed[block] = RETURNED
                wanted.append(block)
            else:
                self._freed[block] = self._epoch
                runs[kind].append(block)
        self._aside.update(dict.fromkeys(reversed(wanted)))
        for kind, run in enumerate(runs):
            if run:
                run.reverse()
                self._enqueue(Release(kind * len(BINS), self._epoch, run))
                self._count(kind, self._epoch, len(run))
        if self._entries > 2 * self._num_waiting + SPARE_ENTRIES:
            self._drop_stale()

    def remove(self, block: int) -> None:
        self._take_out(block)
        self._count(self._class[block], self._freed[block], -1)

    def pick(self, count: int) -> list[int]:
        self._look()
        picked: list[int] = []
        while len(picked) < count and self._hand < len(self._ranked):
            queue = self._queues[self._ranked[self._hand]]
            if not queue:
                self._hand += 1
                continue
            release = queue[0]
            entries = release.blocks
            while entries and len(picked) < count:
                block = entries.pop()
                self._entries -= 1
                if self._release_of[block] is release:
                    self._take_out(block)
                    picked.append(block)
            if not entries:
                queue.popleft()
        while len(picked) < count:  # the one that was wanted last, by the request that came last
            block = next(reversed(self._aside))
            self._take_out(block)
            picked.append(block)
        return picked

    def evicted(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """What was picked is remembered by key, and is at risk like the rest."""
        memory = self._evicted
        for block, name in zip(blocks, names, strict=True):
            self._is_wanted[block] = 0
            memory[name] = (self._uses[block], self._used_us[block], self._class[block], self._freed[block])
        while len(memory) > self._num_remembered:
            _, (_, _, kind, epoch) = memory.popitem(last=False)
            self._count(kind, epoch, -1)

    def want(self, block: int) -> None:
        """A waiting request will hit this block: it goes last, and has returned as far as learning is concerned."""
        self._is_wanted[block] = 1
        if self._release_of[block] is not None:
            self._look()
            self._release_of[block] = None
            self._aside[block] = None
            self._returns(self._class[block], self._freed[block])
            self._freed[block] = RETURNED

    def miss(self, name: bytes) -> None:
        """A waiting request would have hit a block of this name; if it was evicted, it has returned too."""
        if (known := self._evicted.get(name)) is not None:
            uses, used_us, kind, epoch = known
            self._look()
            self._returns(kind, epoch)
            self._evicted[name] = (uses, used_us, kind, RETURNED)

    def unwant(self, block: int) -> None:
        """No waiting request will hit it any more: as if it were set free now."""
        self._is_wanted[block] = 0
        if block in self._aside:
            self._take_out(block)
            self.add([block])

    def num_wanted(self) -> int:
        return self._is_wanted.count(1)

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[int]:
        for number in self._ranked:
            for release in self._queues[number]:
                for block in reversed(release.blocks):
                    if self._release_of[block] is release:
                        yield block
        yield from reversed(self._aside)

    @property
    def num_remembered(self) -> int:
        """Keys of evicted blocks. For checks."""
        return len(self._evicted)

    # -- queues --------------------------------------------------------------------------------------------

    def _enqueue(self, release: Release) -> None:
        for block in release.blocks:
            self._release_of[block] = release
        self._queues[release.queue].append(release)
        self._entries += len(release.blocks)
        self._hand = min(self._hand, self._rank[release.queue])

    def _take_out(self, block: int) -> None:
        self._num_waiting -= 1
        if self._release_of[block] is not None:
            self._release_of[block] = None
        else:
            del self._aside[block]

    def _drop_stale(self) -> None:
        """Releases keep only blocks that still wait in them: entries never outgrow the pool."""
        self._entries = 0
        for number, queue in enumerate(self._queues):
            kept: deque[Release] = deque()
            for release in queue:
                release.blocks = [block for block in release.blocks if self._release_of[block] is release]
                if release.blocks:
                    kept.append(release)
                    self._entries += len(release.blocks)
            self._queues[number] = kept

    def _age(self) -> None:
        """Releases move on to the queues of their age. A queue is in order of time, so only its front is looked at."""
        for kind in range(NUM_CLASSES):
            for at in range(LAST_BIN - 1, -1, -1):
                number = kind * len(BINS) + at
                queue, until = self._queues[number], self._epoch - BINS[at + 1]
                while queue and queue[0].epoch <= until:
                    release = queue.popleft()
                    release.queue = kind * len(BINS) + bin_of(self._epoch - release.epoch)
                    self._queues[release.queue].append(release)

    # -- learning ------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Once in an epoch: count the time that has passed, age the releases, make the index anew."""
        epoch = self._time.now_us // EPOCH_US
        if epoch == self._epoch:
            return
        if self._epoch < 0:
            self._epoch = epoch
        for _ in range(min(epoch - self._epoch, OLD)):
            self._pass_epoch()
        if epoch > self._epoch:  # after a long pause all blocks are old
            self._pass_long(epoch - self._epoch)
        self._age()
        self._make_index()

    def _pass_epoch(self) -> None:
        self._epoch += 1
        at = self._epoch % OLD
        self._fade_tables(1)
        for kind, ring in enumerate(self._at_risk):
            base = kind * len(BINS)
            self._old_at_risk[kind] += ring[at]
            ring[at] = 0
            by_age = ring[at::-1] + ring[:at:-1]
            for number, (start, end) in enumerate(pairwise(BINS)):
                self.risk[base + number] += float(sum(by_age[start:end]) * EPOCH_S)
            self.risk[base + LAST_BIN] += float(self._old_at_risk[kind] * EPOCH_S)

    def _pass_long(self, count: int) -> None:
        """Many epochs in which every block was old."""
        self._epoch += count
        self._fade_tables(count)
        for kind in range(NUM_CLASSES):
            self.risk[kind * len(BINS) + LAST_BIN] += float(self._old_at_risk[kind] * EPOCH_S * count)

    def _fade_tables(self, count: int) -> None:
        factor = 1.0
        for _ in range(min(count, FORGOTTEN)):
            factor *= TABLE_FADE
        self.hits = [value * factor for value in self.hits]
        self.risk = [value * factor for value in self.risk]

    def _count(self, kind: int, epoch: int, change: int) -> None:
        """Blocks of a class that were set free in an epoch and have not returned: more or fewer."""
        if epoch == RETURNED:
            return
        if self._epoch - epoch < OLD:
            self._at_risk[kind][epoch % OLD] += change
        else:
            self._old_at_risk[kind] += change

    def _returns(self, kind: int, epoch: int) -> None:
        """A block that was at risk is hit, or would have been."""
        if epoch != RETURNED:
            self.hits[kind * len(BINS) + bin_of(self._epoch - epoch)] += 1.0
            self._count(kind, epoch, -1)

    def _make_index(self) -> None:
        """Rates of all classes and ages, from them the index, and the order of the queues."""
        below: Sequence[float] = GUESS
        for kind in range(NUM_CLASSES):
            base = kind * len(BINS)
            rates = [
                (self.hits[base + at] + PRIOR_BLOCK_S * below[at]) / (self.risk[base + at] + PRIOR_BLOCK_S)
                for at in range(len(BINS))
            ]
            self.index[base : base + len(BINS)] = index_of(rates)
            below = rates if kind == 0 else below
        # Equal ones: the older first.
        order = sorted(range(len(self.index)), key=lambda number: (self.index[number], -(number % len(BINS))))
        self._ranked = order
        for rank, number in enumerate(order):
            self._rank[number] = rank
        self._hand = 0


def bin_of(age: int) -> int:
    """The bin of an age in epochs."""
    return BIN_OF[age] if age < OLD else LAST_BIN


def faded(uses: int, passed_us: int) -> int:
    """What is left of `uses` after a time."""
    steps = passed_us // FADE_US
    if not steps:
        return uses
    return uses * FADED[steps & 63] >> (16 + (steps >> 6)) if steps < GONE else 0


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
