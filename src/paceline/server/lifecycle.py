"""A server from its first socket to its exit code.

Owns the order of starting and stopping, signals, and the promise to end in time: readiness goes first, then the
listener, then requests get their time, then an error, then everything is cut. A watchdog thread keeps the promise
when nothing else can.

Signals: TERM and INT drain, a second one ends at once; HUP reads the keys again; USR1 writes the state to the log.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from paceline.config.server import ServerConfig
from paceline.errors import PacelineError
from paceline.process.client import EngineClient, EngineInfo
from paceline.server.access.keys_file import Keyring
from paceline.server.app import Api, Application, Background
from paceline.server.health import Phase
from paceline.server.http.listener import Listener
from paceline.server.logs import log

ENGINE_LOST = 70
LAST_WORDS_S = 0.5  # for error frames to leave, after the drain
FORCED_S = 1.5  # the longest a second signal may take
GRACE_S = 1.8  # what the watchdog adds to the drain
TICK_S = 1.0
LAG_WINDOW_S = 10.0  # of which the worst delay of the event loop is reported


class EngineHandle(Protocol):
    """An engine that was started, as far as a server's life concerns it."""

    on_lost: Callable[[str], None] | None

    @property
    def client(self) -> EngineClient: ...

    async def wait_ready(self) -> None: ...

    async def stop(self) -> None: ...


