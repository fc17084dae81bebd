"""The KV manager by example: growing, prefixes, sharing, copy on write, fences, reservations."""

import numpy as np
import pytest

from paceline.core.request import BlockKey
from paceline.kv.block_pool import BlockPool
from tests.pure.kv.kv_helpers import (
    SIZE,
    check_conservation,
    complete,
    compute,
    free,
    held,
    keys,
    make_kv,
    refs,
    submit,
)
from tests.pure.kv.test_kv_block_pool import LargestFirst

# -- growing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "count"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_row_gets_the_blocks_its_tokens_need(slots: int, count: int) -> None:
    kv = make_kv()
    kv.extend(0, slots)
    assert len(held(kv, 0)) == count == kv.blocks_for(slots)
    kv.extend(0, slots)
    assert len(held(kv, 0)) == count, "asking twice gives nothing more"


def test_growing_is_noted_for_the_plan() -> None:
    kv = make_kv()
    kv.extend(1, 9)
    kv.extend_each(np.array([0, 2]))
    appends = submit(kv)[0]
    assert appends.row.tolist() == [0, 2, 1, 1, 1], "rows that grow together come first"
    assert appends.index.tolist() == [0, 0, 0, 1, 2]
    assert appends.block.tolist() == [*held(kv, 0), *held(kv, 2), *held(kv, 1)]


def test_many_appends_are_told_like_few() -> None:
    kv = make_kv(num_blocks=64)
    rows = range(4)
    for row in rows:
        kv.extend(row, 1 + 4 * row)
    for row in rows:
        kv.extend(row, 17)
    told = submit(kv)[0]
    appends = zip(told.row.tolist(), told.index.tolist(), told.block.tolist(), strict=True)
    assert sorted(appends) == [(row, index, held(kv, row)[index]) for row in rows for index in range(5)]
    assert len(submit(kv)[0].row) == 0, "a change is told once"


def test_a_rolled_back_change_is_not_told() -> None:
    kv = make_kv()
    kv.extend(0, 4)
    mark = kv.delta.mark()
    kv.extend(1, 8)
    kv.delta.rollback(mark)
    assert submit(kv)[0].row.tolist() == [0]


def test_a_released_row_is_free_only_when_the_steps_under_way_are_done() -> None:
    """S22: a step still computing may write into what was released."""
    kv = make_kv()
    kv.extend(0, 16)
    submit(kv)
    submit(kv)
    kv.release(0)
    kv.settle()
    assert held(kv, 0) == [] and free(kv) == [12]
    complete(kv, 1)
    assert free(kv) == [12]
    assert kv.coming() == 4
    complete(kv, 2)
    assert free(kv) == [16]
    assert kv.coming() == 0
    check_conservation(kv)


def test_with_no_step_under_way_a_release_is_at_once() -> None:
    kv = make_kv()
    kv.extend(0, 16)
    submit(kv)
    complete(kv)
    kv.release(0)
    kv.settle()
    assert free(kv) == [16]


def test_abandoning_settles_every_fence_and_ticket() -> None:
    kv = make_kv(host=8)
    kv.extend(0, 16)
    kv.extend(1, 8)
    submit(kv)
    kv.release(0)
    kv.swap_out(1, 8, owner=5)
    submit(kv)
    kv.abandon()
    assert free(kv) == [16]
    assert not kv.fences and not kv.tickets.open
    check_conservation(kv)


# -- prefixes ----------------------------------------------------------------------------------------------


def test_a_computed_beginning_is_found_and_adopted() -> None:
    kv = make_kv()
    compute(kv, 0, "abc")
    match = kv.match(keys("abx"), 12)
    assert match.num_blocks == 2
    kv.adopt(1, match)
    assert held(kv, 1) == held(kv, 0)[:2]
    assert refs(kv, held(kv, 0)) == [2, 2, 1]
    check_conservation(kv)


def test_an_adopted_beginning_is_told_to_the_runner() -> None:
    kv = make_kv()
    compute(kv, 0, "ab")
    submit(kv)
    kv.adopt(1, kv.match(keys("ab"), 9))
    appends = submit(kv)[0]
    assert (appends.row.tolist(), appends.block.tolist()) == ([1, 1], held(kv, 0))


@pytest.mark.parametrize(("num_tokens", "blocks"), [(8, 1), (9, 2), (12, 2), (13, 3)])
def test_the_last_token_is_always_left_to_compute(num_tokens: int, blocks: int) -> None:
    kv = make_kv()
    compute(kv, 0, "abc")
    assert kv.match(keys("abc"), num_tokens).num_blocks == blocks


