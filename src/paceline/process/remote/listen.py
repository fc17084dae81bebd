"""`paceline engine`: loads a model, listens, and serves one front after the other until it is told to end.

Strangers are kept away from the thread that computes: handshakes and first frames are read in threads of their own, a
few at a time and within seconds; only a front that has joined is handed to the engine, one at a time. All others are
closed, counted and, once a minute, logged.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import queue
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

from paceline.config.engine import ModelConfig
from paceline.config.links import Address, CannotLink, LinkConfig
from paceline.config.server import ProcessConfig
from paceline.factory import LoadedModel
from paceline.process import far, frames
from paceline.process.channel import Channel, ChannelClosed, Socket
from paceline.process.client import EngineInfo
from paceline.process.engine_main import close_all, make_service, prepare_process, send_whole
from paceline.process.engine_service import EngineService, LogQueue
from paceline.process.remote.tls import TLSSocket, make_context
from paceline.process.unix_socket import bind_unix

GREETING_S = 5.0  # that a handshake and the first frame may take together
MOST_GREETED = 8  # at a time
COMPLAINT_S = 60.0
SILENCE_MS = 15_000  # after which a front that acknowledges nothing is gone
REFUSED_CODE = 78
TAKEN = "another server has this engine; it takes requests of one at a time"
_logger = logging.getLogger("paceline")


def serve_engine(
    model: ModelConfig,
    given: Mapping[str, Any],
    listen: Address,
    links: LinkConfig,
    *,
    on_loading: Callable[[frames.StillLoading | None], None],
    on_ready: Callable[[EngineInfo, str], None],
) -> int:
    """Returns the exit code of the process. `on_ready` is told where it listens."""
    prepare_process()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    _logger.setLevel(logging.INFO)
    links.check(listen, "--listen")
    context, bound = make_context(links, is_engine=True), bind(listen)
    process = ProcessConfig()
    configure = frames.Configure(
        model, dict(given), process.heartbeat_s, process.stats_interval_s, process.max_frame_bytes
    )

    def note(stage: str, done: int, total: int) -> None:
        on_loading(frames.StillLoading(stage, done, total))

    try:
        models, (info,), service = make_service(configure, note, LogQueue())
        on_loading(None)
        gc.collect()
        gc.freeze()  # what loading made stays
        port = FrontPort(bound, context, process.max_frame_bytes)
        port.open()
        _end_on_signals(port, service)
        on_ready(info, listen.path or str(listen._replace(port=bound.getsockname()[1])))
        return _serve_fronts(port, service, models, info)
    finally:
        bound.close()
        if listen.path:
            with contextlib.suppress(OSError):
                os.unlink(listen.path)


def _serve_fronts(
    port: FrontPort, service: EngineService, models: list[LoadedModel], info: EngineInfo
) -> int:
    engine, code = models[0].engine, 0
    while not code and (front := port.next()) is not None:
        channel = front.channel
        try:
            service.meet(front.join)
            now = replace(info, adapters=engine.adapters.infos())
            send_whole(channel, frames.Ready(now, engine.next_id))
            _logger.info("a server has joined")
            code = service.run(channel)
        except ChannelClosed:  # gone before it had begun
            pass
        finally:
            channel.close()
        _logger.info("the server has left")
        port.release()
    close_all(models)
    return code


def _end_on_signals(port: FrontPort, service: EngineService) -> None:
    """The first lets the front go on elsewhere, the second ends at once."""
    told = 0

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal told
        told += 1
        if told > 1:
            os._exit(128 + number)
        port.close()
        service.leave()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


# -- who is let in ---------------------------------------------------------------------------------------


def bind(address: Address) -> socket.socket:
    """A bound socket that takes no connections yet. Raises CannotLink."""
    if address.path:
        return bind_unix(address.path, "--listen", CannotLink)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotLink(
            f"--listen {address}: {address.host} is no address of this machine ({error.strerror})"
        ) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(place)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise CannotLink(f"--listen {address}: the port is in use; name another") from error
        raise CannotLink(f"--listen {address}: {error.strerror}") from error
    return bound


class NotLetIn(Exception):
    """Why a caller is not let in."""


class Front(NamedTuple):
    """A server that gives requests to this engine."""

    channel: Channel
    join: frames.Join


class FrontPort:
    """Lets one front at a time in."""

    def __init__(self, bound: socket.socket, context: ssl.SSLContext | None, max_frame_bytes: int) -> None:
        self.num_refused = 0
        self._bound = bound
        self._context = None if bound.family == socket.AF_UNIX else context
        self._max_frame_bytes = max_frame_bytes
        self._fronts: queue.SimpleQueue[Front | None] = queue.SimpleQueue()
        self._is_free = threading.Semaphore(1)
        self._places = threading.Semaphore(MOST_GREETED)
        self._complaint_s = -COMPLAINT_S
        self._is_closed = False

    def open(self) -> None:
        self._bound.listen(16)
        threading.Thread(target=self._accept, name="paceline-port", daemon=True).start()

    def next(self) -> Front | None:
        """Wait for a front; None: there will be none. `release` lets in the next."""
        return self._fronts.get()

    def release(self) -> None:
        self._is_free.release()

    def close(self) -> None:
        """May be called by a signal's handler."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._bound.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._fronts.put(None)

    # -- threads of its own --------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                sock, _ = self._bound.accept()
            except OSError:
                time.sleep(0.05)  # too many open files, or closed
                continue
            if not self._places.acquire(blocking=False):
                sock.close()
                self._complain("too many connections at once")
                continue
            threading.Thread(target=self._greet, args=(sock,), name="paceline-greeting", daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        channel = None
        try:
            until_s = time.monotonic() + GREETING_S
            channel = Channel(self._secured(sock), self._max_frame_bytes)
            join = _joining(channel, until_s)
            if not self._is_free.acquire(blocking=False):
                raise NotLetIn(TAKEN)
            self._fronts.put(Front(channel, join))
        except (NotLetIn, OSError, ChannelClosed) as error:
            self._complain(str(error) or type(error).__name__)
            if channel is None:
                sock.close()
            else:
                _refuse(channel, error)
        finally:
            self._places.release()

    def _secured(self, sock: socket.socket) -> Socket:
        sock.settimeout(GREETING_S)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS)
        return sock if self._context is None else TLSSocket(self._context.wrap_socket(sock, server_side=True))

    def _complain(self, reason: str) -> None:
        self.num_refused += 1
        now_s = time.monotonic()
        if now_s - self._complaint_s >= COMPLAINT_S:
            self._complaint_s = now_s
            _logger.warning("a connection was refused, %d so far: %s", self.num_refused, reason)


def _joining(channel: Channel, until_s: float) -> frames.Join:
    """What a front says first. Raises NotLetIn, or ChannelClosed."""
    while True:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise NotLetIn("nothing was said in time")
        channel.wait(left_s)
        payloads = channel.receive()
        if channel.rejects.total:
            raise NotLetIn("the first frame is too large")
        if payloads:
            break
    try:
        join = frames.decode_to_engine(payloads[0])
    except frames.BadFrame as error:
        raise NotLetIn("the first frame was not understood: another version of Paceline?") from error
    if not isinstance(join, frames.Join) or len(payloads) > 1:
        raise NotLetIn("the first frame is not that of a server that joins")
    if join.protocol != far.protocol():
        raise NotLetIn("the server is of another version of Paceline: its frames differ")
    return join


def _refuse(channel: Channel, error: Exception) -> None:
    """Close a connection, with a sentence where a server will read it."""
    with contextlib.suppress(ChannelClosed):
        if isinstance(error, NotLetIn) and channel.was_spoken_to:
            channel.send(frames.encode(frames.LoadFailure(str(error), REFUSED_CODE)))
    channel.close()
