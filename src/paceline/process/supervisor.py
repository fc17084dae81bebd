"""Keeps an engine process running: starts it, watches its signs of life, restarts it within a budget.

A dead engine is known by the end of its socket, at once; a stuck one by its silence. In both cases every caller that
waits is answered here. The client stays the same object over all restarts. Never imports what the engine needs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from paceline.config.engine import ModelConfig
from paceline.config.model_set import ModelEntry, ModelSet
from paceline.config.server import ProcessConfig
from paceline.process import child as children
from paceline.process import frames
from paceline.process.async_engine import AsyncEngine
from paceline.process.channel import ChannelBroken, FrameReader, Rejects, make_header
from paceline.process.child import EngineChild, Place
from paceline.process.client import EngineState, EngineUnavailable
from paceline.process.questions import Numbers

# How often an engine may be restarted: a number of times in a window, with growing pauses.


LONGEST_PAUSE_S = 60.0


class RestartBudget:
    """Counts restarts. Time is passed in."""

    def __init__(self, config: ProcessConfig) -> None:
        self._config = config
        self._times_s: deque[float] = deque()

    def spend(self, now_s: float) -> float | None:
        """Seconds to pause before the restart; None when there may be no further one."""
        while self._times_s and now_s - self._times_s[0] > self._config.restart_window_s:
            self._times_s.popleft()
        if len(self._times_s) >= self._config.max_restarts:
            return None
        before = len(self._times_s)
        self._times_s.append(now_s)
        if not before:
            return 0.0
        return float(min(self._config.restart_backoff_s * 2.0 ** (before - 1), LONGEST_PAUSE_S))


# The HTTP process's end of the socket, as a protocol of its event loop.
#
# Cuts what arrives into frames, decodes them and hands them on; what is not understood is counted and passed over.
# One link speaks to one incarnation of the engine.


_logger = logging.getLogger("paceline")


class Link(asyncio.Protocol):
    """A connection to one engine process."""

    def __init__(
        self,
        incarnation: int,
        max_frame_bytes: int,
        rejects: Rejects,
        on_frame: Callable[[frames.FromEngine], None],
    ) -> None:
        self.closed = asyncio.Event()
        self.error: Exception | None = None  # that has closed it
        self._incarnation = incarnation
        self._rejects = rejects
        self._reader = FrameReader(incarnation, max_frame_bytes, rejects)
        self._on_frame = on_frame
        self._transport: asyncio.Transport | None = None

    def send(self, payload: bytes) -> None:
        """Never waits; what the socket does not take is kept by the transport. After the end it does nothing."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(make_header(payload, self._incarnation) + payload)

    @property
    def num_unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def close(self) -> None:
        """Hear and say nothing more."""
        self._on_frame = lambda frame: None
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            payloads = self._reader.feed(data)
        except ChannelBroken:
            self._rejects.undecodable += 1
            _logger.error("the engine's process sent bytes that are no frame")
            self.close()
            return
        for payload in payloads:
            try:
                self._on_frame(frames.decode_from_engine(payload))
            except frames.BadFrame:
                self._rejects.undecodable += 1
            except Exception:  # a mistake of ours about one frame must not cost the connection
                _logger.exception("a frame of the engine could not be handled")

    def eof_received(self) -> bool:
        return False  # close

    def connection_lost(self, error: Exception | None) -> None:
        self.error = error
        self._reader.at_end()
        self.closed.set()


_engine_logger = logging.getLogger("paceline.engine")  # what the engine's process says
_POLL_S = 0.02


class Ending(Protocol):
    """What is done with an engine at its end; see `EngineChild`."""

    @property
    def pid(self) -> int | None: ...

    @property
    def exit_code(self) -> int | None: ...

    async def wait(self, seconds: float) -> bool: ...

    async def kill(self) -> None: ...

    async def dump_stacks(self) -> None: ...

    def describe_end(self) -> str: ...


@dataclass(slots=True)
class Life:
    """One engine process, from its start to its end; or a link to one elsewhere."""

    child: Ending
    link: Link
    started_s: float
    failure: frames.LoadFailure | frames.Failed | None = None
    was_ready: bool = False


