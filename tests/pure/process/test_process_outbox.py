"""The outbox: whatever the socket takes and when, each reader gets all its tokens, then one ending."""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.events import Finished, LogprobEvent, StepEvents, TokenEvents
from paceline.core.plan import RowLogprobs
from paceline.core.request import Cost, FinishReason, RequestId
from paceline.process import frames
from paceline.process.client import EngineStats
from paceline.process.outbox import ENDING_BYTES, Outbox

SMALLEST_FRAME = 64 << 10


@dataclass
class World:
    """Requests that run, and what was said about each."""

    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    ended: list[int] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    next_id: int = 1

    def step(self, num_new: int, num_ended: int, logprobs: int) -> StepEvents:
        for _ in range(num_new):
            self.live.append(self.next_id)
            self.next_id += 1
        tokens, notes = [], []
        for request in self.live:
            token = (request * 31 + len(self.tokens[request])) % 1000
            position = len(self.tokens[request])
            self.tokens[request].append(token)
            tokens.append(token)
            if logprobs:
                notes.append(_logprobs(request, position, token, logprobs))
        columns = TokenEvents(
            seq=1,
            time_s=1.0,
            requests=np.array(self.live, np.int64),
            tokens=np.array(tokens, np.int32),
            index=np.zeros(len(tokens), np.int64),
        )
        gone, self.live = self.live[:num_ended], self.live[num_ended:]
        self.ended += gone
        endings = [
            Finished(RequestId(request), FinishReason.LENGTH, "", 1.0, 1, len(self.tokens[request]), 0, 0)
            for request in gone
        ]
        return StepEvents(tokens=(columns,), logprobs=tuple(notes), finished=tuple(endings))


@dataclass
class Reader:
    """What arrived, checked on its way."""

    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    positions: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    ended: list[int] = field(default_factory=list)
    stats: list[EngineStats] = field(default_factory=list)

    def take(self, update: frames.Update, *, with_logprobs: bool) -> None:
        payload = frames.encode(update)
        assert len(payload) <= SMALLEST_FRAME
        decoded = frames.decode_from_engine(payload)
        assert isinstance(decoded, frames.Update)
        for entry in decoded.logprobs:
            self.positions[entry.request].add(entry.logprobs.position)
        ids = np.frombuffer(decoded.branches, frames.ID).tolist()
        for branch, token in zip(ids, np.frombuffer(decoded.tokens, frames.TOKEN).tolist(), strict=True):
            assert branch not in self.ended
            assert not with_logprobs or len(self.tokens[branch]) in self.positions[branch]
            self.tokens[branch].append(token)
        for ending in decoded.endings:
            assert ending.num_output == len(self.tokens[ending.request])
            self.ended.append(ending.request)
        if decoded.stats is not None:
            self.stats.append(decoded.stats)


steps = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 5)), max_size=60)


@given(steps, st.sampled_from((0, 1, 20)))
def test_whatever_the_socket_takes_each_reader_gets_everything_once(
    steps: list[tuple[int, int, int]], logprobs: int
) -> None:
    world, reader, outbox = World(), Reader(), Outbox(SMALLEST_FRAME)
    for number, (num_new, num_ended, frames_taken) in enumerate(steps):
        outbox.put(world.step(num_new, num_ended, logprobs))
        outbox.stats = EngineStats(steps=number)
        for _ in range(frames_taken):
            if outbox:
                reader.take(outbox.take(), with_logprobs=logprobs > 0)
    while outbox:
        reader.take(outbox.take(), with_logprobs=logprobs > 0)
    assert reader.tokens == world.tokens
    assert reader.ended == world.ended
    assert [stats.steps for stats in reader.stats] == sorted({stats.steps for stats in reader.stats})
    assert not steps or reader.stats[-1].steps == len(steps) - 1


def test_gauges_wait_as_one() -> None:
    outbox = Outbox(SMALLEST_FRAME)
    for number in range(1000):
        outbox.stats = EngineStats(steps=number)
    assert outbox.take().stats == EngineStats(steps=999)
    assert not outbox


def test_a_reader_that_does_not_read_costs_no_more_than_what_it_is_owed() -> None:
    world, outbox = World(), Outbox(SMALLEST_FRAME)
    outbox.put(world.step(64, 0, 0))
    for _ in range(5_000):
        outbox.put(world.step(0, 0, 0))
        outbox.stats = EngineStats()
    num_tokens = sum(map(len, world.tokens.values()))
    (stretch,) = outbox._stretches
    held = sys.getsizeof(stretch.branches) + sys.getsizeof(stretch.tokens)
    assert held < 2 * num_tokens * (frames.ID.itemsize + frames.TOKEN.itemsize)
    assert not outbox.endings and not stretch.logprobs and not outbox.rejections


def test_an_ending_of_the_largest_numbers_has_room() -> None:
    most = 2**40
    ending = Finished(
        RequestId(most),
        FinishReason.LENGTH,
        "x" * 32,
        time_s=1e9,
        num_prompt=most,
        num_output=most,
        num_cached=most,
        preemptions=most,
        queue_s=1e9,
        cost=Cost(*[most] * len(Cost._fields)),
    )
    outbox = Outbox(SMALLEST_FRAME)
    sizes = []
    for endings in ([], [ending]):
        outbox.endings.extend(endings)
        sizes.append(len(frames.encode(outbox.take())))
    assert sizes[1] - sizes[0] <= ENDING_BYTES


def test_many_endings_and_refusals_are_split_over_frames() -> None:
    outbox = Outbox(SMALLEST_FRAME)
    for first in range(1, 301):
        outbox.rejections.append(frames.Rejected(first, "invalid", "é" * 512, "prompt"))
        ending = Finished(
            RequestId(first), FinishReason.ERROR, "internal_error", 1e9, 2**31, 2**31, 2**31, 9, 1.0
        )
        outbox.put(StepEvents(finished=(ending,)))
    refused, ended = [], []
    while outbox:
        update = outbox.take()
        assert len(frames.encode(update)) <= SMALLEST_FRAME
        refused += [rejected.first for rejected in update.rejections]
        ended += [ending.request for ending in update.endings]
    assert refused == ended == list(range(1, 301))


def _logprobs(request: int, position: int, token: int, count: int) -> LogprobEvent:
    found = RowLogprobs(
        row=0,
        position=position,
        token=token,
        logprob=-1.25,
        rank=1,
        top_tokens=tuple(range(40_000, 40_000 + count)),
        top_logprobs=(-1.25,) * count,
    )
    return LogprobEvent(request=RequestId(request), logprobs=found)
