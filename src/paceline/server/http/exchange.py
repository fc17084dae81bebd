"""One request and its answer: its caller, how far it got, and what can end it from outside.

An exchange ends early in two ways: the client goes away, or the server stops it with a refusal. Both cancel the
task that answers; `lost` and `stopped_by` say which it was. Between two pieces of a stream `lost` has to be looked
at, because neither a send to a closed connection nor a queue with something in it lets a cancellation in.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from paceline.server.access.rate_limits import Allowance
from paceline.server.api.route import ANTHROPIC_ERRORS
from paceline.server.call import Answer, Download, Events
from paceline.server.errors import Problem, Refusal, anthropic_body, openai_body
from paceline.server.generate.request_record import RequestRecord
from paceline.server.http.protocol import GuardedProtocol
from paceline.server.http.request_headers import CONNECTION, echoed_id, new_id, speaks_anthropic

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

NO_ROUTE = "none"
CLIENT_CLOSED = 499  # in the log only


class ClientGone(Exception):
    """The client went away before its request was complete."""


class Exchange:
    """The state of one request; lives as long as its task."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, now_s: float) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.id = new_id()
        self.received_s = now_s
        self.method: str = scope["method"]
        self.route = NO_ROUTE  # the template of the matched route
        self.tenant = ""
        self.service_class = ""
        self.allowance: Allowance | None = None  # where the key has limits by the minute
        self.refused_by = ""  # the key's limit that did, if one did
        self.status = 0
        self.error_code = ""
        self.origin_headers: list[tuple[bytes, bytes]] = []  # for web pages that may use the server
        self.has_begun = False  # the status line is out
        self.is_admitted = False  # its body is there; a stopping server lets it finish
        self.lost = False
        self.stopped_by: Refusal | None = None
        self.records: list[RequestRecord] = []
        self._is_over = False
        self._task = asyncio.current_task()
        self._watcher: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ reading

    async def read_body(self) -> bytes:
        """The whole body; the connection has seen to its size and time."""
        return b"".join([chunk async for chunk in self.body_chunks()])

    async def body_chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes; raises ClientGone when it ends too early. A stopping server does not wait for it."""
        while True:
            message = await self.receive()
            if message["type"] != "http.request":
                self.lost = True
                raise ClientGone
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body", False):
                self.is_admitted = True
                return

    def watch(self) -> None:
        """From now on, end the work when the client goes away."""
        self._watcher = asyncio.get_running_loop().create_task(self._wait_for_disconnect())

    async def _wait_for_disconnect(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        if not self._is_over:
            self.lost = True
            self._cancel()

    # ------------------------------------------------------------ ending

    def stop(self, refusal: Refusal) -> None:
        """End this exchange with an error, wherever it is."""
        if not self._is_over and not self.lost:
            self.stopped_by = refusal
            self._cancel()

    def take_cancellation(self) -> Refusal | None:
        """What the task was cancelled for. The cancellation is taken back, so that an answer can still be sent."""
        if (self.stopped_by is not None or self.lost) and self._task is not None:
            self._task.uncancel()
        return self.stopped_by

    def over(self) -> None:
        """Nothing can end this exchange any more.

        What refers back to it is let go: a request should leave with its last reference, not wait for the collector.
        """
        self._is_over = True
        if self._watcher is not None:
            self._watcher.cancel()
        self._watcher = self._task = None
        self.scope.pop(CONNECTION, None)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    # ------------------------------------------------------------ writing

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the status and the headers, ours among them."""
        self.has_begun = True
        self.status = status
        own = echoed_id(self.scope["headers"])
        request_id = self.id.encode()
        headers = [*headers, *self.origin_headers, (b"x-request-id", own or request_id)]
        if own is not None:
            headers.append((b"x-paceline-request-id", request_id))
        if speaks_anthropic(self.scope["headers"]):
            headers.append((b"request-id", own or request_id))
        if self.allowance is not None:
            headers += [
                (name.encode("ascii"), value.encode("ascii"))
                for name, value in self.allowance.headers().items()
            ]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, body: bytes, *, more: bool) -> None:
        if not more:
            self._is_over = True  # what `receive` tells from here on is the end of the answer
        await self.send({"type": "http.response.body", "body": body, "more_body": more})


# Answers, errors and event streams as bytes of an exchange.
#
# The status of a stream goes out with its first event, so that what fails before it has its real status; if that
# takes long, it goes out with a comment, and comments keep silent streams alive. No stream ends without an end:
# what fails later becomes one error frame.


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
        await self._exchange.begin(200, [*_STREAM_HEADERS, *_encoded(self._events.headers())])

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
