"""The models on this machine: those in our cache and those in the Hugging Face hub's. Lists and removes.

Removes only what lies directly in our own folder, or what the hub's library removes itself.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.checkpoint.cache import models_folder
from paceline.checkpoint.default_model import DEFAULT_MODEL, DEFAULT_NAME
from paceline.checkpoint.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptModel:
    """One model that can be used without a download."""

    name: str  # what `resolve` takes
    path: Path
    num_bytes: int
    remove: Callable[[], None]


def kept_models(download_dir: Path | None = None) -> list[KeptModel]:
    own = _own(models_folder(download_dir))
    if download_dir is not None:  # a folder of the user's: only what we put there is ours
        own = (model for model in own if model.name == DEFAULT_NAME)
    return [*own, *_from_hub(download_dir)]


def find_kept(name: str, download_dir: Path | None = None) -> KeptModel:
    models = kept_models(download_dir)
    for model in models:
        if model.name == name:
            return model
    there = ", ".join(model.name for model in models) or "none"
    raise CheckpointError(f"{name!r:.100} is not among the models kept here: {there}")


def _own(folder: Path) -> Iterator[KeptModel]:
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        hidden = path.name.startswith((".", "models--"))
        if hidden or path.is_symlink() or not (path.suffix == ".gguf" or (path / "config.json").is_file()):
            continue
        name = DEFAULT_NAME if path.name == DEFAULT_MODEL.file_name else str(path)
        yield KeptModel(name=name, path=path, num_bytes=_size(path), remove=_remover(path))


def _from_hub(cache: Path | None) -> Iterator[KeptModel]:
    import huggingface_hub
    from huggingface_hub.errors import CacheNotFound

    try:
        info = huggingface_hub.scan_cache_dir(cache)
    except (CacheNotFound, OSError, ValueError):
        return
    for repository in sorted(info.repos, key=lambda found: str(found.repo_id)):
        if repository.repo_type != "model":
            continue
        yield KeptModel(
            name=str(repository.repo_id),
            path=Path(repository.repo_path),
            num_bytes=int(repository.size_on_disk),
            remove=_hub_remover(info, repository),
        )


def _hub_remover(info: Any, repository: Any) -> Callable[[], None]:
    """The library finds what to remove by commit, and copies of a repository share theirs: show it only this one."""
    hashes = [revision.commit_hash for revision in repository.revisions]
    return lambda: replace(info, repos=frozenset((repository,))).delete_revisions(*hashes).execute()


def _remover(path: Path) -> Callable[[], None]:
    def remove() -> None:
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be removed: {error.strerror or error}") from error

    return remove


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
