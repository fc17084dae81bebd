"""Commands made from declared options: what a command takes, how a command line is read, and help pages.

A command names the configs it takes, and the panels of the engine's options. Flags, values, defaults and help texts
come from the declarations in those configs (see `config.options`), so that none of them is written twice. The reader
needs nothing but the standard library and loads nothing else: a value may begin with a dash and arguments may stand
between flags, which argparse does not allow.
"""

from __future__ import annotations

import difflib
import inspect
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field
from functools import cached_property
from typing import Any

from paceline.config.engine import ENGINE_CONFIGS
from paceline.config.options import flag_of, options_of, panel_of
from paceline.errors import InputError

MANY = 20  # options; a command with more shows only the basic ones on its help page
HELP, HELP_ALL, VERSION = ("-h", "--help"), "--help-all", "--version"
HELP_TEXT, HELP_ALL_TEXT, VERSION_TEXT = "show this page", "show all options, by topic", "show the version"
# Characters of a help page.
FLAG_COLUMN, LONGEST_CHOICES, LEAST_WIDTH, MOST_WIDTH = 29, 20, 50, 108
# By how an option's name ends: units come last, and so does what a path is for.
_METAVARS = {
    "_bytes": "BYTES",
    "_ms": "MS",
    "_s": "SECONDS",
    "file": "FILE",
    "ledger": "FILE",
    "_dir": "FOLDER",
}
_NUMBER = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)([kmgKMG]?)")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, kw_only=True)
class CommandOption:
    """A declared option as one command takes it."""

    spec: Field[Any]
    name: str
    kind: type
    help: str
    panel: str
    choices: tuple[str, ...]
    is_basic: bool
    is_argument: bool  # given by its place, not by a name
    default: Any  # its value when it is not given
    default_text: str  # what then holds, as text that could be given; empty where there is nothing to say
    also: tuple[str, ...]  # other spellings

    @property
    def is_repeated(self) -> bool:
        return self.kind is tuple

    @property
    def is_switch(self) -> bool:
        return self.kind is bool

    @property
    def negative(self) -> str | None:
        """The flag that turns a switch off, if it is not off by default."""
        is_on = self.is_switch and self.spec.default is not False
        return f"--no-{flag_of(self.spec).removeprefix('--')}" if is_on else None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every spelling."""
        if self.is_argument:
            return ()
        return (*self.also, flag_of(self.spec), *((self.negative,) if self.negative else ()))

    @cached_property
    def metavar(self) -> str:
        """What stands for its value; empty for a switch."""
        declared = self.spec.metadata["metavar"]
        if declared or self.is_switch:
            return declared or ""
        if self.choices:
            joined = "|".join(self.choices)
            return joined if len(joined) <= LONGEST_CHOICES else "NAME"
        other = "N" if self.kind in (int, float) else "TEXT"
        return next((text for end, text in _METAVARS.items() if self.name.endswith(end)), other)

    def read(self, text: str, name: str) -> Any:
        """The value that `text` stands for."""
        try:
            if self.kind is int:
                return whole_number(text)
            return float(text) if self.kind is float else text
        except ValueError:
            what = "a whole number (such as 4096, 4k or 4K)" if self.kind is int else "a number"
            raise InputError(f"Invalid value for '{name}': {text!r} is not {what}.") from None

    def row(self, *, is_short: bool) -> tuple[str, str]:
        """Its row on a help page. Other long spellings are left to the page with all options."""
        text = self.help
        if len("|".join(self.choices)) > LONGEST_CHOICES:
            text = f"{text}: {', '.join(self.choices)}"
        if self.default_text:
            text = f"{text} [{self.default_text}]"
        if self.is_argument:
            return self.metavar, text
        own = flag_of(self.spec)
        own = f"--[no-]{own.removeprefix('--')}" if self.negative else own
        short = [name for name in self.also if not name.startswith("--")]
        other = [name for name in self.also if name.startswith("--") and not is_short]
        return f"{', '.join((*short, own, *other))} {self.metavar}".rstrip(), text


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command: its options, its help text, and what it does with the values of its options.

    `takes` holds configs, whose options all become flags, and names of panels, which stand for the engine's options of
    these panels. The engine's options are None unless given, so that model and machine can decide; where a command
    declares an option of the same name or flag, its own counts.
    """

    name: str
    help: str
    run: Callable[[Mapping[str, Any]], None]
    takes: tuple[type | str, ...]
    # By option: what holds here when it is not given, in words; None: the declared default.
    defaults: Mapping[str, str | None] = field(default_factory=dict)
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # other spellings, in this command only
    is_optional: bool = False  # every value is None unless given
    instead: Mapping[str, str] = field(default_factory=dict)  # flags of other programs, and what to do here

    @cached_property
    def options(self) -> tuple[CommandOption, ...]:
        found: dict[str, CommandOption] = {}
        flags: set[str] = set()
        for config, spec, is_own in self._declared():
            if spec.name not in found and flag_of(spec) not in flags:
                found[spec.name] = self._option(config, spec, is_own=is_own)
                flags.add(flag_of(spec))
        return tuple(found.values())

    def _declared(self) -> Iterator[tuple[type, Field[Any], bool]]:
        for taken in self.takes:
            if not isinstance(taken, str):
                yield from ((taken, spec, True) for spec in options_of(taken) if panel_of(taken, spec))
                continue
            engine = ((config, spec) for config in ENGINE_CONFIGS for spec in options_of(config))
            chosen = [(config, spec, False) for config, spec in engine if panel_of(config, spec) == taken]
            assert chosen, f"the engine has no options in a panel {taken}"
            yield from chosen

    def _option(self, config: type, spec: Field[Any], *, is_own: bool) -> CommandOption:
        declared = spec.metadata
        words = self.defaults.get(spec.name, declared["default_text"])
        return CommandOption(
            spec=spec,
            name=spec.name,
            kind=declared["kind"],
            help=declared["help"],
            panel=panel_of(config, spec) or "",
            choices=declared["choices"] or (),
            is_basic=declared["basic"],
            is_argument=declared["argument"],
            default=spec.default if is_own and not self.is_optional else None,
            default_text=_default_text(spec) if words is None else words,
            also=self.also.get(spec.name, ()) + declared["also"],
        )

    @cached_property
    def arguments(self) -> tuple[CommandOption, ...]:
        return tuple(each for each in self.options if each.is_argument)

    @cached_property
    def flags(self) -> Mapping[str, CommandOption]:
        """The options by every spelling of their flags."""
        return {name: each for each in self.options for name in each.names}

    @property
    def is_long(self) -> bool:
        return len(self.options) > MANY

    def call(self, words: Sequence[str], path: str) -> None:
        """Run the command with the words behind its name, or show a help page."""
        wanted = _CommandLine(self)
        wanted.read(words)
        if wanted.help_page:
            print(self.page(path, is_short=self.is_long and wanted.help_page != HELP_ALL))
        else:
            self.run(wanted.values())

    def page(self, path: str, *, is_short: bool) -> str:
        usage = [f"[{each.metavar}]{'...' * each.is_repeated}" for each in self.arguments]
        sections: dict[str, list[tuple[str, str]]] = {}
        for each in self.options:
            if not is_short or each.is_argument or each.is_basic:
                title = "Options" if is_short else each.panel
                sections.setdefault(title, []).append(each.row(is_short=is_short))
        title = "Options" if is_short or "Options" in sections else "Help"
        rows = sections.setdefault(title, [])
        rows.append((", ".join(HELP), HELP_TEXT))
        if self.is_long:
            rows.append((HELP_ALL, HELP_ALL_TEXT))
        count = len(self.options) - len(self.arguments)
        more = f"Defaults are in brackets. {HELP_ALL} shows all {count} options." if is_short else ""
        return _page(f"{path} [OPTIONS] {' '.join(usage)}", self.help, sections, more)


