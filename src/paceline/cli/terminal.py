"""What a model writes, on somebody's terminal or in a pipe: shown as it comes, and only ever as text."""

from __future__ import annotations

import re
import sys
from typing import TextIO

# A model may write anything, also what would move the cursor or rename the window.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


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


def note(text: str) -> None:
    """A sentence beside the answer."""
    print(text, file=sys.stderr, flush=True)
