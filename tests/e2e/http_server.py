"""A fake server process for tests, and raw sockets to talk to it byte by byte."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
# How long to wait for what must happen. Tests of mutants wait less: what they wait for never comes.
PATIENCE_S = float(os.environ.get("PACELINE_TEST_PATIENCE_S", "60"))


@dataclass
class Reply:
    """An answer as it came over the wire."""

    status: int
    headers: dict[str, str]
    body: bytes
    raw: bytes = field(repr=False, default=b"")

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])


class FakeServer:
    """A running server process."""

    def __init__(
        self, *, log: Path | None = None, environment: dict[str, str] | None = None, **options: Any
    ) -> None:
        self._log = None if log is None else log.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.serve_fake", json.dumps(options)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=self._log or subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
        )
        assert self.process.stdout is not None
        ports = json.loads(self.process.stdout.readline())
        self.port, self.side = ports["port"], ports["side"]
        if not options.get("load_s"):
            self.wait_until(lambda: self.get("/health").status == 200)

    def wait_until(self, condition: Any, seconds: float = PATIENCE_S) -> None:
        wait_until(condition, seconds, every_s=0.02)

    def connect(self, *, receive_bytes: int | None = None, port: int | None = None) -> socket.socket:
        client = socket.socket()
        if receive_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.settimeout(PATIENCE_S)
        try:
            client.connect(("127.0.0.1", port or self.port))
        except OSError:
            client.close()
            raise
        return client

    def raw(self, data: bytes, *, port: int | None = None) -> Reply:
        """Send bytes on a separate connection, and read the one answer."""
        with self.connect(port=port) as client:
            client.sendall(data)
            return read_reply(client)

    def get(self, path: str, *headers: str, method: str = "GET", port: int | None = None) -> Reply:
        return self.raw(request_bytes(method, path, headers=headers), port=port)

    def post(self, path: str, body: Any, *headers: str) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.raw(request_bytes("POST", path, data, headers=headers))

    def seen(self) -> dict[str, int]:
        found: dict[str, int] = self.get("/v1/seen").json
        return found

    def stop(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.close()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        if self._log is not None:
            self._log.close()


@contextmanager
def fake_server(**options: Any) -> Iterator[FakeServer]:
    server = FakeServer(**options)
    try:
        yield server
    finally:
        server.close()


def request_bytes(
    method: str, path: str, body: bytes | None = None, *, headers: tuple[str, ...] = (), close: bool = True
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1"]
    names = [header.partition(":")[0].lower() for header in headers]
    if "host" not in names:
        lines.append("Host: localhost")
    if body is not None and "content-type" not in names:
        lines.append("Content-Type: application/json")
    if body is not None and not {"content-length", "transfer-encoding"} & set(names):
        lines.append(f"Content-Length: {len(body)}")
    if close:
        lines.append("Connection: close")
    lines += headers
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (body or b"")


def read_reply(client: socket.socket) -> Reply:
    """Everything until the server closes, as one answer."""
    parts = []
    while True:
        try:
            part = client.recv(65536)
        except ConnectionResetError:
            break
        if not part:
            break
        parts.append(part)
    return parse_reply(b"".join(parts))


def read_one(client: socket.socket) -> Reply:
    """One answer of a known length, on a connection that stays open."""
    data = b""
    while True:
        _, found, body = data.partition(b"\r\n\r\n")
        if found:
            reply = parse_reply(data)
            if len(body) >= int(reply.headers["content-length"]):
                return reply
        part = client.recv(65536)
        assert part, "the connection was closed"
        data += part


def parse_reply(raw: bytes) -> Reply:
    if not raw:
        raise ConnectionError("the connection was closed without an answer")
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = unchunked(body)
    return Reply(int(first.split()[1]), headers, body, raw)


def unchunked(data: bytes) -> bytes:
    """The body of a chunked answer; fails when its end is missing."""
    result = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            return result
        result, data = result + data[:length], data[length + 2 :]
