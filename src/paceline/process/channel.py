"""Frames over a socket: a header with length, client and incarnation, then the payload.

`FrameReader` cuts a stream of bytes into payloads for either side; whatever is not for us or too large is passed
over and counted. `Channel` is the engine's end: it never blocks, keeps at most one frame that the socket did not
take, and leaves waiting to the caller. Knows nothing of what a payload means.
"""

from __future__ import annotations

import select
import struct
from dataclasses import dataclass
from typing import Protocol

HEADER = struct.Struct("<2sHII")  # magic, client, incarnation, bytes of payload
MAGIC = b"PL"
ONLY_CLIENT = 0  # there is one HTTP process
_CHUNK = 64 << 10
_MOST_CHUNKS = 256  # of one poll: a flood of requests must not hold up the next step


class ChannelClosed(Exception):
    """The other side is gone."""


class ChannelBroken(ChannelClosed):
    """What came is no frame: the place where the next one starts is lost, and with it the connection."""


@dataclass(slots=True)
class Rejects:
    """Frames that were not taken, and parts of frames whose branch is not known."""

    oversize: int = 0
    stale: int = 0  # of another incarnation or client
    undecodable: int = 0
    truncated: int = 0
    unknown_branch: int = 0  # late updates of closed branches are among them

    @property
    def total(self) -> int:
        """Without late updates, which are no error."""
        return self.oversize + self.stale + self.undecodable + self.truncated


def make_header(payload: bytes, incarnation: int, client: int = ONLY_CLIENT) -> bytes:
    return HEADER.pack(MAGIC, client, incarnation, len(payload))


class FrameReader:
    """Cuts what arrives into payloads."""

    def __init__(self, incarnation: int | None, max_bytes: int, rejects: Rejects) -> None:
        self.incarnation = incarnation  # None takes over that of the first frame
        self._max_bytes = max_bytes
        self._rejects = rejects
        self._buffer = bytearray()
        self._skip = 0  # bytes of a payload that is not wanted

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """The payloads that are whole now, in order. Raises ChannelBroken when the stream makes no sense."""
        if self._skip:
            passed = min(self._skip, len(data))
            self._skip -= passed
            data = data[passed:]
        self._buffer += data
        payloads = []
        start, end = 0, len(self._buffer)
        while end - start >= HEADER.size:
            magic, client, incarnation, length = HEADER.unpack_from(self._buffer, start)
            if magic != MAGIC:
                raise ChannelBroken("the bytes on the channel are no frame")
            body = start + HEADER.size
            if not self._is_wanted(client, incarnation, length):
                self._skip = max(0, body + length - end)
                start = min(body + length, end)
            elif end - body < length:
                break
            else:
                payloads.append(bytes(self._buffer[body : body + length]))
                start = body + length
        del self._buffer[:start]
        return payloads

    def at_end(self) -> None:
        """No more will come: what is left is a frame that was cut off."""
        if self._buffer or self._skip:
            self._rejects.truncated += 1
            self._buffer.clear()

    def _is_wanted(self, client: int, incarnation: int, length: int) -> bool:
        if self.incarnation is None:
            self.incarnation = incarnation
        if client != ONLY_CLIENT or incarnation != self.incarnation:
            # Counted once, when its header is complete: `_skip` takes the rest.
            self._rejects.stale += 1
            return False
        if length > self._max_bytes:
            self._rejects.oversize += 1
            return False
        return True


class Socket(Protocol):
    """What a channel needs of one; see `remote.tls` for another kind than the system's."""

    def setblocking(self, flag: bool, /) -> None: ...

    def fileno(self) -> int: ...

    def recv_into(self, buffer: memoryview, /) -> int: ...

    def send(self, data: bytes, /) -> int: ...

    def close(self) -> None: ...


class Channel:
    """The engine's end of the socket."""

    def __init__(self, sock: Socket, max_frame_bytes: int) -> None:
        sock.setblocking(False)
        self.rejects = Rejects()
        self._sock = sock
        self._reader = FrameReader(None, max_frame_bytes, self.rejects)
        self._arrived = memoryview(bytearray(_CHUNK))  # made once: most polls find nothing
        self._unsent = b""
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def receive(self) -> list[bytes]:
        """Every payload that has arrived; never waits. Raises ChannelClosed at the end of the stream."""
        payloads: list[bytes] = []
        for _ in range(_MOST_CHUNKS):
            try:
                count = self._sock.recv_into(self._arrived)
            except BlockingIOError:
                break
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not count:
                self._reader.at_end()
                raise ChannelClosed("the other side has closed the channel")
            payloads += self._reader.feed(self._arrived[:count])
            if count < _CHUNK:
                break  # most likely all of it; the rest is found at the next poll
        return payloads

    def wait(self, seconds: float) -> None:
        """Sleep until something arrives, until there is room for what was not sent, or until the time is over."""
        wanted = select.POLLIN | select.POLLOUT if self._unsent else select.POLLIN
        self._poll.modify(self._sock, wanted)
        self._poll.poll(seconds * 1000)

    @property
    def was_spoken_to(self) -> bool:
        """Whether a header has come: who sent it reads frames."""
        return self._reader.incarnation is not None

    @property
    def is_free(self) -> bool:
        """Whether a frame may be sent: the one before is out."""
        return not self._unsent or self.flush()

    def send(self, payload: bytes) -> bool:
        """Start sending a frame; True when the socket took all of it. Only when `is_free`."""
        assert not self._unsent, "the frame before is still on its way"
        incarnation = self._reader.incarnation
        assert incarnation is not None, "the engine never speaks first"
        self._unsent = make_header(payload, incarnation) + payload
        return self.flush()

    def flush(self) -> bool:
        """Send what is left, as far as the socket takes it."""
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent)
            except BlockingIOError:
                return False
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            self._unsent = self._unsent[sent:]
        return True

    def close(self) -> None:
        self._sock.close()
