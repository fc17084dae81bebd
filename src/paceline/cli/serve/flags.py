"""`paceline serve` on the command line: options from flags, environment variables and a config file.

Everything is checked before anything heavy is imported; running the server is in `run`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any, ClassVar

from paceline.cli.command import Command, CommandOption
from paceline.cli.flags import engine_options
from paceline.cli.serve.models_file import mapping_of, number, public_name, read_values
from paceline.cli.serve.other_flags import INSTEAD
from paceline.config.options import flag_of, from_values, option, pick
from paceline.config.server import (
    ApiConfig,
    BatchConfig,
    BillingConfig,
    FleetConfig,
    ObserveConfig,
    ProcessConfig,
    ServerConfig,
)
from paceline.errors import ConfigError, InputError

PREFIX = "PACELINE_"
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def merged(
    given: Mapping[str, Any], options: Iterable[CommandOption], environment: Mapping[str, str]
) -> dict[str, Any]:
    """The values of all options that were given anywhere, by field name."""
    specs = {each.name: each.spec for each in options if not each.is_argument}
    values = _from_environment(specs, environment)
    path = given.get("config") or values.get("config")
    if path is not None:
        values = _from_file(Path(path), specs) | values
    return values | {name: value for name, value in given.items() if value is not None}


def _from_environment(specs: Mapping[str, Field[Any]], environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, spec in specs.items():
        variable = PREFIX + public_name(spec).upper()
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
        return number(text, kind)
    except ValueError:
        whole = "whole " if kind is int else ""
        raise ConfigError(
            f"the environment variable {variable} must be a {whole}number, not {text!r:.80}; "
            f"correct it, unset it or give {flag_of(spec)}"
        ) from None


def _from_file(path: Path, specs: Mapping[str, Field[Any]]) -> dict[str, Any]:
    return read_values(mapping_of(path, "--config"), specs, f"--config {path}")


HELP = """
Serve a model over HTTP with the OpenAI API.

  paceline serve
  paceline serve org/model org/other --port 9000
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

    named_models: tuple[str, ...] | None = option(
        None,
        "the model, same as --model; several share the device",
        kind=tuple,
        argument=True,
        metavar="MODEL",
    )
    models: str | None = option(
        None, "YAML file with several models and their shares", basic=True, metavar="FILE"
    )
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
    named, listed = values.pop("named_models", None) or [], values.pop("models", None)
    if len(named) == 1 and listed is None:
        if values.get("model") not in (None, named[0]):
            raise InputError("the model is given twice; give it once, by its place or with --model")
        values["model"] = named[0]
    config = ServerConfig(
        **pick(ServerConfig, values),
        api=from_values(ApiConfig, values),
        billing=from_values(BillingConfig, values),
        batches=from_values(BatchConfig, values),
        observe=from_values(ObserveConfig, values),
    )
    process = from_values(ProcessConfig, values)
    fleet = from_values(FleetConfig, values)
    engine = engine_options(values)
    models = None
    if len(named) > 1 or listed is not None:
        from paceline.cli.serve.models_file import models_of

        if values.get("model") is not None or (named and listed):
            raise InputError("models are given twice; give them once, by their places or with --models")
        models = models_of(named, listed, engine)
        if config.api.model_names:
            raise InputError("--served-model-name names one model; name several in the file of --models")
        if fleet.replicas > 1:
            raise InputError("--replicas is for one model; several models share one engine process")

    from paceline.cli.serve.run import run_server

    if values.get("run_log"):
        from paceline.audit.run_recorder import check_run_log

        check_run_log(values["run_log"])

    code = run_server(config, process, engine, models, fleet)
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
            "Pictures",
        ),
        *("Queue and preemption", "Recording", "Records to keep"),
        *(FleetConfig, ProcessConfig, UnsupportedOptions),
    ),
    # The server rejects requests before the engine's own queue is full.
    defaults={
        "max_queue": "10000; --max-waiting-requests rejects earlier",
        "max_queue_tokens": "100000000; --max-waiting-tokens rejects earlier",
    },
    is_optional=True,
    instead=INSTEAD,
)
