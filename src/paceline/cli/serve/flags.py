"""`paceline serve`: the flags of the server, and what is told before and after it runs.

Everything is checked before anything heavy is imported; running it is in `serve_run`.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any

import typer

from paceline.cli.flags import (
    BATCH,
    DIAL,
    ENGINE,
    FORMING,
    MODEL,
    POLICY,
    Flag,
    Panel,
    add_command,
    engine_options,
    seed_panel,
    whole_number,
)
from paceline.config.engine import EngineConfig, SchedulerConfig
from paceline.config.options import flag_of, option
from paceline.config.process import ProcessConfig
from paceline.config.server import ApiConfig, BatchConfig, BillingConfig, ObserveConfig, ServerConfig
from paceline.errors import ConfigError, InputError

# Options of `paceline serve` from four places


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


HELP = """
Serve a model over HTTP with the OpenAI API.

\b
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
    "api_key": "--api-key would show the key to everybody on this machine; use PACELINE_API_KEY or --api-keys-file",
}
# Names of the same options elsewhere.
ALSO = {"drain_timeout_s": ("--shutdown-timeout",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What `paceline serve` takes beside the options of the server, the model and the engine."""

    named_model: str | None = option(None, "the model; same as --model", kind=str)
    config: str | None = option(None, "YAML file with options", kind=str, basic=True)
    trust_remote_code: bool = option(False, "not supported: no code of a model is run")
    api_key: str | None = option(None, "not supported: use PACELINE_API_KEY or --api-keys-file", kind=str)


def _flags(config: type, *titles: tuple[str, tuple[str, ...]]) -> list[Panel]:
    """Panels for all options of a config; what no title names comes under the last."""
    names = [spec.name for spec in fields(config) if "help" in spec.metadata]
    named = {name for _, group in titles for name in group}
    rest = tuple(name for name in names if name not in named)
    panels = []
    for index, (title, group) in enumerate(titles):
        chosen = group + (rest if index == len(titles) - 1 else ())
        flags = tuple(Flag(name=name, also=ALSO.get(name, ())) for name in chosen)
        panels.append(Panel(title=title, config=config, flags=flags, optional=True))
    return panels


TRAIL = (
    Flag(name="decision_ring"),
    Flag(name="decision_log", metavar="DIR"),
    Flag(name="decision_log_bytes"),
    Flag(name="decision_log_files"),
    Flag(name="decision_log_days"),
    Flag(name="run_log", metavar="FILE"),
    Flag(name="run_log_bytes"),
    Flag(name="run_log_files"),
)
PANELS = (
    Panel(
        title="Server",
        config=ServeOptions,
        optional=True,
        flags=(
            Flag(name="named_model", metavar="MODEL", is_argument=True),
            Flag(name="config", metavar="FILE"),
        ),
    ),
    *_flags(
        ServerConfig,
        ("Server", ("host", "port", "uds", "ssl_certfile", "ssl_keyfile", "allowed_hosts", "api_keys_file")),
        ("Stopping", ("drain_delay_s", "drain_timeout_s")),
        (
            "Logs and metrics",
            tuple(
                spec.name
                for spec in fields(ServerConfig)
                if spec.name.startswith(("log_", "disable_log", "metrics_"))
            ),
        ),
        ("Connections", ()),
    ),
    *_flags(ObserveConfig, ("Logs and metrics", ())),
    *_flags(ApiConfig, ("Requests", ())),
    *_flags(BillingConfig, ("Billing", ())),
    *_flags(BatchConfig, ("Files and batches", ())),
    MODEL,
    seed_panel("0"),
    *ENGINE,
    BATCH,
    Panel(
        title="Engine",
        config=SchedulerConfig,
        optional=True,
        flags=(
            Flag(name="step_target_ms", default="automatic on a GPU, off on a CPU"),
            *DIAL,
            *POLICY,
            Flag(name="watermark"),
            Flag(name="mode"),
            *FORMING,
        ),
    ),
    Panel(title="Engine", config=EngineConfig, optional=True, flags=TRAIL),
    *_flags(ProcessConfig, ("Engine process", ())),
    Panel(
        title="Not supported",
        config=ServeOptions,
        optional=True,
        flags=(Flag(name="trust_remote_code"), Flag(name="api_key")),
    ),
)


def add_serve(app: typer.Typer) -> None:
    add_command(app, "serve", _serve, PANELS, HELP)


def _serve(given: Mapping[str, Any]) -> None:
    values = merged(given, PANELS, {**os.environ, "PACELINE_API_KEY": ""})
    for name, reason in REFUSED.items():
        if values.get(name):
            raise InputError(reason)
    named = values.pop("named_model", None)
    if named is not None:
        if values.get("model") not in (None, named):
            raise InputError("the model is given twice; give it once, by its place or with --model")
        values["model"] = named
    config = ServerConfig(
        **_of(ServerConfig, values),
        api=ApiConfig(**_of(ApiConfig, values)),
        billing=BillingConfig(**_of(BillingConfig, values)),
        batches=BatchConfig(**_of(BatchConfig, values)),
        observe=ObserveConfig(**_of(ObserveConfig, values)),
    )
    process = ProcessConfig(**_of(ProcessConfig, values))
    engine = engine_options(values)

    from paceline.audit.run_recorder import check_run_log
    from paceline.cli.serve.run import run_server

    if values.get("run_log"):
        check_run_log(values["run_log"])

    code = run_server(config, process, engine)
    sys.stdout.flush()
    if code:
        raise typer.Exit(code)


def _of(config: type, values: Mapping[str, Any]) -> dict[str, Any]:
    names = {spec.name for spec in fields(config) if "help" in spec.metadata}
    return {name: value for name, value in values.items() if name in names}
