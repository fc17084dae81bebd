"""Which requests move: only where more is saved than it costs, few at a time, and never in circles."""

import random

from paceline.routing.moves import AT_ONCE, REST_S, WORTH, Balancer, Movable, Move
from paceline.routing.view import EngineState, FleetView, Gauges, Role

BLOCK = 10
# Fifty rows of 100 tokens hold all blocks but one, and 300 tokens wait.
FULL = Gauges(waiting_tokens=300, running_tokens=5000, rows=50, free_blocks=1, decode_s=0.02, row_s=1e-5)
EMPTY = Gauges(free_blocks=500, decode_s=0.01, row_s=1e-5)


def fleet(*gauges: Gauges, fingerprint: str = "") -> FleetView:
    view = FleetView(BLOCK)
    for each in gauges:
        view.attach(gauges=each, fingerprint=fingerprint)
    return view


def rows(
    engine: int, count: int = 50, tokens: int = 100, left: float = 200.0, first: int = 0
) -> list[Movable]:
    return [Movable(first + at, engine, tokens + at, left) for at in range(count)]


def quick(tokens: int) -> float:
    return tokens * 1e-5


def test_what_costs_least_goes_where_there_is_room() -> None:
    moves = Balancer(quick).choose(fleet(FULL, FULL, EMPTY), rows(0), 0.0)
    assert [(move.request, move.source, move.target) for move in moves] == [(0, 0, 2), (1, 0, 2)]
    for move in moves:
        assert move.saved_s > WORTH * move.cost_s > 0.0


def test_nothing_moves_where_nothing_waits_or_it_costs_too_much() -> None:
    assert not Balancer(quick).choose(fleet(FULL._replace(waiting_tokens=0), EMPTY), rows(0), 0.0)
    assert not Balancer(quick).choose(fleet(FULL._replace(free_blocks=40), EMPTY), rows(0), 0.0)
    assert not Balancer(lambda tokens: 60.0).choose(fleet(FULL, EMPTY), rows(0), 0.0)
    assert not Balancer(quick).choose(fleet(FULL, FULL), rows(0), 0.0), "there is no room anywhere"


def test_two_at_a_time_leave_or_reach_an_engine() -> None:
    view, balancer = fleet(FULL, EMPTY, EMPTY), Balancer(quick)
    first = balancer.choose(view, rows(0), 0.0)
    assert len(first) == AT_ONCE
    assert not balancer.choose(view, rows(0), 1.0), "both are still under way"
    balancer.ended(first[0].request)
    assert len(balancer.choose(view, rows(0), 2.0)) == 1
    view, balancer = fleet(FULL, FULL, FULL, EMPTY), Balancer(quick)
    moves = balancer.choose(view, [*rows(0), *rows(1, first=100), *rows(2, first=200)], 0.0)
    assert len(moves) == AT_ONCE, "as many reach one"


def test_nobody_moves_twice_within_ten_seconds() -> None:
    balancer = Balancer(quick)
    (move,) = balancer.choose(fleet(FULL, EMPTY), rows(0, 1), 0.0)
    balancer.ended(move.request)
    back = [Movable(move.request, 1, 100, 200.0)]
    assert not balancer.choose(fleet(EMPTY, FULL), back, REST_S - 0.1)
    assert balancer.choose(fleet(EMPTY, FULL), back, REST_S)


def test_what_is_on_its_way_counts_at_the_target() -> None:
    view, balancer = fleet(FULL, EMPTY._replace(free_blocks=45)), Balancer(quick)
    assert len(balancer.choose(view, rows(0), 0.0)) == 1, (
        "a second one, with what it will generate, has no room"
    )
    assert view.rows[1] == 1 and view.running_tokens[1] == 100 and view.free_blocks[1] == 35
    view.report(1, EMPTY._replace(free_blocks=45), known=0)
    assert view.free_blocks[1] == 35, "a report that does not know it yet takes nothing back"
    view.report(1, EMPTY._replace(free_blocks=35), known=1)
    assert view.free_blocks[1] == 35


def test_only_engines_that_can_go_on_with_the_stream_get_it() -> None:
    view = fleet(FULL, EMPTY, EMPTY, EMPTY, EMPTY)
    view.role[1] = Role.PREFILL
    view.set_state(2, EngineState.DRAINING)
    view.fingerprint[3] = "another"
    moves = Balancer(quick).choose(view, rows(0), 0.0)
    assert {move.target for move in moves} == {4}


def test_balancing_comes_to_rest() -> None:
    """Random fleets, looked at once a second, moves carried out: after a while there is nothing left to move."""
    total = 0
    for seed in range(20):
        draw = random.Random(seed)
        counts = [draw.randrange(50, 60), *(draw.randrange(20, 60) for _ in range(3))]
        held = {100 * engine + at: engine for engine, count in enumerate(counts) for at in range(count)}
        waiting = [2000, 0, 0, 0]
        balancer, moves = Balancer(quick), list[Move]()
        for second in range(60):
            view = FleetView(BLOCK)
            for engine in range(4):
                count = sum(where == engine for where in held.values())
                gauges = FULL._replace(waiting_tokens=waiting[engine], running_tokens=100 * count, rows=count)
                view.attach(gauges=gauges._replace(free_blocks=600 - 10 * count))
            running = [Movable(each, where, 100, 500.0) for each, where in held.items()]
            moves = balancer.choose(view, running, float(second))
            total += len(moves)
            for move in moves:
                held[move.request] = move.target
                balancer.ended(move.request)
        assert not moves, f"seed {seed}: {counts}"
    assert total > 10
