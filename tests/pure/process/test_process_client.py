"""The client without a process: streams, endings, refusals, losses and questions, fed by hand."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.server import ProcessConfig
from paceline.core.adapter import AdapterInfo
from paceline.core.events import Decision, DecisionKind, Finished, Rule
from paceline.core.request import RequestId
from paceline.core.sampling import SamplingParams
from paceline.core.service_class import ServiceLevel
from paceline.errors import (
    ConfigError,
    InvalidAdapter,
    InvalidRequest,
    NeverFits,
    PacelineError,
    QueueFull,
    UnknownAdapter,
)
from paceline.process import frames, questions
from paceline.process.async_engine import AsyncEngine
from paceline.process.client import Begun, EngineState, EngineStats, EngineUnavailable, Explanation
from paceline.process.supervisor import RestartBudget
from tests.fake_engine import finished
from tests.pure.process.test_process_frames import INFO

SAMPLING = SamplingParams(max_tokens=8)


class FakeSender:
    """Keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[frames.ToEngine] = []
        self.num_unsent_bytes = 0

    def send(self, payload: bytes) -> None:
        self.sent.append(frames.decode_to_engine(payload))


def connected(**changes: Any) -> tuple[AsyncEngine, FakeSender]:
    client, sender = AsyncEngine(ProcessConfig(**changes)), FakeSender()
    client.attach(sender)
    client.ready(INFO)
    return client, sender


def tokens(*pairs: tuple[int, int], time_s: float = 1.0) -> frames.Update:
    ids, numbers = zip(*pairs, strict=True)
    return frames.Update(
        time_s, np.array(ids, frames.ID).tobytes(), np.array(numbers, frames.TOKEN).tobytes()
    )


def ending(branch: int, reason: str = "stop") -> Finished:
    return finished(branch, reason)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 10))


def test_branches_are_numbered_one_behind_the_other() -> None:
    client, sender = connected()
    for count in (1, 3, 2):
        client.submit(
            [1, 2], SamplingParams(n=count), tenant="a", service_level=ServiceLevel("spot", -1), timeout_s=2.5
        )
    adds = [message for message in sender.sent if isinstance(message, frames.Add)]
    assert [add.first for add in adds] == [1, 2, 5]
    assert [add.sampling.n for add in adds] == [1, 3, 2]
    assert (adds[0].tenant, adds[0].left_s) == ("a", 2.5)
    assert (adds[0].service_class, adds[0].priority) == ("spot", -1)
    assert np.frombuffer(adds[0].tokens, frames.TOKEN).tolist() == [1, 2]
    assert (adds[0].age_s, adds[0].outputs) == (0.0, ())


def test_what_another_engine_had_begun_comes_with_its_output_and_without_what_has_ended() -> None:
    client, sender = connected()
    stream = client.submit(
        [1, 2], SamplingParams(n=3), tenant="a", begun=Begun(outputs=([7, 8], None, []), age_s=2.5)
    )
    (add,) = [message for message in sender.sent if isinstance(message, frames.Add)]
    known = [None if each is None else np.frombuffer(each, frames.TOKEN).tolist() for each in add.outputs]
    assert (known, add.age_s) == ([[7, 8], None, []], 2.5)
    client.on_update(frames.Update(1.0, endings=[ending(1), ending(3)]))
    assert stream.num_open == 0 == client.num_open and not client._branches


def test_a_reader_gets_its_own_updates_in_order() -> None:
    async def test() -> None:
        client, _ = connected()
        stream, other = (client.submit([1], SamplingParams(n=2), tenant="a") for _ in range(2))
        client.on_update(tokens((1, 10), (3, 30), (2, 20)))
        client.on_update(tokens((1, 11), time_s=2.0))
        updates = await stream.take()
        assert [(item.branch, item.tokens, item.time_s) for item in updates] == [
            (0, [10, 11], 2.0),
            (1, [20], 1.0),
        ]
        waiting = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        client.on_update(frames.Update(3.0, endings=[ending(2), ending(1)]))
        updates = await waiting
        assert [(item.branch, item.tokens) for item in updates] == [(1, []), (0, [])]
        assert all(item.ending is not None and item.ending.queue_s == 0.25 for item in updates)
        assert [item.tokens for item in await other.take()] == [[30]]
        assert client.num_open == 1

    run(test())