class EngineProcess:
    """An engine in a separate process, behind `client`."""

    command: Sequence[str] = children.COMMAND
    called = "the engine's process"  # in sentences
    cannot = "cannot be started"

    def __init__(
        self,
        model: ModelConfig,
        given: Mapping[str, Any],
        config: ProcessConfig,
        first: EngineChild | None = None,
        further: ModelSet | None = None,
        *,
        numbers: Numbers | None = None,
        place: Place | None = None,
    ) -> None:
        """`first` is a process that was started already, and waits for the model to load. `further`: the models where
        there are several, or one that may sleep; its first is `model`. `numbers`: of requests, which several engines
        share; `place`: what of the machine this one has."""
        self._models = further or ModelSet(entries=[ModelEntry(model=model, given=given)])
        self._numbers = numbers = numbers or Numbers()
        self._place = place
        self.fleet_key = b""  # of prefixes' names; b"": it is no fleet's
        self.rank = 0  # its number in the fleet
        self.clients = [AsyncEngine(config, number, numbers) for number in range(len(self._models.entries))]
        self.client = self.clients[0]
        self._first = first
        self.on_lost: Callable[[str], None] | None = None  # there will be no further restart; why
        self.on_loading: Callable[[frames.StillLoading | None], None] | None = None  # None: it has ended
        self.num_restarts = 0
        self._config = config
        self._budget = RestartBudget(config)
        self._incarnation = 0
        self._life: Life | None = None
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._is_stopping = False

    @property
    def pid(self) -> int | None:
        """Of the engine's process, while there is one."""
        return None if self._life is None else self._life.child.pid

    async def start(self) -> None:
        """Start the process; its model is loaded meanwhile."""
        assert self._task is None, "an engine process is started once"
        self._ready = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(_look_at)
        self._task = asyncio.create_task(self._run(), name="paceline-supervisor")

    async def wait_ready(self) -> None:
        """Until the model is loaded for the first time. Raises EngineUnavailable that says why it cannot be."""
        assert self._ready is not None, "start first"
        await asyncio.shield(self._ready)

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new and let what is under way end; what has not ended by then ends with an error.

        Returns whether everything came to its end.
        """
        for client in self.clients:
            client.refuse_new()
        until_s = time.monotonic() + timeout_s
        while self._num_open and time.monotonic() < until_s:
            await asyncio.sleep(_POLL_S)
        finished = self._num_open == 0
        for client in self.clients:
            client.fail_all(EngineUnavailable("the server is shutting down", code="shutting_down"))
        return finished

    @property
    def _num_open(self) -> int:
        return sum(client.num_open for client in self.clients)

    async def stop(self) -> None:
        """End the process, in whatever state it is. May be called twice."""
        self._is_stopping = True
        for client in self.clients:
            client.refuse_new()
            client.fail_all(EngineUnavailable("the server is shutting down", code="shutting_down"))
        life = self._life
        if life is not None:
            life.link.send(frames.encode(frames.Stop()))
            # Loading cannot be interrupted.
            patience_s = self._config.stop_timeout_s if life.was_ready else 0.0
            await life.child.wait(patience_s)
            await life.child.kill()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._life is not None:  # started while we were stopping
            self._life.link.close()
            await self._life.child.kill()
            self._life = None
        for client in self.clients:
            client.stopped()
        self._fail_ready("the server is shutting down", 0)

    # -- lives ---------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            reason, exit_code = await self._supervise()
        except Exception:  # an error of ours: no request may wait for an engine that is not watched
            _logger.exception("the engine is no longer watched")
            reason, exit_code = "the engine is no longer watched", 70
            self._detach(reason)
        assert self._ready is not None
        if not self._ready.done():
            self._fail_ready(reason, exit_code)
        elif not self._is_stopping and self.on_lost is not None:
            self.on_lost(reason)

    async def _supervise(self) -> tuple[str, int]:
        """One engine after the other; returns why there is no further one, and an exit code."""
        assert self._ready is not None
        while True:
            reason, exit_code = await self._live_once()
            if self._is_stopping:
                return reason, exit_code
            pause_s = self._pause_s(reason)
            if pause_s is None:
                return reason, exit_code
            await asyncio.sleep(pause_s)
            self._note_restart()

    def _pause_s(self, reason: str) -> float | None:
        """Before the next try; None: there is none. If it has never worked, trying again would not help."""
        _logger.error("%s", reason)
        assert self._ready is not None
        return self._budget.spend(time.monotonic()) if self._ready.done() else None

    def _note_restart(self) -> None:
        self.num_restarts += 1
        _logger.warning("the engine is restarted")

    async def _live_once(self) -> tuple[str, int]:
        """One process from start to end; returns what became of it, as a sentence and an exit code."""
        try:
            life = self._life = await self._begin()
        except OSError as error:
            self._detach(f"{self.called} {self.cannot}")
            return f"{self.called} {self.cannot}: {error}", 70
        try:
            reason = await self._watch(life)
        finally:
            life.link.close()  # whatever it still says comes too late
        self._detach(reason or f"{self.called} has ended")  # before anything that takes time
        if reason is not None:
            await life.child.dump_stacks()
        else:  # it has closed its end: it is gone, or about to be
            await life.child.wait(self._config.stop_timeout_s)
        ended = life.child.describe_end()
        await life.child.kill()
        self._life = None
        return self._sentence(life, reason, ended)

    def _detach(self, reason: str) -> None:
        for client in self.clients:
            client.detach(reason)

    async def _begin(self) -> Life:
        self._incarnation += 1
        config = self._config
        link = Link(self._incarnation, config.max_frame_bytes, self.client.rejects, self._on_frame)
        child, self._first = self._first or EngineChild(self.command, self._place), None
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=child.sock)
        except BaseException:
            child.sock.close()
            child.kill_now()
            raise
        for client in self.clients:
            client.attach(link)
        first, *others = self._models.entries
        configure = frames.Configure(
            first.model,
            dict(first.given),
            config.heartbeat_s,
            config.stats_interval_s,
            config.max_frame_bytes,
            first.share,
            [frames.FurtherModel(each.model, dict(each.given), each.share) for each in others],
            self._models.memory_bytes,
            self.fleet_key,
            frames.KVEventPlaces(config.kv_events, config.kv_events_replay, self.rank)
            if config.kv_events
            else None,
        )
        link.send(frames.encode(configure))
        return Life(child, link, time.monotonic())

    async def _watch(self, life: Life) -> str | None:
        """Until the end of a life; a reason when it has to be ended from here."""
        config, client = self._config, self.client
        while True:
            looked_s = time.monotonic()
            try:
                await asyncio.wait_for(life.link.closed.wait(), config.heartbeat_s)
                return None
            except TimeoutError:
                pass
            if life.child.exit_code is not None:
                return None
            now_s = time.monotonic()
            for each in self.clients:
                each.extend_deadline(max(0.0, now_s - looked_s - 2 * config.heartbeat_s))
            if not life.was_ready:
                if now_s - life.started_s > config.ready_timeout_s:
                    return f"the model was not loaded within {config.ready_timeout_s:g} s"
                continue
            if client.heartbeat_age_s > config.restart_after_s:
                return f"the engine gave no sign of life for {config.restart_after_s:g} s"
            if client.heartbeat_age_s > config.stuck_after_s:
                if self.is_ready:
                    _logger.warning("the engine gave no sign of life for %g s", config.stuck_after_s)
                for each in self.clients:
                    each.mark_stuck()

    def _on_frame(self, frame: frames.FromEngine, number: int = 0) -> None:
        if isinstance(frame, frames.ForModel):
            number = frame.model
            frame = frames.decode_from_engine(frame.payload)
        if not number < len(self.clients) or isinstance(frame, frames.ForModel):
            self.client.rejects.undecodable += 1
            return
        for client in (
            self.clients[:number] + self.clients[number + 1 :]
        ):  # one process: a sign of life of all
            client.on_heartbeat()
        client = self.clients[number]
        if isinstance(frame, frames.Update):
            client.on_update(frame)
            return
        if isinstance(frame, frames.PrefixNews):
            client.on_heartbeat()
            client.on_prefixes(frame)
            return
        if isinstance(frame, frames.Answer):
            client.on_answer(frame)
            return
        if isinstance(frame, frames.Log):
            _engine_logger.log(frame.level, "%s", frame.message, extra={"traceback": frame.traceback})
            return
        client.on_heartbeat()
        if self.on_loading is not None:
            self.on_loading(frame if isinstance(frame, frames.StillLoading) else None)
        life = self._life
        if life is None:
            return
        if isinstance(frame, frames.Ready):
            client.ready(frame.info)
            life.was_ready = all(each.state is EngineState.READY for each in self.clients)
            self._numbers.next = max(self._numbers.next, frame.next_number)
            assert self._ready is not None
            if life.was_ready and not self._ready.done():
                self._ready.set_result(None)
        elif isinstance(frame, frames.LoadFailure | frames.Failed):
            life.failure = frame

    def _fail_ready(self, reason: str, exit_code: int) -> None:
        if self._ready is not None and not self._ready.done():
            error = EngineUnavailable(reason)
            error.exit_code = exit_code
            self._ready.set_exception(error)

    @property
    def is_ready(self) -> bool:
        return all(client.state is EngineState.READY for client in self.clients)

    def _sentence(self, life: Life, reason: str | None, ended: str) -> tuple[str, int]:
        """What became of a life, and the exit code that stands for it."""
        if isinstance(life.failure, frames.LoadFailure):
            return life.failure.message, life.failure.exit_code
        if reason is None:
            while_loading = "" if life.was_ready else " while loading the model"
            said = "" if life.failure is None else f": {life.failure.message}"
            reason = f"{self.called} {ended}{while_loading}{said}"
        return reason, 70


def _look_at(future: asyncio.Future[None]) -> None:
    """An error that was not awaited is no reason for a warning."""
    if not future.cancelled():
        future.exception()
