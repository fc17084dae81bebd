"""Where the lines of a conversation come from: a terminal with editing and history, or a pipe.

A message over several lines begins and ends with three quotation marks. Knows nothing of models.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.checkpoint.cache import models_folder

PROMPT, MORE = ">>> ", "... "
QUOTES = '"""'
HISTORY_LINES = 1_000


class LineSource:
    """Messages, each one line or a quoted block of them."""

    def __init__(self, next_line: Callable[[str], str | None]) -> None:
        self._next_line = next_line  # given a prompt; None at the end

    def read(self) -> str | None:
        """The next message; None when there are no more."""
        line = self._next_line(PROMPT)
        if line is None or not line.lstrip().startswith(QUOTES):
            return line
        parts = [line.lstrip().removeprefix(QUOTES)]
        while not parts[-1].rstrip().endswith(QUOTES):
            more = self._next_line(MORE)
            if more is None:  # the end closes it as well
                return "\n".join(parts).strip("\n")
            parts.append(more)
        parts[-1] = parts[-1].rstrip().removesuffix(QUOTES)
        return "\n".join(parts).strip("\n")


@contextmanager
def open_lines(on_terminal: bool) -> Iterator[LineSource]:
    if not on_terminal:
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")
        yield LineSource(_piped)
        return
    with _history(models_folder().parent / "chat_history"):
        yield LineSource(_typed)


def _typed(prompt: str) -> str | None:
    try:
        return input(prompt)
    except EOFError:
        print()
        return None


def _piped(prompt: str) -> str | None:
    line = sys.stdin.readline()
    return line.removesuffix("\n") if line else None


@contextmanager
def _history(path: Path) -> Iterator[None]:
    """Line editing, with what was typed before; only its owner can read the file. Works without one."""
    try:
        import readline
    except ImportError:  # a Python without it: plain lines
        yield
        return
    readline.set_auto_history(True)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_history_length(HISTORY_LINES)
        with suppress(OSError):
            readline.write_history_file(path)
            path.chmod(0o600)
