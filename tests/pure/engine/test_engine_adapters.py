"""Adapters of an engine without tensors: numbers, identities in prefix keys, and when matrices may go."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.config.engine import EngineConfig, KVConfig, SchedulerConfig
from paceline.core.clock import ManualClock
from paceline.core.inputs import SetAdapter
from paceline.core.sampling import SamplingParams
from paceline.engine.adapters import Adapters
from paceline.engine.engine import Engine
from paceline.errors import InvalidAdapter, UnknownAdapter
from paceline.factory import build_engine
from paceline.models.files.adapter import Adapter, LowRank
from paceline.scheduler.scheduler import Scheduler
from tests.fakes import FakeRunner

SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True)
NOTHING = np.zeros((1, 1), np.float32)


class Memory:
    """What a runner would hold."""

    def __init__(self) -> None:
        self.held: dict[int, str] = {}

    def put(self, number: int, adapter: Adapter) -> None:
        self.held[number] = adapter.identity

    def drop(self, number: int) -> None:
        del self.held[number]


def read(folder: Path) -> Adapter:
    """An adapter whose identity is the number its folder is called by."""
    if not folder.name.isdigit():
        raise InvalidAdapter(f"{folder} is no adapter")
    return Adapter(identity=f"{int(folder.name):064x}", rank=4, parts={(0, "q"): LowRank(NOTHING, NOTHING)})


def make(depth: int = 1) -> tuple[Engine, Memory]:
    config = EngineConfig(kv=KVConfig(num_blocks=64), scheduler=SchedulerConfig(max_num_seqs=4), depth=depth)
    memory = Memory()

    def adapters(scheduler: Scheduler) -> Adapters:
        return Adapters(scheduler, memory, read)

    clock = ManualClock(10.0)
    return build_engine(config, FakeRunner(config), clock=clock, make_adapters=adapters), memory


def test_numbers_only_go_up_and_a_folder_read_again_is_another() -> None:
    engine, memory = make()
    first, again = (engine.adapters.load("a", Path("7")) for _ in range(2))
    assert (first.number, again.number) == (1, 2) and first.identity == again.identity
    assert engine.adapters.load("b", Path("8"), number=5).number == 5
    for number in (1, 5):
        with pytest.raises(InvalidAdapter, match="was used before"):
            engine.adapters.load("c", Path("9"), number=number)
    with pytest.raises(InvalidAdapter, match="has changed since it was loaded"):
        engine.adapters.load("c", Path("9"), identity=first.identity)
    with pytest.raises(InvalidAdapter, match="is no adapter"):
        engine.adapters.load("c", Path("none"))
    assert engine.adapters.load("c", Path("9")).number == 6, "what was refused took no number"
    assert sorted(memory.held) == [1, 2, 5, 6]
    noted = [each for _, each in engine.scheduler.take_journal() if isinstance(each, SetAdapter)]
    assert [each.number for each in noted] == [1, 2, 5, 6]


def test_a_request_needs_an_adapter_that_is_there() -> None:
    engine, _ = make()
    number = engine.adapters.load("a", Path("7")).number
    engine.unload_adapter(number)
    for wrong in (number, number + 1):
        with pytest.raises(UnknownAdapter):
            engine.add([1], SAMPLING, adapter=wrong)
        with pytest.raises(UnknownAdapter):
            engine.forecast([1], SAMPLING, adapter=wrong)
    assert not engine.unload_adapter(number), "there is none any more"
    assert not engine.has_requests


def test_prefix_keys_go_by_identity() -> None:
    engine, _ = make()
    one, same, other = (engine.adapters.load("a", Path(name)).number for name in ("7", "7", "8"))
    prompt = list(range(1, 40))
    ids = [engine.add(prompt, SAMPLING, adapter=number)[0] for number in (0, one, same, other)]
    keys = [[key.key for key in engine.scheduler.state.requests[each].keys] for each in ids]
    assert keys[1] == keys[2] != keys[3]
    assert len({tuple(each) for each in keys}) == 3
    branches = engine.fork(ids[1], 2)
    requests = engine.scheduler.state.requests
    assert [requests[each].adapter for each in branches] == [one, one]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_matrices_stay_while_rows_or_steps_under_way_have_them(depth: int) -> None:
    engine, memory = make(depth)
    number = engine.adapters.load("a", Path("7")).number
    step = engine.step_overlapped if depth else engine.step
    (request,) = engine.add([1, 2, 3], SAMPLING, adapter=number)
    (other,) = engine.add([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))
    step()
    engine.unload_adapter(number)
    while request in engine.scheduler.state.requests:
        assert memory.held, "its row still computes"
        step()
    submitted = engine.num_submitted
    for _ in range(depth):  # steps that were planned before its end was known
        if memory.held:
            step()
    step()
    assert not memory.held and not engine.adapters.is_leaving
    assert other in engine.scheduler.state.requests, "others go on meanwhile"
    assert engine.num_submitted <= submitted + depth + 1


def test_one_without_rows_goes_at_once() -> None:
    engine, memory = make()
    number = engine.adapters.load("a", Path("7")).number
    assert engine.unload_adapter(number) and not memory.held


def test_an_engine_without_adapters_loads_none() -> None:
    config = EngineConfig(kv=KVConfig(num_blocks=8))
    engine = build_engine(config, FakeRunner(config))
    with pytest.raises(InvalidAdapter, match="started without adapters"):
        engine.adapters.load("a", Path("7"))
