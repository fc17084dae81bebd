"""Answers, errors and event streams as bytes of an exchange.

The status of a stream goes out with its first event, so that what fails before it has its real status; if that takes
long, it goes out with a comment, and comments keep silent streams alive. No stream ends without an end: what fails
later becomes one error frame.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

from paceline.server.api.route import ANTHROPIC_ERRORS
from paceline.server.call import Answer, Download, Events
from paceline.server.errors import Problem, anthropic_body, openai_body
from paceline.server.http.exchange import Exchange
from paceline.server.http.protocol import GuardedProtocol
from paceline.server.http.request import CONNECTION

MAX_HEADER_CHARS = 2048
COMMENT = b": keep-alive\n\n"
PIECE_BYTES = 1 << 18  # of a file, read at once
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def send_answer(exchange: Exchange, answer: Answer) -> None:
    headers = [
        (b"content-type", answer.media_type.encode("latin-1")),
        (b"content-length", b"%d" % len(answer.body)),
        *_encoded(answer.headers),
    ]
    await exchange.begin(answer.status, headers)
    await exchange.write(answer.body, more=False)


async def send_problem(
    exchange: Exchange, problem: Problem, shape: str, headers: Mapping[str, str] | None = None
) -> None:
    exchange.error_code = problem.code
    body = anthropic_body(problem) if shape == ANTHROPIC_ERRORS else openai_body(problem)
    more = dict(headers or {})
    if problem.retry_after_s is not None:
        more["retry-after"] = str(problem.retry_after_s)
        more["retry-after-ms"] = str(1000 * problem.retry_after_s)  # what OpenAI's clients look for first
    if problem.status == 401:
        more["www-authenticate"] = "Bearer"
    await send_answer(exchange, Answer(body=body, status=problem.status, headers=more))


async def send_file(exchange: Exchange, download: Download) -> None:
    """Send a file piece by piece, as fast as the client reads it."""
    loop = asyncio.get_running_loop()
    file = await loop.run_in_executor(None, download.path.open, "rb")
    try:
        headers = [
            (b"content-type", download.media_type.encode("latin-1")),
            (b"content-length", b"%d" % download.size),
            *_encoded(download.headers),
        ]
        await exchange.begin(200, headers)
        left = 0 if exchange.method == "HEAD" else download.size
        while left > 0:
            piece = await loop.run_in_executor(None, file.read, min(left, PIECE_BYTES))
            if not piece:
                raise EOFError(f"{download.path.name} is shorter than it was")
            left -= len(piece)
            if left:
                await exchange.write(piece, more=True)
        await exchange.write(b"" if exchange.method == "HEAD" or not download.size else piece, more=False)
    finally:
        file.close()


async def send_events(exchange: Exchange, events: Events, keep_alive_s: float) -> None:
    """Send a stream to its end. What is raised before the first event leaves this function."""
    stream = _Stream(exchange, events, keep_alive_s)
    try:
        await stream.send()
    finally:
        stream.end()
        await events.frames.aclose()


class _Stream:
    """One event stream on its way. A timer for the whole stream looks for silence; frames cost nothing extra."""

    def __init__(self, exchange: Exchange, events: Events, keep_alive_s: float) -> None:
        self._exchange = exchange
        self._events = events
        self._keep_alive_s = keep_alive_s
        self._connection: GuardedProtocol | None = exchange.scope.get(CONNECTION)
        self._was_silent = True
        self._comment: asyncio.Task[None] | None = None
        self._pulse = asyncio.get_running_loop().call_later(keep_alive_s, self._beat)

    def end(self) -> None:
        self._pulse.cancel()
        if self._comment is not None:
            self._comment.cancel()

    async def send(self) -> None:
        exchange, send, divert = self._exchange, self._exchange.send, self._events.divert
        try:
            async for frame in self._events.frames:
                if exchange.lost:
                    return
                if not exchange.has_begun:
                    await self._begin()
                if not self._write(frame):
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
                if divert is not None:
                    divert(self._write)
                    divert = None
            if not exchange.has_begun:
                await self._begin()
        except asyncio.CancelledError:
            refusal = exchange.take_cancellation()
            if refusal is None or not exchange.has_begun:
                raise
            await self._fail(refusal)
            return
        except Exception as error:
            if not exchange.has_begun:
                raise
            await self._fail(error)
            raise
        await exchange.write(b"", more=False)

    def _write(self, frame: bytes) -> bool:
        """Write a frame straight to the connection; False when it has to go the long way, and wait there."""
        self._was_silent = False
        return self._connection is not None and bool(self._connection.write_chunk(frame))

    async def _begin(self) -> None:
        await self._exchange.begin(200, [*_STREAM_HEADERS, *_encoded(self._events.headers)])

    async def _fail(self, error: BaseException) -> None:
        if not self._exchange.lost:
            await self._exchange.write(self._events.error_frame(error), more=False)

    def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        if self._was_silent and not self._exchange.lost and (self._comment is None or self._comment.done()):
            self._comment = loop.create_task(self._send_comment())
        self._was_silent = True
        self._pulse = loop.call_later(self._keep_alive_s, self._beat)

    async def _send_comment(self) -> None:
        if not self._exchange.has_begun:
            await self._begin()
        await self._exchange.send({"type": "http.response.body", "body": COMMENT, "more_body": True})


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Headers as bytes. Values may quote a client's words: they are kept short, printable and on their line."""
    return [
        (name.lower().encode("ascii"), _UNPRINTABLE.sub("?", value[:MAX_HEADER_CHARS]).encode("ascii"))
        for name, value in headers.items()
    ]
