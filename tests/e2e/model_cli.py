"""Commands as a user runs them, in this process or in a separate one, on a model folder made in the test."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

from paceline.cli import main
from tests.kernels import with_kernels

COMMAND = [sys.executable, "-m", "paceline"]
TIMEOUT_S = 300
# Greedy text of made-up weights goes round in circles and never ends before its length.
TINY = ("--load-format", "dummy", "--temperature", "0")
ENDLESS_CONTEXT = 100_000


def environment(cache: Path | None = None, **more: str) -> dict[str, str]:
    """One thread and no colours, and, with a `cache`, nothing of the cache of the user that runs the tests
    but compiled kernels."""
    own = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "120"}
    if cache is not None:
        own["PACELINE_CACHE_ROOT"] = str(with_kernels(cache))
    return {**os.environ, **own, **more}


def run(
    *arguments: object,
    cache: Path | None = None,
    cwd: Path | None = None,
    stdin: str | bytes = "",
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """A command in this process, which has loaded its libraries already. It reads and writes its own streams, and a
    test sees an exit code as of `run_process`."""
    words = [str(argument) for argument in arguments]
    given = stdin.encode() if isinstance(stdin, str) else stdin
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment(cache, **variables)))
        stack.enter_context(mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), "utf-8")))
        stack.enter_context(mock.patch.object(sys, "argv", ["paceline", *words]))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        stack.enter_context(chdir(cwd or os.curdir))
        code = main.run(words)
    return subprocess.CompletedProcess(
        words, code, *(stream.buffer.getvalue().decode() for stream in (out, err))
    )


def run_process(
    *arguments: object, cache: Path | None = None, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The real command."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=cwd,
        env=environment(cache, **variables),
        timeout=TIMEOUT_S,
        check=False,
    )


def start(*arguments: str, cache: Path, **more: Any) -> subprocess.Popen[bytes]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.Popen([*COMMAND, *arguments], env=environment(cache), **pipes)