def test_closing_aborts_what_has_not_ended_and_only_that() -> None:
    client, sender = connected()
    stream = client.submit([1], SamplingParams(n=3), tenant="a")
    client.on_update(frames.Update(1.0, endings=[ending(2)]))
    stream.close()
    stream.close()
    assert sender.sent[1:] == [frames.Abort((1, 3))]
    done = client.submit([1], SAMPLING, tenant="a")
    client.on_update(frames.Update(1.0, endings=[ending(4)]))
    done.close()
    assert sender.sent[3:] == []
    assert client.num_open == 0 and not client._branches


def test_late_updates_are_dropped() -> None:
    client, _ = connected()
    stream = client.submit([1], SAMPLING, tenant="a")
    stream.close()
    later = client.submit([1], SAMPLING, tenant="a")
    client.on_update(tokens((1, 7)))
    client.on_update(frames.Update(1.0, endings=[ending(1)]))
    assert not later.touched
    assert client.rejects.unknown_branch == 2
    assert client.rejects.total == 0


def test_reading_a_closed_stream_is_an_error_and_no_wait() -> None:
    async def test() -> None:
        client, _ = connected()
        stream = client.submit([1], SAMPLING, tenant="a")
        waiting = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        stream.close()
        with pytest.raises(PacelineError, match="closed"):
            await waiting

    run(test())


@pytest.mark.parametrize(
    ("kind", "error"), [("never_fits", NeverFits), ("queue_full", QueueFull), ("invalid", InvalidRequest)]
)
def test_a_refusal_is_raised_for_its_reader(kind: str, error: type[Exception]) -> None:
    async def test() -> None:
        client, sender = connected()
        stream = client.submit([1], SamplingParams(n=2), tenant="a")
        client.on_update(frames.Update(1.0, rejections=[frames.Rejected(1, kind, "because", "prompt")]))
        with pytest.raises(error, match="because"):
            await stream.take()
        stream.close()
        assert len(sender.sent) == 1 and not client._branches and not client.num_open

    run(test())


def test_a_finish_is_sent_once_for_a_branch_that_runs() -> None:
    client, sender = connected()
    stream = client.submit([1], SamplingParams(n=2), tenant="a")
    client.on_update(frames.Update(1.0, endings=[ending(1)]))
    stream.finish_at(0, 3)
    stream.finish_at(1, 4)
    stream.close()
    stream.finish_at(1, 5)
    assert sender.sent[1:] == [frames.FinishAt(2, 4), frames.Abort((2,))]


def test_when_the_engine_is_lost_every_request_learns_it_after_what_has_come() -> None:
    async def test() -> None:
        client, sender = connected()
        streams = [client.submit([1], SAMPLING, tenant="a") for _ in range(3)]
        waiting = asyncio.create_task(streams[1].take())
        await asyncio.sleep(0)
        client.on_update(tokens((1, 5)))
        client.detach("it fell over")
        assert client.state is EngineState.LOST and client.stats == EngineStats()
        assert (await streams[0].take())[0].tokens == [5]
        for reading in (streams[0].take(), waiting, streams[2].take()):
            with pytest.raises(EngineUnavailable, match="it fell over"):
                await reading
        with pytest.raises(EngineUnavailable):
            client.submit([1], SAMPLING, tenant="a")
        assert len(sender.sent) == 3 and client.num_open == 0
        again = FakeSender()
        client.attach(again)
        with pytest.raises(EngineUnavailable) as caught:
            client.submit([1], SAMPLING, tenant="a")
        assert caught.value.code == "starting"
        client.ready(INFO)
        assert client.submit([1], SAMPLING, tenant="a").first == 4  # numbers go on

    run(test())


@pytest.mark.parametrize("answers", [True, False])
def test_a_stuck_engine_is_back_with_its_next_sign_of_life(answers: bool) -> None:
    client, sender = connected(fail_when_stuck=answers)
    stream = client.submit([1], SAMPLING, tenant="a")
    client.mark_stuck()
    assert client.state.value == "stuck"
    assert (stream.error is not None) is answers
    assert sender.sent[1:] == ([frames.Abort((1,))] if answers else [])
    client.on_update(frames.Update(1.0))
    assert client.state.value == "ready"


def test_our_own_absence_is_not_held_against_the_engine() -> None:
    client, _ = connected()
    client._heartbeat_s -= 100
    client.extend_deadline(90)
    assert 9 < client.heartbeat_age_s < 12
    client.extend_deadline(1000)
    assert client.heartbeat_age_s < 5


def test_requests_do_not_pile_up_before_an_engine_that_does_not_read() -> None:
    client, sender = connected(max_unsent_bytes=1 << 16)
    sender.num_unsent_bytes = (1 << 16) + 1
    with pytest.raises(QueueFull):
        client.submit([1], SAMPLING, tenant="a")
    assert client.num_open == 0


