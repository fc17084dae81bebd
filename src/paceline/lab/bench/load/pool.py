"""Connections to one server, kept open and used again.

Owns sockets, HTTP/1.1 framing and the moment at which bytes are said to have arrived: the first thing that happens
when the loop hands them over. Knows no events and no measures; what comes is handed to an `ResponseReader`.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass
from typing import cast

import httptools

from paceline.lab.bench.load.reader import ResponseReader

CONNECT_TIMEOUT_S = 10.0


class ConnectFailed(Exception):
    """No connection could be made; the text says why."""


class ConnectionEnded(Exception):
    """The connection ended, or spoke no HTTP, before the answer was whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go."""

    host: str
    port: int
    is_https: bool = False
    path: str = "/v1/chat/completions"

    def head(self, body: bytes, key: str, request_id: str) -> bytes:
        """Everything that comes before the body."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            f"Content-Length: {len(body)}",
            f"X-Request-Id: {request_id}",
        ]
        if key:
            lines.append(f"Authorization: Bearer {key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Pool:
    """Idle connections, the last one used first; as many as there are requests under way."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if target.is_https else None

    async def post(self, payload: bytes, reader: ResponseReader) -> None:
        """Send a request and feed its answer to the reader, to the end.

        A server may close an idle connection at any time. A request that met one and got not a single byte was never
        looked at, and goes again over a new connection.
        """
        connection, is_used = await self._take()
        try:
            await connection.exchange(payload, reader)
        except ConnectionEnded:
            if not is_used or reader.has_begun:
                raise
            connection = await self._connect()
            await connection.exchange(payload, reader)
        finally:
            if connection.is_reusable:
                self._idle.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _take(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection, True
        return await self._connect(), False

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        target = self.target
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    _Connection, target.host, target.port, ssl=self._tls
                )
        except TimeoutError as error:
            raise ConnectFailed(f"no connection within {CONNECT_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise ConnectFailed(error.strerror or str(error) or type(error).__name__) from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._reader: ResponseReader | None = None
        self._done: asyncio.Future[None] | None = None
        self._headers: dict[bytes, bytes] = {}
        self._now_s = 0.0
        self._lasts_until_close = False
        self.is_reusable = False

    async def exchange(self, payload: bytes, reader: ResponseReader) -> None:
        assert self._transport is not None and self._done is None
        self.is_reusable = False
        self._reader, self._headers = reader, {}
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        try:
            if self._transport.is_closing():
                raise ConnectionEnded("the connection was closed")
            self._transport.write(payload)
            await self._done
        finally:
            self._done = self._reader = self._parser = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()  # an abandoned answer is not read to its end

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self.is_reusable = True

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        if self._parser is None:  # no request was sent
            self.is_reusable = False
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is not HTTP ({error})")

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        if self._done is None or self._done.done():
            return
        self._now_s = time.perf_counter()
        if self._lasts_until_close and exc is None:
            self._finish()
        else:
            self._fail(f"the connection was closed by the server{f' ({exc})' if exc else ''}")

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        assert self._parser is not None and self._reader is not None
        status = self._parser.get_status_code()
        if status >= 200:
            headers = self._headers
            self._lasts_until_close = not (b"content-length" in headers or b"transfer-encoding" in headers)
            self._reader.take_head(status, headers, self._now_s)

    def on_body(self, body: bytes) -> None:
        assert self._reader is not None
        self._reader.take_body(body, self._now_s)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._parser.get_status_code() >= 200:  # before it there may be words like "continue"
            self.is_reusable = bool(self._parser.should_keep_alive())
            self._finish()

    def _finish(self) -> None:
        assert self._reader is not None and self._done is not None
        self._reader.end(self._now_s)
        if not self._done.done():
            self._done.set_result(None)

    def _fail(self, message: str) -> None:
        self.is_reusable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionEnded(message))
        self.close()
