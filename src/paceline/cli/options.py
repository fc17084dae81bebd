"""Command-line flags from declared options.

An option is declared once, as a field made with `config.option` (default, help, bounds, choices). This module
turns such fields into the parameters of a command, so that no flag, help text or bound is written twice.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from paceline.config import flag_of

_NUMBER = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)([kmgKMG]?)")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """How one declared option appears on a command line."""

    name: str  # of the field
    also: tuple[str, ...] = ()  # shorter names, given first
    default: str | None = None  # what holds when it is not given, in words, if not the field's own default
    metavar: str | None = None
    is_argument: bool = False  # given by its place, not by a name


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A group of flags in the help page, all fields of one config."""

    title: str
    config: type
    flags: tuple[Flag, ...]
    optional: bool = False  # None unless given, so that the command can tell


def add_command(
    app: typer.Typer, name: str, run: Callable[[Mapping[str, Any]], None], panels: Iterable[Panel], help: str
) -> None:
    """Add a command whose parameters are the panels' flags; `run` gets their values by field name."""

    def command(**values: Any) -> None:
        run(values)

    parameters = [_parameter(panel, flag) for panel in panels for flag in panel.flags]
    signature = inspect.Signature(parameters)
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name, help=help, cls=GroupedCommand)(command)


class GroupedCommand(TyperCommand):
    """A command whose help page shows its flags in groups, as plain text that cuts nothing off."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                title = getattr(parameter, "rich_help_panel", None) or "Help"
                groups.setdefault(title, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def whole_number(text: str | int) -> int:
    """A whole number as people write them: 4096, 4k (4,000), 4K (4,096), 1.5m."""
    found = _NUMBER.fullmatch(str(text).strip().replace("_", ""))
    if found is None:
        raise ValueError
    value = float(found[1]) * _UNITS[found[2]] if "." in found[1] else int(found[1]) * _UNITS[found[2]]
    if value != int(value):
        raise ValueError
    return int(value)


def _number_flag(text: str | int) -> int:
    try:
        return whole_number(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number (such as 4096, 4k or 4K).") from None


def dashed(arguments: Sequence[str]) -> list[str]:
    """Arguments with the names of flags spelled in one way: --max_num_seqs is --max-num-seqs."""
    done: list[str] = []
    for index, argument in enumerate(arguments):
        if argument == "--":
            return done + list(arguments[index:])
        name, equals, value = argument.partition("=")
        done.append(name.replace("_", "-") + equals + value if name.startswith("--") else argument)
    return done


def _parameter(panel: Panel, flag: Flag) -> inspect.Parameter:
    spec = next(spec for spec in fields(panel.config) if spec.name == flag.name)
    assert spec.default is not MISSING, flag.name
    kind = get_type_hints(panel.config)[flag.name]
    if tuple[str, ...] in (kind, *get_args(kind)):  # a flag that may be given several times
        kind = list[str] | None
    shown: dict[str, Any] = {
        "help": _help(spec, flag),
        "rich_help_panel": panel.title,
        "show_default": False,
        "metavar": flag.metavar or _metavar(spec, kind),
    }
    declared: Any
    if flag.is_argument:
        declared = typer.Argument(**shown)
    else:
        if int in (kind, *get_args(kind)):
            shown["parser"] = _number_flag
        declared = typer.Option(*_names(spec, flag, kind), **shown)
    return inspect.Parameter(
        flag.name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[kind | None if panel.optional else kind, declared],
        default=None if panel.optional else spec.default,
    )


def _names(spec: Field[Any], flag: Flag, kind: object) -> tuple[str, ...]:
    own = flag_of(spec)
    if bool in (kind, *get_args(kind)) and spec.default is not False:
        own = f"{own}/--no-{own.removeprefix('--')}"
    return (*flag.also, own)


def _help(spec: Field[Any], flag: Flag) -> str:
    text: str = spec.metadata["help"]
    default = flag.default
    if default is None and spec.default is not None and spec.default is not False:
        default = "yes" if spec.default is True else str(spec.default)
    return f"{text} [{default}]" if default else text


def _metavar(spec: Field[Any], kind: object) -> str | None:
    choices = spec.metadata["choices"]
    if choices:
        return "|".join(choices)
    plain = next((part for part in get_args(kind) if part is not type(None)), kind)
    return {int: "N", float: "NUMBER", str: "TEXT"}.get(plain) if isinstance(plain, type) else None