def test_only_what_is_computed_is_offered() -> None:
    """S16: blocks beyond the computed tokens, and a part-filled last one, stay out of the cache."""
    kv = make_kv()
    kv.extend(0, 16)
    kv.publish(0, keys("abcd"), 11)
    assert kv.match(keys("abcd"), 99).num_blocks == 2
    kv.publish(0, keys("abcd"), 12)
    assert kv.match(keys("abcd"), 99).num_blocks == 3


def test_a_gap_in_the_cache_ends_the_match() -> None:
    kv = make_kv()
    compute(kv, 0, "abc")
    group = kv.groups[0]
    middle = held(kv, 0)[1]
    group.device.forget(np.array([middle]))
    assert kv.match(keys("abc"), 99).num_blocks == 1


def test_a_colliding_key_is_refused_by_its_payload() -> None:
    """K5."""
    kv = make_kv()
    same = [BlockKey(b"same", b"one")]
    other = [BlockKey(b"same", b"other")]
    kv.extend(0, 4)
    kv.publish(0, same, 4)
    assert kv.match(same, 99).num_blocks == 1
    assert kv.match(other, 99).num_blocks == 0
    kv.extend(1, 4)
    kv.publish(1, other, 4)
    assert kv.match(other, 99).num_blocks == 0, "the first to come keeps the key"
    check_conservation(kv)


def test_two_rows_that_computed_the_same_share_one_entry() -> None:
    kv = make_kv()
    compute(kv, 0, "ab")
    compute(kv, 1, "ab")
    assert kv.match(keys("ab"), 99).blocks[0].tolist() == held(kv, 0)
    for row in (1, 0):
        kv.release(row)
    kv.settle()
    assert free(kv) == [16]
    check_conservation(kv)


def test_without_caching_nothing_is_offered_or_found() -> None:
    kv = make_kv(caching=False)
    compute(kv, 0, "ab")
    assert kv.match(keys("ab"), 99).num_blocks == 0
    assert len(kv.groups[0].cache) == 0


def test_a_released_beginning_is_still_found_until_it_is_evicted() -> None:
    kv = make_kv(num_blocks=5)
    compute(kv, 0, "ab")
    kv.release(0)
    kv.settle()
    assert free(kv) == [4] and kv.match(keys("ab"), 99).num_blocks == 2
    kv.extend(1, 3 * SIZE)  # two plain blocks and one cached
    assert kv.match(keys("ab"), 99).num_blocks == 1, "the end of a prefix goes before its beginning"
    kv.extend(1, 4 * SIZE)
    assert kv.match(keys("ab"), 99).num_blocks == 0
    assert len(kv.groups[0].cache) == 0, "S17: an evicted block leaves the map"
    check_conservation(kv)


def test_the_least_recently_freed_prefix_goes_first() -> None:
    kv = make_kv(num_blocks=4)
    for row, text in enumerate("xyz"):
        compute(kv, row, text)
    for row in (1, 0, 2):
        kv.release(row)
    kv.settle()
    gone = []
    for slots in (4, 8, 12):
        kv.extend(3, slots)
        gone.append([text for text in "xyz" if not kv.match(keys(text), 99).num_blocks])
    assert gone == [["y"], ["x", "y"], ["x", "y", "z"]]


def test_the_seam_of_the_eviction_order_reaches_the_manager() -> None:
    kv = make_kv(
        num_blocks=4, make_pool=lambda count, **rest: BlockPool(count, **{**rest, "order": LargestFirst()})
    )
    for row, text in enumerate("xyz"):
        compute(kv, row, text)
    for row in (1, 0, 2):
        kv.release(row)
    kv.settle()
    kv.extend(3, 4)
    assert [bool(kv.match(keys(text), 99).num_blocks) for text in "xyz"] == [True, True, False]


def test_a_hit_without_a_holder_costs_a_free_block() -> None:
    """K6: a block about to be adopted must be counted, or it is given away in between."""
    kv = make_kv()
    compute(kv, 0, "ab")
    assert kv.cost(kv.match(keys("ab"), 12), 12) == (1,)
    kv.release(0)
    kv.settle()
    assert kv.cost(kv.match(keys("ab"), 12), 12) == (3,)
    assert kv.cost(kv.match((), 12), 12) == (3,)


def test_adopting_takes_blocks_out_of_the_eviction_order() -> None:
    """K6: once adopted, a prefix cannot be evicted by what is allocated next."""
    kv = make_kv(num_blocks=4)
    compute(kv, 0, "ab")
    kv.release(0)
    kv.settle()
    kv.adopt(1, kv.match(keys("ab"), 12))
    mine = held(kv, 1)
    kv.extend(2, 4)
    assert not set(mine) & set(held(kv, 2))
    check_conservation(kv)


