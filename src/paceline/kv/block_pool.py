"""Blocks of one pool: reference counts, the free list, and which block is evicted.

A block is free when its count is 0. Free blocks that still hold a cached prefix wait in the eviction order and
are found again by a hit; the others lie on a stack and are handed out first. Block 0 is the null block: it
takes writes that are never read and is never handed out. Where pools share memory, blocks come and go (`gain`, `lose`).
Knows nothing of requests, rows or keys.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.int64]  # block numbers; 64 bit because they are used as indices
NULL_BLOCK = 0
ABSENT = -1  # in place of a count: the block's memory belongs to another pool
REMEMBERED = 512  # of the blocks that were evicted last


class EvictionOrder(Protocol):
    """Which cached block that no row holds goes next. An order that learns also hears what becomes of prefixes."""

    def add(self, blocks: Sequence[int] | Blocks) -> None: ...
    def remove(self, blocks: Sequence[int] | Blocks) -> None: ...
    def pick(self, count: int) -> list[int]: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...

    def entered(
        self, blocks: Sequence[int], names: Sequence[bytes], uses: Sequence[int] | None = None
    ) -> None:
        """Blocks can be hit from now on, under these names. `uses`: they come from another level, with this many."""
        return None

    def uses(self, blocks: Blocks) -> list[int]:
        """How often blocks were used, lately; the more, the more they are worth to a lower level."""
        return [0] * len(blocks)

    @property
    def num_remembered(self) -> int:
        """Keys of evicted blocks that it keeps."""
        return 0

    def used(self, blocks: Sequence[int]) -> None:
        """A request hits these blocks; those that are free are removed next."""
        return None

    def evicted(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """What was picked is gone."""
        return None

    def want(self, blocks: Sequence[int]) -> None:
        """A waiting request will hit these blocks."""
        return None

    def miss(self, names: Sequence[bytes]) -> None:
        """A waiting request would hit blocks of these names, but there are none."""
        return None

    def num_wanted(self) -> int:
        """Blocks that waiting requests will hit."""
        return 0

    def unwant(self, blocks: Sequence[int]) -> None:
        """No waiting request will any more."""
        return None

    def learned(self) -> tuple[float, ...]:
        """What was learned from hits so far, for a later run."""
        return ()

    def learn(self, values: Sequence[float]) -> None:
        """What an earlier run has learned. Before anything is added; values of another kind are left alone."""
        return None

    def hurry(self, blocks: Sequence[int]) -> None:
        """These go before all others once no row holds them, unless they are hit before or wanted."""
        return None


class LeastRecentlyFreed(EvictionOrder):
    """The block that was set free longest ago goes first."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, blocks: Sequence[int] | Blocks) -> None:
        for block in np.asarray(blocks).tolist():
            self._blocks[block] = None

    def remove(self, blocks: Sequence[int] | Blocks) -> None:
        for block in np.asarray(blocks).tolist():
            del self._blocks[block]

    def pick(self, count: int) -> list[int]:
        return [self._blocks.popitem(last=False)[0] for _ in range(count)]

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(dict.keys(self._blocks))  # the same order, without the ordered dict's slow iterator


