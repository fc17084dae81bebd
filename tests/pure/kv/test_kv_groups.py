"""Two layer groups, one of them with a sliding window: hits, slides and sizes that agree over both."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.engine import GroupSpec
from tests.pure.kv.kv_helpers import (
    FULL,
    SIZE,
    check_conservation,
    complete,
    compute,
    free,
    held,
    keys,
    make_kv,
    submit,
)


def window(tokens: int, num_blocks: int | None = None) -> GroupSpec:
    return GroupSpec(window=tokens, num_blocks=num_blocks)


def test_groups_grow_together_each_from_its_own_pool() -> None:
    kv = make_kv(groups=(FULL, window(8, num_blocks=9)))
    kv.extend(0, 10)
    assert free(kv) == [13, 5]
    appends = submit(kv)[0]
    assert appends.group.tolist() == [0, 0, 0, 1, 1, 1]
    assert appends.block.tolist() == [*held(kv, 0, 0), *held(kv, 0, 1)]


def test_the_smallest_group_says_how_much_room_there_is() -> None:
    kv = make_kv(groups=(FULL, window(8, num_blocks=9)))
    assert kv.free_for() == 8
    kv.extend(0, 4)
    kv.reserve(0, (3, 5))
    assert kv.free_for() == 3
    assert kv.free_for(0) == 7


@given(st.integers(1, 20), st.integers(0, 40))
def test_a_window_keeps_exactly_what_the_next_token_sees(tokens: int, computed: int) -> None:
    kv = make_kv(num_blocks=33, groups=(FULL, window(tokens)))
    kv.extend(0, computed)
    kv.slide(0, computed)
    kv.settle()
    sliding = kv.groups[1]
    # A token at position `computed` sees the window - 1 tokens before it, and itself.
    needed = {position // SIZE for position in range(max(0, computed - tokens + 1), computed)}
    kept = set(range(int(sliding.first[0]), int(sliding.held[0])))
    assert needed <= kept
    assert not {block for block in kept if block < min(needed, default=computed // SIZE)}
    assert len(held(kv, 0, 0)) == kv.blocks_for(computed), "full attention keeps everything"
    assert not sliding.table[0, : int(sliding.first[0])].any(), "what has been passed is the null block"
    check_conservation(kv)


def test_what_a_window_has_passed_waits_for_the_steps_under_way() -> None:
    kv = make_kv(groups=(FULL, window(4)))
    kv.extend(0, 16)
    submit(kv)
    kv.slide(0, 16)
    kv.settle()
    assert free(kv) == [12, 12]
    complete(kv)
    assert free(kv) == [12, 15]


def test_a_slide_back_is_no_slide() -> None:
    kv = make_kv(groups=(FULL, window(4)))
    kv.extend(0, 16)
    kv.slide(0, 16)
    first = int(kv.groups[1].first[0])
    kv.slide(0, 3)
    assert int(kv.groups[1].first[0]) == first


def test_a_hit_needs_only_the_last_window_of_a_sliding_group() -> None:
    kv = make_kv(groups=(FULL, window(5)))
    compute(kv, 0, "abcd")
    match = kv.match(keys("abcdx"), 20)
    assert match.num_blocks == 4
    assert match.start == (0, 3), "the next token sees four tokens back: the last block alone"
    kv.adopt(1, match)
    assert held(kv, 1, 1) == held(kv, 0, 1)[3:]
    assert int(kv.groups[1].held[1]) == int(kv.groups[0].held[1]) == 4
    check_conservation(kv)


def test_a_hit_is_the_least_over_the_groups() -> None:
    kv = make_kv(groups=(FULL, window(5)))
    compute(kv, 0, "abcd")
    sliding = kv.groups[1]
    for block in held(kv, 0, 1)[2:]:
        sliding.device.forget(np.array([block]))
    match = kv.match(keys("abcd"), 99)
    assert match.num_blocks == 2
    assert [len(blocks) for blocks in match.blocks] == [2, 1]


def test_a_window_missing_at_the_end_falls_back_to_an_earlier_one() -> None:
    kv = make_kv(groups=(FULL, window(9)))  # two blocks and a token
    compute(kv, 0, "abcdef")
    sliding = kv.groups[1]
    hole = held(kv, 0, 1)[3]
    sliding.device.forget(np.array([hole]))
    assert kv.match(keys("abcdefg"), 99).num_blocks == 6, "the hole lies before the last window"
    assert kv.match(keys("abcde"), 99).num_blocks == 3
    check_conservation(kv)


def test_two_windows_agree_on_one_length() -> None:
    kv = make_kv(groups=(FULL, window(5), window(9)))
    compute(kv, 0, "abcdef")
    for group, entry in ((1, 5), (2, 2)):
        block = held(kv, 0, group)[entry]
        kv.groups[group].device.forget(np.array([block]))
    match = kv.match(keys("abcdef"), 99)
    # Group 1 has no sixth block: five. Five needs entries 3 and 4 of group 2: there.
    assert (match.num_blocks, match.start) == (5, (0, 4, 3))


def test_a_window_bounds_what_a_long_sequence_needs() -> None:
    kv = make_kv(num_blocks=33, groups=(FULL, window(4)), max_chunk=8)
    assert kv.full_need(100) == (25, 5)
    assert kv.full_need(8) == (2, 2)
    assert kv.cost(kv.match((), 100), 100) == (25, 5)


@pytest.mark.parametrize(("total", "fits"), [(64, True), (65, False)])
def test_every_group_must_be_able_to_hold_a_request(total: int, fits: bool) -> None:
    assert make_kv(groups=(FULL, window(4, num_blocks=6))).can_ever_hold(total) is fits
    assert not make_kv(groups=(FULL, window(4, num_blocks=5))).can_ever_hold(total)


def test_a_parent_that_slid_on_cannot_share_its_beginning() -> None:
    kv = make_kv(groups=(FULL, window(5)))
    kv.extend(0, 20)
    kv.slide(0, 17)
    assert kv.can_share(0, 17)
    assert not kv.can_share(0, 8), "a branch at 8 tokens would need what has been passed"


def test_copy_on_write_copies_in_every_group() -> None:
    kv = make_kv(groups=(FULL, window(8)))
    kv.extend(0, 6)
    kv.share(0, 1, 6)
    submit(kv)
    assert kv.shared_writes(np.array([1]), np.array([6])).tolist() == [True]
    kv.copy_on_write(1, 6)
    copies = submit(kv)[1]
    assert copies.group.tolist() == [0, 1]
    complete(kv)
    check_conservation(kv)
