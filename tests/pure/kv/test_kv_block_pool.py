"""The block pool against a model of it: references, the free list, and eviction in order behind its seam."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.kv.block_pool import NULL_BLOCK, BlockPool, Blocks, EvictionOrder, LeastRecentlyFreed


def blocks(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


class LargestFirst(EvictionOrder):
    """Another order behind the seam: the highest block number goes. Strict about what it is told."""

    def __init__(self) -> None:
        self._blocks: list[int] = []

    def add(self, blocks: Sequence[int] | Blocks) -> None:
        for block in np.asarray(blocks).tolist():
            assert block not in self._blocks, f"block {block} was added twice"
            self._blocks.append(block)

    def remove(self, blocks: Sequence[int] | Blocks) -> None:
        for block in np.asarray(blocks).tolist():
            self._blocks.remove(block)

    def pick(self, count: int) -> list[int]:
        self._blocks.sort()
        picked = [self._blocks.pop() for _ in range(count)]
        assert len(picked) == count
        return picked

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)


class PoolMachine(RuleBasedStateMachine):
    """References in a Counter, free cached blocks in a list: what the pool must agree with."""

    @initialize(size=st.integers(2, 12))
    def start(self, size: int) -> None:
        self.pool = BlockPool(size, on_evict=self.evicted)
        self.refs: Counter[int] = Counter()
        self.cached: set[int] = set()
        self.waiting: list[int] = []  # free and cached, the next to go in front
        self.told: list[int] = []

    def evicted(self, gone: list[int]) -> None:
        assert all(self.pool.refs[block] == 0 for block in gone), "only what no row holds is evicted"
        self.told += gone

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.pool.available))
        plain = self.pool.num_free - len(self.waiting)
        expected = self.waiting[: max(0, count - plain)]
        self.told.clear()
        given = self.pool.allocate(count).tolist()
        assert self.told == expected, "plain blocks go first, then cached ones, longest free first"
        assert len(set(given)) == count and NULL_BLOCK not in given
        assert not any(self.refs[block] for block in given)
        self.waiting = self.waiting[len(expected) :]
        self.cached -= set(given)
        self.refs.update(given)

    @precondition(lambda self: +self.refs or self.waiting)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        known = sorted({*(+self.refs), *self.waiting})
        shared = data.draw(st.lists(st.sampled_from(known), unique=True))
        self.pool.share(blocks(*shared))
        self.refs.update(shared)
        self.waiting = [block for block in self.waiting if block not in shared]

    @precondition(lambda self: +self.refs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = sorted(self.refs.elements())
        let_go = data.draw(st.permutations(held))[: data.draw(st.integers(1, len(held)))]
        self.pool.release(blocks(*let_go))
        self.refs.subtract(let_go)
        for block in dict.fromkeys(let_go):
            if not self.refs[block] and block in self.cached:
                self.waiting.append(block)

    @precondition(lambda self: +self.refs)
    @rule(data=st.data())
    def enter_cache(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(+self.refs)))
        self.pool.cached[block] = True
        self.cached.add(block)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.cached)))
        self.pool.forget(np.array([block]))
        self.cached.discard(block)
        if block in self.waiting:
            self.waiting.remove(block)

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        live = {block for block in range(1, pool.num_blocks) if pool.refs[block]}
        assert live == set(+self.refs)
        assert all(pool.refs[block] == self.refs[block] for block in live)
        assert pool.refs[NULL_BLOCK] == 1
        free = pool.free_blocks().tolist()
        assert sorted(free) == sorted(set(range(1, pool.num_blocks)) - live), "each free block once"
        assert pool.num_free == pool.available == len(free) == pool.usable - len(live)
        assert list(pool.evictable) == self.waiting
        assert set(np.flatnonzero(pool.cached).tolist()) == self.cached


PoolMachine.TestCase.settings = settings(
    max_examples=settings().max_examples * 6 // 10, stateful_step_count=30
)
TestPoolAgainstItsModel = PoolMachine.TestCase


def test_the_null_block_is_counted_and_never_handed_out() -> None:
    pool = BlockPool(2)
    assert (pool.usable, pool.num_free) == (1, 1)
    assert pool.allocate(1).tolist() == [1]
    assert pool.num_free == 0


def test_a_pool_of_the_null_block_alone_makes_no_sense() -> None:
    with pytest.raises(AssertionError, match="null block"):
        BlockPool(1)


def test_low_numbers_go_first_so_that_a_quiet_pool_stays_compact() -> None:
    assert BlockPool(9).allocate(3).tolist() == [1, 2, 3]


def test_the_map_entry_is_gone_before_the_block_is_handed_out() -> None:
    """S17: at the moment of eviction the block has no owner yet."""
    moments: list[tuple[int, int]] = []
    pool = BlockPool(4, on_evict=lambda gone: moments.append((gone[0], int(pool.refs[gone[0]]))))
    taken = pool.allocate(3)
    pool.cached[taken] = True
    pool.release(taken[::-1].copy())
    assert pool.allocate(1).tolist() == [3]
    assert moments == [(3, 0)]
    assert not pool.cached[3] and pool.num_evicted == 1


def test_what_was_used_again_goes_to_the_back_of_the_order() -> None:
    pool = BlockPool(4)
    taken = pool.allocate(3)
    pool.cached[taken] = True
    pool.release(taken)
    pool.share(taken[:1])
    pool.release(taken[:1])
    assert pool.allocate(3).tolist() == [2, 3, 1]


def test_several_holders_may_let_go_of_a_block_in_one_call() -> None:
    pool = BlockPool(4)
    taken = pool.allocate(2)
    pool.share(taken)
    pool.release(blocks(2, 1, 2, 1))
    assert sorted(pool.free_blocks().tolist()) == [1, 2, 3]


def test_another_order_chooses_other_victims() -> None:
    order = LargestFirst()
    gone: list[int] = []
    pool = BlockPool(6, on_evict=gone.extend, order=order)
    taken = pool.allocate(5)
    pool.cached[taken] = True
    pool.release(taken[::-1].copy())  # 5 was freed first: the default order would keep 1 longest
    pool.share(blocks(5))
    assert pool.allocate(2).tolist() == [4, 3]
    assert gone == [4, 3]
    assert sorted(order) == [1, 2]


def test_the_order_hears_of_a_block_once() -> None:
    pool = BlockPool(4, order=LargestFirst())
    taken = pool.allocate(1)
    pool.share(taken)
    pool.cached[taken] = True
    pool.release(blocks(1, 1))
    assert len(pool.evictable) == 1


def test_least_recently_freed_is_first_in_first_out() -> None:
    order: EvictionOrder = LeastRecentlyFreed()
    order.add([5, 3, 8])
    order.remove([3])
    order.add([3])
    assert (len(order), list(order)) == (3, [5, 8, 3])
    assert order.pick(2) == [5, 8]
    assert list(order) == [3]
