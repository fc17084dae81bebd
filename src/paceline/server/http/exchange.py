"""One request and its answer: who asked, how far it got, and what can end it from outside.

An exchange ends early in two ways: the client goes away, or the server stops it with a refusal. Both cancel the
task that answers; `lost` and `stopped_by` say which it was. Between two pieces of a stream `lost` has to be looked
at, because neither a send to a closed connection nor a queue with something in it lets a cancellation in.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from paceline.server.call import RequestRecord
from paceline.server.errors import Refusal
from paceline.server.http.request import CONNECTION, echoed_id, new_id, speaks_anthropic
from paceline.server.rate_limits import Allowance

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
        parts: list[bytes] = []
        while True:
            message = await self.receive()
            if message["type"] != "http.request":
                self.lost = True
                raise ClientGone
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

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
        headers = [*headers, (b"x-request-id", own or request_id)]
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
