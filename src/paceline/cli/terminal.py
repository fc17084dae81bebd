"""What commands show on a terminal or in a pipe: answers as they come and only ever as text, columns, progress."""

from __future__ import annotations

import os
import re
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

# A model may write anything, also what would move the cursor or rename the window.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def has_colour(stream: TextIO) -> bool:
    """Whether a stream is a terminal that takes styles, and nothing says that they are unwanted (no-color.org)."""
    return stream.isatty() and not is_dumb() and not os.environ.get("NO_COLOR")


def is_dumb() -> bool:
    """Whether the terminal takes text and nothing else."""
    return os.environ.get("TERM", "dumb") in ("dumb", "unknown")


@contextmanager
def keys_unseen() -> Iterator[None]:
    """While an answer is drawn, typed keys are not shown among it; they wait for the next prompt."""
    try:
        before = termios.tcgetattr(sys.stdin)
    except (OSError, ValueError, termios.error):  # no terminal
        yield
        return
    muted = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, muted)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class Printer:
    """Shows an answer piece by piece. A terminal gets no control characters; a pipe gets every character."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._at_line_start = True
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a character this terminal does not have ends nothing

    def show(self, text: str) -> None:
        kept = shown(text) if self._is_terminal else text
        if kept:
            self._stream.write(kept)
            self._stream.flush()
            self._at_line_start = kept.endswith("\n")

    def end_line(self) -> None:
        if not self._at_line_start:
            self.show("\n")


def shown(text: str) -> str:
    """A text from elsewhere without what a terminal would obey."""
    return _CONTROL.sub("", text)


def columns(rows: Sequence[Sequence[str]], num_left: int) -> list[str]:
    """Lines of cells as wide as their columns, which are flush right behind the first `num_left`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        pairs = list(zip(row, widths, strict=True))
        left = [cell.ljust(width) for cell, width in pairs[:num_left]]
        lines.append("  ".join([*left, *(cell.rjust(width) for cell, width in pairs[num_left:])]).rstrip())
    return lines


@contextmanager
def status_line(text: str) -> Iterator[Callable[[str], None]]:
    """A line on standard error that can be changed; nothing at all when that is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status(text) as status:
        yield status.update


class RequestBar:
    """Requests that have ended, on a terminal; elsewhere nothing is shown."""

    def __init__(self, label: str, total: int) -> None:
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=label, unit="req", dynamic_ncols=True)

    def advance(self, text: str = "") -> None:
        """One more has ended; `text` stands behind the bar."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def note(text: str) -> None:
    """A sentence beside the answer."""
    print(f"\x1b[2m{text}\x1b[0m" if has_colour(sys.stderr) else text, file=sys.stderr, flush=True)
