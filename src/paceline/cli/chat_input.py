"""Where the messages of a conversation come from: a terminal with editing and history, or a pipe.

On a terminal a paste is one message, however many lines it has, and the arrows bring back whole messages. A message
over several lines can also be typed between three quotation marks. Knows nothing of models.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.checkpoint.cache import models_folder
from paceline.cli.terminal import has_colour, is_dumb

PROMPT, MORE = ">>> ", "... "
QUOTES = '"""'
HISTORY_MESSAGES = 1_000
PASTED_S = 0.03  # in which the next line of a paste is there, and no hand has typed one


class LineSource:
    """Messages, each one line, a paste, or a quoted block of lines."""

    def __init__(
        self, next_line: Callable[[str], str | None], remember: Callable[[str], None] = lambda message: None
    ) -> None:
        self._next_line = next_line  # given a prompt; None at the end
        self._remember = remember

    def read(self) -> str | None:
        """The next message; None when there are no more."""
        message = self._read()
        if message is not None and message.strip():
            self._remember(message)
        return message

    def _read(self) -> str | None:
        line = self._next_line(PROMPT)
        if line is None or "\n" in line or not line.lstrip().startswith(QUOTES):
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
    try:
        import readline
    except ImportError:  # a Python without it: plain lines
        yield LineSource(_pasted(_typed))
        return
    history = History(models_folder().parent / "chat_history")
    readline.set_auto_history(False)
    for message in history.messages:
        readline.add_history(message)

    def remember(message: str) -> None:
        if history.add(message):
            readline.add_history(message)

    if is_dumb() or "libedit" in (readline.__doc__ or ""):  # which do not mark pastes
        yield LineSource(_pasted(_typed), remember)
        return
    readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    yield LineSource(_coloured(_typed), remember)


class History:
    """What was said in earlier conversations too: one message a line, those of several lines as JSON.

    Written as it grows, so that nothing is lost and two conversations do not undo each other's; only its owner can
    read it. Works without a file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.messages: list[str] = []
        with suppress(OSError, UnicodeError):
            lines = path.read_text(encoding="utf-8").splitlines()
            self.messages = [_decoded(line) for line in lines[-HISTORY_MESSAGES:] if line]
            if len(lines) > 2 * HISTORY_MESSAGES:
                path.write_text("".join(f"{line}\n" for line in lines[-HISTORY_MESSAGES:]), encoding="utf-8")

    def add(self, message: str) -> bool:
        """Keep a message; False if it is the one before it again."""
        if self.messages[-1:] == [message]:
            return False
        self.messages.append(message)
        with suppress(OSError, UnicodeError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with open(handle, "a", encoding="utf-8") as file:
                file.write(_encoded(message) + "\n")
        return True


def _encoded(message: str) -> str:
    is_plain = len(message.splitlines()) == 1 and not message.startswith('"')
    return message if is_plain else json.dumps(message)


def _decoded(line: str) -> str:
    if line.startswith('"'):
        with suppress(ValueError):
            found = json.loads(line)
            return found if isinstance(found, str) else line
    return line


def _typed(prompt: str) -> str | None:
    try:
        return input(prompt)
    except EOFError:
        print()
        return None


def _coloured(typed: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """With a prompt that stands out; the marks keep the line editor from counting the style as characters."""
    if not has_colour(sys.stdout):
        return typed
    return lambda prompt: typed(f"\001\x1b[1;36m\002{prompt}\001\x1b[0m\002")


def _pasted(typed: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """With lines that come faster than they could be typed as one: they are a paste."""

    def read(prompt: str) -> str | None:
        line = typed(prompt)
        while line is not None and select.select([sys.stdin], [], [], PASTED_S)[0]:
            more = typed(MORE)
            if more is None:
                break
            line = f"{line}\n{more}"
        return line

    return read


def _piped(prompt: str) -> str | None:
    line = sys.stdin.readline()
    return line.removesuffix("\n") if line else None
