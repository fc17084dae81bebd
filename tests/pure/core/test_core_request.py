"""The life cycle of a request, move by move, and what a new request looks like."""

import numpy as np
import pytest

from paceline.core.request import (
    NO_ROW,
    TRANSITIONS,
    BlockKey,
    Request,
    RequestId,
    RequestState,
)
from paceline.core.sampling import SamplingParams
from paceline.errors import InvalidRequest

S = RequestState

# Written out a second time on purpose: a move added to the product's table must be meant.
ALLOWED = {
    (S.NEW, S.WAITING),
    (S.NEW, S.REJECTED),
    (S.WAITING, S.RUNNING),
    (S.WAITING, S.BLOCKED),
    (S.WAITING, S.PAUSED),
    (S.WAITING, S.FINISHED),
    (S.RUNNING, S.WAITING),  # preempted, to be computed again
    (S.RUNNING, S.SWAPPED),
    (S.RUNNING, S.PAUSED),
    (S.RUNNING, S.FINISHED),
    (S.BLOCKED, S.WAITING),
    (S.BLOCKED, S.RUNNING),  # its swap-in has arrived
    (S.BLOCKED, S.SWAPPED),
    (S.BLOCKED, S.PAUSED),
    (S.BLOCKED, S.FINISHED),
    (S.SWAPPED, S.BLOCKED),
    (S.SWAPPED, S.WAITING),
    (S.SWAPPED, S.PAUSED),
    (S.SWAPPED, S.FINISHED),
    (S.PAUSED, S.WAITING),
    (S.PAUSED, S.SWAPPED),
    (S.PAUSED, S.FINISHED),
    *((state, S.HELD) for state in (S.WAITING, S.RUNNING, S.BLOCKED, S.SWAPPED, S.PAUSED)),
    (S.HELD, S.WAITING),  # it was extended
    (S.HELD, S.FINISHED),
}
FORBIDDEN = {(one, other) for one in S for other in S} - ALLOWED


def make(length: int = 3, **options: object) -> Request:
    return Request(RequestId(7), np.arange(length, dtype=np.int32), SamplingParams(max_tokens=5), **options)  # type: ignore[arg-type]


def in_state(state: RequestState) -> Request:
    request = make()
    request.state = state
    return request


@pytest.mark.parametrize(("start", "end"), sorted(ALLOWED, key=str))
def test_an_allowed_move_changes_the_state(start: RequestState, end: RequestState) -> None:
    request = in_state(start)
    request.move(end)
    assert request.state is end


@pytest.mark.parametrize(("start", "end"), sorted(FORBIDDEN, key=str))
def test_a_forbidden_move_is_refused_and_changes_nothing(start: RequestState, end: RequestState) -> None:
    request = in_state(start)
    with pytest.raises(AssertionError, match=f"request 7: {start.value} -> {end.value}"):
        request.move(end)
    assert request.state is start


def test_every_state_has_a_line_in_the_table_and_terminal_ones_lead_nowhere() -> None:
    assert TRANSITIONS.keys() == set(S)
    terminal = {state for state, following in TRANSITIONS.items() if not following}
    assert terminal == {S.FINISHED, S.REJECTED}
    assert {state for state in S if in_state(state).is_terminal} == terminal


def test_every_state_can_be_reached_and_left_for_the_end() -> None:
    reached = {S.NEW}
    for _ in S:
        reached |= {end for start, end in ALLOWED if start in reached}
    assert reached == set(S)
    for state in set(S) - {S.FINISHED, S.REJECTED, S.NEW}:
        assert (state, S.FINISHED) in ALLOWED, "an abort must be possible at any moment"


def test_a_new_request_owns_nothing() -> None:
    request = make()
    assert (request.state, request.row, request.host_places, request.blocked) == (S.NEW, NO_ROW, (), None)
    assert (request.num_computed, request.preemptions, request.reserved) == (0, 0, False)
    assert (request.tenant, request.priority, request.deadline_s) == ("default", 0, None)
    assert (request.num_tokens, request.num_prompt, request.max_total) == (3, 3, 8)


def test_max_total_counts_from_the_prompt_not_from_what_has_been_generated() -> None:
    request = make()
    request.tokens = np.arange(6, dtype=np.int32)
    assert (request.num_tokens, request.num_prompt, request.max_total) == (6, 3, 8)


def test_an_empty_prompt_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="empty") as caught:
        make(length=0)
    assert caught.value.param == "prompt"


def test_the_keys_of_a_request_are_its_own() -> None:
    keys = [BlockKey(b"a", b"b")]
    request = make(keys=keys)
    request.keys.append(BlockKey(b"c", b"d"))
    assert len(keys) == 1


def test_a_request_has_no_room_for_stray_attributes() -> None:
    with pytest.raises(AttributeError):
        make().num_tokens_computed = 3  # type: ignore[attr-defined]


def test_its_repr_says_what_a_log_reader_needs() -> None:
    assert repr(make()) == "Request(7, new, row=-1, tokens=3)"
