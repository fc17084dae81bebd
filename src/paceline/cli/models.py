"""`paceline pull | ls | show | rm | warm | train-head`: the models on this machine, the kernels that
compute them, and heads that draft for them.

Owns what is asked and printed; finding, fetching and reading models is the checkpoint part's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.command import Command
from paceline.cli.terminal import columns
from paceline.config.options import option
from paceline.errors import InputError

if TYPE_CHECKING:
    from paceline.models.files.open import Checkpoint
    from paceline.models.spec import ModelSpec
from importlib.util import find_spec

from paceline.config.options import from_values
from paceline.lab.train.train_options import TrainHeadOptions

DEFAULT = "smollm2"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNameOptions:
    """Which model to fetch or describe."""

    name: str = option(
        DEFAULT, "smollm2, minilm, org/model, org/model:file.gguf, or a path", argument=True, metavar="MODEL"
    )
    revision: str | None = option(
        None, "branch, tag or commit on the hub", metavar="NAME", default_text="newest"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveOptions:
    """Which model to remove."""

    kept_name: str | None = option(None, "name as in paceline ls", argument=True, metavar="MODEL")
    yes: bool = option(False, "do not ask", also=("-y",))


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderOptions:
    """Where models are."""

    download_dir: str | None = option(None, "folder for models", metavar="FOLDER", default_text="the caches")


def pull(given: Mapping[str, Any]) -> None:
    from paceline.models.files.fetch import resolve
    from paceline.models.files.open import open_checkpoint
    from paceline.runner.native.code import KernelsUnavailable, has_host_code, host_code

    path = resolve(given["name"], given["revision"], _folder(given))
    open_checkpoint(path)  # a model that cannot run is reported now, not when it is needed
    if not has_host_code():
        with suppress(KernelsUnavailable):  # the first start says it
            host_code(_say)
    print(str(path))


def warm(given: Mapping[str, Any]) -> None:
    from paceline.runner.native.code import has_host_code, host_code

    if has_host_code():
        print("The CPU kernels are compiled.")
        return
    started_s = time.monotonic()
    code = host_code(_say)
    print(f"Compiled the CPU kernels ({code.isa.title}) in {time.monotonic() - started_s:.0f} s.")


def _say(stage: str) -> None:
    print(f"{stage[:1].upper()}{stage[1:]} (about 15 s on two cores)", file=sys.stderr)


def ls(given: Mapping[str, Any]) -> None:
    from paceline.models.files.fetch import kept_models

    models = kept_models(_folder(given))
    if not models:
        print("No models here; paceline pull fetches the default one.")
        return
    width = max(len(model.name) for model in models)
    for model in models:
        print(f"{model.name:<{width}}  {_size(model.num_bytes):>9}  {model.path}")


def show(given: Mapping[str, Any]) -> None:
    from paceline.models.files.fetch import resolve
    from paceline.models.files.open import open_checkpoint

    path = resolve(given["name"], given["revision"], _folder(given), local_only=True)
    print(*columns(_description(open_checkpoint(path)), 2), sep="\n")


def rm(given: Mapping[str, Any]) -> None:
    from paceline.models.files.fetch import find_kept

    if not given["kept_name"]:
        raise InputError("say which model to remove: paceline rm NAME; paceline ls lists them")
    model = find_kept(given["kept_name"], _folder(given))
    if not given["yes"] and not _confirmed(f"Remove {model.name} ({_size(model.num_bytes)}, {model.path})?"):
        print("Kept.")
        raise SystemExit(1)
    model.remove()
    print(f"Removed {model.name}: {_size(model.num_bytes)}.")


def _folder(given: Mapping[str, Any]) -> Path | None:
    return None if given["download_dir"] is None else Path(given["download_dir"])


def _confirmed(question: str) -> bool:
    try:
        answer = input(f"{question} [y/N]: ")
    except EOFError as error:
        raise InputError(
            "there is no terminal to confirm on; give --yes to remove it without a question"
        ) from error
    return answer.strip().lower() in ("y", "yes")


def _description(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    from paceline.models.files.stored import num_parameters

    spec, text = checkpoint.spec, checkpoint.text
    stored = ", ".join(
        f"{dtype} {_size(held.num_bytes)} in {held.num_tensors}"
        for dtype, held in sorted(checkpoint.stored.items(), key=lambda item: -item[1].num_bytes)
    )
    total = sum(held.num_bytes for held in checkpoint.stored.values())
    return [
        ("path", str(checkpoint.path)),
        ("format", checkpoint.kind),
        ("architecture", spec.architecture),
        ("parameters", f"{num_parameters(spec) / 1e6:,.2f} M"),
        ("layers", _layers(spec)),
        ("width", f"{spec.hidden_size}, feed-forward {spec.intermediate_size}"),
        ("heads", f"{spec.num_heads}, {spec.num_kv_heads} for keys and values, of {spec.head_dim}"),
        *([("experts", _experts(spec))] if spec.experts else []),
        ("vocabulary", f"{spec.vocab_size}{', tied to the output' if spec.tied_embeddings else ''}"),
        ("context", f"{spec.max_positions} tokens"),
        *([("rotation", _rotation(spec))] if spec.ropes else []),
        ("weights", f"{_size(total)}; by type and number of tensors: {stored}"),
        ("tokenizer", "yes" if text.tokenizer_json or text.gguf_fields else "no"),
        ("chat template", "yes" if text.chat_template else "no"),
        *([("vectors", _vectors(checkpoint))] if checkpoint.embedding else []),
        *([("labels", ", ".join(spec.encoder.labels))] if spec.encoder and spec.encoder.labels else []),
    ]


def _rotation(spec: ModelSpec) -> str:
    return "; ".join(f"{rope.kind}, theta {rope.theta:g}" for rope in spec.ropes)


def _vectors(checkpoint: Checkpoint) -> str:
    embedding = checkpoint.embedding
    assert embedding is not None
    parts = [f"{checkpoint.spec.hidden_size} numbers, {embedding.kind} of a text"]
    parts += ["of length 1"] if embedding.normalize else []
    parts += [f"trained with {embedding.max_length} tokens"] if embedding.max_length else []
    parts += [f"prompts: {', '.join(embedding.prompts)}"] if embedding.prompts else []
    return ", ".join(parts)


def _layers(spec: ModelSpec) -> str:
    windows = [window for window in spec.windows if window is not None]
    if not windows:
        return str(spec.num_layers)
    return f"{spec.num_layers}, {len(windows)} of them with a window of {windows[0]} tokens"


def _experts(spec: ModelSpec) -> str:
    experts = spec.experts
    assert experts is not None
    return (
        f"{experts.num_experts}, {experts.per_token} for each token, of {experts.intermediate_size}, "
        f"in {len(experts.layers)} layers"
    )


def _size(num_bytes: int) -> str:
    for unit, bytes_each in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= bytes_each:
            return f"{num_bytes / bytes_each:.1f} {unit}"
    return f"{num_bytes} B"


WARM = Command(
    name="warm",
    help="Compile the CPU kernels now, so that no start has to.",
    run=warm,
    takes=(),
)
MODELS = (
    Command(
        name="pull",
        help="Download a model, or check one that is downloaded.",
        run=pull,
        takes=(ModelNameOptions, FolderOptions),
    ),
    Command(name="ls", help="List the models on this machine.", run=ls, takes=(FolderOptions,)),
    Command(
        name="show",
        help="Describe a model on this machine.",
        run=show,
        takes=(ModelNameOptions, FolderOptions),
    ),
    Command(name="rm", help="Remove a model from the cache.", run=rm, takes=(RemoveOptions, FolderOptions)),
)


TRAIN_HELP = """
Train a head that makes drafts for a model.

  paceline train-head smollm2 --text texts.json --out head --minutes 20
  paceline train-head ./my-model --prompts ask.jsonl --out head --kind medusa
  paceline serve --speculative-config '{"model": "head"}'

It learns from the model's answers to prompts, or from texts as they are, on a GPU where there is one. Every minute it
writes the head and prints how many of its guesses on held-out texts the model would take, by depth. Run again, it
goes on where it was stopped.
"""


def train(given: Mapping[str, Any]) -> None:
    options = from_values(TrainHeadOptions, given)
    if find_spec("torch") is None:
        raise InputError("training needs torch, which is not installed: pip install 'paceline[torch]'")
    from paceline.lab.train.head import train_head

    trained = train_head(options)
    first = trained.acceptance[0] if trained.acceptance else 0.0
    print(f"Wrote {trained.path}: {first:.0%} of first drafts are taken on held-out texts")
    print(f"""paceline serve --speculative-config '{{"model": "{trained.path}"}}' uses it.""")


TRAIN_HEAD = Command(name="train-head", help=TRAIN_HELP, run=train, takes=(TrainHeadOptions,))