@pytest.mark.parametrize("prompt", [[2**31], [None], ["a"], [[1], [2, 3]]])
def test_a_prompt_that_is_no_list_of_numbers_is_refused(prompt: Any) -> None:
    client, sender = connected()
    with pytest.raises(InvalidRequest):
        client.submit(prompt, SAMPLING, tenant="a")
    assert not sender.sent and client.num_open == 0


@pytest.mark.parametrize("priority", [2**31, -(2**31) - 1, 2**70])
def test_a_priority_that_no_column_holds_is_refused(priority: int) -> None:
    client, sender = connected()
    with pytest.raises(InvalidRequest, match="priority"):
        client.submit([1], SAMPLING, tenant="a", service_level=ServiceLevel(priority=priority))
    assert not sender.sent


def test_before_the_model_is_loaded_nothing_is_known_of_it() -> None:
    client = AsyncEngine(ProcessConfig())
    with pytest.raises(EngineUnavailable):
        _ = client.info
    assert client.state is EngineState.STARTING


def test_a_restart_has_its_price() -> None:
    budget = RestartBudget(ProcessConfig(max_restarts=3, restart_window_s=100.0, restart_backoff_s=2.0))
    assert [budget.spend(now_s) for now_s in (0.0, 10.0, 20.0, 30.0)] == [0.0, 2.0, 4.0, None]
    assert budget.spend(101.0) == 4.0  # the first is forgotten
    assert RestartBudget(ProcessConfig(max_restarts=0)).spend(0.0) is None


@given(st.lists(st.floats(0.0, 50.0), max_size=60), st.integers(1, 5))
def test_there_are_never_more_restarts_in_a_window_than_allowed(gaps: list[float], most: int) -> None:
    budget = RestartBudget(ProcessConfig(max_restarts=most, restart_window_s=100.0))
    now_s, allowed = 0.0, []
    for gap in gaps:
        now_s += gap
        if budget.spend(now_s) is not None:
            allowed.append(now_s)
    assert all(later - first > 100 for first, later in zip(allowed, allowed[most:], strict=False))


def test_times_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="--stuck-after-s"):
        ProcessConfig(heartbeat_s=4.0)
    with pytest.raises(ConfigError, match="--restart-after-s"):
        ProcessConfig(stuck_after_s=60.0)


def test_the_http_process_loads_no_engine() -> None:
    heavy = ["torch", "paceline.factory", "paceline.engine", "paceline.scheduler", "paceline.models"]
    program = (
        f"import sys, paceline.process.supervisor; print([name for name in {heavy} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


# ----------------------------------------------------------------
# Questions to the engine: answered, answered too late, never answered, too many.


DECISION = Decision(DecisionKind.FINISH, RequestId(7), Rule.STOP, 3, 9, 1.5, detail="why")


def answer(question: int, *decisions: Decision) -> frames.Explained:
    told = frames.Explained(question, Explanation(list(decisions), True))
    read = frames.decode_from_engine(frames.encode(told))
    assert isinstance(read, frames.Explained)
    return read


def test_an_answer_finds_its_question() -> None:
    async def test() -> None:
        client, sender = connected()
        asked = [asyncio.ensure_future(client.explain(number)) for number in (7, 8)]
        await asyncio.sleep(0)
        assert sender.sent == [frames.Explain(1, 7), frames.Explain(2, 8)]
        client.on_answer(answer(2))
        client.on_answer(answer(1, DECISION))
        client.on_answer(answer(1, DECISION))  # told twice
        client.on_answer(answer(99, DECISION))  # no question was asked
        assert await asked[0] == ([DECISION], True) and await asked[1] == ([], True)

    run(test())


def test_an_engine_that_is_lost_answers_every_request() -> None:
    async def test() -> None:
        client, _ = connected()
        asked = asyncio.ensure_future(client.explain(7))
        await asyncio.sleep(0)
        client.detach("the engine is gone")
        with pytest.raises(EngineUnavailable, match="the engine is gone"):
            await asked
        with pytest.raises(EngineUnavailable):
            await client.explain(7)

    run(test())


def test_no_request_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "PATIENCE_S", 0.01)

    async def test() -> None:
        client, _ = connected()
        with pytest.raises(EngineUnavailable, match="does not answer"):
            await client.explain(7)

    run(test())


