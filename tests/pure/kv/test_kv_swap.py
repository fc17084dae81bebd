"""Swaps: host places and tickets, and that nothing is given back before its copy has completed."""

import pytest

from paceline.config.engine import GroupSpec
from paceline.kv.block_time import BlockTime
from paceline.kv.level import Level
from paceline.kv.swap import Tickets
from tests.pure.kv.kv_helpers import (
    FULL,
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


def test_places_are_taken_and_given_back() -> None:
    places = Level(4)
    taken = places.take(3)
    assert len(set(taken.tolist())) == 3 and places.num_free == 1
    places.give_back(taken)
    assert sorted(places.free_places()) == [0, 1, 2, 3]


def test_tickets_have_numbers_of_their_own() -> None:
    kv = make_kv(host=8)
    numbers = []
    for row in (0, 1):
        kv.extend(row, 4)
        kv.swap_out(row, 4, owner=row)
        numbers.append(submit(kv)[2].ticket.tolist())
    assert numbers == [[1], [2]]
    assert Tickets(BlockTime(1)).open == {}


def test_a_swap_out_frees_the_row_at_once_and_the_blocks_when_the_copy_is_done() -> None:
    kv = make_kv(host=8)
    kv.extend(0, 12)
    blocks = held(kv, 0)
    submit(kv)
    complete(kv)
    places = kv.swap_out(0, 10, owner=7)
    kv.settle()
    assert held(kv, 0) == [] and kv.is_moving(7)
    swaps = submit(kv)[2]
    assert swaps.block.tolist() == blocks and swaps.place.tolist() == places[0].tolist()
    complete(kv)
    assert refs(kv, blocks) == [1, 1, 1], "the step is done, the copy is not"
    assert kv.coming() == 3
    kv.complete_ticket(int(swaps.ticket[0]))
    kv.settle()
    assert free(kv) == [16] and not kv.is_moving(7)
    assert kv.places[0].num_free == 5, "the places hold the request's KV"
    check_conservation(kv)


def test_only_the_computed_tokens_are_swapped() -> None:
    kv = make_kv(host=8)
    kv.extend(0, 16)
    places = kv.swap_out(0, 5, owner=7)
    assert len(places[0]) == 2


def test_a_swap_in_fills_an_empty_row_and_gives_the_places_back_when_done() -> None:
    kv = make_kv(host=8)
    kv.extend(0, 12)
    places = kv.swap_out(0, 12, owner=7)
    kv.complete_ticket(int(submit(kv)[2].ticket[0]))
    kv.settle()
    complete(kv)
    number = kv.swap_in(2, places, 12, owner=7)
    plan = submit(kv)
    assert plan[3].place.tolist() == places[0].tolist()
    assert plan[3].block.tolist() == plan[0].block.tolist() == held(kv, 2)
    assert kv.places[0].num_free == 5
    complete(kv)
    kv.release(2)
    kv.settle()
    assert free(kv) == [13], "the copy still writes into them"
    ticket = kv.complete_ticket(number)
    kv.settle()
    assert ticket is not None and ticket.owner == 7 and ticket.incoming
    assert free(kv) == [16] and kv.places[0].num_free == 8
    check_conservation(kv)


def test_late_word_of_an_unknown_ticket_is_ignored() -> None:
    """B29: an aborted request's copy may report long after."""
    kv = make_kv(host=8)
    assert kv.complete_ticket(99) is None
    kv.extend(0, 4)
    kv.swap_out(0, 4, owner=7)
    number = int(submit(kv)[2].ticket[0])
    complete(kv)
    assert kv.complete_ticket(number) is not None
    assert kv.complete_ticket(number) is None
    check_conservation(kv)


@pytest.mark.parametrize("copied_first", [True, False])
def test_places_of_a_request_that_ended_come_back_once(copied_first: bool) -> None:
    kv = make_kv(host=8)
    kv.extend(0, 12)
    places = kv.swap_out(0, 12, owner=7)
    number = int(submit(kv)[2].ticket[0])
    complete(kv)
    if copied_first:
        kv.complete_ticket(number)
        kv.settle()
        kv.drop_places(places, owner=7)
    else:
        kv.drop_places(places, owner=7)
        assert kv.places[0].num_free == 5, "the copy into them is still under way"
        kv.complete_ticket(number)
        kv.settle()
    assert sorted(kv.places[0].free_places()) == list(range(8))
    check_conservation(kv)


@pytest.mark.parametrize(("host", "fits"), [(0, False), (2, False), (3, True)])
def test_a_swap_out_needs_a_place_per_block(host: int, fits: bool) -> None:
    kv = make_kv(host=host)
    kv.extend(0, 12)
    assert kv.can_swap_out(0, 12) is fits
    assert not kv.can_swap_out(0, 0), "what has computed nothing has nothing to swap"


def test_a_window_swaps_only_what_it_still_sees() -> None:
    kv = make_kv(host=5, groups=(FULL, GroupSpec(window=5)))
    kv.extend(0, 20)
    kv.slide(0, 17)
    kv.settle()
    assert kv.can_swap_out(0, 20)
    places = kv.swap_out(0, 20, owner=7)
    assert [len(place) for place in places] == [5, 2]
    kv.complete_ticket(int(submit(kv)[2].ticket[0]))
    kv.settle()
    complete(kv)
    kv.swap_in(1, places, 20, owner=7)
    assert [int(group.first[1]) for group in kv.groups] == [0, 3]
    assert [int(group.held[1]) for group in kv.groups] == [5, 5]
    assert not kv.groups[1].table[1, :3].any()
    check_conservation(kv)


def test_blocks_shared_with_others_survive_a_swap_out() -> None:
    kv = make_kv(host=8)
    compute(kv, 0, "ab")
    kv.adopt(1, kv.match(keys("abc"), 12))
    shared = held(kv, 1)
    kv.swap_out(1, 8, owner=7)
    kv.complete_ticket(int(submit(kv)[2].ticket[0]))
    kv.settle()
    complete(kv)
    assert held(kv, 0) == shared and refs(kv, shared) == [1, 1]
    check_conservation(kv)


def test_what_comes_back_from_the_host_is_not_published_as_it_stands() -> None:
    """A row that was swapped in starts with nothing offered: its blocks are new."""
    kv = make_kv(host=8)
    compute(kv, 0, "ab")
    places = kv.swap_out(0, 8, owner=7)
    kv.complete_ticket(int(submit(kv)[2].ticket[0]))
    kv.settle()
    complete(kv)
    kv.reset_cache()
    kv.swap_in(1, places, 8, owner=7)
    assert not kv.match(keys("ab"), 99).num_blocks
    assert int(kv.groups[0].published[1]) == 0
