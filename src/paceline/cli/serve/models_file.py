"""Several models of one server: those named on the command line, or the file of `--models`.

    memory_bytes: 8G                # optional: of weights and KV of the models that are awake at a time
    models:
      - model: org/model            # as on the command line; any option of the model or the engine may follow
        name: chat
        share: 0.7
        pinned: true
      - model: ./folder
        name: code
        share: 0.3
        idle_sleep_s: 300
        kv_cache_memory_bytes: 2G

What an entry does not say, the command line does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.cli.command import whole_number
from paceline.cli.serve.yaml_values import mapping_of, read_values
from paceline.config.engine import ENGINE_CONFIGS
from paceline.config.models import ModelEntry, ModelSet, ModelShare
from paceline.config.options import from_values, options_of
from paceline.errors import ConfigError
from paceline.llm.arguments import split_arguments

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