class Server:
    """One life of a server."""

    def __init__(
        self,
        config: ServerConfig,
        engine: EngineHandle,
        app: Application,
        *,
        open_api: Callable[[], Awaitable[Api]],
        on_ready: Callable[[EngineInfo], None],
        read_keys: Callable[[], Keyring],
    ) -> None:
        self._config = config
        self._engine = engine
        self._app = app
        self._open_api = open_api
        self._on_ready = on_ready
        self._read_keys = read_keys
        self._stop = asyncio.Event()
        self._forced = asyncio.Event()
        self._num_signals = 0
        self._exit_code = 0
        self._api: Api | None = None

    async def run(self, listeners: list[Listener]) -> int:
        """Serve until a signal or the end of the engine; returns the exit code."""
        self._app.listeners = listeners
        self._engine.on_lost = self._engine_lost
        self._install_signals()
        ticker = asyncio.create_task(self._tick())
        try:
            for listener in listeners:
                await listener.open()
            await self._load()
            await self._stop.wait()
        except BaseException as error:
            self._exit_code = error.exit_code if isinstance(error, PacelineError) else 1
            raise
        finally:
            self._guard_exit()
            await self._shut_down(listeners)
            ticker.cancel()
        return self._exit_code

    # ------------------------------------------------------------ starting

    async def _load(self) -> None:
        """Wait for the model, unless a signal comes first."""
        loading = asyncio.gather(self._open_api(), self._engine.wait_ready())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                return
            self._api, _ = loading.result()
        finally:
            stopping.cancel()
            if loading.cancel():
                await asyncio.wait((loading,))
                with suppress(asyncio.CancelledError, Exception):  # nothing waits for it any more
                    loading.result()
        self._app.become_ready(self._api)
        if self._app.status.phase is Phase.STARTING:
            self._app.status.phase = Phase.SERVING
        for part in self._parts():
            part.start()
        _settle_memory()
        self._on_ready(self._engine.client.info)

    def _parts(self) -> tuple[Background, ...]:
        feeds = (feed for model in self._app.models for feed in model.feeds)
        return () if self._api is None else (*self._api.background, *feeds)

    # ------------------------------------------------------------ signals

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload_keys)
        loop.add_signal_handler(signal.SIGUSR1, self._dump_state)

    def _end(self, number: signal.Signals) -> None:
        self._num_signals += 1
        self._app.status.phase = Phase.DRAINING
        if self._num_signals > 1:
            self._exit_code = 128 + number
            self._forced.set()
            _exit_after(FORCED_S, self._exit_code)
            return
        log("stopping", signal=number.name, under_way=self._app.num_under_way)
        self._stop.set()

    def _engine_lost(self, reason: str) -> None:
        log("the engine is lost for good", level=logging.ERROR, reason=reason)
        self._exit_code = ENGINE_LOST
        self._app.status.phase = Phase.DRAINING
        self._forced.set()
        self._stop.set()

    def _reload_keys(self) -> None:
        try:
            keyring = self._read_keys()
        except PacelineError as error:
            log(f"the keys were not read again: {error}", level=logging.ERROR)
            return
        self._app.replace_keys(keyring)
        log("the keys were read again", keys=len(keyring))

    def _dump_state(self) -> None:
        client = self._engine.client
        log(
            "state",
            status=self._app.status.word,
            engine=client.state.value,
            heartbeat_age_s=client.heartbeat_age_s,
            stats=client.stats,
            connections=sum(listener.num_connections for listener in self._app.listeners),
            tasks=len(asyncio.all_tasks()),
        )
        for exchange in list(self._app.main.exchanges):
            age_s = time.monotonic() - exchange.received_s
            log("under way", id=exchange.id, route=exchange.route, age_s=age_s, begun=exchange.has_begun)

    # ------------------------------------------------------------ stopping

    def _guard_exit(self) -> None:
        """Whatever hangs from here on, the process ends in time."""
        longest_s = 1.0  # nothing to drain: only the engine has to be ended
        if self._api is not None and not self._forced.is_set():
            longest_s = self._config.drain_delay_s + self._config.drain_timeout_s
        _exit_after(longest_s + GRACE_S, self._exit_code)

    async def _shut_down(self, listeners: list[Listener]) -> None:
        self._app.status.phase = Phase.DRAINING
        parts = self._parts()
        for part in parts:
            part.drain()
        if self._api is not None and not self._forced.is_set():
            await self._wait_forced(self._config.drain_delay_s)
        for listener in listeners:
            listener.close()
            listener.end_connections()
        self._app.stop_all(only_unadmitted=True)
        if not self._forced.is_set() and self._api is not None:
            await self._drain()
        self._app.stop_all()
        await asyncio.sleep(0)
        until_s = time.monotonic() + LAST_WORDS_S
        while any(app.exchanges for app in self._app.apps) and time.monotonic() < until_s:
            await asyncio.sleep(0.01)
        for listener in listeners:
            listener.abort_connections()
        for part in parts:
            await part.stop()
        if self._api is not None:
            self._api.close()
        await self._engine.stop()
        log("stopped", code=self._exit_code)

    async def _drain(self) -> None:
        """Let what is under way end, as long as it may take; a pause must not hold that up."""
        self._engine.client.resume_all()
        until_s = time.monotonic() + self._config.drain_timeout_s
        while self._app.num_under_way and time.monotonic() < until_s and not self._forced.is_set():
            await asyncio.sleep(0.02)

    async def _wait_forced(self, seconds: float) -> None:
        if seconds > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._forced.wait(), seconds)

    # ------------------------------------------------------------ meanwhile

    async def _tick(self) -> None:
        last_s = time.monotonic()
        pause_s = min(TICK_S, self._config.log_stats_interval_s)
        lags_s: deque[float] = deque(maxlen=max(1, round(LAG_WINDOW_S / pause_s)))
        while True:
            started_s = time.monotonic()
            await asyncio.sleep(pause_s)
            lags_s.append(max(0.0, time.monotonic() - started_s - pause_s))
            self._app.loop_lag_s = max(lags_s)
            self._app.note()
            for listener in self._app.listeners:
                listener.refresh_date()
            now_s = time.monotonic()
            if not self._config.disable_log_stats and now_s - last_s >= self._config.log_stats_interval_s:
                last_s = now_s
                for line in self._app.stats_lines:
                    line.write()


def _settle_memory() -> None:
    """What is there now stays: the collector need not look at it again, and what comes is seldom in a cycle.

    The second collection has nothing to look at, and that is what it notes: a full collection is put off until there
    is a quarter more than at the last one, which would be a quarter of all that is frozen.
    """
    gc.collect()
    gc.freeze()
    gc.collect()
    gc.set_threshold(10_000, 5, 5)


def _exit_after(seconds: float, code: int) -> None:
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
