"""Adapters of an engine without tensors: numbers, identities in prefix keys, and when matrices may go."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from paceline.config.engine import EngineConfig, KVConfig, SchedulerConfig
from paceline.core.clock import ManualClock
from paceline.core.inputs import SetAdapter
from paceline.core.sampling import SamplingParams
from paceline.core.standing import DEVICE_LOST
from paceline.engine.adapters import Adapters, ThreadedReads
from paceline.engine.engine import Engine
from paceline.errors import InvalidAdapter, UnknownAdapter
from paceline.factory import build_engine
from paceline.models.files.adapter_files import Adapter
from paceline.scheduler.scheduler import Scheduler
from tests.fake_adapters import HeldReads, Memory, read
from tests.fakes import FakeRunner

SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True)


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


# ---------------------------------------------------------------- fewer places than adapters


def engine_of(depth: int) -> EngineConfig:
    scheduler = SchedulerConfig(max_num_seqs=4, max_loras=1)
    return EngineConfig(kv=KVConfig(num_blocks=64), scheduler=scheduler, depth=depth)


def crowded(depth: int = 1) -> tuple[Engine, Memory, HeldReads]:
    """Three adapters, the first of them in the only place."""
    config = engine_of(depth)
    memory, reads = Memory(), HeldReads()
    engine = build_engine(
        config,
        FakeRunner(config),
        clock=ManualClock(10.0),
        make_adapters=lambda scheduler: Adapters(scheduler, memory, read, reads),
    )
    for folder in ("7", "8", "9"):
        engine.adapters.load(folder, Path(folder))
    assert list(memory.held) == [1]
    return engine, memory, reads


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_adapters_take_turns_in_one_place(depth: int) -> None:
    engine, memory, reads = crowded(depth)
    step = engine.step_overlapped if depth else engine.step
    asked = {engine.add([1, 2, number], SAMPLING, adapter=number)[0]: number for number in (1, 2, 3, 2)}
    ended: list[int] = []
    for _ in range(100):
        ended += [asked[finished.request] for finished in step().finished]
        assert len(memory.held) <= 1
        reads.finish()
        if not engine.has_requests:
            break
    assert ended == [1, 2, 3, 2], "no request passes one that waits for the place"
    assert engine.scheduler.state.adapters.read == 3


@pytest.mark.parametrize("depth", [0, 1])
def test_a_sleep_lets_go_of_all_adapters_and_they_are_read_again(depth: int) -> None:
    engine, memory, reads = crowded(depth)
    step = engine.step_overlapped if depth else engine.step
    asked = [engine.add([1, 2, number], SAMPLING, adapter=number)[0] for number in (1, 2)]
    for _ in range(3):
        step()
    engine.sleep(levels_lost=DEVICE_LOST)
    assert not memory.held and not engine.scheduler.state.adapters.resident
    assert engine.unload_adapter(3), "one that no request has can go meanwhile"
    engine.wake(FakeRunner(engine_of(depth)))
    ended: list[int] = []
    for _ in range(100):
        ended += [finished.request for finished in step().finished]
        assert len(memory.held) <= 1
        reads.finish()
        if not engine.has_requests:
            break
    assert ended == asked and engine.scheduler.state.adapters.read == 2


def test_steps_go_on_while_a_folder_is_read() -> None:
    engine, memory, reads = crowded()
    (other,) = engine.add([5, 6], SAMPLING)
    (request,) = engine.add([1, 2], SAMPLING, adapter=2)
    for _ in range(4):
        engine.step()
    assert engine.adapters.is_reading and list(reads.waiting) == [2] and not memory.held
    assert engine.scheduler.num_tokens_of(engine.scheduler.state.requests[other]) > 4, "it runs meanwhile"
    reads.finish()
    engine.step()
    assert list(memory.held) == [2]
    while engine.has_requests:
        engine.step()
    assert not engine.adapters.is_reading and request not in engine.scheduler.state.requests


def test_rows_do_not_wait_for_a_copy_in_a_step() -> None:
    engine, memory, reads = crowded()
    (request,) = engine.add([1, 2], SAMPLING, adapter=2)
    engine.step()
    memory.copying = {2}
    reads.finish()
    for _ in range(3):
        engine.step()
    assert list(memory.held) == [2] and engine.adapters.is_reading
    assert not engine.scheduler.state.adapters.rows, "it is admitted when its adapter is there"
    memory.copying = set()
    while engine.has_requests:
        engine.step()
    assert not engine.adapters.is_reading and request not in engine.scheduler.state.requests


def test_a_folder_that_has_changed_ends_its_requests_and_no_others() -> None:
    engine, memory, reads = crowded()
    (other,) = engine.add([5, 6], SAMPLING)
    (request,) = engine.add([1, 2], SAMPLING, adapter=2)
    engine.step()
    reads.waiting[2] = lambda: read(Path("77"))
    reads.finish()
    finished = [each for _ in range(20) for each in engine.step().finished]
    endings = {each.request: each.detail for each in finished}
    assert endings[request] == "internal_error" and endings[other] != "internal_error"
    assert not memory.held
    engine.add([1, 2], SAMPLING, adapter=3)
    engine.step()
    assert list(reads.waiting) == [3], "the place is free for others"


def test_one_that_is_unloaded_while_it_is_read_takes_no_place() -> None:
    engine, memory, reads = crowded()
    (request,) = engine.add([1, 2], SAMPLING, adapter=2)
    engine.step()
    engine.abort(request)
    engine.unload_adapter(2)
    reads.finish()
    engine.step()
    assert not memory.held and engine.adapters.identity_of(2) == ""
    assert not engine.scheduler.state.adapters.coming


def test_a_load_in_a_thread_is_answered_when_it_is_done() -> None:
    engine, _, reads = crowded()
    answers: list[object] = []
    engine.adapters.load_later("a", Path("11"), 4, answers.append)
    engine.adapters.load_later("b", Path("none"), 5, answers.append)
    with pytest.raises(InvalidAdapter, match="was used before"):
        engine.adapters.load_later("c", Path("12"), 5, answers.append)
    engine.step()
    assert not answers and engine.adapters.is_reading
    with pytest.raises(UnknownAdapter):
        engine.add([1], SAMPLING, adapter=4)
    reads.finish()
    engine.step()
    loaded, refused = answers
    assert getattr(loaded, "number", 0) == 4 and isinstance(refused, InvalidAdapter)
    engine.add([1], SAMPLING, adapter=4)


def test_folders_are_read_in_a_thread() -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow(folder: Path) -> Adapter:
        started.set()
        go_on.wait(5)
        return read(folder)

    reads = ThreadedReads()
    reads.start(3, lambda: slow(Path("7")))
    assert started.wait(5) and reads.done() == []
    go_on.set()
    until_s = time.monotonic() + 5
    while not (found := reads.done()):
        assert time.monotonic() < until_s
        time.sleep(0.001)
    assert found[0][0] == 3 and found[0][1]().rank == 4
