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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config.server import ProcessConfig
from paceline.core.adapter import NO_ADAPTER, AdapterInfo
from paceline.core.dial import DialSetting
from paceline.core.events import Finished, Forecast, Held, LogprobEvent
from paceline.core.request import BranchState, Change, ChangeOutcome, TreeLimits
from paceline.core.sampling import SamplingParams
from paceline.core.service_class import DEFAULT_LEVEL, ServiceLevel
from paceline.core.standing import Standing
from paceline.core.stretch import PLAIN, ModulePart, PromptParts
from paceline.errors import InvalidRequest, PacelineError, QueueFull, UnknownAdapter
from paceline.process import frames
from paceline.process.channel import HEADER, Rejects
from paceline.process.client import (
    Begun,
    EngineInfo,
    EngineState,
    EngineStats,
    EngineUnavailable,
    Explanation,
    PolicyChange,
    Steering,
)
from paceline.process.frames import error_of
from paceline.process.questions import ModelSender, Numbers, Questions, Sender
from paceline.process.streams import Stream, StreamBranch

_logger = logging.getLogger("paceline")
LOST_MODEL = "this model could not be woken; an operator can try again: POST /v1/models/{id}/wake"


class AsyncEngine:
    """One engine, whichever process it lives in at the moment."""

    waits_for_engine = False

    def __init__(self, config: ProcessConfig, number: int = 0, numbers: Numbers | None = None) -> None:
        """`number`: which of the models of the process it is; `numbers`: of their requests."""
        self.rejects = Rejects()
        self.on_prefixes: Callable[[frames.PrefixNews | None], None] = lambda news: None  # None: all are gone
        self._number = number
        self._config = config
        self._state = EngineState.STARTING
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._sender: Sender | None = None
        self._streams: dict[int, Stream] = {}  # by their first branch
        self._branches: dict[int, StreamBranch] = {}  # those that have not ended
        self._undelivered: list[Stream] = []  # with updates in the frame that is being read
        self._questions = Questions[frames.Answer]("questions are being answered")
        self._forecasts = Questions[Forecast | None]("estimates are being made")
        self._next_question = 1
        self._dial: DialSetting | None = None  # as it was set while serving
        self._policy: PolicyChange | None = None
        self._weights = ""  # of tenants, as `--tenant-weights` would say them
        self._adapters: dict[str, AdapterInfo] = {}
        self._next_adapter = 1
        self._loading_adapters = asyncio.Lock()  # one after the other: the last one asked for has the name
        self._numbers = numbers or Numbers()
        self._heartbeat_s = time.monotonic()
        self._is_draining = False
        self.clock: Callable[[], float | None] = time.monotonic  # that the engine reads too

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
        return self._stats

    @property
    def heartbeat_age_s(self) -> float:
        return time.monotonic() - self._heartbeat_s

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
        service_level: ServiceLevel = DEFAULT_LEVEL,
        timeout_s: float | None = None,
        tree: TreeLimits | None = None,
        adapter: int = NO_ADAPTER,
        parts: PromptParts = PLAIN,
        begun: Begun | None = None,
    ) -> Stream:
        """See `EngineClient`. Raises EngineUnavailable, or QueueFull when the engine does not read fast enough."""
        outputs, age_s = begun or ((), 0.0)
        payload = self._payload(
            tokens,
            sampling,
            tenant,
            service_level,
            timeout_s,
            tree=tree,
            adapter=adapter,
            media=tuple([frames.item_of(part) for part in parts.media]),
            modules=tuple(map(frames.Module.of, parts.modules)),
            is_module=parts.is_module,
            outputs=tuple([None if each is None else frames.column_of(each, "outputs") for each in outputs]),
            age_s=age_s,
        )
        for _, given in parts.media:
            self._send_pixels(given.pixels)
        return self._start(payload, sampling.n, [place for place, each in enumerate(outputs) if each is None])

    def fork(
        self,
        number: int,
        count: int,
        *,
        at: int,
        append: Sequence[int] = (),
        score: float = 0.0,
        changes: Mapping[str, bool | int | float | str | None] | None = None,
    ) -> Stream:
        """See `EngineClient`. Raises as `submit` does."""
        self._check_unsent(self._ready_sender())
        frame = frames.Fork(
            self._numbers.next,
            number,
            count,
            at,
            frames.column_of(append, "append"),
            score,
            dict(changes or {}),
        )
        return self._start(frames.encode(frame), count)

    def _start(self, payload: bytes, count: int, ended: Sequence[int] = ()) -> Stream:
        """Send branches under the next numbers, and follow them; those at the places `ended` are not made."""
        sender, first = self._ready_sender(), self._numbers.next
        self._numbers.next += count
        stream = Stream(first, count, self._undelivered, close=self._close, finish_at=self._finish_at)
        self._streams[first] = stream
        for branch in stream.branches:
            self._branches[branch.id] = branch
        for place in ended:
            del self._branches[first + place]
        stream.num_open -= len(ended)
        sender.send(payload)
        return stream

    def _send_pixels(self, pixels: NDArray[np.uint8]) -> None:
        """Of the request under the next number, ahead of it."""
        sender, data = self._ready_sender(), memoryview(pixels.reshape(-1).data)
        most = self._config.max_frame_bytes // 2
        for at in range(0, len(data), most):
            sender.send(frames.encode(frames.Pixels(self._numbers.next, bytes(data[at : at + most]))))

    async def extend(
        self,
        number: int,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        modules: Sequence[ModulePart] = (),
    ) -> None:
        column, sent = frames.column_of(tokens, "tokens"), tuple(map(frames.Module.of, modules))
        answer = await self._ask(
            lambda question: frames.ExtendBranch(question, number, column, max_tokens, sent)
        )
        assert isinstance(answer, frames.Extended)
        if answer.rejected is not None:
            raise error_of(answer.rejected)

    async def prune(self, numbers: Sequence[int]) -> list[ChangeOutcome]:
        answer = await self._ask(lambda question: frames.Prune(question, tuple(numbers)))
        assert isinstance(answer, frames.Changed)
        return answer.outcomes

    async def tree(self, number: int) -> list[BranchState]:
        answer = await self._ask(lambda question: frames.ShowTree(question, number))
        assert isinstance(answer, frames.TreeShown)
        return answer.branches

    async def explain(self, number: int) -> Explanation:
        answer = await self._ask(lambda question: frames.Explain(question, number))
        assert isinstance(answer, frames.Explained)
        return answer.explanation

    async def steer(self, *, dial: DialSetting | None = None, policy: PolicyChange | None = None) -> Steering:
        answer = await self._ask(lambda question: frames.Steer(question, dial, policy))
        assert isinstance(answer, frames.Steered)
        if answer.rejected is not None:
            raise error_of(answer.rejected)
        self._dial, self._policy = dial or self._dial, policy or self._policy
        return answer.steering

    async def snapshot(self) -> bytes:
        answer = await self._ask(frames.Watch)
        assert isinstance(answer, frames.Watched)
        return answer.body

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        return self._adapters

    async def load_adapter(self, name: str, folder: str) -> AdapterInfo:
        async with self._loading_adapters:
            number = self._next_adapter
            self._next_adapter += 1
            try:
                answer = await self._ask(lambda question: frames.LoadAdapter(question, number, name, folder))
            except BaseException:  # it may be read all the same, and no request will have it
                self._send(frames.UnloadAdapter(number))
                raise
            assert isinstance(answer, frames.AdapterLoaded)
            if answer.info is None:
                assert answer.rejected is not None
                raise error_of(answer.rejected)
            before = self._adapters.get(name)
            self._adapters[name] = answer.info
            if before is not None:  # behind every request that was given its number
                self._send(frames.UnloadAdapter(before.number))
            return answer.info

    def unload_adapter(self, name: str) -> None:
        if (known := self._adapters.pop(name, None)) is None:
            raise UnknownAdapter(f"there is no adapter {name!r:.128}", param="lora_name")
        self._send(frames.UnloadAdapter(known.number))

    def unpin(self, tenant: str, name: str) -> None:
        self._send(frames.EndPin(tenant, name))

    def _restore_adapters(self, first: Sequence[AdapterInfo]) -> None:
        """An engine has come up with the adapters of the start; one in the place of another gets the rest too."""
        if self._info is None:
            self._adapters = {info.name: info for info in first}
            self._next_adapter = max((info.number for info in first), default=0) + 1
            return
        now = {info.number: info for info in first}
        for number in now.keys() - {info.number for info in self._adapters.values()}:
            self._send(frames.UnloadAdapter(number))
        for name, info in sorted(self._adapters.items(), key=lambda item: item[1].number):
            if info.number in now:  # its folder was read again
                self._adapters[name] = now[info.number]
            else:
                self._send(frames.LoadAdapter(0, info.number, name, info.folder, info.identity))

    async def rest(self, level: int, *, aborts: bool = False) -> Standing:
        answer = await self._ask(lambda question: frames.Rest(question, level, aborts))
        assert isinstance(answer, frames.Rested)
        if answer.rejected is not None:
            raise error_of(answer.rejected)
        self._stats = replace(self._stats, standing=answer.standing)  # its next figures are on their way
        return answer.standing

    async def change(self, numbers: Sequence[int], change: Change) -> list[ChangeOutcome]:
        answer = await self._ask(lambda question: frames.ChangeBranches(question, tuple(numbers), change))
        assert isinstance(answer, frames.Changed)
        return answer.outcomes

    async def _ask(self, make: Callable[[int], frames.ToEngine]) -> frames.Answer:
        """The answer to the frame that `make` makes of a question's number."""
        number, sender = self._next_question, self._ready_sender()

        def payload() -> bytes:
            self._next_question = (number + 1) % 2**31
            return frames.encode(make(number))

        return await self._questions.ask(number, sender, payload)

    def on_answer(self, answer: frames.Answer) -> None:
        """The engine's answer to a question."""
        self.on_heartbeat()
        if isinstance(answer, frames.AdapterLoaded) and not answer.question and answer.rejected is not None:
            lost = [name for name, info in self._adapters.items() if info.number == answer.number]
            for name in lost:
                del self._adapters[name]
                _logger.warning("the adapter %s is not served any more: %s", name, answer.rejected.message)
        self._questions.answer(answer.question, answer)

    async def forecast(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        tenant: str,
        service_level: ServiceLevel = DEFAULT_LEVEL,
        adapter: int = NO_ADAPTER,
        parts: PromptParts = PLAIN,
    ) -> Forecast | None:
        """See `EngineClient`. Raises as `submit` does."""
        number, sender = self._numbers.next, self._ready_sender()

        def payload() -> bytes:
            media, modules = map(frames.item_of, parts.media), map(frames.Module.of, parts.modules)
            more = {"adapter": adapter, "media": tuple(media), "modules": tuple(modules)}
            made = self._payload(tokens, sampling, tenant, service_level, None, only_forecast=True, **more)
            self._numbers.next += 1
            return made

        return await self._forecasts.ask(number, sender, payload)

    def _payload(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        tenant: str,
        service_level: ServiceLevel,
        timeout_s: float | None,
        **more: Any,
    ) -> bytes:
        """The frame of a request under the next number; `more` are fields of it."""
        self._check_unsent(self._awake_sender())
        service_level.check()
        add = frames.Add(
            first=self._numbers.next,
            tokens=frames.column_of(tokens),
            sampling=frames.Sampling.of(sampling),
            tenant=tenant,
            priority=service_level.priority,
            left_s=timeout_s,
            service_class=service_level.service_class,
            sent_s=self.clock(),
            **({"age_s": 0.0} | more),
        )
        payload = frames.encode(add)
        around = HEADER.size + (frames.FOR_MODEL_BYTES if self._number else 0)
        if len(payload) + around > self._config.max_frame_bytes:
            raise InvalidRequest(f"a prompt of {len(tokens)} tokens is too long", param="prompt")
        return payload

    def _check_unsent(self, sender: Sender) -> None:
        if sender.num_unsent_bytes > self._config.max_unsent_bytes:
            raise QueueFull("the engine does not take requests as fast as they come; try again later")

    # -- for the supervisor --------------------------------------------------------------------------------

    def attach(self, sender: Sender) -> None:
        """An engine has been started and will load its model."""
        self._sender = ModelSender(self._number, sender) if self._number else sender
        self._state = EngineState.STARTING
        self._heartbeat_s = time.monotonic()

    def ready(self, info: EngineInfo) -> None:
        self._restore_adapters(info.adapters)
        self._info = info
        self._state = EngineState.READY
        self.on_heartbeat()
        self._send_weights("")
        if self._dial or self._policy:  # an engine in the place of another
            self._send(frames.Steer(0, self._dial, self._policy))

    def on_heartbeat(self) -> None:
        """The engine is alive."""
        self._heartbeat_s = time.monotonic()
        if self._state is EngineState.STUCK:
            self._state = EngineState.READY

    def extend_deadline(self, seconds: float) -> None:
        """This process itself did not run for `seconds`: heartbeats may wait unread."""
        self._heartbeat_s = min(self._heartbeat_s + seconds, time.monotonic())

    def mark_stuck(self) -> None:
        """Alive, but silent for too long; if it comes back, its requests are aborted first."""
        if self._state is not EngineState.READY:
            return
        self._state = EngineState.STUCK
        if self._config.fail_when_stuck:
            self.fail_all(EngineUnavailable("the engine does not answer"))

    def detach(self, message: str) -> None:
        """The engine is lost: every request fails now."""
        self._sender = None
        self._state = EngineState.LOST
        self._stats = EngineStats(rejected_frames=self.rejects.total)
        self.on_prefixes(None)
        self._questions.fail_all(message)
        self.fail_all(EngineUnavailable(message))

    def stopped(self) -> None:
        self.detach("the server is shutting down")
        self._state = EngineState.STOPPED

    def ping(self) -> None:
        """Ask the engine for its gauges of this moment."""
        self._send(frames.Ping())

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """The shares of tenants from now on, for this engine and for those that take its place."""
        before, is_ready = self._weights, self._state is EngineState.READY
        written = ",".join(f"{name}={weight:g}" for name, weight in sorted(weights.items()))
        self._weights = written if any(weight != 1 for weight in weights.values()) else ""
        if is_ready:
            self._send_weights(before)

    def _send_weights(self, before: str) -> None:
        if self._weights != before:
            self._send(
                frames.Steer(0, None, PolicyChange(name="", options={"tenant_weights": self._weights}))
            )

    def refuse_new(self) -> None:
        """From now on only requests under way continue."""
        self._is_draining = True
        self.resume_all()

    def resume_all(self) -> None:
        if self._state is EngineState.READY:
            self._send(frames.Drain())

    def fail_all(self, error: EngineUnavailable) -> None:
        """End every stream with an error, and what an engine may still do for them."""
        streams = list(self._streams.values())
        for stream in streams:
            self._forget(stream)
            # One for each: an error collects the places it was raised at.
            stream.fail(EngineUnavailable(str(error), code=error.code))
        self._forecasts.fail_all(str(error), error.code)

    # -- frames of the engine ------------------------------------------------------------------------------

    def on_update(self, update: frames.Update) -> None:
        """Hand an update to its streams. Nothing in it can raise: unknown numbers are counted and dropped."""
        self.on_heartbeat()
        if len(update.branches) * frames.TOKEN.itemsize != len(update.tokens) * frames.ID.itemsize:
            self.rejects.undecodable += 1
            return
        for event in update.logprobs:
            self._take_logprobs(event)
        for held in update.held:
            self._seal(held.request, held=held)
        if update.tokens:
            self._take_tokens(update)
        for ending in update.endings:
            self._take_ending(ending)
        for first, forecast in update.forecasts:
            if (stream := self._streams.get(first)) is not None:
                stream.forecast = forecast
                stream.is_known = True
            else:
                self._forecasts.answer(first, forecast)
        for rejected in update.rejections:
            self._take_rejection(rejected)
        if update.stats is not None:
            on_both_sides = update.stats.rejected_frames + self.rejects.total
            self._stats = replace(update.stats, rejected_frames=on_both_sides)
            if update.stats.standing is Standing.FAILED and self._streams:
                self.fail_all(EngineUnavailable(LOST_MODEL, code="model_unavailable"))
        # Not before the end: a token and the ending that follows it belong together.
        undelivered = self._undelivered.copy()
        self._undelivered.clear()
        for stream in undelivered:
            self._deliver(stream)

    def _take_rejection(self, rejected: frames.Rejected) -> None:
        stream = self._streams.get(rejected.first)
        if stream is not None:
            self._drop(stream)
            stream.fail(error_of(rejected))
        elif not self._forecasts.fail(rejected.first, error_of(rejected)):
            self.rejects.unknown_branch += 1

    def _take_tokens(self, update: frames.Update) -> None:
        """The hottest lines of the HTTP process: a lookup and an append for each token."""
        ids = np.frombuffer(update.branches, frames.ID).tolist()
        tokens = np.frombuffer(update.tokens, frames.TOKEN).tolist()
        time_s, find = update.time_s, self._branches.get
        if update.is_injected:  # what came before is another update
            for branch_id in dict.fromkeys(ids):
                self._seal(branch_id)
        for branch_id, token in zip(ids, tokens, strict=True):
            branch = find(branch_id)
            if branch is None:
                self.rejects.unknown_branch += 1
                continue
            branch.tokens.append(token)
            branch.time_s = time_s
            if not branch.is_touched:
                self._touch(branch)
        if update.is_injected:
            for branch_id in dict.fromkeys(ids):
                self._seal(branch_id, is_injected=True)

    def _seal(self, branch_id: int, *, held: Held | None = None, is_injected: bool = False) -> None:
        branch = self._branches.get(branch_id)
        if branch is None:
            self.rejects.unknown_branch += held is not None
        elif held is not None or branch.tokens or branch.logprobs:
            branch.seal(held=held, is_injected=is_injected)
            if not branch.is_touched:
                self._touch(branch)

    def _take_logprobs(self, event: LogprobEvent) -> None:
        branch = self._branches.get(event.request)
        if branch is None:
            self.rejects.unknown_branch += 1
            return
        branch.logprobs.append(event.logprobs)
        if not branch.is_touched:
            self._touch(branch)

    def _take_ending(self, ending: Finished) -> None:
        branch = self._branches.pop(ending.request, None)
        if branch is None:  # closed meanwhile, or sent twice
            self.rejects.unknown_branch += 1
            return
        branch.ending = ending
        stream = branch.stream
        stream.num_open -= 1
        if not stream.num_open:
            del self._streams[stream.first]
        if not branch.is_touched:
            self._touch(branch)

    def _touch(self, branch: StreamBranch) -> None:
        """Note that a branch has an update. An error there ends its request alone."""
        try:
            branch.touch()
        except Exception:
            self._fail(branch.stream)

    def _deliver(self, stream: Stream) -> None:
        """Give a reader its updates; an error there ends its request alone."""
        try:
            stream.deliver()
        except Exception:
            self._fail(stream)

    def _fail(self, stream: Stream) -> None:
        _logger.exception("request %d could not be given its updates", stream.first)
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

    def _awake_sender(self) -> Sender:
        """For a request: its model is awake, or will be."""
        sender = self._ready_sender()
        if self._stats.standing is Standing.FAILED:
            raise EngineUnavailable(LOST_MODEL, code="model_unavailable")
        return sender

    def _send(self, frame: frames.ToEngine) -> None:
        if self._sender is not None:
            self._sender.send(frames.encode(frame))

    def _finish_at(self, branch_id: int, num_output: int) -> None:
        if branch_id in self._branches:
            self._send(frames.FinishAt(branch_id, num_output))

    def _close(self, stream: Stream) -> None:
        if stream.first in self._streams:
            self._forget(stream)
            stream.fail(PacelineError("the stream was closed by its owner"))

    def _forget(self, stream: Stream) -> None:
        """Its reader is gone: the engine frees what it holds."""
        open_ids = tuple(branch.id for branch in stream.branches if branch.ending is None)
        self._drop(stream)
        self._send(frames.Abort(open_ids))

    def _drop(self, stream: Stream) -> None:
        self._streams.pop(stream.first, None)
        for branch in stream.branches:
            self._branches.pop(branch.id, None)