def test_resetting_the_cache_forgets_prefixes_and_keeps_what_is_in_use() -> None:
    kv = make_kv()
    compute(kv, 0, "ab")
    compute(kv, 1, "xy")
    kv.release(1)
    kv.settle()
    before = held(kv, 0)
    kv.reset_cache()
    assert held(kv, 0) == before and free(kv) == [14]
    assert not kv.match(keys("ab"), 99).num_blocks and not kv.match(keys("xy"), 99).num_blocks
    check_conservation(kv)


def test_quarantine_takes_out_what_the_row_computed_and_nothing_else() -> None:
    """E5: adopted blocks were good when they were entered; the rest is not to be trusted."""
    kv = make_kv()
    compute(kv, 0, "ab")
    kv.adopt(1, kv.match(keys("abcd"), 16))
    compute(kv, 1, "abcd")
    assert kv.match(keys("abcd"), 99).num_blocks == 4
    kv.quarantine(1)
    assert kv.match(keys("abcd"), 99).num_blocks == 2
    check_conservation(kv)


# -- sharing -----------------------------------------------------------------------------------------------


def test_a_branch_shares_blocks_and_copies_on_write_exactly_once() -> None:
    kv = make_kv()
    kv.extend(0, 6)  # one full block, one with two tokens
    submit(kv)
    kv.share(0, 1, 6)
    assert held(kv, 1) == held(kv, 0)
    assert kv.shared_writes(np.array([0, 1]), np.array([6, 6])).tolist() == [True, True]
    submit(kv)
    kv.copy_on_write(1, 6)
    copies = submit(kv)[1]
    assert (copies.row.tolist(), copies.index.tolist()) == ([1], [1])
    assert copies.source.tolist() == held(kv, 0)[1:] and copies.target.tolist() == held(kv, 1)[1:]
    assert held(kv, 0)[0] == held(kv, 1)[0]
    complete(kv)
    assert kv.shared_writes(np.array([0, 1]), np.array([6, 6])).tolist() == [False, False]
    assert refs(kv, held(kv, 0)) == [2, 1]
    check_conservation(kv)


def test_the_source_of_a_copy_is_held_until_the_copying_step_is_done() -> None:
    kv = make_kv()
    kv.extend(0, 2)
    kv.share(0, 1, 2)
    submit(kv)
    complete(kv)
    source = held(kv, 0)
    kv.copy_on_write(1, 2)
    kv.release(0)
    kv.settle()
    assert refs(kv, source) != [0], "the copy has not been planned yet"
    submit(kv)
    assert refs(kv, source) != [0], "the copy has not been made yet"
    complete(kv)
    assert refs(kv, source) == [0]
    check_conservation(kv)


def test_a_block_without_other_readers_is_not_copied() -> None:
    kv = make_kv()
    kv.extend(0, 6)
    kv.copy_on_write(0, 6)
    assert len(submit(kv)[1].row) == 0
    kv.copy_on_write(0, 8)  # the next block is not there yet: nothing to copy
    assert len(submit(kv)[1].row) == 0


def test_a_write_into_a_block_still_to_come_is_not_shared() -> None:
    kv = make_kv()
    kv.extend(0, 4)
    kv.share(0, 1, 4)
    assert kv.shared_writes(np.array([0, 1]), np.array([4, 4])).tolist() == [False, False]


def test_a_branch_of_part_of_its_parent_shares_that_part() -> None:
    kv = make_kv()
    kv.extend(0, 16)
    kv.share(0, 1, 7)
    assert held(kv, 1) == held(kv, 0)[:2]


# -- reservations ------------------------------------------------------------------------------------------


def test_a_reservation_sets_free_blocks_aside_for_one_row() -> None:
    kv = make_kv(num_blocks=11)
    kv.extend(0, 8)
    kv.reserve(0, (6,))
    assert kv.groups[0].reserved == 4
    assert (kv.free_for(), kv.free_for(0), kv.free_for(1)) == (4, 8, 4)
    kv.extend(0, 12)
    assert kv.groups[0].reserved == 3
    assert (kv.free_for(), kv.free_for(0)) == (4, 7), "taking its own block leaves the others' room alone"
    kv.extend_each(np.array([0, 1]))
    assert kv.groups[0].reserved == 2
    assert kv.free_for() == 3
    kv.release(0)
    kv.settle()
    assert kv.groups[0].reserved == 0
    assert kv.free_for() == 9
    check_conservation(kv)


def test_a_row_that_holds_more_than_was_promised_needs_nothing_set_aside() -> None:
    kv = make_kv()
    kv.extend(0, 16)
    kv.reserve(0, (2,))
    assert kv.groups[0].reserved == 0


# -- sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "fits"), [(1, True), (63, True), (64, True), (65, False)])
def test_what_can_ever_be_held(total: int, fits: bool) -> None:
    """L6: 16 usable blocks of 4."""
    assert make_kv().can_ever_hold(total) is fits
