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
from contextlib import suppress
from dataclasses import Field, replace
from pathlib import Path
from typing import Any

from paceline.cli.command import whole_number
from paceline.config.engine import ENGINE_CONFIGS
from paceline.config.model_set import ModelEntry, ModelSet, ModelShare
from paceline.config.options import flag_of, from_values, options_of
from paceline.errors import ConfigError, did_you_mean
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
