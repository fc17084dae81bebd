"""Writes docs/reference/options.md: the flags of every command, as the commands themselves declare them, and the table
of policies in docs/reference/policies.md.

`python -m tools.option_pages` writes the pages; a test compares them with what it would write.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import Field
from pathlib import Path
from typing import Any

from paceline.cli.command import Command, CommandGroup, CommandOption
from paceline.cli.main import PACELINE
from paceline.config.options import flag_of
from paceline.scheduler.policy import POLICY_CLASSES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "options.md"
POLICY_PAGE = PAGE.with_name("policies.md")
POLICY_HEAD = "| name | order | options |\n|---|---|---|\n"


def commands(group: CommandGroup, path: str = "") -> Iterator[tuple[str, Command]]:
    """Every command below a group, by its words."""
    for name, each in group.commands.items():
        if isinstance(each, CommandGroup):
            yield from commands(each, f"{path}{name} ")
        else:
            yield path + name, each


COMMANDS = dict(commands(PACELINE))
HEAD = (
    "# Options\n\n"
    "Generated from `paceline/config` and the commands by `make options`. Numbers may be written with k, m or g "
    "(thousands), or K, M or G (powers of 1,024); dashes and underscores in a flag's name are equivalent. For `serve`, "
    "every flag is also a key of the `--config` file (`port: 9000`) and an environment variable "
    "(`PACELINE_PORT=9000`); the command line comes first, then the environment, then the file.\n"
)


def page() -> str:
    parts = [HEAD]
    for name, command in COMMANDS.items():
        parts.append(f"\n## paceline {name}\n")
        for title in dict.fromkeys(each.panel for each in command.options):
            parts.append(f"\n### {title}\n\n| flag | values | default | meaning |\n|---|---|---|---|\n")
            rows = (_row(each) for each in command.options if each.panel == title)
            parts += [f"| {' | '.join(row)} |\n" for row in rows]
    return "".join(parts)


def _row(each: CommandOption) -> tuple[str, ...]:
    names = [each.metavar] if each.is_argument else [*each.also, flag_of(each.spec)]
    default = each.default_text or ("no" if each.spec.default is False else "")
    shown = ", ".join(f"`{name}`" for name in names)
    return shown, _values(each.spec), default, each.help.replace("|", "\\|")


def _values(spec: Field[Any]) -> str:
    low, high, choices = (spec.metadata[key] for key in ("low", "high", "choices"))
    if choices:
        return ", ".join(choices)
    kind = {int: "whole number", float: "number", bool: "yes or no", str: "text", tuple: "text, several"}
    text = kind.get(spec.metadata["kind"], "text")
    if low is not None and high is not None:
        return f"{text}, {low:,} to {high:,}"
    if low is not None:
        return f"{text}, at least {low:,}"
    return text if high is None else f"{text}, at most {high:,}"


def policy_page() -> str:
    """The page of policies, with its table as their classes declare it."""
    before, _, after = POLICY_PAGE.read_text(encoding="utf-8").partition(POLICY_HEAD)
    return before + POLICY_HEAD + "".join(_policy_rows()) + "\n" + after.partition("\n\n")[2]


def _policy_rows() -> Iterator[str]:
    for name, kind in POLICY_CLASSES.items():
        options = ", ".join(f"`--{option.replace('_', '-')}`" for option in kind.options)
        yield f"| `{name}` | {inspect.getdoc(kind)} | {options} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    POLICY_PAGE.write_text(policy_page(), encoding="utf-8")
