"""`paceline serve` on the command line: options from flags, environment variables and a config file.

Everything is checked before anything heavy is imported; running the server is in `run`.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any, ClassVar

from paceline.cli.command import Command, CommandOption, whole_number
from paceline.cli.flags import engine_options
from paceline.config.options import flag_of, from_values, option, pick
from paceline.config.process import ProcessConfig
from paceline.config.server import ApiConfig, BatchConfig, BillingConfig, ObserveConfig, ServerConfig
from paceline.errors import ConfigError, InputError

PREFIX = "PACELINE_"
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def merged(
    given: Mapping[str, Any], options: Iterable[CommandOption], environment: Mapping[str, str]
) -> dict[str, Any]:
    """The values of all options that were given anywhere, by field name."""
    specs = {each.name: each.spec for each in options}
    values = _from_environment(specs, environment)
    path = given.get("config") or values.get("config")
    if path is not None:
        values = _from_file(Path(path), specs) | values
    return values | {name: value for name, value in given.items() if value is not None}


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


HELP = """
Serve a model over HTTP with the OpenAI API.

  paceline serve
  paceline serve org/model --port 9000
  paceline serve ./folder --host 0.0.0.0 --api-keys-file keys.jsonl
  paceline serve --config server.yaml

An option is read from the command line, else from the environment (PACELINE_PORT for --port), else from --config.
Ctrl-C or SIGTERM lets running requests finish; a second one stops at once. SIGHUP reads the API keys again.
"""
# Known from other servers, and refused for a reason.
REFUSED = {
    "trust_remote_code": "--trust-remote-code is not supported: no code that comes with a model is ever run",
    "api_key": "--api-key would show the key to all users of this machine; use PACELINE_API_KEY or --api-keys-file",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What `paceline serve` takes beside the options of the server, the model and the engine."""

    PANEL: ClassVar = "Server"

    named_model: str | None = option(None, "the model; same as --model", argument=True, metavar="MODEL")
    config: str | None = option(None, "YAML file with options", basic=True, metavar="FILE")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsupportedOptions:
    """Options of other servers that are refused with a reason."""

    PANEL: ClassVar = "Not supported"

    trust_remote_code: bool = option(False, "not supported: no code of a model is run")
    api_key: str | None = option(None, "not supported: use PACELINE_API_KEY or --api-keys-file")


def _serve(given: Mapping[str, Any]) -> None:
    values = merged(given, SERVE.options, {**os.environ, "PACELINE_API_KEY": ""})
    for name, reason in REFUSED.items():
        if values.get(name):
            raise InputError(reason)
    named = values.pop("named_model", None)
    if named is not None:
        if values.get("model") not in (None, named):
            raise InputError("the model is given twice; give it once, by its place or with --model")
        values["model"] = named
    config = ServerConfig(
        **pick(ServerConfig, values),
        api=from_values(ApiConfig, values),
        billing=from_values(BillingConfig, values),
        batches=from_values(BatchConfig, values),
        observe=from_values(ObserveConfig, values),
    )
    process = from_values(ProcessConfig, values)
    engine = engine_options(values)

    from paceline.cli.serve.run import run_server

    if values.get("run_log"):
        from paceline.audit.run_recorder import check_run_log

        check_run_log(values["run_log"])

    code = run_server(config, process, engine)
    sys.stdout.flush()
    if code:
        raise SystemExit(code)


SERVE = Command(
    name="serve",
    help=HELP,
    run=_serve,
    takes=(
        *(ServeOptions, ServerConfig, ObserveConfig, ApiConfig, BillingConfig, BatchConfig),
        *(
            "Model",
            "Adapters",
            "Sampling",
            "KV cache",
            "Step size",
            "Batching",
            "Tuning",
            "Scheduling policy",
        ),
        *("Queue and preemption", "Recording", "Records to keep"),
        *(ProcessConfig, UnsupportedOptions),
    ),
    # The server rejects requests before the engine's own queue is full.
    defaults={
        "max_queue": "10000; --max-waiting-requests rejects earlier",
        "max_queue_tokens": "100000000; --max-waiting-tokens rejects earlier",
    },
    is_optional=True,
)
