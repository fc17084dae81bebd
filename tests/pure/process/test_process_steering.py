"""Steering an engine over frames: made, refused, answered, and made again by an engine in the place of another."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from paceline.core.clock import ManualClock
from paceline.core.dial import OFF, DialKind, DialSetting, DialWord
from paceline.core.request import NoHooks
from paceline.errors import InvalidRequest
from paceline.factory import build_scheduler
from paceline.process import frames
from paceline.process.client import PolicyChange
from paceline.process.model_service import steer, steering_of
from paceline.scheduler.scheduler import Scheduler
from tests.pure.engine.engine_helpers import engine_config
from tests.pure.process.test_process_client import FakeSender, connected
from tests.pure.process.test_process_frames import INFO

ITL = DialSetting(kind=DialKind.ITL, value=30.0)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 10))


def scheduler(**options: Any) -> Scheduler:
    return build_scheduler(engine_config(**options), ManualClock(), NoHooks())


def sent(frame: Any) -> Any:
    return frames.decode_from_engine(frames.encode(frame))


def test_an_engine_does_what_is_asked_and_says_how_it_stands() -> None:
    engine = scheduler()
    asked = frames.decode_to_engine(
        frames.encode(frames.Steer(5, ITL, PolicyChange(name="shortest", options={"ageing_s": 3.0})))
    )
    assert isinstance(asked, frames.Steer)
    told = sent(steer(engine, asked))
    assert (told.question, told.rejected) == (5, None)
    assert told.steering.dial.setting == ITL and told.steering.dial.word is DialWord.STARTING
    assert (told.steering.policy, told.steering.policy_options["ageing_s"]) == ("shortest", 3.0)
    assert sent(steer(engine, frames.Steer(6))).steering == told.steering  # a look changes nothing


@pytest.mark.parametrize(
    "asked, message",
    [
        (frames.Steer(1, None, PolicyChange(name="own:Class")), "is loaded at start-up only"),
        (
            frames.Steer(1, None, PolicyChange(name="fair", options={"max_num_seqs": 3})),
            "cannot be changed with the policy",
        ),
        (
            frames.Steer(1, None, PolicyChange(name="fair", options={"ageing_s": -3.0})),
            "--ageing-s must be at least",
        ),
    ],
)
def test_a_mistake_is_an_answer_and_changes_nothing(asked: frames.Steer, message: str) -> None:
    engine = scheduler()
    before = steering_of(engine)
    told = sent(steer(engine, asked))
    assert told.rejected is not None and message in told.rejected.message
    assert told.steering == before and not engine.take_journal()


def test_a_dial_out_of_its_range_is_no_frame() -> None:
    sound = frames.encode(frames.Steer(1, DialSetting(kind=DialKind.POSITION, value=1.0)))
    bad = sound.replace(msgspec.msgpack.encode(1.0), msgspec.msgpack.encode(7.0))
    assert bad != sound and frames.decode_to_engine(sound)
    with pytest.raises(frames.BadFrame):
        frames.decode_to_engine(bad)


def test_padded_batches_refuse_a_dial() -> None:
    told = steer(scheduler(mode="static"), frames.Steer(1, DialSetting(kind=DialKind.POSITION, value=0.5)))
    assert told.rejected is not None and "--mode continuous" in told.rejected.message


def test_an_answer_finds_its_question_and_a_new_engine_is_steered_alike() -> None:
    async def test() -> None:
        client, sender = connected()
        engine = scheduler()

        async def ask(**more: Any) -> Any:
            asked = asyncio.ensure_future(client.steer(**more))
            await asyncio.sleep(0)
            frame = sender.sent[-1]
            assert isinstance(frame, frames.Steer)
            client.on_answer(sent(steer(engine, frame)))
            return await asked

        assert (await ask()).dial.setting == OFF
        assert (await ask(dial=ITL)).dial.setting == ITL
        assert (await ask(policy=PolicyChange(name="tail"))).policy == "tail"
        with pytest.raises(InvalidRequest, match="is not known"):
            await ask(policy=PolicyChange(name="none"))
        client.detach("lost")
        again = FakeSender()
        client.attach(again)
        client.ready(INFO)
        assert again.sent == [frames.Steer(0, ITL, PolicyChange(name="tail"))]

    run(test())


def test_an_engine_that_was_never_steered_is_told_nothing_at_its_start() -> None:
    _, sender = connected()
    assert sender.sent == []


def test_weights_of_tenants_reach_the_policy_there_is_and_every_engine_after() -> None:
    client, sender = connected()
    sender.sent.clear()
    client.set_weights({"a": 1.0, "b": 1.0})
    assert not sender.sent  # all alike: nothing to say
    client.set_weights({"b": 0.5, "a": 2.0})
    weights = frames.Steer(0, None, PolicyChange(name="", options={"tenant_weights": "a=2,b=0.5"}))
    assert sender.sent == [weights]
    engine = scheduler(scheduling_policy="fair")
    steer(engine, weights)
    assert (engine.state.config.scheduling_policy, engine.state.config.tenant_weights) == (
        "fair",
        "a=2,b=0.5",
    )
    after = FakeSender()
    client.detach("it is gone")
    client.attach(after)
    client.ready(INFO)
    assert after.sent == [weights]
    client.set_weights({"a": 1.0})
    assert after.sent[1:] == [frames.Steer(0, None, PolicyChange(name="", options={"tenant_weights": ""}))]


def test_an_operators_own_policy_stays_as_it_is_and_whichever_follows_has_the_weights() -> None:
    engine = scheduler(scheduling_policy="paceline.scheduler.policy.fcfs:FirstComeFirstServed")
    own = engine.state.policy
    assert (
        steer(
            engine, frames.Steer(0, None, PolicyChange(name="", options={"tenant_weights": "a=2"}))
        ).rejected
        is None
    )
    assert engine.state.policy is own and engine.state.config.tenant_weights == "a=2"
    assert steer(engine, frames.Steer(0, None, PolicyChange(name="fair"))).rejected is None
    assert engine.state.config.tenant_weights == "a=2"