@dataclass(frozen=True, kw_only=True)
class CommandGroup:
    """A command that only has commands; called without one, it shows its help page."""

    name: str
    help: str
    headings: Mapping[str, tuple[Command | CommandGroup, ...]]
    version: str = ""  # what --version prints, where there is such a flag

    @cached_property
    def commands(self) -> Mapping[str, Command | CommandGroup]:
        return {each.name: each for commands in self.headings.values() for each in commands}

    def call(self, words: Sequence[str], path: str) -> None:
        word = words[0] if words else HELP[0]
        if word in HELP:
            print(self.page(path))
        elif self.version and word == VERSION:
            print(self.version)
        elif word.startswith("-"):
            raise no_such_option(word.partition("=")[0], [name for name, _ in self.flags])
        elif word not in self.commands:
            close = difflib.get_close_matches(word, self.commands)
            hint = f" Did you mean {', '.join(map(repr, close))}?" if close else ""
            raise InputError(f"No such command {word!r}.{hint}")
        else:
            self.commands[word].call(words[1:], f"{path} {word}")

    @property
    def flags(self) -> list[tuple[str, str]]:
        version = [(VERSION, VERSION_TEXT)] if self.version else []
        return [*version, (HELP[-1], HELP_TEXT)]

    def page(self, path: str) -> str:
        width = max(len(name) for name in self.commands)
        sections = {
            title: [(f"{each.name:<{width}}", first_line(each.help)) for each in commands]
            for title, commands in self.headings.items()
        }
        version = [(VERSION, VERSION_TEXT)] if self.version else []
        sections["Options"] = [*version, (", ".join(HELP), HELP_TEXT)]
        return _page(f"{path} [OPTIONS] COMMAND [ARGS]...", self.help, sections, "")


