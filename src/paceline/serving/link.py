"""The HTTP process's end of the socket, as a protocol of its event loop.

Cuts what arrives into frames, decodes them and hands them on; what is not understood is counted and passed over. One
link speaks to one incarnation of the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from paceline.serving import frames
from paceline.serving.channel import ChannelBroken, FrameReader, Rejects, make_header

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
        self._on_frame = _ignore
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
        self._reader.at_end()
        self.closed.set()


def _ignore(frame: frames.FromEngine) -> None:
    return None
