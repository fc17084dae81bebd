"""`paceline pull | ls | show | rm`: the models on this machine.

Owns what is asked and printed; finding, fetching and reading models is the checkpoint part's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.errors import InputError

if TYPE_CHECKING:
    from paceline.checkpoint.open import Checkpoint
    from paceline.checkpoint.spec import ModelSpec

Name = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="smollm2, org/model, org/model:file.gguf, or a path [smollm2]",
        show_default=False,
    ),
]
Kept = Annotated[str, typer.Argument(metavar="MODEL", help="name as in paceline ls")]
Revision = Annotated[
    str | None, typer.Option("--revision", metavar="NAME", help="branch, tag or commit on the hub [newest]")
]
Folder = Annotated[
    Path | None,
    typer.Option("--download-dir", metavar="FOLDER", help="folder for models, instead of the caches"),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="do not ask")]


def add_models(app: typer.Typer) -> None:
    app.command("pull", help="Download a model, or check one that is downloaded.")(pull)
    app.command("ls", help="List the models on this machine.")(ls)
    app.command("show", help="Describe a model on this machine.")(show)
    app.command("rm", help="Remove a model from the cache.")(rm)


def pull(name: Name = "smollm2", revision: Revision = None, download_dir: Folder = None) -> None:
    from paceline.checkpoint.names import resolve
    from paceline.checkpoint.open import open_checkpoint

    path = resolve(name, revision, download_dir)
    open_checkpoint(path)  # what cannot be run is told now, not when it is needed
    typer.echo(str(path))


def ls(download_dir: Folder = None) -> None:
    from paceline.checkpoint.store import kept_models

    models = kept_models(download_dir)
    if not models:
        typer.echo("No models here; paceline pull fetches the default one.")
        return
    width = max(len(model.name) for model in models)
    for model in models:
        typer.echo(f"{model.name:<{width}}  {_size(model.num_bytes):>9}  {model.path}")


def show(name: Name = "smollm2", revision: Revision = None, download_dir: Folder = None) -> None:
    from paceline.checkpoint.names import resolve
    from paceline.checkpoint.open import open_checkpoint

    path = resolve(name, revision, download_dir, local_only=True)
    lines = _description(open_checkpoint(path))
    width = max(len(label) for label, _ in lines)
    for label, text in lines:
        typer.echo(f"{label:<{width}}  {text}")


def rm(name: Kept, yes: Yes = False, download_dir: Folder = None) -> None:
    from paceline.checkpoint.store import find_kept

    model = find_kept(name, download_dir)
    if not yes and not _confirmed(f"Remove {model.name} ({_size(model.num_bytes)}, {model.path})?"):
        typer.echo("Kept.")
        raise typer.Exit(1)
    model.remove()
    typer.echo(f"Removed {model.name}: {_size(model.num_bytes)}.")


def _confirmed(question: str) -> bool:
    try:
        return typer.confirm(question)
    except typer.Abort as error:
        raise InputError(
            "there is no terminal to confirm on; give --yes to remove it without a question"
        ) from error


def _description(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    from paceline.checkpoint.stored import num_parameters

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
        ("rotation", "; ".join(f"{rope.kind}, theta {rope.theta:g}" for rope in spec.ropes)),
        ("weights", f"{_size(total)}; by type and number of tensors: {stored}"),
        ("tokenizer", "yes" if text.tokenizer_json or text.gguf_fields else "no"),
        ("chat template", "yes" if text.chat_template else "no"),
    ]


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
