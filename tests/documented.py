"""The commands that README and guides show, read from their fenced blocks.

A block without a language, or of the language `console`, holds commands: after `$ `, with what they print below, or
one on each line. Everything else that is fenced has a language (`text`, `json`, `yaml`); `python` is a program.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMANDS, PROGRAMS = ("", "console"), ("python",)
PROMPT = "$ "
_FENCE = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_HERE = re.compile(r"<<'?(\w+)'?")
_NUMBER = re.compile(r"\d(?:[\d,.]*\d)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command or a program of a page, and what the page says it prints; nothing where the page does not say."""

    page: str
    text: str
    shown: str = ""
    is_exact: bool = False  # `console`: word for word; else numbers may differ
    is_program: bool = False

    @property
    def name(self) -> str:
        """Its first line with single spaces and without a comment: how tables of the tests name it."""
        first = re.sub(r"\s+# .*", "", self.text.partition("\n")[0])
        return " ".join(first.split())


def documented_pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]


def commands_of(page: Path) -> list[Command]:
    """In the order of the page."""
    found: list[Command] = []
    for _, language, text in _FENCE.findall(page.read_text(encoding="utf-8")):
        if language in PROGRAMS:
            found.append(Command(page=page.name, text=text, is_program=True))
        elif language in COMMANDS:
            found += _commands(page.name, text, is_exact=language == "console")
    return found


def _commands(page: str, text: str, *, is_exact: bool) -> list[Command]:
    has_prompts = any(line.startswith(PROMPT) for line in text.splitlines())
    lines = iter(text.splitlines())
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        if has_prompts and not line.startswith(PROMPT):
            assert found, f"{page}: an output without a command: {line}"
            found[-1][1].append(line)
        elif line.strip() and not line.startswith("#"):
            found.append((_whole(line.removeprefix(PROMPT), lines), []))
    return [
        Command(page=page, text=command, shown="".join(f"{line}\n" for line in shown), is_exact=is_exact)
        for command, shown in found
    ]


def _whole(command: str, lines: Iterator[str]) -> str:
    """A command with the lines that belong to it: continued ones, and those of a here-document."""
    here = _HERE.search(command)
    parts = [command]
    while parts[-1] != here.group(1) if here is not None else parts[-1].endswith("\\"):
        parts.append(next(lines))
    return "\n".join(parts)


def resembles(command: Command, said: str) -> bool:
    """Whether an output is what the page shows: `...` is anything on a line, alone on its line any lines."""
    return re.fullmatch("".join(map(_pattern, _lines(command))), said) is not None


def _lines(command: Command) -> list[str]:
    shown = command.shown.splitlines()
    return shown if command.is_exact else [_NUMBER.sub("\0", line) for line in shown]


def _pattern(line: str) -> str:
    if line.strip() == "...":
        return r"(?:.*\n)*"
    parts = re.split(r"(\.\.\.|\0)", line)
    return "".join({"...": ".*", "\0": r"[\d,.]+"}.get(part, re.escape(part)) for part in parts) + r"\n"
