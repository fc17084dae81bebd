"""Trees between the processes: holds and injected tokens keep their place among tokens, however slow a reader is."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.events import Held, StepEvents, TokenEvents
from paceline.core.parameters import Pin
from paceline.core.request import ChangeOutcome, FinishReason, RequestId, TreeLimits
from paceline.core.stretch import ModulePart
from paceline.errors import InvalidTransition, PacelineError, TreeFull, UnknownRequest
from paceline.process import frames
from paceline.process.client import BranchUpdate
from paceline.process.frames import error_of, rejected_with
from paceline.process.outbox import Outbox
from tests.pure.process.test_process_client import SAMPLING, connected

FRAME = 64 << 10
BRANCH = 1


def token_events(first: int, tokens: list[int], *, is_injected: bool = False) -> TokenEvents:
    count = len(tokens)
    return TokenEvents(
        seq=1,
        time_s=1.0,
        requests=np.full(count, BRANCH, np.int64),
        tokens=np.array(tokens, np.int32),
        index=np.arange(first, first + count),
        is_injected=is_injected,
    )


def held(num_output: int) -> Held:
    return Held(RequestId(BRANCH), FinishReason.STOP, num_output, 9.0)


def story(updates: list[BranchUpdate]) -> list[object]:
    """What a reader hears, in order: tokens, tokens put in, holds."""
    heard: list[object] = []
    for update in updates:
        heard += [("in", token) if update.is_injected else token for token in update.tokens]
        if update.held is not None:
            heard.append(("held", update.held.num_output))
    return heard


# Tokens 1 and 2, a hold behind them, 7 and 8 put in, 3, and a hold again.
STEPS = [
    StepEvents(tokens=(token_events(0, [1]),)),
    StepEvents(tokens=(token_events(1, [2]),), held=(held(2),)),
    StepEvents(tokens=(token_events(2, [7, 8], is_injected=True),)),
    StepEvents(tokens=(token_events(4, [3]),), held=(held(5),)),
]
HEARD = [1, 2, ("held", 2), ("in", 7), ("in", 8), 3, ("held", 5)]


@given(st.lists(st.booleans(), min_size=8, max_size=8))
def test_a_reader_hears_the_same_story_whatever_is_joined(choices: list[bool]) -> None:
    async def run() -> list[object]:
        client, _ = connected()
        stream = client.submit([1], SAMPLING, tenant="a")
        assert stream.first == BRANCH
        outbox, heard = Outbox(FRAME), []
        for number, events in enumerate(STEPS):
            outbox.put(events)
            while outbox and (choices[number] or number == len(STEPS) - 1):
                client.on_update(frames.decode_from_engine(frames.encode(outbox.take())))
            if choices[4 + number] and stream.touched:
                heard += story(await stream.take())
        return heard + (story(await stream.take()) if stream.touched else [])

    assert asyncio.run(run()) == HEARD


def test_a_hold_and_what_follows_it_in_one_step_are_told_apart() -> None:
    outbox = Outbox(FRAME)
    both = (token_events(0, [1, 2]), token_events(2, [7], is_injected=True))
    outbox.put(StepEvents(tokens=both, held=(held(2),)))
    first, second = outbox.take(), outbox.take()
    assert (len(first.tokens), first.held, first.is_injected) == (2 * frames.TOKEN.itemsize, [], False)
    assert second.held == [held(2)] and second.is_injected and len(second.tokens) == frames.TOKEN.itemsize
    assert not outbox


def test_a_fork_is_a_stream_under_the_next_numbers() -> None:
    async def run() -> None:
        client, sender = connected()
        client.submit([1], SAMPLING, tenant="a", tree=TreeLimits(max_rows=2))
        stream = client.fork(1, 3, at=2, append=[5, 6], score=0.5, changes={"temperature": 0.5})
        assert stream.first == 2
        add, fork = sender.sent
        assert isinstance(add, frames.Add) and add.tree == TreeLimits(max_rows=2)
        append = np.array([5, 6], frames.TOKEN).tobytes()
        assert fork == frames.Fork(2, 1, 3, 2, append, 0.5, {"temperature": 0.5})
        client.on_update(frames.Update(0.0, rejections=[rejected_with(TreeFull("0 are left"), 2)]))
        with pytest.raises(TreeFull, match="0 are left"):
            await stream.take()

    asyncio.run(run())


def test_pruning_and_extending_are_answered() -> None:
    async def run() -> None:
        client, sender = connected()
        pruned = asyncio.ensure_future(client.prune([1, 2]))
        parts = [ModulePart(0, 5, pin=Pin(ttl_s=60, name="ctx")), ModulePart(7, 2)]
        extended = asyncio.ensure_future(client.extend(1, [5], max_tokens=3, modules=parts))
        await asyncio.sleep(0)
        first, second = sender.sent
        assert isinstance(first, frames.Prune) and isinstance(second, frames.ExtendBranch)
        sent = frames.decode_to_engine(frames.encode(second))
        assert isinstance(sent, frames.ExtendBranch) and [each.part for each in sent.modules] == parts
        client.on_answer(frames.Changed(first.question, [ChangeOutcome.CHANGED, ChangeOutcome.ENDED]))
        no = rejected_with(InvalidTransition("it has all its tokens"))
        client.on_answer(frames.Extended(second.question, no))
        assert await pruned == [ChangeOutcome.CHANGED, ChangeOutcome.ENDED]
        with pytest.raises(InvalidTransition, match="it has all its tokens"):
            await extended

    asyncio.run(run())


@pytest.mark.parametrize("error", [TreeFull("a"), UnknownRequest("b"), InvalidTransition("c")])
def test_errors_of_trees_cross_as_they_are(error: PacelineError) -> None:
    found = error_of(rejected_with(error))
    assert type(found) is type(error) and str(found) == str(error)
