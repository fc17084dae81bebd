"""The engine as the HTTP process sees it: implements `EngineClient` over whatever link there is at the moment.

The supervisor attaches a link when an engine starts and detaches it when that is lost; requests are numbered here, by
a counter that goes on over restarts, so that nothing an old engine said can reach a new request. Everything runs in
one event loop, and nothing waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from paceline.config.process import ProcessConfig
from paceline.core.dial import DialSetting
from paceline.core.request import Change, ChangeOutcome
from paceline.core.sampling import SamplingParams
from paceline.core.service_class import PLAIN, Urgency
from paceline.errors import InvalidRequest, PacelineError, QueueFull
from paceline.process import frames
from paceline.process.channel import HEADER, Rejects
from paceline.process.client import (
    Ending,
    EngineInfo,
    EngineState,
    EngineStats,
    EngineUnavailable,
    PolicyChange,
    Prospect,
    Steering,
    Told,
)
from paceline.process.frames import error_of
from paceline.process.streams import Branch, Stream

# Questions to the engine that get an answer of their own


MOST_QUESTIONS = 32  # under way at a time
PATIENCE_S = 10.0


class Sender(Protocol):
    """The way to an engine; see `link`."""

    def send(self, payload: bytes) -> None: ...

    @property
    def num_unsent_bytes(self) -> int: ...


class Questions:
    """Those that wait for an answer."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[frames.Answer]] = {}
        self._next = 1

    async def ask(self, sender: Sender, make: Callable[[int], frames.ToEngine]) -> frames.Answer:
        """The answer to the frame that `make` makes of a question's number. Raises QueueFull, or EngineUnavailable
        when no answer comes."""
        if len(self._waiting) >= MOST_QUESTIONS:
            raise QueueFull("too many questions are being answered at once; try again later")
        question, self._next = self._next, (self._next + 1) % 2**31
        answer = self._waiting[question] = asyncio.get_running_loop().create_future()
        try:
            sender.send(frames.encode(make(question)))
            return await asyncio.wait_for(answer, PATIENCE_S)
        except TimeoutError:
            raise EngineUnavailable("the engine does not answer at the moment; try again later") from None
        finally:
            del self._waiting[question]

    def answer(self, told: frames.Answer) -> None:
        """An answer has come; one that nobody waits for any more is passed over."""
        waiting = self._waiting.get(told.question)
        if waiting is not None and not waiting.done():
            waiting.set_result(told)

    def give_up(self, message: str) -> None:
        """No answer will come."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EngineUnavailable(message))


_logger = logging.getLogger("paceline")


class AsyncEngine:
    """One engine, whichever process it lives in at the moment."""

    def __init__(self, config: ProcessConfig) -> None:
        self.rejects = Rejects()
        self._config = config
        self._state = EngineState.STARTING
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._sender: Sender | None = None
        self._streams: dict[int, Stream] = {}  # by their first branch
        self._branches: dict[int, Branch] = {}  # those that have not ended
        self._asked: dict[int, asyncio.Future[Prospect]] = {}  # who waits for a forecast
        self._undelivered: list[Stream] = []  # with news of the frame that is being read
        self._questions = Questions()
        self._dial: DialSetting | None = None  # as it was set while serving
        self._policy: PolicyChange | None = None
        self._weights = ""  # of tenants, as `--tenant-weights` would say them
        self._next_id = 1
        self._heard_s = time.monotonic()
        self._is_draining = False

    # -- EngineClient --------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineUnavailable("the model is being loaded", code="starting")
        return self._info

    @property
    def stats(self) -> EngineStats:
        rejected = self.rejects.total
        stats = self._stats
        return replace(stats, rejected_frames=stats.rejected_frames + rejected) if rejected else stats

    @property
    def heartbeat_age_s(self) -> float:
        return time.monotonic() - self._heard_s

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def submit(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        tenant: str,
        urgency: Urgency = PLAIN,
        timeout_s: float | None = None,
    ) -> Stream:
        """See `EngineClient`. Raises EngineUnavailable, or QueueFull when the engine does not read fast enough."""
        sender = self._ready_sender()
        payload = self._payload(tokens, sampling, tenant, urgency, timeout_s)
        first = self._next_id
        self._next_id += sampling.n
        stream = Stream(first, sampling.n, self._undelivered, close=self._close, finish_at=self._finish_at)
        self._streams[first] = stream
        for branch in stream.branches:
            self._branches[branch.id] = branch
        sender.send(payload)
        return stream

    async def explain(self, number: int) -> Told:
        """See `ExplainingClient`."""
        sender = self._ready_sender()
        told = await self._questions.ask(sender, lambda question: frames.Explain(question, number))
        assert isinstance(told, frames.Explained)
        return Told([decision.decision() for decision in told.decisions], told.is_live)

    async def steer(self, *, dial: DialSetting | None = None, policy: PolicyChange | None = None) -> Steering:
        """See `SteeringClient`."""
        sender = self._ready_sender()
        told = await self._questions.ask(sender, lambda question: frames.Steer.of(question, dial, policy))
        assert isinstance(told, frames.Steered)
        if told.refusal is not None:
            raise error_of(told.refusal)
        self._dial, self._policy = dial or self._dial, policy or self._policy
        return told.steering

    async def look(self) -> bytes:
        """See `WatchedClient`."""
        seen = await self._questions.ask(self._ready_sender(), frames.Look)
        assert isinstance(seen, frames.Seen)
        return seen.body

    async def change(self, numbers: Sequence[int], change: Change) -> list[ChangeOutcome]:
        """See `ChangingClient`."""
        parts = (tuple(numbers), change.priority, change.until_s, change.paused)
        told = await self._questions.ask(
            self._ready_sender(), lambda question: frames.Change(question, *parts)
        )
        assert isinstance(told, frames.Changed)
        return told.outcomes

    def answered(self, answer: frames.Answer) -> None:
        """The engine's answer to a question."""
        self.heard()
        self._questions.answer(answer)

    async def ask(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        tenant: str,
        urgency: Urgency = PLAIN,
    ) -> Prospect:
        """See `EngineClient`. Raises as `submit` does."""
        sender = self._ready_sender()
        if len(self._asked) >= MOST_QUESTIONS:
            raise QueueFull("too many estimates are being made at once; try again later")
        payload = self._payload(tokens, sampling, tenant, urgency, None, asks=True)
        number = self._next_id
        self._next_id += 1
        answer: asyncio.Future[Prospect] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            sender.send(payload)
            return await asyncio.wait_for(answer, PATIENCE_S)
        except TimeoutError:
            raise EngineUnavailable("the engine does not answer at the moment; try again later") from None
        finally:
            del self._asked[number]

    def _payload(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        tenant: str,
        urgency: Urgency,
        timeout_s: float | None,
        *,
        asks: bool = False,
    ) -> bytes:
        """A request under the next number, as the engine is told of it."""
        sender = self._ready_sender()
        if sender.num_unsent_bytes > self._config.max_unsent_bytes:
            raise QueueFull("the engine does not take requests as fast as they come; try again later")
        urgency.check()
        add = frames.Add(
            self._next_id,
            _column(tokens),
            frames.Sampling.of(sampling),
            tenant,
            urgency.priority,
            time.monotonic(),
            timeout_s,
            asks,
            urgency.service_class,
        )
        payload = frames.encode(add)
        if len(payload) + HEADER.size > self._config.max_frame_bytes:
            raise InvalidRequest(f"a prompt of {len(tokens)} tokens is too long", param="prompt")
        return payload

    # -- for the supervisor --------------------------------------------------------------------------------

    def attach(self, sender: Sender) -> None:
        """An engine has been started and will load its model."""
        self._sender = sender
        self._state = EngineState.STARTING
        self._heard_s = time.monotonic()

    def ready(self, info: EngineInfo) -> None:
        self._info = info
        self._state = EngineState.READY
        self.heard()
        self._send_weights("")
        if self._sender is not None and (self._dial or self._policy):  # an engine in the place of another
            self._sender.send(frames.encode(frames.Steer.of(0, self._dial, self._policy)))

    def heard(self) -> None:
        """A sign of life."""
        self._heard_s = time.monotonic()
        if self._state is EngineState.STUCK:
            self._state = EngineState.READY

    def forgive(self, seconds: float) -> None:
        """This process itself did not run for so long: the engine's silence may be our own."""
        self._heard_s = min(self._heard_s + seconds, time.monotonic())

    def mark_stuck(self) -> None:
        """Alive, but silent for too long; if it comes back, what it was asked for is aborted first."""
        if self._state is not EngineState.READY:
            return
        self._state = EngineState.STUCK
        if self._config.fail_when_stuck:
            self.fail_all(EngineUnavailable("the engine does not answer"))

    def detach(self, message: str) -> None:
        """The engine is lost: everybody who waits hears it now."""
        self._sender = None
        self._state = EngineState.LOST
        self._stats = EngineStats()
        self._questions.give_up(message)
        self.fail_all(EngineUnavailable(message))

    def stopped(self) -> None:
        self.detach("the server is shutting down")
        self._state = EngineState.STOPPED

    def ping(self) -> None:
        """Ask the engine for its gauges of this moment."""
        if self._sender is not None:
            self._sender.send(frames.encode(frames.Ping()))

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """The shares of tenants from now on, for this engine and for those that take its place."""
        before, is_ready = self._weights, self._state is EngineState.READY
        told = ",".join(f"{name}={weight:g}" for name, weight in sorted(weights.items()))
        self._weights = told if any(weight != 1 for weight in weights.values()) else ""
        if is_ready:
            self._send_weights(before)

    def _send_weights(self, before: str) -> None:
        if self._sender is not None and self._weights != before:
            change = PolicyChange(name="", options={"tenant_weights": self._weights})
            self._sender.send(frames.encode(frames.Steer.of(0, None, change)))

    def refuse_new(self) -> None:
        """From now on only what is under way goes on."""
        self._is_draining = True
        self.let_all_go_on()

    def let_all_go_on(self) -> None:
        """See `DrainingClient`."""
        if self._sender is not None and self._state is EngineState.READY:
            self._sender.send(frames.encode(frames.Drain()))

    def fail_all(self, error: EngineUnavailable) -> None:
        """End every stream with an error, and what an engine may still do for them."""
        streams = list(self._streams.values())
        for stream in streams:
            self._forget(stream)
            # One for each: an error collects the places it was raised at.
            stream.fail(EngineUnavailable(str(error), code=error.code))
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable(str(error), code=error.code))

    # -- frames of the engine ------------------------------------------------------------------------------

    def take(self, news: frames.News) -> None:
        """Hand news to their streams. Nothing in it can raise: numbers nobody knows are counted and passed over."""
        self.heard()
        if len(news.branches) * frames.TOKEN.itemsize != len(news.tokens) * frames.ID.itemsize:
            self.rejects.undecodable += 1
            return
        for entry in news.logprobs:
            self._take_logprobs(entry)
        if news.tokens:
            self._take_tokens(news)
        for ending in news.endings:
            self._take_ending(ending)
        for told in news.told:
            self._take_told(told)
        for refusal in news.refusals:
            self._take_refusal(refusal)
        if news.stats is not None:
            self._stats = news.stats
        # Not before the end: a token and the news that it was the last one belong together.
        undelivered = self._undelivered.copy()
        self._undelivered.clear()
        for stream in undelivered:
            self._deliver(stream)

    def _take_told(self, told: frames.Told) -> None:
        prospect = Prospect(
            first_token_s=told.first_token_s,
            finish_s=told.finish_s,
            ahead=told.ahead,
            num_cached=told.num_cached,
            num_output=told.num_output,
        )
        stream, answer = self._streams.get(told.first), self._asked.get(told.first)
        if stream is not None:
            stream.prospect = prospect
        elif answer is not None and not answer.done():
            answer.set_result(prospect)

    def _take_refusal(self, refusal: frames.Refusal) -> None:
        stream, answer = self._streams.get(refusal.first), self._asked.get(refusal.first)
        if stream is not None:
            self._drop(stream)
            stream.fail(error_of(refusal))
        elif answer is not None:
            if not answer.done():
                answer.set_exception(error_of(refusal))
        else:
            self.rejects.unknown_branch += 1

    def _take_tokens(self, news: frames.News) -> None:
        """The hottest lines of the HTTP process: a lookup and an append for each token."""
        ids = np.frombuffer(news.branches, frames.ID).tolist()
        tokens = np.frombuffer(news.tokens, frames.TOKEN).tolist()
        time_s, find = news.time_s, self._branches.get
        for branch_id, token in zip(ids, tokens, strict=True):
            branch = find(branch_id)
            if branch is None:
                self.rejects.unknown_branch += 1
                continue
            branch.tokens.append(token)
            branch.time_s = time_s
            if not branch.is_touched:
                self._touch(branch)

    def _take_logprobs(self, entry: frames.BranchLogprobs) -> None:
        branch = self._branches.get(entry.branch)
        if branch is None:
            self.rejects.unknown_branch += 1
            return
        branch.logprobs.append(entry.of_row(branch.index))
        if not branch.is_touched:
            self._touch(branch)

    def _take_ending(self, ending: frames.BranchEnding) -> None:
        branch = self._branches.pop(ending.branch, None)
        if branch is None:  # closed meanwhile, or told twice
            self.rejects.unknown_branch += 1
            return
        branch.ending = Ending(
            reason=ending.reason,
            detail=ending.detail,
            num_prompt=ending.num_prompt,
            num_output=ending.num_output,
            num_cached=ending.num_cached,
            preemptions=ending.preemptions,
            queue_s=ending.queue_s,
            time_s=ending.time_s,
            cost=ending.cost,
        )
        stream = branch.stream
        stream.num_open -= 1
        if not stream.num_open:
            del self._streams[stream.first]
        if not branch.is_touched:
            self._touch(branch)

    def _touch(self, branch: Branch) -> None:
        """Note that a branch has news. A mistake there is told to its reader, and the rest of the news goes on."""
        try:
            branch.touch()
        except Exception:
            self._fail(branch.stream)

    def _deliver(self, stream: Stream) -> None:
        """Give a reader its news; a mistake there costs no other reader its own."""
        try:
            stream.deliver()
        except Exception:
            self._fail(stream)

    def _fail(self, stream: Stream) -> None:
        _logger.exception("request %d could not be told its news", stream.first)
        self._forget(stream)
        stream.fail(PacelineError("the request failed inside the server"))

    # -- helpers -------------------------------------------------------------------------------------------

    def _ready_sender(self) -> Sender:
        if self._is_draining or self._state is EngineState.STOPPED:
            raise EngineUnavailable("the server is shutting down", code="shutting_down")
        if self._state is EngineState.STARTING:
            raise EngineUnavailable("the model is being loaded; try again in a moment", code="starting")
        if self._state is not EngineState.READY or self._sender is None:
            raise EngineUnavailable("the engine does not answer at the moment; try again later")
        return self._sender

    def _finish_at(self, branch_id: int, num_output: int) -> None:
        if self._sender is not None and branch_id in self._branches:
            self._sender.send(frames.encode(frames.FinishAt(branch_id, num_output)))

    def _close(self, stream: Stream) -> None:
        if stream.first in self._streams:
            self._forget(stream)
            stream.fail(PacelineError("the stream was closed by its owner"))

    def _forget(self, stream: Stream) -> None:
        """Nobody waits for it any more: the engine frees what it holds."""
        open_ids = tuple(branch.id for branch in stream.branches if branch.ending is None)
        self._drop(stream)
        if self._sender is not None:
            self._sender.send(frames.encode(frames.Abort(open_ids)))

    def _drop(self, stream: Stream) -> None:
        self._streams.pop(stream.first, None)
        for branch in stream.branches:
            self._branches.pop(branch.id, None)


def _column(tokens: Sequence[int]) -> bytes:
    try:
        return np.array(tokens, dtype=frames.TOKEN).tobytes()
    except (OverflowError, ValueError, TypeError) as error:
        raise InvalidRequest("a prompt is a list of token ids", param="prompt") from error
