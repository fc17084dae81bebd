"""How an option is declared and checked.

An option is a dataclass field made with `option(...)`: default, help text, bounds and choices live there, and
validation, command-line flags and the reference page are derived from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, field, fields
from typing import Any, TypeVar

from paceline.errors import ConfigError

Config = TypeVar("Config")

OWN_CLASS = "module:Class"  # among the choices of an option: a class that the operator brings


def option(
    default: Any,
    help: str,
    *,
    panel: str | None = "",
    basic: bool = False,
    kind: type | None = None,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
    flag: str | None = None,
    also: tuple[str, ...] = (),
    metavar: str = "",
    default_text: str | None = None,
    argument: bool = False,
) -> Any:
    """Declare one option: its default, what it means, and the values it accepts.

    `panel` is the group of flags it stands in on a help page: by default that of its config (`PANEL`); None: it has no
    flag. `basic` options are the ones a new user needs: they are on the short help page of commands with many options.
    `kind` is the type of its values; without it that of the default, of the lower bound where the default is None, or
    text. `also` holds other spellings of the flag, `metavar` what stands for the value on a help page, and
    `default_text` what holds when the option is not given, where that is not the default. An `argument` is given by its
    place instead of a flag.
    """
    metadata = {
        "help": help,
        "panel": panel,
        "basic": basic,
        "kind": kind or (type(default) if default is not None else str if low is None else type(low)),
        "low": low,
        "high": high,
        "choices": choices,
        "flag": flag,
        "also": also,
        "metavar": metavar,
        "default_text": default_text,
        "argument": argument,
    }
    return field(default=default, metadata=metadata)


def options_of(config: Any) -> list[Field[Any]]:
    """The fields of a config that are options: made with `option(...)`."""
    return [spec for spec in fields(config) if "help" in spec.metadata]


def pick(config: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `values` that are options of `config`."""
    return {spec.name: values[spec.name] for spec in options_of(config) if spec.name in values}


def from_values(config: type[Config], values: Mapping[str, Any]) -> Config:
    """A config from those of `values` that are its options."""
    return config(**pick(config, values))


class CheckedOptions:
    """Base of a config whose options are checked when it is made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_options(self)


def check_options(config: Any) -> None:
    """Raise `ConfigError` for the first option of `config` that is out of its declared range."""
    for spec in options_of(config):
        _check_option(spec, getattr(config, spec.name))


def _check_option(spec: Field[Any], value: Any) -> None:
    if value is None and spec.default is None:
        return  # not given, and nothing has to be
    flag = flag_of(spec)
    low, high, choices = (spec.metadata[key] for key in ("low", "high", "choices"))
    own = choices is not None and OWN_CLASS in choices and isinstance(value, str) and ":" in value
    if choices is not None and value not in choices and not own:
        raise ConfigError(f"{flag} must be one of {', '.join(choices)}, not {value!r}")
    kind: type = spec.metadata["kind"]
    if kind is bool or kind is str:
        if not isinstance(value, kind):
            raise ConfigError(f"{flag} must be {'true or false' if kind is bool else 'text'}, not {value!r}")
        return
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise ConfigError(f"{flag} must be a {'whole ' if kind is int else ''}number, not {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{flag} must be a finite number, not {value!r}")
    if low is not None and value < low:
        raise ConfigError(f"{flag} must be at least {low}, not {value}")
    if high is not None and value > high:
        raise ConfigError(f"{flag} must be at most {high}, not {value}")


def flag_of(spec: Field[Any]) -> str:
    """The command-line flag of an option."""
    return spec.metadata["flag"] or "--" + spec.name.replace("_", "-")


def panel_of(config: type, spec: Field[Any]) -> str | None:
    """The help panel of an option of `config`; None: it has no flag."""
    panel: str | None = spec.metadata["panel"]
    return getattr(config, "PANEL", "Options") if panel == "" else panel
