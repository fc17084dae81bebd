"""`paceline serve` on the command line: options from flags, environment variables and a config file.

Everything is checked before anything heavy is imported; running the server is in `run`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from paceline.cli.command import Command, CommandOption, whole_number
from paceline.cli.flags import engine_options
from paceline.config.engine import ENGINE_CONFIGS
from paceline.config.links import LinkConfig
from paceline.config.model_set import ModelEntry, ModelSet, ModelShare
from paceline.config.options import flag_of, from_values, option, options_of, pick
from paceline.config.server import (
    ApiConfig,
    BatchConfig,
    BillingConfig,
    FleetConfig,
    ObserveConfig,
    ProcessConfig,
    ServerConfig,
)
from paceline.errors import ConfigError, InputError, did_you_mean
from paceline.llm.arguments import split_arguments

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


# Values of options in YAML files: their names, their types, and mistakes in them.


def public_name(spec: Field[Any]) -> str:
    return flag_of(spec).removeprefix("--").replace("-", "_")


def number(text: str, kind: type) -> float:
    """A number as it is written on the command line, in the environment or in a file."""
    return whole_number(text) if kind is int else float(text)


def read_values(
    given: Mapping[Any, Any],
    specs: Mapping[str, Field[Any]],
    where: str,
) -> dict[str, Any]:
    """The values of options as a YAML file gives them; `where` begins the sentence about a mistake."""
    names = {public_name(spec): name for name, spec in specs.items()} | {name: name for name in specs}
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = names.get(str(key).replace("-", "_").removeprefix("__"))
        if name is None or name == "config":
            hint = did_you_mean(str(key).replace("_", "-"), [known.replace("_", "-") for known in names])
            raise ConfigError(f"{where}: there is no option {str(key)!r:.80}{hint}")
        kind = specs[name].metadata["kind"]
        if isinstance(value, list) and kind is str:
            value = ",".join(str(item) for item in value)
        if kind in (int, float) and type(value) in (str, int):  # true is no number
            with suppress(ValueError):
                value = number(str(value), kind)
        is_wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
        if value is not None and is_wrong:
            wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
            raise ConfigError(f"{where}: {key} must be {wanted}, not {value!r:.80}")
        values[name] = value
    return {name: value for name, value in values.items() if value is not None}


def mapping_of(path: Path, flag: str) -> Mapping[Any, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{flag} {path} is not a YAML file: {' '.join(str(error).split())[:200]}"
        ) from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{flag} {path} must hold options as 'name: value' lines")
    return found


# Several models of one server: those named on the command line, or the file of `--models`.
#
#     memory_bytes: 8G                # optional: of weights and KV of the models that are awake at a time
#     models:
#       - model: org/model            # as on the command line; any option of the model or the engine may follow
#         name: chat
#         share: 0.7
#         pinned: true
#       - model: ./folder
#         name: code
#         share: 0.3
#         idle_sleep_s: 300
#         kv_cache_memory_bytes: 2G
#
# What an entry does not say, the command line does.

MOST_MODELS = 32
# Files that one engine writes to as long as it lives.
_ONE_WRITER = ("run_log", "decision_log", "kv_disk_dir")


def models_of(named: Sequence[str], listed: str | None, common: Mapping[str, Any]) -> ModelSet:
    """The models of a server; `common` are engine options of all of them. Raises ConfigError."""
    memory = None
    entries: list[Mapping[Any, Any]] = [{"model": name} for name in named]
    if listed is not None:
        entries, memory = _listed(Path(listed))
    where = "the models" if listed is None else f"--models {listed}"
    if not 1 <= len(entries) <= MOST_MODELS:
        raise ConfigError(f"{where}: there must be 1 to {MOST_MODELS} models, not {len(entries)}")
    found = [_entry(each, common, f"{where}: model {place}") for place, each in enumerate(entries, 1)]
    for name in _ONE_WRITER:
        written = [entry.given.get(name) or getattr(entry.model, name, None) for entry in found]
        paths = [path for path in written if path]
        if len(set(paths)) < len(paths):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{where}: models cannot write to one {flag}; give {name} for each in --models")
    total = sum(entry.share.share for entry in found)
    parts = [replace(entry.model, kv_memory_part=entry.share.share / total) for entry in found]
    made = [replace(entry, model=model) for entry, model in zip(found, parts, strict=True)]
    return ModelSet(entries=made, memory_bytes=memory)


def _listed(path: Path) -> tuple[list[Mapping[Any, Any]], int | None]:
    given = dict(mapping_of(path, "--models"))
    entries, memory = given.pop("models", None), given.pop("memory_bytes", None)
    if given:
        raise ConfigError(f"--models {path}: there is no option {str(next(iter(given)))!r:.80}")
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        raise ConfigError(f"--models {path} must hold a list 'models:' with options of each model")
    if memory is None:
        return entries, None
    try:
        memory = 0 if isinstance(memory, bool) else whole_number(memory)
    except (ValueError, TypeError):
        memory = 0
    if memory < 1:
        raise ConfigError(f"--models {path}: memory_bytes must be a number of bytes, such as 8G")
    return entries, memory


def _entry(given: Mapping[Any, Any], common: Mapping[str, Any], where: str) -> ModelEntry:
    configs = (ModelShare, *ENGINE_CONFIGS)
    specs = {spec.name: spec for config in configs for spec in options_of(config)}
    values = read_values(given, specs, where)
    if not values.get("model"):
        raise ConfigError(f"{where}: say which it is, with 'model: NAME'")
    try:
        share = from_values(ModelShare, values)
        own = {name: value for name, value in values.items() if name not in _SHARE}
        model, engine = split_arguments(None, {**common, **own})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return ModelEntry(model=model, given=engine, share=share)


_SHARE = frozenset(spec.name for spec in options_of(ModelShare))


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


# Flags of other servers that are refused in words alone: what people who come from vLLM, SGLang or llama.cpp look for.
_ONE_PROCESS = "one process takes the requests of all engines; leave it out"
_ALWAYS = "that is always done; leave it out"
_POOLING = "what the model offers follows from its files; --pooling makes vectors with any model"
_SAMPLING = "the model's generation_config.json decides; requests give what is to differ"

INSTEAD: Mapping[str, str] = {
    "--pipeline-parallel-size": "take --tensor-parallel-size, which divides each layer",
    **dict.fromkeys(("--data-parallel-size", "--dp-size", "--dp"), "take --replicas"),
    **dict.fromkeys(("--tp", "--tp-size"), "take --tensor-parallel-size"),
    **dict.fromkeys(("--api-server-count", "--distributed-executor-backend"), _ONE_PROCESS),
    **dict.fromkeys(("--enable-chunked-prefill", "--async-scheduling", "--enable-sleep-mode"), _ALWAYS),
    **dict.fromkeys(("--enable-auto-tool-choice", "--jinja", "--enable-metrics"), _ALWAYS),
    **dict.fromkeys(("--continuous-batching", "--cont-batching", "--enable-log-requests"), _ALWAYS),
    "--cors-allow-origins": "take --allowed-origins",
    "--allow-credentials": "keys come in headers and no cookie is used; leave it out",
    **dict.fromkeys(("--task", "--runner", "--convert", "--embedding", "--embeddings"), _POOLING),
    **dict.fromkeys(("--generation-config", "--override-generation-config"), _SAMPLING),
    "--no-enable-chunked-prefill": "prompts are always computed in chunks; see --max-num-batched-tokens",
    "--chunked-prefill-size": "take --max-num-prompt-tokens",
    "--chat-template": "the model's own is used; change chat_template in its tokenizer_config.json",
    "--swap-space": "take --num-host-blocks, in KV blocks",
    "--cpu-offload-gb": "weights stay on one device; take a smaller or quantised model",
    "--preemption-mode": "take --preemption",
    "--policy": "take --scheduling-policy",
    "--schedule-policy": "take --scheduling-policy",
    "--uvicorn-log-level": "take --log-level",
    "--mem-fraction-static": "take --gpu-memory-utilization",
    "--context-length": "take --max-model-len",
    "--ctx-size": "take --max-model-len",
    "--parallel": "take --max-num-seqs",
    "--max-running-requests": "take --max-num-seqs",
    "--max-batch-size": "take --max-num-seqs",
    "--threads": "take --cpu-threads",
    "--n-gpu-layers": "take --device; a model is on a GPU as a whole, or on the CPU",
    "--model-path": "take --model",
    "--hf-token": "set the environment variable HF_TOKEN",
    "--guided-decoding-backend": "there is one backend; leave it out",
    "--grammar-backend": "there is one backend; leave it out",
    "--root-path": "routes begin at /; let the proxy take the prefix away",
}


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
    links = from_values(LinkConfig, values)
    engine = engine_options(values)
    models = None
    if len(named) > 1 or listed is not None:
        if values.get("model") is not None or (named and listed):
            raise InputError("models are given twice; give them once, by their places or with --models")
        models = models_of(named, listed, engine)
        if config.api.model_names:
            raise InputError("--served-model-name names one model; name several in the file of --models")
        if fleet.num_local != 1:
            raise InputError("--replicas and --engines are for one model; several share one engine process")
    for name in _ONE_WRITER if fleet.num_local > 1 else ():
        if values.get(name):
            flag = "--" + name.replace("_", "-")
            raise InputError(f"several engines cannot write to one {flag}: leave out {flag} or --replicas")

    from paceline.cli.serve.run import run_server

    if values.get("run_log"):
        from paceline.audit.run_recorder import check_run_log

        check_run_log(values["run_log"])

    code = run_server(config, process, engine, models, fleet, links)
    sys.stdout.flush()
    if code:
        raise SystemExit(code)


# Of whatever loads a model to serve it.
ENGINE_PANELS = (
    *("Model", "Adapters", "Sampling", "KV cache", "Step size", "Batching", "Tuning", "Scheduling policy"),
    *("Pictures", "Queue and preemption", "Recording", "Records to keep"),
)
SERVE = Command(
    name="serve",
    help=HELP,
    run=_serve,
    takes=(
        *(ServeOptions, ServerConfig, ObserveConfig, ApiConfig, BillingConfig, BatchConfig),
        *ENGINE_PANELS,
        *(FleetConfig, LinkConfig, ProcessConfig, UnsupportedOptions),
    ),
    # The server rejects requests before the engine's own queue is full.
    defaults={
        "max_queue": "10000; --max-waiting-requests rejects earlier",
        "max_queue_tokens": "100000000; --max-waiting-tokens rejects earlier",
    },
    is_optional=True,
    instead=INSTEAD,
)
