"""A conversation: its turns, its settings, and the commands that change them.

What was said is kept as messages; when they no longer fit the model's context, the oldest turns go. An answer that
was stopped stays as far as it came. Knows nothing of where lines come from.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from paceline.cli.answer import Answer, Answering
from paceline.cli.terminal import answer_printer, note
from paceline.core.sampling import SamplingParams
from paceline.errors import InputError

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
Kind = Callable[[str], object]
SETTINGS: dict[str, Kind] = {
    "max_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
    "stop": str,
}


class Session:
    """One conversation with one model."""

    def __init__(
        self, talker: Answering, given: Mapping[str, Any], *, system_prompt: str | None, shows_stats: bool
    ) -> None:
        self._talker = talker
        self._given = dict(given)
        self._system = system_prompt
        self._shows_stats = shows_stats
        self._turns: list[dict[str, str]] = []
        self._last: Answer | None = None
        self._has_dropped = False
        self._printer = answer_printer(sys.stdout)

    @staticmethod
    def wants_to_leave(line: str) -> bool:
        return line.strip() in LEAVE

    def take(self, line: str) -> Answer | None:
        """A command, or a message that is answered. A command is one line: pasted code may begin with a slash too."""
        if line.startswith("/") and "\n" not in line:
            self._command(line)
            return None
        return self.say(line)

    def say(self, message: str) -> Answer:
        """Print the answer to a message as it is made. What cannot be asked leaves no trace."""
        self._turns.append({"role": "user", "content": message})
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
        self._turns.append({"role": "assistant", "content": answer.text})
        self._last = answer
        if answer.finish_reason == "length":
            note(f"(cut after {answer.num_output} tokens)")
        if self._shows_stats:
            note(f"({answer.describe()})")
        return answer

    def _messages(self) -> list[dict[str, str]]:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
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
