"""A conversation: its turns, its settings, and the commands that change them.

What was said is kept as messages; when they no longer fit the model's context, the oldest turns go. An answer that
was stopped stays as far as it came. Knows nothing of where lines come from.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from paceline.cli.answering import ChatAnswer, Talker
from paceline.cli.pictures import content_with
from paceline.cli.remote import Remote
from paceline.cli.terminal import Printer, has_colour, is_dumb, note
from paceline.core.sampling import Offer, SamplingParams, offered
from paceline.errors import InputError
from paceline.models.files.fetch import models_folder

if TYPE_CHECKING:
    from paceline.cli.markdown import MarkdownPrinter

LEAVE = ("/bye", "/exit", "/quit")
HELP = '''\
/?, /help           this list
/clear              forget the conversation
/system TEXT        set the system prompt; without TEXT, remove it
/set                show the settings
/set NAME VALUE     change a setting, e.g. /set temperature 0.2
/stats              figures of the last answer and of the conversation
/bye                exit (also Ctrl-D)
"""                 begins and ends a message of several lines
Up, Down            earlier messages; pasted lines are one message
Ctrl-C              stops an answer'''

UNKNOWN = "the server's own"
SETTINGS = {spec.name: str if spec.is_text else spec.kind for spec in offered(Offer.SET)}


def answer_printer(stream: TextIO) -> Printer | MarkdownPrinter:
    """Markdown and colour on a terminal that has them, plain text everywhere else."""
    if not has_colour(stream):
        return Printer(stream)
    from paceline.cli.markdown import MarkdownPrinter

    return MarkdownPrinter(stream)


class ChatSession:
    """One conversation with one model."""

    def __init__(
        self,
        talker: Talker | Remote,
        given: Mapping[str, Any],
        *,
        system_prompt: str | None,
        shows_stats: bool,
        images: str | None = None,
    ) -> None:
        """`images`: files that are shown with the first message."""
        self._talker = talker
        self._given = dict(given)
        self._system = system_prompt
        self._shows_stats = shows_stats
        self._images = images
        self._turns: list[dict[str, Any]] = []
        self._last: ChatAnswer | None = None
        self._has_dropped = False
        self._printer = answer_printer(sys.stdout)

    def take(self, line: str) -> ChatAnswer | None:
        """A command, or a message that is answered. A command is one line: pasted code may begin with a slash too."""
        if line.startswith("/") and "\n" not in line:
            self._command(line)
            return None
        return self.say(line)

    def say(self, message: str) -> ChatAnswer:
        """Print the answer to a message as it is made. What cannot be asked leaves no trace."""
        self._turns.append({"role": "user", "content": content_with(message, self._images)})
        try:
            self._make_room()
            answer = self._talker.reply(self._messages(), self._given, self._printer.show)
        except BaseException:
            self._turns.pop()
            self._printer.end_line()
            raise
        self._printer.end_line()
        if answer.is_interrupted and not answer.text:  # stopped before it began: nothing was said
            self._turns.pop()
            return answer
        self._images = None
        self._turns.append({"role": "assistant", "content": answer.text})
        self._last = answer
        if answer.finish_reason == "length":
            note(f"(cut after {answer.num_output} tokens)")
        if self._shows_stats:
            note(f"({answer.describe()})")
        return answer

    def _messages(self) -> list[dict[str, Any]]:
        system: list[dict[str, Any]] = (
            [] if self._system is None else [{"role": "system", "content": self._system}]
        )
        return [*system, *self._turns]

    def _make_room(self) -> None:
        """Drop the oldest turns when an answer would not fit any more; several at once, so that it stays rare."""
        longest = self._talker.max_model_len
        room = min(self._settings()["max_tokens"], longest // 4)
        if self._count() + room <= longest:
            return
        while len(self._turns) > 1 and self._count() > longest // 2:
            del self._turns[:2]
            if not self._has_dropped:
                self._has_dropped = True
                note(
                    f"(the conversation outgrows the {longest} tokens of the context: its oldest turns are dropped)"
                )

    def _count(self) -> int:
        return self._talker.count(self._messages())

    def _settings(self) -> dict[str, Any]:
        return {**self._talker.defaults, **self._given}

    # -- commands ------------------------------------------------------------------------------------------

    def _command(self, line: str) -> None:
        name, _, rest = line.strip().partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/?": lambda _: print(HELP),
            "/help": lambda _: print(HELP),
            "/clear": self._clear,
            "/system": self._set_system,
            "/set": self._set,
            "/stats": self._stats,
        }
        if name not in commands:
            raise InputError(f"there is no command {name}; /? lists them")
        commands[name](rest.strip())
        sys.stdout.flush()

    def _clear(self, rest: str) -> None:
        self._turns.clear()
        self._has_dropped = False
        print("The conversation is forgotten.")

    def _set_system(self, text: str) -> None:
        self._system = text or None
        print("The system prompt is set." if text else "There is no system prompt any more.")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if not name:
            settings = self._settings()
            for known in SETTINGS:
                print(f"{known:<20}{_shown(settings[known]) if known in settings else UNKNOWN}")
            return
        name = name.replace("-", "_")
        if name not in SETTINGS:
            raise InputError(f"there is no setting {name}; there are {', '.join(SETTINGS)}")
        try:
            parsed = SETTINGS[name](value.strip())
        except ValueError:
            kind = "a whole number" if SETTINGS[name] is int else "a number"
            raise InputError(f"{name} takes {kind}, not {value.strip()!r}") from None
        if name == "stop":
            parsed = (parsed,) if parsed else ()
        SamplingParams(**self._given | {name: parsed})  # raises what is wrong with it
        self._given[name] = parsed
        print(f"{name} is {_shown(parsed)}.")

    def _stats(self, rest: str) -> None:
        print(f"last answer: {self._last.describe()}" if self._last else "nothing has been answered yet")
        used = self._count() if self._turns else 0
        print(f"conversation: {len(self._turns)} messages, {used} of {self._talker.max_model_len} tokens")


def _shown(value: object) -> str:
    if value is None or value == ():
        return "none"
    return ", ".join(repr(part) for part in value) if isinstance(value, tuple) else str(value)


# Where the messages of a conversation come from: a terminal with editing and history, or a pipe.
#
# On a terminal a paste is one message, however many lines it has, and the arrows bring back whole messages. A
# message over several lines can also be typed between three quotation marks. Knows nothing of models.


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
    history = ChatHistory(models_folder().parent / "chat_history")
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


class ChatHistory:
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
