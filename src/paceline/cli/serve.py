"""`paceline serve`: the flags of the server, and what is told before and after it runs.

Everything is checked before anything heavy is imported; running it is in `serve_run`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import typer

from paceline.cli.model_options import BATCH, ENGINE, MODEL, engine_options, seed_panel
from paceline.cli.options import Flag, Panel, add_command
from paceline.cli.serve_options import merged
from paceline.cli.shared_flags import DIAL, FORMING, POLICY
from paceline.config import EngineConfig, SchedulerConfig, option
from paceline.config_process import ProcessConfig
from paceline.config_serve import ApiConfig, BatchConfig, BillingConfig, ObserveConfig, ServerConfig
from paceline.errors import InputError

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
    from paceline.cli.serve_run import run_server

    if values.get("run_log"):
        check_run_log(values["run_log"])

    code = run_server(config, process, engine)
    sys.stdout.flush()
    if code:
        raise typer.Exit(code)


def _of(config: type, values: Mapping[str, Any]) -> dict[str, Any]:
    names = {spec.name for spec in fields(config) if "help" in spec.metadata}
    return {name: value for name, value in values.items() if name in names}