class BlockPool:
    """Hands out blocks and takes them back. `on_evict` hears of cached blocks before they are reused."""

    def __init__(
        self,
        num_blocks: int,
        *,
        on_evict: Callable[[list[int]], None] = lambda blocks: None,
        order: EvictionOrder | None = None,
        has_null: bool = True,
    ) -> None:
        assert num_blocks >= 2 or not has_null, "a pool needs the null block and one more"
        self.num_blocks = num_blocks
        self.usable = num_blocks - has_null  # blocks that can be handed out
        self.refs = np.zeros(num_blocks, np.int32)
        self.refs[:has_null] = 1
        self.cached = np.zeros(num_blocks, np.bool_)  # holds a prefix that can be hit
        self.evictable: EvictionOrder = order if order is not None else LeastRecentlyFreed()
        self.num_free = self.usable  # on the stack and waiting for eviction
        self.num_evicted = 0
        self.evicted_last: deque[int] = deque(maxlen=REMEMBERED)  # for viewers
        self.withheld = 0  # free blocks kept back from outside (to shrink a pool, or to test a shortage)
        self._on_evict = on_evict
        # The lowest ids come off the stack first, so that a lightly used pool stays compact.
        self._stack: Blocks = np.arange(num_blocks - 1, -1, -1, dtype=np.int64)
        self._depth = self.usable

    @property
    def num_empty(self) -> int:
        """Free blocks that hold nothing."""
        return self._depth

    @property
    def available(self) -> int:
        """Blocks that `allocate` will give now."""
        return max(0, self.num_free - self.withheld) if self.withheld else self.num_free

    def free_blocks(self) -> Blocks:
        """All free blocks, cached ones last in the order they will be evicted. For checks."""
        waiting = np.fromiter(iter(self.evictable), np.int64, len(self.evictable))
        return np.concatenate([self.free_stack(), waiting])

    def free_stack(self) -> Blocks:
        """The free blocks that hold nothing. For checks."""
        return self._stack[: self._depth]

    def allocate(self, count: int) -> Blocks:
        """Take `count` blocks, each with one reference. The caller has checked `available`."""
        taken = count if count < self._depth else self._depth
        blocks = self._stack[self._depth - taken : self._depth][::-1].copy()
        self._depth -= taken
        self.num_free -= count
        if taken < count:
            evicted = self._evict(count - taken)
            blocks = np.concatenate((blocks, evicted)) if taken else evicted
        self.refs[blocks] = 1
        return blocks

    def claim(self, blocks: Blocks) -> None:
        """Take these blocks, which hold nothing, each with one reference."""
        left = self.free_stack()
        left = left[~np.isin(left, blocks)]
        assert len(left) + len(blocks) == self._depth, "a block that is claimed holds nothing"
        self._stack[: len(left)] = left
        self._depth = len(left)
        self.num_free -= len(blocks)
        self.refs[blocks] = 1

    def lose(self, blocks: Blocks) -> None:
        """These blocks, which hold nothing, leave the pool."""
        self.claim(blocks)
        self.refs[blocks] = ABSENT
        self.usable -= len(blocks)

    def gain(self, blocks: Blocks) -> None:
        """Blocks that were not there can be handed out from now on."""
        assert (self.refs[blocks] == ABSENT).all(), "a block that is gained was not there"
        self.refs[blocks] = 1
        self.usable += len(blocks)
        self.release(blocks[::-1])

    def take_cached(self, count: int) -> Blocks:
        """Take the `count` cached blocks that are evicted next, though others may be free."""
        self.num_free -= count
        blocks = self._evict(count)
        self.refs[blocks] = 1
        return blocks

    def share(self, blocks: Blocks) -> None:
        """Add a reference to each of `blocks` (all different)."""
        counts = self.refs[blocks]
        self.refs[blocks] = counts + 1
        if np.count_nonzero(counts) < len(counts):
            free = blocks[counts == 0]
            self.evictable.remove(free)  # only a cached block can be found without a reference
            self.num_free -= len(free)

    def release(self, blocks: Blocks) -> None:
        """Drop one reference for each entry of `blocks`; the first given is the first evicted.

        A block may be given more than once when several holders let go together.
        """
        given = blocks.tolist()
        if len(set(given)) < len(given):
            np.subtract.at(self.refs, blocks, 1)
            blocks = np.array(list(dict.fromkeys(given)), np.int64)
            counts = self.refs[blocks]
        else:
            counts = self.refs[blocks] - 1
            self.refs[blocks] = counts
        zero = blocks[counts == 0] if np.count_nonzero(counts) else blocks
        self.num_free += len(zero)
        is_cached = self.cached[zero]
        num_plain = len(zero) - int(np.count_nonzero(is_cached))
        if num_plain:
            self._stack[self._depth : self._depth + num_plain] = zero[~is_cached]
            self._depth += num_plain
            zero = zero[is_cached]
        if len(zero):
            self.evictable.add(zero)

    def _evict(self, count: int) -> Blocks:
        """Take `count` blocks out of the eviction order; their prefixes are gone."""
        evicted = self.evictable.pick(count)
        self.num_evicted += count
        self.evicted_last.extend(evicted)
        self._on_evict(evicted)
        blocks = np.array(evicted, np.int64)
        self.cached[blocks] = False
        return blocks

    def forget(self, blocks: Blocks) -> None:
        """Blocks no longer hold a cached prefix; those that are free move to the stack."""
        self.cached[blocks] = False
        free = blocks[self.refs[blocks] == 0]
        if len(free):
            self.evictable.remove(free)
            self._stack[self._depth : self._depth + len(free)] = free
            self._depth += len(free)
