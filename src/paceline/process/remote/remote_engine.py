"""An engine that listens elsewhere: kept linked, with growing pauses between tries, as long as the server lives.

It is started and restarted by others. What is lost is the link, with every request on it; the next one finds an engine
that has forgotten them. Times come as durations: its clock is not ours.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import replace
from typing import cast

from paceline.config.engine import ModelConfig
from paceline.config.links import Address
from paceline.config.server import ProcessConfig
from paceline.errors import ConfigError
from paceline.process import far, frames
from paceline.process.client import DRAINED, EngineUnavailable
from paceline.process.questions import Numbers
from paceline.process.supervisor import EngineProcess, Life, Link

CONNECT_S = 5.0  # that a connection and the answer to the first frame may take, each
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
SAME_AGAIN_S = 60.0  # from one log line about a reason to the next
_logger = logging.getLogger("paceline")


class RemoteEngine(EngineProcess):
    """The interface of `EngineProcess`, over a link to one that was started by others."""

    cannot = "cannot be reached"

    def __init__(
        self,
        model: ModelConfig,
        config: ProcessConfig,
        address: Address,
        context: ssl.SSLContext | None,
        *,
        numbers: Numbers,
        digest: str,
    ) -> None:
        """`digest`: of the model's files here, which must be those there."""
        super().__init__(model, {}, replace(config, ready_timeout_s=CONNECT_S), numbers=numbers)
        self.address = address
        self.called = f"the engine at {address}"
        self.client.clock = _no_clock
        self._context = None if address.path else context
        self._digest = digest
        self._num_failed = 0  # tries in a row
        self._told, self._told_s = "", 0.0

    async def _begin(self) -> Life:
        self._incarnation += 1
        if self._incarnation == 1:
            await asyncio.sleep(FIRST_PAUSE_S)  # a server that starts is still busy importing
        config, link = self._config, self._new_link()
        loop, address, tls = asyncio.get_running_loop(), self.address, self._context
        if address.path:
            connecting = loop.create_unix_connection(lambda: link, address.path)
        else:
            name = None if tls is None else address.name or address.host
            connecting = loop.create_connection(
                lambda: link, address.host, address.port, ssl=tls, server_hostname=name
            )
        try:
            transport, _ = await asyncio.wait_for(connecting, CONNECT_S)
        except TimeoutError as error:
            raise OSError(f"no answer within {CONNECT_S:g} s") from error
        _send_at_once(transport)
        for client in self.clients:
            client.attach(link)
        join = frames.Join(
            far.protocol(),
            config.heartbeat_s,
            config.stats_interval_s,
            config.max_frame_bytes,
            self.fleet_key,
        )
        link.send(frames.encode(join))
        return Life(Peer(link), link, time.monotonic())

    def _new_link(self) -> Link:
        return Link(self._incarnation, self._config.max_frame_bytes, self.client.rejects, self._on_frame)

    def _on_frame(self, frame: frames.FromEngine, number: int = 0) -> None:
        life = self._life
        if isinstance(frame, frames.Ready) and life is not None:
            if frame.info.fingerprint.partition("-")[0] != self._digest:
                message = f"{self.called} has another model, or other files of it, than this server"
                life.failure = frames.LoadFailure(message, ConfigError.exit_code)
                life.link.close()
                return
            self._num_failed, self._told = 0, ""
            _logger.info("%s takes requests", self.called)
        elif isinstance(frame, frames.LoadFailure):
            frame = frames.LoadFailure(f"{self.called} says: {frame.message}", frame.exit_code)
        elif isinstance(frame, frames.Leaving):
            for client in self.clients:  # it was told to end: no request is to blame
                client.fail_all(EngineUnavailable(f"{self.called} leaves", code=DRAINED))
                client.detach(f"{self.called} leaves")
            if life is not None:
                life.link.close()
            return
        super()._on_frame(far.moved(frame, time.monotonic()), number)

    def _pause_s(self, reason: str) -> float | None:
        now_s = time.monotonic()
        if reason != self._told or now_s - self._told_s > SAME_AGAIN_S:
            self._told, self._told_s = reason, now_s
            _logger.warning("%s; trying again", reason)
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self._num_failed, 16), LONGEST_PAUSE_S)
        self._num_failed += 1
        return pause_s * random.uniform(0.5, 1.0)

    def _note_restart(self) -> None:
        """Others restart it; what counts is that it was lost."""
        assert self._ready is not None
        if self._num_failed == 1 and self._ready.done():
            self.num_restarts += 1


class Peer:
    """What is done with an engine elsewhere at the end of a link: nothing."""

    pid = None
    exit_code = None

    def __init__(self, link: Link) -> None:
        self._link = link

    async def wait(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._link.closed.wait(), seconds)
        return True

    async def kill(self) -> None:
        self._link.close()

    async def dump_stacks(self) -> None:
        return

    def describe_end(self) -> str:
        error = self._link.error
        return "has closed the link" if error is None else f"was lost ({error})"


def _no_clock() -> None:
    """Theirs is another."""


def _send_at_once(transport: asyncio.Transport) -> None:
    sock = cast("socket.socket | None", transport.get_extra_info("socket"))
    if sock is not None and sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
