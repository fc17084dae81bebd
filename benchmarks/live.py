"""A server on this machine and requests to it over loopback, with their times: what the studies of a server share."""

from __future__ import annotations

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.lab.bench.load.pool import Target
from paceline.lab.bench.load.source import COMPLETIONS, PATHS
from paceline.lab.bench.machine import source_commit

START_S, STOP_S = 120.0, 30.0


@contextlib.contextmanager
def served(options: Sequence[str], output: Path | None = None) -> Iterator[int]:
    """The port of a server that is ready, and goes when it is no longer needed. `output` gets its card and log."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "paceline", "serve", "--port", str(port), *options]
    with open(output or os.devnull, "wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
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


def target(port: int) -> Target:
    """The completions of the server here."""
    return Target(host="127.0.0.1", port=port, path=PATHS[COMPLETIONS])
