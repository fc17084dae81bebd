"""Models by name from the Hugging Face hub, through its own library and cache.

The library does what users know of it: HF_HOME, HF_TOKEN and HF_HUB_OFFLINE hold, and what is cached is not
fetched again. Owns which files of a repository are wanted and turns the library's errors into sentences.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from paceline.checkpoint.errors import CheckpointError

# Descriptions, vocabularies and weights; never code and never pickled weights.
WANTED = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
UNWANTED = ("*/*", "consolidated*.safetensors")  # copies in subfolders and in other layouts
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

Snapshot = Callable[..., str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A repository, or one GGUF file in it."""

    repository: str
    file: str | None = None

    def __str__(self) -> str:
        return self.repository if self.file is None else f"{self.repository}:{self.file}"


def parse_hub_name(text: str) -> HubName | None:
    """`org/model` or `org/model:file.gguf`; None where the text is neither."""
    repository, _, file = text.partition(":")
    if not _NAME.fullmatch(repository) or (file and not file.endswith(".gguf")) or text.endswith(":"):
        return None
    if "\\" in file or any(part in ("", ".", "..") for part in (file or "x").split("/")):
        return None
    return HubName(repository=repository, file=file or None)


def fetch_from_hub(
    name: HubName,
    *,
    revision: str | None = None,
    cache: Path | None = None,
    local_only: bool = False,
    snapshot: Snapshot | None = None,
) -> Path:
    """The folder of the repository, or the file in it, in the hub's cache; downloaded where it is not there."""
    if snapshot is None:
        import huggingface_hub

        snapshot = cast(Snapshot, huggingface_hub.snapshot_download)
    options: dict[str, Any] = {"allow_patterns": list(WANTED), "ignore_patterns": list(UNWANTED)}
    if name.file is not None:
        options = {"allow_patterns": [name.file]}
    try:
        folder = Path(
            snapshot(
                name.repository, revision=revision, cache_dir=cache, local_files_only=local_only, **options
            )
        )
    except KeyboardInterrupt:
        raise
    except Exception as error:  # the library and what it stands on have many kinds
        raise CheckpointError(_sentence(error, name, revision, local_only=local_only)) from error
    return _wanted_part(folder, name)


def _wanted_part(folder: Path, name: HubName) -> Path:
    if name.file is None:
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"{name}: has no config.json; if it holds GGUF files, name one as {name.repository}:FILE.gguf"
            )
        return folder
    if not (folder / name.file).is_file():
        raise CheckpointError(f"{name}: the repository has no file of that name")
    return folder / name.file


def _sentence(error: Exception, name: HubName, revision: str | None, *, local_only: bool) -> str:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return (
            f"{name.repository}: its owners grant access one by one; ask for it on its page "
            "and set HF_TOKEN to a token of yours"
        )
    if "RevisionNotFoundError" in kinds:
        return f"{name.repository}: has no revision {revision!r}; leave --revision out to use the newest"
    if "RepositoryNotFoundError" in kinds:
        return (
            f"{name.repository}: there is no such model on the hub, or it is private; "
            "check the name, or set HF_TOKEN to a token that may read it"
        )
    if "HFValidationError" in kinds:
        return f"{name.repository}: is not a name the hub could have; names are like org/model"
    if local_only:
        return f"{name}: is not in the cache; fetch it with: paceline pull {name}"
    if "OfflineModeIsEnabled" in kinds or _offline():
        return f"{name}: is not in the cache and HF_HUB_OFFLINE is set; unset it to download the model"
    if kinds & {"LocalEntryNotFoundError", "ConnectionError", "ConnectError", "TimeoutException"}:
        return f"{name}: is not in the cache and the hub cannot be reached; check the network, or give a local path"
    first = str(error).strip().partition("\n")[0]
    return f"{name}: could not be downloaded: {first or type(error).__name__}"


def _offline() -> bool:
    import huggingface_hub.constants

    return bool(huggingface_hub.constants.HF_HUB_OFFLINE)
