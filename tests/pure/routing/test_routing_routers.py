"""The rules: what each looks at, by fleets made up for it."""

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.routing.routers import (
    ROUTERS,
    LeastLoaded,
    PrefixAware,
    RoundRobin,
    SoonestFirstToken,
    make_router,
    route,
)
from paceline.routing.view import NOBODY, Ask, Choice, EngineState, FleetView, Gauges

FAST, SLOW = Gauges(prefill_per_s=1000.0), Gauges(prefill_per_s=100.0)


def view_of(*gauges: Gauges) -> FleetView:
    view = FleetView(10)
    for each in gauges:
        view.attach(gauges=each)
    return view


def loaded(*tokens: int) -> FleetView:
    return view_of(*(Gauges(running_tokens=each, prefill_per_s=1000.0) for each in tokens))


def keys(*numbers: int) -> tuple[bytes, ...]:
    return tuple(b"%08d" % number for number in numbers)


def ask(num_prompt: int = 20, **more: Any) -> Ask:
    return Ask(0.0, num_prompt)._replace(**more)


# ---------------------------------------------------------------- soonest


def test_soonest_counts_seconds_and_not_tokens() -> None:
    view = view_of(SLOW._replace(waiting_tokens=50), FAST._replace(waiting_tokens=300))
    choice = SoonestFirstToken().choose(view, ask(100))
    assert (choice.engine, choice.rule, choice.against) == (1, "soonest", 0)
    assert choice.cost_s == pytest.approx(0.4) and choice.against_cost_s == pytest.approx(1.5)


def test_soonest_waits_for_a_prefix_only_as_long_as_it_saves() -> None:
    view = view_of(FAST._replace(waiting_tokens=15), FAST)
    view.prefixes.stored(0, keys(1, 2))
    choice = SoonestFirstToken().choose(view, ask(30, keys=keys(1, 2, 3)))
    assert (choice.engine, choice.rule, choice.cached_tokens) == (0, "prefix", 20)
    view.report(0, FAST._replace(waiting_tokens=25), known=0)
    choice = SoonestFirstToken().choose(view, ask(30, keys=keys(1, 2, 3)))
    assert (choice.engine, choice.cached_tokens, choice.against) == (1, 0, 0)


def test_soonest_leaves_an_engine_whose_steps_are_long() -> None:
    view = view_of(FAST._replace(decode_s=0.010), FAST._replace(decode_s=0.005))
    view.prefixes.stored(0, keys(1, 2))
    short, long = (ask(30, keys=keys(1, 2), max_tokens=tokens) for tokens in (2, 200))
    assert SoonestFirstToken().choose(view, short).engine == 0
    assert SoonestFirstToken().choose(view, long).engine == 1
    assert SoonestFirstToken().choose(view, long._replace(max_tokens=10**9)).cost_s < 3.0, (
        "an answer without a limit is not thought to be endless"
    )


def test_soonest_counts_what_a_prompt_costs_the_rows_beside_it() -> None:
    idle_but_waiting, decoding = FAST._replace(waiting_tokens=500), FAST._replace(rows=10)
    view = view_of(idle_but_waiting, decoding)
    assert SoonestFirstToken(others=0.0).choose(view, ask(200)).engine == 1, "its own token would come sooner"
    choice = SoonestFirstToken(others=0.5).choose(view, ask(200))
    assert (choice.engine, choice.against) == (0, 1)
    assert choice.cost_s == pytest.approx(0.7)
    assert choice.against_cost_s == pytest.approx(0.2 + 0.5 * 10 * 0.2)
    assert SoonestFirstToken(others=0.5).choose(view, ask(50)).engine == 1, "a short prompt costs them little"


def test_what_a_prefix_saves_the_rows_beside_it_is_no_cost() -> None:
    view = view_of(FAST, FAST._replace(rows=10))
    view.prefixes.stored(1, keys(*range(20)))
    choice = SoonestFirstToken(others=0.5).choose(view, ask(205, keys=keys(*range(20))))
    assert (choice.engine, choice.rule) == (1, "prefix") and choice.cost_s == pytest.approx(0.005 * 6)


def test_one_beginning_in_all_requests_heats_no_engine() -> None:
    view = view_of(*[FAST._replace(decode_s=0.005, row_s=1e-4)] * 8)
    for engine in range(8):
        view.prefixes.stored(engine, keys(1, 2))
    counts = [0] * 8
    for _ in range(400):
        choice = route(view, SoonestFirstToken(), ask(25, keys=keys(1, 2), max_tokens=100))
        assert choice is not None
        counts[choice.engine] += 1
    assert max(counts) <= 1.1 * 50


