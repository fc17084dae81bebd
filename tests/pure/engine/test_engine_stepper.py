"""Ids from outside, how long a request waited, and stepping without a thread."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.config.engine import EngineConfig, KVConfig, SchedulerConfig
from paceline.core.clock import ManualClock
from paceline.core.events import Finished, StepEvents
from paceline.core.request import RequestId
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.stepper import Stepper
from paceline.errors import InvalidRequest
from paceline.factory import build_engine
from tests.fakes import FakeRunner

SAMPLING = SamplingParams(max_tokens=3)


def make(max_num_seqs: int = 4) -> tuple[Engine, ManualClock]:
    config = EngineConfig(
        kv=KVConfig(num_blocks=32), scheduler=SchedulerConfig(max_num_seqs=max_num_seqs), depth=0
    )
    clock = ManualClock(10.0)
    return build_engine(config, FakeRunner(config), clock=clock), clock


def test_ids_from_outside_only_go_up() -> None:
    engine, _ = make()
    engine.number_from(RequestId(7))
    assert engine.add([1], replace(SAMPLING, n=3)) == [7, 8, 9]
    assert engine.add([1], SAMPLING) == [10]
    for used in (1, 7, 10):
        with pytest.raises(InvalidRequest, match="used before"):
            engine.number_from(RequestId(used))
    engine.number_from(RequestId(11))
    assert engine.add([1], SAMPLING) == [11]


def test_an_ending_tells_how_long_its_request_waited() -> None:
    engine, clock = make(max_num_seqs=1)
    first, second, never = (engine.add([1, 2], SAMPLING, arrival_s=9.0)[0] for _ in range(3))
    found: dict[int, Finished] = {}
    for _ in range(6):
        clock.advance(1.0)
        found |= {ending.request: ending for ending in engine.step().finished}
    engine.abort(never)
    found |= {ending.request: ending for ending in engine.scheduler.take_events().finished}
    assert [found[request].queue_s for request in (first, second, never)] == [2.0, 5.0, 7.0]


def test_a_stepper_knows_when_there_is_nothing_to_do() -> None:
    engine, _ = make(max_num_seqs=1)
    told: list[StepEvents] = []
    stepper = Stepper(engine, told.append)
    assert stepper.wait_s() is None
    (request,) = engine.add([1], SAMPLING)
    for _ in range(3):
        assert stepper.wait_s() == 0
        stepper.step()
    assert stepper.wait_s() is None
    assert [ending.request for events in told for ending in events.finished] == [request]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_stepper_does_not_sleep_before_a_request_that_an_ending_makes_room_for(depth: int) -> None:
    """The last result that is read may be what another request waits for: its blocks."""
    config = EngineConfig(
        kv=KVConfig(num_blocks=4, block_size=4), scheduler=SchedulerConfig(max_num_seqs=4), depth=depth
    )
    engine = build_engine(config, FakeRunner(config), clock=ManualClock(10.0))
    told: list[StepEvents] = []
    stepper = Stepper(engine, told.append)
    requests = [engine.add(list(range(start, start + 9)), SAMPLING)[0] for start in (20, 40, 60)]
    for _ in range(40):
        if not engine.has_requests:
            break
        assert stepper.wait_s() == 0
        stepper.step()
    assert [ending.request for events in told for ending in events.finished] == requests


def test_a_stepper_sleeps_until_the_next_deadline() -> None:
    engine, clock = make()
    stepper = Stepper(engine, lambda events: None)
    (request,) = engine.add([1], SAMPLING, deadline_s=10.25)
    engine.scheduler.pause(request)
    stepper.step()
    assert stepper.wait_s() == pytest.approx(0.25)
    stepper.wake()
    assert stepper.wait_s() == 0
    clock.advance(0.5)
    stepper.step()
    assert stepper.wait_s() is None and not engine.has_requests