def test_only_so_many_ask_at_a_time() -> None:
    async def test() -> None:
        client, _ = connected()
        asked = [asyncio.ensure_future(client.explain(7)) for _ in range(questions.MOST_QUESTIONS)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="too many questions"):
            await client.explain(7)
        asked[0].cancel()  # a caller that leaves makes room
        await asyncio.gather(asked[0], return_exceptions=True)
        again = asyncio.ensure_future(client.explain(8))
        await asyncio.sleep(0)
        client.on_answer(answer(questions.MOST_QUESTIONS + 1, DECISION))
        assert await again == ([DECISION], True)
        for one in asked[1:]:
            one.cancel()

    run(test())


# ----------------------------------------------------------------
# Adapters: names here, numbers in the engine, and an engine in the place of another.


def adapter(name: str, number: int, identity: str = "aa") -> AdapterInfo:
    return AdapterInfo(name=name, folder=f"/adapters/{name}", number=number, identity=identity, rank=4)


async def loaded(client: AsyncEngine, sender: FakeSender, name: str, identity: str = "aa") -> AdapterInfo:
    """Load an adapter, with the engine's part in it."""
    asked = asyncio.ensure_future(client.load_adapter(name, f"/adapters/{name}"))
    await asyncio.sleep(0)
    load = sender.sent[-1]
    assert isinstance(load, frames.LoadAdapter)
    info = adapter(name, load.number, identity)
    client.on_answer(frames.AdapterLoaded(load.question, load.number, info, None))
    return await asked


def test_a_reload_is_another_number_and_the_first_is_let_go_of_behind_its_requests() -> None:
    async def test() -> None:
        client, sender = connected()
        first = await loaded(client, sender, "poet")
        client.submit([1], SAMPLING, tenant="a", adapter=client.adapters["poet"].number)
        second = await loaded(client, sender, "poet", "bb")
        assert (first.number, second.number, client.adapters["poet"]) == (1, 2, second)
        kinds = [type(frame).__name__ for frame in sender.sent]
        assert kinds == ["LoadAdapter", "Add", "LoadAdapter", "UnloadAdapter"]
        added = sender.sent[1]
        assert isinstance(added, frames.Add) and added.adapter == 1
        assert sender.sent[-1] == frames.UnloadAdapter(1)
        client.unload_adapter("poet")
        assert sender.sent[-1] == frames.UnloadAdapter(2)
        with pytest.raises(UnknownAdapter, match="there is no adapter 'poet'"):
            client.unload_adapter("poet")

    run(test())


def test_what_cannot_be_loaded_leaves_the_name_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        client, sender = connected()
        first = await loaded(client, sender, "poet")
        asked = asyncio.ensure_future(client.load_adapter("poet", "/adapters/other"))
        await asyncio.sleep(0)
        why = frames.Rejected(0, "invalid_adapter", "it has no tensors", "lora_path")
        client.on_answer(frames.AdapterLoaded(2, 2, None, why))
        with pytest.raises(InvalidAdapter, match="it has no tensors"):
            await asked
        monkeypatch.setattr(questions, "PATIENCE_S", 0.01)
        with pytest.raises(EngineUnavailable):
            await client.load_adapter("poet", "/adapters/slow")
        assert sender.sent[-1] == frames.UnloadAdapter(3), "should it be read after all"
        assert client.adapters == {"poet": first}

    run(test())


def test_an_engine_in_the_place_of_another_gets_the_adapters() -> None:
    async def test() -> None:
        client, sender = AsyncEngine(ProcessConfig()), FakeSender()
        client.attach(sender)
        start = replace(INFO, adapters=(adapter("one", 1), adapter("two", 2)))
        client.ready(start)
        assert list(client.adapters) == ["one", "two"]
        three = await loaded(client, sender, "three")
        four = await loaded(client, sender, "one", "cc")  # in the place of the first
        assert (three.number, four.number) == (3, 4)
        client.detach("lost")
        again = FakeSender()
        client.attach(again)
        client.ready(replace(start, adapters=(adapter("one", 1), adapter("two", 2, "changed"))))
        assert again.sent == [
            frames.UnloadAdapter(1),
            frames.LoadAdapter(0, 3, "three", "/adapters/three", "aa"),
            frames.LoadAdapter(0, 4, "one", "/adapters/one", "cc"),
        ]
        assert client.adapters["two"].identity == "changed"
        gone = frames.Rejected(0, "invalid_adapter", "it has changed", None)
        client.on_answer(frames.AdapterLoaded(0, 3, None, gone))
        client.on_answer(frames.AdapterLoaded(0, 4, four, None))
        assert sorted(client.adapters) == ["one", "two"]

    run(test())