def test_a_new_beginning_is_followed_before_any_news_of_it() -> None:
    view = view_of(*[FAST] * 4)
    first = route(view, SoonestFirstToken(), ask(200, keys=keys(*range(20)), session=b"one"))
    assert first is not None
    view.report(first.engine, FAST, known=1)
    second = route(view, SoonestFirstToken(), ask(200, keys=keys(*range(20)), session=b"other"))
    assert second is not None and second.engine == first.engine and second.rule == "prefix"


def test_sessions_break_ties_and_move_only_from_engines_that_go() -> None:
    view = view_of(*[FAST] * 8)
    names = [b"session %d" % number for number in range(200)]
    before = [SoonestFirstToken().choose(view, ask(session=name)) for name in names]
    assert {each.rule for each in before} == {"session"} and len({each.engine for each in before}) == 8
    view.set_state(3, EngineState.DRAINING)
    after = [SoonestFirstToken().choose(view, ask(session=name)) for name in names]
    assert all(now.engine == was.engine for was, now in zip(before, after, strict=True) if was.engine != 3)
    assert 3 not in {each.engine for each in after}
    home = after[0].engine
    view.report(home, FAST._replace(waiting_tokens=100), known=0)
    assert SoonestFirstToken().choose(view, ask(session=names[0])).engine != home, "a session is no wall"


def test_a_lone_engine_has_no_runner_up() -> None:
    choice = SoonestFirstToken().choose(view_of(FAST), ask())
    assert (choice.engine, choice.against) == (0, NOBODY)


# ---------------------------------------------------------------- what it is compared with


def test_round_robin_takes_each_in_turn_and_passes_over_who_is_missing() -> None:
    view, router = loaded(9, 0, 0, 0), RoundRobin()
    assert [router.choose(view, ask()).engine for _ in range(5)] == [0, 1, 2, 3, 0]
    view.set_state(1, EngineState.LOST)
    assert [router.choose(view, ask()).engine for _ in range(4)] == [2, 3, 0, 2]


def test_least_loaded_takes_the_first_of_the_least() -> None:
    assert LeastLoaded().choose(loaded(5, 3, 3, 9), ask()).engine == 1


def test_prefix_aware_goes_where_most_of_the_prompt_is_unless_that_is_overloaded() -> None:
    router = PrefixAware(imbalance=2.0, slack_tokens=10)
    view = loaded(20, 5, 30)
    view.prefixes.stored(0, keys(1, 2))
    view.prefixes.stored(2, keys(1, 2, 3))
    choice = router.choose(view, ask(40, keys=keys(1, 2)))
    assert (choice.engine, choice.rule, choice.cached_tokens) == (0, "prefix", 20), "the less loaded of both"
    choice = router.choose(view, ask(40, keys=keys(1, 2, 3)))
    assert (choice.engine, choice.rule) == (1, "overloaded"), "more than twice the least and ten"
    assert router.choose(view, ask(40, keys=keys(7, 1, 2))).rule == "least-loaded"


# ---------------------------------------------------------------- by name

OWN = """
from paceline.routing.view import Choice
class Last:
    def choose(self, view, ask):
        return Choice(int(view.candidates(ask)[-1]), "last")
class NeedsMore(Last):
    def __init__(self, more): ...
class Mute: ...
"""


@pytest.fixture
def own_routers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_routers.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own_routers")
def test_an_operators_own_router_chooses() -> None:
    view = loaded(0, 0, 9)
    router = make_router("own_routers:Last")
    assert route(view, router, ask()) == Choice(2, "last") and view.num_sent[2] == 1


@pytest.mark.usefixtures("own_routers")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nearest", "soonest, round-robin, least-loaded, prefix-aware or MODULE:CLASS"),
        ("own_routers:Mute", "lacks choose"),
        ("own_routers:NeedsMore", "without arguments"),
        ("no_such_routers:Last", "cannot be imported"),
        (":Last", "such as my_routers:Nearest"),
    ],
)
def test_a_router_that_cannot_be_had_is_said_in_a_sentence(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_router(name)


def test_every_name_makes_a_router() -> None:
    for name in ROUTERS:
        assert make_router(name).choose(loaded(1, 2), ask()).engine in (0, 1)
