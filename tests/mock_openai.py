"""A server of the OpenAI API without a model, whose timings are known because it notes them itself.

    python -m tests.mock_openai '{"ttft_ms": 50, "gap_ms": 10}'

Prints one line of JSON with its port. Every answer has the tokens that were asked for; `faults` says what goes wrong
with which request, by the number in its X-Request-Id ("*" for all). GET /record tells when each request was received
and when each piece was handed to the socket, by `time.perf_counter`, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass(frozen=True, kw_only=True)
class Settings:
    ttft_ms: float = 20.0
    gap_ms: float = 5.0
    tokens_per_piece: int = 1
    has_usage: bool = True
    cached_tokens: int | None = None
    role_first_ms: float | None = None  # a first event without text, so long after the request
    splits: bool = False  # events arrive in two parts, the second with the next event
    closes: bool = False  # no keep-alive, and no length: the answer ends with the connection
    idle_closes_ms: float | None = None  # a connection that rests so long is closed
    refused_until: int = 0  # a request is refused until it has come this number of times
    faults: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class Entry:
    """What the server knows of one request."""

    index: int
    received_s: float
    key: str
    body: dict[str, Any]
    piece_s: list[float] = field(default_factory=list)
    is_left: bool = False  # the client went before the end


class Mock:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.entries: list[Entry] = []
        self._times_seen: dict[int, int] = {}
        self._connections: set[asyncio.StreamWriter] = set()  # those over which something was generated

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; whether another may follow."""
        idle_ms = self._settings.idle_closes_ms
        async with asyncio.timeout(None if idle_ms is None else idle_ms / 1e3):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        method, path, _ = first.split()
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        received_s = time.perf_counter()
        if method == "GET":
            self._send_json(writer, *self._describe(path))
            return True
        number = headers.get("x-request-id", "").removeprefix("bench-")
        index = int(number) if number.lstrip("-").isdigit() else 0
        key = headers.get("authorization", "").removeprefix("Bearer ")
        entry = Entry(index=index, received_s=received_s, key=key, body=json.loads(body))
        self.entries.append(entry)
        self._connections.add(writer)
        try:
            return await self._answer(entry, path, writer)
        except ConnectionError:
            entry.is_left = True
            raise

    def _describe(self, path: str) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "mock", "object": "model", "max_model_len": 4096}]}
        if path == "/version":
            return 200, {"version": "0.0-mock"}
        if path == "/record":
            entries = [asdict(entry) for entry in self.entries]
            return 200, {"connections": len(self._connections), "entries": entries}
        return 404, {"error": {"message": f"there is no {path} here"}}

    async def _answer(self, entry: Entry, path: str, writer: asyncio.StreamWriter) -> bool:
        times = self._times_seen[entry.index] = self._times_seen.get(entry.index, 0) + 1
        faults = self._settings.faults
        fault = faults.get(str(entry.index), faults.get("*", "") if entry.index >= 0 else "")
        if entry.index >= 0 and times <= self._settings.refused_until:
            fault = "429"
        if fault in ("400", "429", "500", "503"):
            extra = {"429": "Retry-After: 0.05\r\n"}.get(fault, "")
            self._send_json(writer, int(fault), {"error": {"message": f"told to say {fault}"}}, extra)
            return True
        if fault == "close":
            return False
        if fault == "garbage":
            writer.write(b"this is not HTTP\r\n\r\n")
            return False
        if fault == "no_stream":
            self._send_json(writer, 200, {"choices": [{"message": {"content": "all at once"}}]})
            return True
        await self._stream(entry, path, writer, fault)
        return fault != "break" and not self._settings.closes

    async def _stream(self, entry: Entry, path: str, writer: asyncio.StreamWriter, fault: str) -> None:
        settings = self._settings
        out = _Events(writer, is_chat="chat" in path, settings=settings)
        out.begin()
        if settings.role_first_ms is not None:
            await asyncio.sleep(settings.role_first_ms / 1e3)
            out.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        count = -(-int(entry.body.get("max_tokens", 16)) // settings.tokens_per_piece)
        next_s = entry.received_s + settings.ttft_ms / 1e3
        for number in range(count):
            await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
            if fault == "hang" and number == 1:
                await asyncio.sleep(3600)
            if number == 2 and fault in ("break", "stream_error"):
                if fault == "stream_error":
                    out.event({"error": {"message": "told to fail in the stream"}})
                    out.end()
                return
            if writer.transport.is_closing():
                raise ConnectionError
            entry.piece_s.append(time.perf_counter())
            out.piece()
            next_s += settings.gap_ms / 1e3
            if number % 64 == 63:
                await writer.drain()
        out.finish(entry, count)
        await writer.drain()

    @staticmethod
    def _send_json(writer: asyncio.StreamWriter, status: int, value: Any, extra: str = "") -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
        writer.write(head.encode() + body)


class _Events:
    """The bytes of a stream."""

    def __init__(self, writer: asyncio.StreamWriter, *, is_chat: bool, settings: Settings) -> None:
        self._writer = writer
        self._settings = settings
        self._held = b""
        choice = {"index": 0, "delta": {"content": " word"}} if is_chat else {"index": 0, "text": " word"}
        value = {"id": "mock-1", "object": "chat.completion.chunk", "created": 1, "model": "mock"}
        self._piece = _data({**value, "choices": [choice], "usage": None})

    def begin(self) -> None:
        self._writer.write(
            HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"") if self._settings.closes else HEAD
        )

    def event(self, value: Any) -> None:
        self._write(_data(value))

    def piece(self) -> None:
        self._write(self._piece)

    def finish(self, entry: Entry, count: int) -> None:
        choice = {"index": 0, "delta": {}, "text": "", "finish_reason": "length"}
        self.event({"choices": [choice]})
        if self._settings.has_usage:
            num_input = len(str(entry.body.get("prompt") or entry.body["messages"][-1]["content"]).split())
            usage: dict[str, Any] = {
                "prompt_tokens": num_input,
                "completion_tokens": count * self._settings.tokens_per_piece,
            }
            if self._settings.cached_tokens is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": self._settings.cached_tokens}
            self.event({"choices": [], "usage": usage})
        self.end()

    def end(self) -> None:
        self._write(b"data: [DONE]\n\n")
        if self._held:
            self._chunk(self._held)
        if not self._settings.closes:
            self._writer.write(b"0\r\n\r\n")

    def _write(self, data: bytes) -> None:
        if self._settings.splits:
            middle = len(data) // 2
            self._chunk(self._held + data[:middle])
            self._held = data[middle:]
        else:
            self._chunk(data)

    def _chunk(self, data: bytes) -> None:
        self._writer.write(data if self._settings.closes else b"%x\r\n%b\r\n" % (len(data), data))


def _data(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


class RunningMock:
    """A mock in a separate process."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.port = port

    def record(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/record", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def entries(self) -> list[dict[str, Any]]:
        """Of the requests that count, in the order of their numbers."""
        counted = [entry for entry in self.record()["entries"] if entry["index"] >= 0]
        return sorted(counted, key=lambda entry: int(entry["index"]))


@contextmanager
def running_mock(**settings: Any) -> Iterator[RunningMock]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.mock_openai", json.dumps(settings)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[1],
    )
    try:
        assert process.stdout is not None
        yield RunningMock(json.loads(process.stdout.readline())["port"])
    finally:
        process.kill()
        process.communicate()


async def main() -> None:
    mock = Mock(Settings(**json.loads(sys.argv[1] if len(sys.argv) > 1 else "{}")))
    server = await asyncio.start_server(mock.serve, "127.0.0.1", 0)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
