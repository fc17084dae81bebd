"""A generation as a stream of server-sent events.

`EventStream` is what leaves a route: an async generator whose owner may close it before the first item was asked
for, which a plain generator would not notice. What the frames look like is a `FrameWriter`'s business.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, TypeVar

import msgspec

from paceline.server.call import Events
from paceline.server.errors import anthropic_body, openai_body, problem_of
from paceline.server.generate.generation import Delta, Generation

DONE = b"data: [DONE]\n\n"


class FrameWriter(Protocol):
    """Makes frames of deltas; may give b"" where there is nothing to show."""

    def write(self, deltas: list[Delta]) -> bytes: ...

    def end(self) -> bytes:
        """What follows when every branch has ended well."""


Writer = TypeVar("Writer", bound=FrameWriter)


class EventStream(AsyncGenerator[bytes, None]):
    """Frames of one generation, which is closed with it in every case."""

    def __init__(self, generation: Generation, writer: FrameWriter) -> None:
        self._generation = generation
        self._writer = writer
        self._write: Callable[[bytes], bool] | None = None
        self._kept = b""  # made while the reader of this stream waited, and not written
        self._frames = self._make_frames()

    def divert(self, write: Callable[[bytes], bool]) -> None:
        """From now on, frames that find the reader waiting go to `write`, until it says no."""
        self._write = write
        self._generation.divert(self._pass_on)

    def __anext__(self) -> Any:
        return self._frames.__anext__()

    async def asend(self, value: None) -> bytes:
        return await self._frames.asend(value)

    async def athrow(
        self,
        kind: Any,
        value: BaseException | object = None,
        traceback: TracebackType | None = None,
    ) -> bytes:
        self._generation.close()
        return await self._frames.athrow(kind, value, traceback)

    async def aclose(self) -> None:
        try:
            await self._frames.aclose()
        finally:
            self._write = None
            self._generation.close()

    async def _make_frames(self) -> AsyncGenerator[bytes, None]:
        generation, writer = self._generation, self._writer
        try:
            while generation.is_open:
                deltas = await generation.next()
                data = self._kept + writer.write(deltas)
                self._kept = b""
                if not generation.is_open and not generation.must_settle:
                    data += self._end()
                if data:
                    yield data
                    generation.sent()
            if generation.must_settle:
                # What was made is out by now; the end is not before it is written down.
                await generation.settle()
                yield self._end()
        finally:
            generation.close()

    def _end(self) -> bytes:
        end = self._writer.end()
        self._generation.release()
        return end

    def _pass_on(self, deltas: list[Delta]) -> bool:
        assert self._write is not None
        data = self._writer.write(deltas)
        if self._generation.is_open:
            if not data:
                return True
            if self._write(data):
                self._generation.sent()
                return True
        self._kept = data
        return False


def stream_events(
    generation: Generation,
    make_writer: Callable[[], Writer],
    error_frame: Callable[[Writer], Callable[[BaseException], bytes]],
    headers: Mapping[str, str],
) -> Events:
    """The stream of a generation, which is closed at once if there cannot be one."""
    try:
        writer = make_writer()
    except BaseException:
        generation.close()
        raise
    frames = EventStream(generation, writer)
    sent = generation.headers(headers)
    return Events(frames=frames, error_frame=error_frame(writer), headers=sent, divert=frames.divert)


# Errors inside a stream that has begun: one frame each, in the shape of its API.


def openai_error_frame(error: BaseException) -> bytes:
    return b"data: %b\n\n" % openai_body(problem_of(error))


def anthropic_error_frame(error: BaseException) -> bytes:
    return b"event: error\ndata: %b\n\n" % anthropic_body(problem_of(error))


def responses_error_frame(error: BaseException, sequence_number: int) -> bytes:
    problem = problem_of(error)
    event = {
        "type": "error",
        "sequence_number": sequence_number,
        "code": problem.code,
        "message": problem.message,
        "param": problem.param,
    }
    return b"event: error\ndata: %b\n\n" % msgspec.json.encode(event)
