"""What a front knows of its engines: load counts when chosen, reports take back what they have counted."""

import pytest

from paceline.routing.routers import LeastLoaded, route
from paceline.routing.view import NOBODY, Ask, Choice, EngineState, FleetView, Gauges, Role


def view_of(*gauges: Gauges, block_tokens: int = 10) -> FleetView:
    view = FleetView(block_tokens)
    for each in gauges:
        view.attach(gauges=each)
    return view


def test_a_choice_counts_at_once_until_a_report_has_it() -> None:
    view = view_of(Gauges(waiting_tokens=5, rows=1, free_blocks=20, row_s=0.5, decode_s=1.0))
    ask = Ask(0.0, num_prompt=35)
    view.enter(ask, Choice(0, "any"))
    view.enter(ask, Choice(0, "any", cached_tokens=20))
    assert view.waiting_tokens[0] == 5 + 35 + 15 and view.running_tokens[0] == 20
    assert view.rows[0] == 3 and view.free_blocks[0] == 20 - 4 - 2 and view.decode_s[0] == 2.0
    view.report(0, Gauges(waiting_tokens=35, rows=2), known=1)
    assert view.waiting_tokens[0] == 35 + 15 and view.rows[0] == 3, "the second is still on its way"
    view.report(0, Gauges(waiting_tokens=1), known=2)
    assert view.waiting_tokens[0] == 1 and view.rows[0] == 0
    view.report(0, Gauges(waiting_tokens=2), known=2)
    assert view.waiting_tokens[0] == 2, "a report of nothing new takes nothing back"


def test_a_choice_that_was_not_sent_leaves_nothing() -> None:
    view = view_of(Gauges(waiting_tokens=5, row_s=0.5, decode_s=1.0, free_blocks=9))
    ask, choice = Ask(0.0, num_prompt=35), Choice(0, "any")
    view.enter(ask, choice)
    view.withdraw(choice)
    assert (view.waiting_tokens[0], view.rows[0], view.free_blocks[0], view.decode_s[0]) == (5, 0, 9, 1.0)
    view.enter(ask, choice)
    view.report(0, Gauges(), known=0)
    assert view.waiting_tokens[0] == 35, "numbers of choices go on where they were"


def test_requests_that_come_together_spread() -> None:
    view = view_of(*[Gauges()] * 4)
    chosen = [route(view, LeastLoaded(), Ask(0.0, num_prompt=100)) for _ in range(8)]
    assert sorted(each.engine for each in chosen if each) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_only_ready_engines_of_the_right_role_are_candidates() -> None:
    view = FleetView(16)
    for state in EngineState:
        if state is not EngineState.ABSENT:
            view.attach(state=state)
    view.attach(role=Role.PREFILL)
    view.attach(role=Role.DECODE)
    ask = Ask(0.0, num_prompt=1)
    assert view.candidates(ask).tolist() == [1, 4]
    assert view.candidates(ask._replace(has_begun=True)).tolist() == [1, 5]
    view.set_state(1, EngineState.DRAINING)
    view.set_state(0, EngineState.READY)
    assert view.candidates(ask).tolist() == [0, 4]
    assert view.candidates(ask._replace(without=frozenset({4}))).tolist() == [0]


def test_a_stream_goes_on_only_where_the_same_model_is() -> None:
    view = FleetView(16)
    for fingerprint in ("a", "b", "a"):
        view.attach(fingerprint=fingerprint)
    ask = Ask(0.0, num_prompt=1, only="a", has_begun=True)
    assert view.candidates(ask).tolist() == [0, 2]
    assert route(view, LeastLoaded(), ask._replace(only="c")) is None


def test_a_number_is_given_again_with_nothing_of_its_former_engine() -> None:
    view = view_of(Gauges(), Gauges(), Gauges())
    view.enter(Ask(0.0, num_prompt=30, keys=(b"k",)), Choice(1, "any"))
    view.detach(1)
    assert view.candidates(Ask(0.0, num_prompt=1)).tolist() == [0, 2]
    assert view.attach(fingerprint="new") == 1 and view.attach() == 3 and len(view) == 4
    assert view.fingerprint[1] == "new" and view.num_sent[1] == 0 and view.waiting_tokens[1] == 0
    assert view.cached(Ask(0.0, num_prompt=30, keys=(b"k",))).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(("num_prompt", "cached"), [(20, 19), (25, 20), (21, 20), (1, 0)])
def test_the_last_token_of_a_prompt_is_computed(num_prompt: int, cached: int) -> None:
    view = view_of(Gauges())
    view.prefixes.stored(0, [b"1", b"2"])
    assert view.cached(Ask(0.0, num_prompt=num_prompt, keys=(b"1", b"2"))).tolist() == [cached]


def test_nobody_is_no_engine() -> None:
    assert Choice(0, "any").against == NOBODY < 0
