"""What commands share: sampling flags, values of a command line turned into arguments, and files that flags name."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

from paceline.config.engine import ENGINE_CONFIGS
from paceline.config.options import option, pick
from paceline.core.sampling import Offer, SamplingParams, offered
from paceline.errors import InputError, InvalidRequest
from paceline.llm.arguments import split_arguments
from paceline.models.files.sampling_defaults import ANSWER_TOKENS, FALLBACK

_RECOMMENDED = {**FALLBACK.sampling, "max_tokens": ANSWER_TOKENS, "top_k": 0}
# How tokens are chosen: the parameters of `SamplingParams` that commands offer. None: as the model's makers recommend.
SamplingOptions = make_dataclass(
    "SamplingOptions",
    [
        (
            spec.name,
            spec.type | None,
            option(
                None,
                spec.help,
                panel="Sampling",
                kind=spec.kind,
                basic=spec.is_basic,
                default_text=f"the model's own, else {_RECOMMENDED[spec.name]}"
                if spec.name in _RECOMMENDED
                else None,
            ),
        )
        for spec in offered(Offer.FLAG)
    ],
    frozen=True,
)
# What the commands take that answer a prompt with a model.
ANSWERING = (SamplingOptions, "Sampling", "Model", "KV cache", "Pictures")
RANDOM_SEED = {"seed": "random"}


def engine_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options given for `LLM` and `AsyncLLM`, checked as far as that needs no model."""
    chosen = [pick(config, values) for config in ENGINE_CONFIGS]
    given = {name: value for each in chosen for name, value in each.items() if value is not None}
    split_arguments(None, given)
    return given


def find_model(engine: Mapping[str, Any]) -> None:
    """Fetch the model if it is not on this machine; an unknown name is reported before torch is imported."""
    from paceline.models.files.fetch import bring_here

    bring_here(engine.get("model"), engine.get("revision"), engine.get("download_dir"))


def given_sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that were given, checked."""
    given = {name: value for name, value in pick(SamplingOptions, values).items() if value is not None}
    checked_sampling(given)
    return given


def checked_sampling(given: Mapping[str, Any]) -> SamplingParams:
    """Sampling from what was given; a mistake is reported under the name of its flag."""
    try:
        return SamplingParams(**given)
    except InvalidRequest as error:
        name = error.param or ""
        text = str(error)
        if name and text.startswith(name):
            text = "--" + name.replace("_", "-") + text.removeprefix(name)
        raise InputError(text) from error


def command_line() -> str:
    """The command as results may show it: without the password of an address."""
    return re.sub(r"(://[^/@\s:]*):[^/@\s]*@", r"\1:...@", shlex.join(["paceline", *sys.argv[1:]]))


def split_list(text: str, flag: str) -> list[str]:
    """The entries of a list with commas, each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InputError(f"{flag} '{text}' has an empty entry; separate entries by single commas")
    return list(dict.fromkeys(parts))


def writable(flag: str, name: str | None) -> Path | None:
    """The path a flag names, if a file can be written there; None where the flag was not given.

    Commands call it before they start, so that a long run does not end without its file.
    """
    if not name:
        return None
    path, folder = Path(name), Path(name).parent
    if name == "-":
        raise InputError(f"{flag} -: standard output has the table; give the name of a file")
    if path.is_dir():
        raise InputError(f"{flag} {name}: that is a folder; give the name of a file")
    if not folder.is_dir():
        raise InputError(f"{flag} {name}: the folder {folder} does not exist; make it first")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(f"{flag} {name}: there is no permission to write it")
    return path


def writable_folder(flag: str, name: str) -> Path:
    """The folder a flag names, made if it is not there."""
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        reason = problem.strerror or problem
        raise InputError(f"{flag} {name}: the folder cannot be made ({reason})") from problem
    return folder


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    try:
        path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as problem:
        raise InputError(f"cannot write {path}: {problem.strerror or problem}") from problem
