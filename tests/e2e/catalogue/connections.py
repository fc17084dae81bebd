"""Many requests over a few connections that stay open, and whole answers read off them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress

from tests.e2e.http_server import Reply

PATIENCE_S = 120.0  # far more than an answer takes, on a busy machine too


class Connection:
    """One connection to a server, opened again when the server has closed it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, data: bytes) -> Reply:
        """Raises TimeoutError for a hang and ConnectionError for a connection that ends without an answer."""
        async with asyncio.timeout(PATIENCE_S):
            is_fresh = self._streams is None
            try:
                return await self._ask(data)
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                self.close()
                if not is_fresh:  # closed while it was idle, as a server may
                    return await self.ask(data)
                raise ConnectionError("closed without an answer") from error

    async def _ask(self, data: bytes) -> Reply:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(data)
        with suppress(ConnectionError):  # refused before it was all sent; the answer may be there
            await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        status, headers = _parsed(head)
        if head.startswith(b"HTTP/1.1 100"):
            head = await reader.readuntil(b"\r\n\r\n")
            status, headers = _parsed(head)
        if data.startswith(b"HEAD "):
            body = b""
        elif headers.get("transfer-encoding") == "chunked":
            body = await _chunks(reader)
        else:
            body = await reader.readexactly(int(headers["content-length"]))
        if headers.get("connection") == "close":
            self.close()
        return Reply(status, headers, body, head + body)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def ask_all(
    port: int,
    requests: Iterable[bytes],
    handle: Callable[[int, Reply | Exception], None],
    *,
    connections: int,
) -> None:
    """Send all requests over a number of connections, each as soon as one is free."""
    numbered = enumerate(requests)

    async def work() -> None:
        connection = Connection(port)
        try:
            for number, data in numbered:
                try:
                    reply: Reply | Exception = await connection.ask(data)
                except (OSError, ValueError, EOFError) as error:
                    reply = error
                    connection.close()
                handle(number, reply)
        finally:
            connection.close()

    await asyncio.gather(*(work() for _ in range(connections)))


def _parsed(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split()[1]), headers


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    await reader.readuntil(b"\r\n")
    return b"".join(parts)
