"""From the name a user gives for a model to its place on this machine, fetching it where that is needed."""

from __future__ import annotations

from pathlib import Path

from paceline.checkpoint.default_model import DEFAULT_NAME, default_model
from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.hub import HubName, fetch_from_hub, parse_hub_name

FORMS = f"{DEFAULT_NAME} (the default model), the path of a folder or .gguf file, org/model, or org/model:file.gguf"


def resolve(
    name: str | Path | None,
    revision: str | None = None,
    download_dir: Path | str | None = None,
    *,
    local_only: bool = False,
) -> Path:
    """The folder or file of the model called `name`; `local_only` fetches nothing."""
    folder = None if download_dir is None else Path(download_dir).expanduser()
    found = find(name)
    if found is None:
        return default_model(folder, local_only=local_only)
    if isinstance(found, Path):
        return found
    return fetch_from_hub(found, revision=revision, cache=folder, local_only=local_only)


def bring_here(name: str | None, revision: str | None = None, download_dir: str | None = None) -> None:
    """Make sure that the model is on this machine, so that what is wrong with its name is said before anything is set
    up. Asks the hub only where the cache does not have the model."""
    try:
        resolve(name, revision, download_dir, local_only=True)
    except CheckpointError:
        resolve(name, revision, download_dir)


def find(name: str | Path | None) -> Path | HubName | None:
    """What a name stands for: a path that exists, a model on the hub, or None for the default model.

    Raises CheckpointError for any other, at once and without the network.
    """
    if name is None or str(name).lower() == DEFAULT_NAME:
        return None
    path = _existing(name)
    if path is not None:
        return path
    if _is_path(str(name)):
        raise CheckpointError(f"{name}: there is no such file or folder")
    hub_name = parse_hub_name(str(name))
    if hub_name is None:
        raise CheckpointError(f"{name!r:.100} is not a model: give {FORMS}")
    return hub_name


def _existing(name: str | Path) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # a name that no file can have, or the home of nobody
        return None


def _is_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or (name.endswith(".gguf") and ":" not in name)
