"""The way between the lead and one follower: messages over a socket pair, and noticing at once that the other is gone.

A message is four bytes of length, one of its kind, and the rest. A rank that waits in a sum cannot be
interrupted, so that a separate thread watches the socket and says when the other side has closed it.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum

_HEADER = struct.Struct("<IB")
MOST_BYTES = 1 << 30


class Kind(IntEnum):
    """What a message says."""

    SET_UP = 1  # to the follower: which model, which rank
    MEASURE = 2  # how long steps take
    OPEN = 3  # a runner with this config, in the place of the one before
    RESET, SUBMIT = 4, 5  # a plan
    RUN = 6  # the steps up to this one; rows that have guides
    ANSWER = 7  # of a guide
    COPY = 8  # blocks out and back
    CLOSE = 9  # the runner goes, with its KV; the weights stay
    DONE, FAILED = 20, 21  # from the follower: what it was told last


class LinkClosed(Exception):
    """The other side is gone."""


class Link:
    """One end. One thread sends and receives."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        try:
            self.sock.sendall(_HEADER.pack(len(payload), kind) + payload)
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> tuple[Kind, memoryview]:
        """The next message. Raises TimeoutError if none begins in that time."""
        self.sock.settimeout(timeout_s)
        try:
            size, kind = _HEADER.unpack(self._read(_HEADER.size))
            self.sock.settimeout(None)
            if size > MOST_BYTES:
                raise LinkClosed(f"a message of {size} bytes")
            return Kind(kind), self._read(size)
        except TimeoutError:
            raise
        except (OSError, ValueError) as error:
            raise LinkClosed(str(error)) from error

    def close(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def _read(self, size: int) -> memoryview:
        data = memoryview(bytearray(size))
        at = 0
        while at < size:
            count = self.sock.recv_into(data[at:])
            if not count:
                raise LinkClosed("the other side is gone")
            at += count
        return data


def watch(links: Sequence[Link], on_gone: Callable[[int], None]) -> threading.Thread:
    """Call `on_gone` once, from a thread of its own, with the place of the first link whose other side is gone."""
    poll = select.poll()
    places = {link.sock.fileno(): place for place, link in enumerate(links)}
    for number in places:
        poll.register(number, select.POLLRDHUP | select.POLLHUP | select.POLLERR)

    def wait() -> None:
        number, _ = poll.poll()[0]
        on_gone(places[number])

    thread = threading.Thread(target=wait, name="paceline-ranks", daemon=True)
    thread.start()
    return thread