class _CommandLine:
    """The words of one command line, sorted by the options they belong to."""

    def __init__(self, command: Command) -> None:
        self.help_page = ""  # the flag that asks for one
        self._command = command
        # Option, how it was named, text or switch.
        self._given: list[tuple[CommandOption, str, str | bool]] = []
        self._arguments: list[str] = []

    def read(self, words: Sequence[str]) -> None:
        left = iter(words)
        for word in left:
            if word == "--":
                self._arguments += left
            elif word.startswith("-") and word != "-":
                self._read_flag(word, left)
            else:
                self._arguments.append(word)

    def _read_flag(self, word: str, left: Iterator[str]) -> None:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
        else:  # -m MODEL or -mMODEL
            name, equals, value = word[:2], word[2:], word[2:]
        option = self._command.flags.get(name)
        if name in HELP or (name == HELP_ALL and self._command.is_long):
            self.help_page = name
        elif option is None:
            raise no_such_option(name, [*self._command.flags, HELP[-1]], self._command.instead)
        elif option.is_switch:
            if equals:
                raise InputError(f"Option '{name}' does not take a value.")
            self._given.append((option, name, name != option.negative))
        else:
            text = value if equals else next(left, None)
            if text is None:
                raise InputError(f"Option '{name}' requires an argument.")
            self._given.append((option, name, text))

    def values(self) -> dict[str, Any]:
        """A value for every option of the command, by name."""
        found = {each.name: each.default for each in self._command.options}
        for option, name, text in (*self._given, *self._placed()):
            value = text if isinstance(text, bool) else option.read(text, name)
            found[option.name] = [*(found[option.name] or ()), value] if option.is_repeated else value
        return found

    def _placed(self) -> Iterator[tuple[CommandOption, str, str]]:
        """The words that have no flag, in the order of the command's arguments."""
        left = list(self._arguments)
        for argument in self._command.arguments:
            count = len(left) if argument.is_repeated else 1
            yield from ((argument, argument.metavar, text) for text in left[:count])
            del left[:count]
        if left:
            raise InputError(f"Got unexpected extra argument(s) ({' '.join(left)})")


def no_such_option(name: str, known: Iterable[str], instead: Mapping[str, str] | None = None) -> InputError:
    if instead and name in instead:
        return InputError(f"No such option: {name}; {instead[name]}")
    close = sorted(difflib.get_close_matches(name, known)) if name.startswith("--") else []
    hint = f" (Possible options: {', '.join(close)})" if close else ""
    return InputError(f"No such option: {name}{hint}")


def dashed(arguments: Sequence[str]) -> list[str]:
    """Arguments with the names of flags spelled in one way: --max_num_seqs is --max-num-seqs."""
    done: list[str] = []
    for index, argument in enumerate(arguments):
        if argument == "--":
            return done + list(arguments[index:])
        name, equals, value = argument.partition("=")
        done.append(name.replace("_", "-") + equals + value if name.startswith("--") else argument)
    return done


def whole_number(text: str | int) -> int:
    """A whole number as people write them: 4096, 4k (4,000), 4K (4,096), 1.5m."""
    found = _NUMBER.fullmatch(str(text).strip().replace("_", ""))
    if found is None:
        raise ValueError
    value = float(found[1]) * _UNITS[found[2]] if "." in found[1] else int(found[1]) * _UNITS[found[2]]
    if value != int(value):
        raise ValueError
    return int(value)


def first_line(help: str) -> str:
    return help.strip().partition("\n")[0]


def _default_text(spec: Field[Any]) -> str:
    default = spec.default
    if isinstance(default, bool):
        return "yes" if default else ""
    if isinstance(default, int) and spec.name.endswith("_bytes"):
        for unit in "GMK":
            if default % _UNITS[unit] == 0:
                return f"{default // _UNITS[unit]}{unit}"
    if isinstance(default, float):
        return f"{default:g}"
    return "" if default is None else str(default)


def _page(usage: str, help: str, sections: Mapping[str, Sequence[tuple[str, str]]], more: str) -> str:
    """A help page. A paragraph of the text that is indented keeps its lines: it holds commands."""
    width = max(min(shutil.get_terminal_size().columns, MOST_WIDTH + 2) - 2, LEAST_WIDTH)
    parts = [_wrapped(f"Usage: {usage.strip()}", width, "", "       ")]
    for paragraph in inspect.cleandoc(help).split("\n\n"):
        is_kept = paragraph.startswith(" ")
        parts.append(textwrap.indent(paragraph, "  ") if is_kept else _wrapped(paragraph, width, "  ", "  "))
    for title, rows in sections.items():
        column = min(max(len(name) for name, _ in rows), FLAG_COLUMN) + 2
        parts.append("\n".join((f"{title}:", *(_row(name, text, column, width) for name, text in rows))))
    if more:
        parts.append(_wrapped(more, width, "", ""))
    return "\n\n".join(parts)


def _row(name: str, text: str, column: int, width: int) -> str:
    indent = " " * (column + 2)
    wrapped = _wrapped(text, width, indent, indent)
    return f"  {name}\n{wrapped}" if len(name) > column - 2 else f"  {name:<{column}}{wrapped.lstrip()}"


def _wrapped(text: str, width: int, first: str, others: str) -> str:
    return textwrap.fill(
        " ".join(text.split()),
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_on_hyphens=False,
        break_long_words=False,
    )
