"""Commands that load a model, as a user runs them: real processes on a model folder made in the test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "paceline"]
TIMEOUT_S = 120
# Greedy text of made-up weights goes round in circles and never ends by itself.
TINY = ("--load-format", "dummy", "--temperature", "0")
ENDLESS_CONTEXT = 100_000


def environment(cache: Path, **more: str) -> dict[str, str]:
    """One thread and no colours, and nothing of the cache of whoever runs the tests."""
    own = {"PACELINE_CACHE_ROOT": str(cache), "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "120"}
    return {**os.environ, **own, **more}


def run(
    *arguments: str, cache: Path, stdin: str | bytes | None = "", **more: str
) -> subprocess.CompletedProcess[str]:
    given = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        input=given,
        env=environment(cache, **more),
        timeout=TIMEOUT_S,
        check=False,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def start(*arguments: str, cache: Path, **more: Any) -> subprocess.Popen[bytes]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.Popen([*COMMAND, *arguments], env=environment(cache), **pipes)
