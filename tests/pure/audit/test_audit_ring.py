"""The decisions an engine keeps in memory: the newest, no more than it may, found by request."""

from __future__ import annotations

from paceline.audit.ring import DecisionRing
from paceline.core.events import Decision, DecisionKind, Rule
from paceline.core.request import RequestId
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt


def decided(request: int, step: int) -> Decision:
    return Decision(DecisionKind.CHUNK, RequestId(request), Rule.BUDGET, 1, step)


def test_the_newest_are_kept_and_found_by_request() -> None:
    ring = DecisionRing(6)
    for step in range(10):
        ring.add([decided(1, step), decided(2 + step % 2, step)])
    assert len(ring) == 6 and ring.num_dropped == 14
    assert [decision.step for decision in ring.of(RequestId(1))] == [7, 8, 9]
    assert [decision.step for decision in ring.of(RequestId(3))] == [7, 9]
    assert ring.of(RequestId(9)) == []


def test_a_batch_larger_than_the_ring_is_kept_alone() -> None:
    ring = DecisionRing(2)
    ring.add([decided(1, 1)])
    ring.add([decided(2, 2)] * 5)
    assert len(ring) == 5 and ring.of(RequestId(1)) == []


def test_a_ring_of_nothing_keeps_nothing() -> None:
    ring = DecisionRing(0)
    ring.add([decided(1, 1)])
    assert len(ring) == 0


def test_an_engine_knows_the_decisions_of_live_and_of_ended_requests() -> None:
    bench = Bench(engine_config(num_blocks=7))
    ids = [bench.add(prompt(4, start), 20) for start in range(4)]
    bench.run()
    for request_id in ids:
        known = bench.engine.decisions_of(request_id)
        recorded = bench.watch.decisions + bench.state.decisions
        assert known == [decision for decision in recorded if decision.request == request_id]
        assert known[0].kind is DecisionKind.ADMIT and known[-1].kind is DecisionKind.FINISH
