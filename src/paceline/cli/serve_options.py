"""Options of `paceline serve` from four places: the command line, the environment, a file, the declared defaults.

The first that says something counts. In a file and in the environment an option has the name of its flag:
`--queue-timeout` is `queue-timeout: 60` and `PACELINE_QUEUE_TIMEOUT=60`. Mistakes name the place they were made in.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from paceline.cli.options import Panel, whole_number
from paceline.config import flag_of
from paceline.errors import ConfigError

PREFIX = "PACELINE_"
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def merged(
    given: Mapping[str, Any], panels: Iterable[Panel], environment: Mapping[str, str]
) -> dict[str, Any]:
    """The values of all options that somebody gave, by field name."""
    specs = _specs(panels)
    values = _from_environment(specs, environment)
    path = given.get("config") or values.get("config")
    if path is not None:
        values = _from_file(Path(path), specs) | values
    return values | {name: value for name, value in given.items() if value is not None}


def _specs(panels: Iterable[Panel]) -> dict[str, Field[Any]]:
    """The declared fields by name, as far as the panels show them."""
    shown = [(panel.config, {flag.name for flag in panel.flags}) for panel in panels]
    return {spec.name: spec for config, names in shown for spec in fields(config) if spec.name in names}


def _public_name(spec: Field[Any]) -> str:
    return flag_of(spec).removeprefix("--").replace("-", "_")


def _from_environment(specs: Mapping[str, Field[Any]], environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, spec in specs.items():
        variable = PREFIX + _public_name(spec).upper()
        text = environment.get(variable, "")
        if text:
            values[name] = _read(text, spec, variable)
    return values


def _read(text: str, spec: Field[Any], variable: str) -> Any:
    kind: type = spec.metadata["kind"]
    if kind is bool:
        if text.lower() not in _YES + _NO:
            raise ConfigError(f"{variable} must be true or false, not {text!r:.80}")
        return text.lower() in _YES
    if kind is str:
        return text
    try:
        return _number(text, kind)
    except ValueError:
        whole = "whole " if kind is int else ""
        raise ConfigError(
            f"the environment variable {variable} must be a {whole}number, not {text!r:.80}; "
            f"correct it, unset it or give {flag_of(spec)}"
        ) from None


def _number(text: str, kind: type) -> float:
    """A number as it is written on the command line, in the environment or in a file."""
    return whole_number(text) if kind is int else float(text)


def _from_file(path: Path, specs: Mapping[str, Field[Any]]) -> dict[str, Any]:
    names = {_public_name(spec): name for name, spec in specs.items()} | {name: name for name in specs}
    values: dict[str, Any] = {}
    for key, value in _mapping(path).items():
        name = names.get(str(key).replace("-", "_").removeprefix("__"))
        if name is None or name == "config":
            close = difflib.get_close_matches(str(key).replace("-", "_"), names, 1)
            hint = f"; did you mean {close[0].replace('_', '-')}?" if close else ""
            raise ConfigError(f"--config {path}: there is no option {str(key)!r:.80}{hint}")
        kind = specs[name].metadata["kind"]
        if isinstance(value, list) and kind is str:
            value = ",".join(str(item) for item in value)
        if kind in (int, float) and type(value) in (str, int):  # true is no number
            with suppress(ValueError):
                value = _number(str(value), kind)
        is_wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
        if value is not None and is_wrong:
            wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
            raise ConfigError(f"--config {path}: {key} must be {wanted}, not {value!r:.80}")
        values[name] = value
    return {name: value for name, value in values.items() if value is not None}


def _mapping(path: Path) -> Mapping[Any, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--config {path} is not a YAML file: {' '.join(str(error).split())[:200]}"
        ) from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"--config {path} must hold options as 'name: value' lines")
    return found
