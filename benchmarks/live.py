"""A server on this machine and requests to it over loopback, with their times: what the studies of a server share."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.bench.machine import source_commit

START_S, STOP_S = 120.0, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back, and when: times are of `time.perf_counter`."""

    status: int
    headers: dict[str, str]
    sent_s: float
    piece_s: list[float] = field(default_factory=list)  # when each piece of text came
    ended_s: float

    @property
    def ttft_s(self) -> float:
        return self.piece_s[0] - self.sent_s

    @property
    def whole_s(self) -> float:
        return self.ended_s - self.sent_s


@contextlib.contextmanager
def served(options: Sequence[str]) -> Iterator[int]:
    """The port of a server that is ready, and goes when it is no longer needed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "paceline", "serve", "--port", str(port), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until_s = time.monotonic() + START_S
        while not _is_ready(port):
            if process.poll() is not None or time.monotonic() > until_s:
                raise SystemExit(f"the server did not start: {' '.join(command)}")
            time.sleep(0.2)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def environment() -> dict[str, Any]:
    """What a result must carry to mean anything later."""
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "commit": source_commit(),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
    }


def write_keys(path: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """A keys file in which the key of each name is `sk-` and the name."""
    lines = [
        json.dumps({"name": name, "sha256": hashlib.sha256(f"sk-{name}".encode()).hexdigest(), **fields})
        for name, fields in entries.items()
    ]
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o600)


async def stream(port: int, path: str, body: Mapping[str, Any], tenant: str = "") -> Answer:
    """Send a request that streams and read its answer to the end."""
    payload = json.dumps({**body, "stream": True}).encode()
    key = f"Authorization: Bearer sk-{tenant}\r\n" if tenant else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{key}"
        f"Connection: close\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    sent_s, pieces = time.perf_counter(), list[float]()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + payload)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        async for line in reader:
            # A chat's first frame names the speaker and has no text yet.
            if line.startswith(b"data: {") and (b'"content":"' in line or b'"text":"' in line):
                pieces.append(time.perf_counter())
    finally:
        writer.close()
    named = (line.partition(":") for line in lines[1:])
    headers = {name.lower(): value.strip() for name, _, value in named}
    return Answer(
        status=int(lines[0].split()[1]),
        headers=headers,
        sent_s=sent_s,
        piece_s=pieces,
        ended_s=time.perf_counter(),
    )


async def at(
    origin_s: float, due_s: float, sending: Coroutine[Any, Any, Answer], within_s: float
) -> Answer | None:
    """Send at its time, whether or not others have been answered. None: nothing came in time."""
    await asyncio.sleep(max(0.0, origin_s + due_s - time.perf_counter()))
    try:
        return await asyncio.wait_for(sending, within_s)
    except (TimeoutError, OSError, asyncio.IncompleteReadError):
        return None
