"""Where an engine listens for a front: strangers are kept away from the thread that computes.

Handshakes and first frames are read in threads of their own, a few at a time and within seconds; only a front that has
joined is handed to the engine, one at a time. Whoever else comes is closed, counted and, once a minute, logged.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import socket
import ssl
import stat
import threading
import time
from pathlib import Path
from typing import NamedTuple

from paceline.config.links import Address, CannotLink
from paceline.process import far, frames
from paceline.process.channel import Channel, ChannelClosed, Socket
from paceline.process.remote.tls import TLSSocket

GREETING_S = 5.0  # that a handshake and the first frame may take together
MOST_GREETED = 8  # at a time
COMPLAINT_S = 60.0
SILENCE_MS = 15_000  # after which a front that acknowledges nothing is gone
REFUSED_CODE = 78
TAKEN = "another server has this engine; it takes requests of one at a time"
_logger = logging.getLogger("paceline")


def bind(address: Address) -> socket.socket:
    """A bound socket that nobody can connect to yet. Raises CannotLink."""
    if address.path:
        return _bind_unix(address.path)
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


def _bind_unix(path: str) -> socket.socket:
    """What an earlier engine left behind is removed; anything else in its place is not."""
    place = Path(path)
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(place.stat().st_mode):
            raise CannotLink(f"--listen {path} exists and is not a socket; name another path")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(path) == 0:
                raise CannotLink(f"--listen {path} is in use; name another path")
        place.unlink()
    bound = socket.socket(socket.AF_UNIX)
    try:
        bound.bind(path)
        os.chmod(path, 0o600)
    except OSError as error:
        bound.close()
        raise CannotLink(f"--listen {path}: {error.strerror}") from error
    return bound


class Refusal(Exception):
    """Why whoever has come is not let in."""


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
                raise Refusal(TAKEN)
            self._fronts.put(Front(channel, join))
        except (Refusal, OSError, ChannelClosed) as error:
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
    """What a front says first. Raises Refusal, or ChannelClosed."""
    while True:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise Refusal("nothing was said in time")
        channel.wait(left_s)
        payloads = channel.receive()
        if channel.rejects.total:
            raise Refusal("the first frame is too large")
        if payloads:
            break
    try:
        join = frames.decode_to_engine(payloads[0])
    except frames.BadFrame as error:
        raise Refusal("the first frame was not understood: another version of Paceline?") from error
    if not isinstance(join, frames.Join) or len(payloads) > 1:
        raise Refusal("the first frame is not that of a server that joins")
    if join.protocol != far.protocol():
        raise Refusal("the server is of another version of Paceline: its frames differ")
    return join


def _refuse(channel: Channel, error: Exception) -> None:
    """Close a connection, with a sentence where a server will read it."""
    with contextlib.suppress(ChannelClosed):
        if isinstance(error, Refusal) and channel.was_spoken_to:
            channel.send(frames.encode(frames.LoadFailure(str(error), REFUSED_CODE)))
    channel.close()
