"""Uploads: bounded in size, by file and by key, and nothing is left of what was refused."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError, InvalidRequest
from paceline.server.batches.batch_records import FileTooLarge, QuotaExceeded, TooManyFiles
from paceline.server.batches.batch_store import NewFile, StorageFailed, Store
from paceline.server.batches.upload import BadMultipart, Upload, Uploads
from paceline.server.errors import problem_of
from tests.pure.server_batches.batch_helpers import BOUNDARY, CONTENT_TYPE, form, pieces


def take(folder: Path, *bodies: bytes, size: int = 1000, quota: int = 2500, piece: int = 77) -> list[Upload]:
    """Upload forms of one tenant, one after the other."""

    async def go() -> list[Upload]:
        store = Store(folder)
        uploads = Uploads(store, max_bytes=size, quota_bytes=quota)
        try:
            return [await uploads.take("t", CONTENT_TYPE, pieces(body, piece)) for body in bodies]
        finally:
            store.close()

    return asyncio.run(go())


def left(folder: Path) -> list[str]:
    return [path.name for part in ("files", "incoming") for path in (folder / part).iterdir()]


@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_a_file_is_kept_as_it_came(tmp_path: Path, piece: int) -> None:
    content = bytes(range(256)) * 3 + b"\r\n--" + BOUNDARY.encode()[:-1]
    (upload,) = take(tmp_path, form(content, filename="../../etc/passwd"), piece=piece)
    file = upload.file
    assert (file.bytes, file.filename, file.purpose) == (len(content), "../../etc/passwd", "batch")
    assert (tmp_path / "files" / file.id).read_bytes() == content
    assert left(tmp_path) == [file.id]
    assert (tmp_path / "files" / file.id).stat().st_mode & 0o777 == 0o600


def field(name: str, value: str) -> bytes:
    return f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()


def test_unknown_fields_are_named_and_times_are_kept(tmp_path: Path) -> None:
    more = (
        field("expires_after[anchor]", "created_at")
        + field("expires_after[seconds]", "3600")
        + field("x", "y")
    )
    (upload,) = take(tmp_path, more + form())
    assert upload.ignored == ("x",) and upload.file.expires_at == upload.file.created_at + 3600


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (form(purpose="fine-tune"), "purpose"),
        (form(purpose="\xff"), "purpose"),
        (field("purpose", "batch") + f"--{BOUNDARY}--".encode(), "file"),
        (form(b""), "file"),
        (form(filename=""), "file"),
        (form(name="data"), "file"),
        (field("file", "no name") + form(), "file"),
        (field("purpose", "batch") + form(), "file"),
        (form()[: -len(BOUNDARY) - 6] + form(), "file"),
        (field("expires_after[seconds]", "3600") + form(), "expires_after[anchor]"),
        (field("expires_after[anchor]", "created_at") + form(), "expires_after[seconds]"),
        (
            field("expires_after[anchor]", "created_at") + field("expires_after[seconds]", "3599") + form(),
            "expires_after[seconds]",
        ),
    ],
)
def test_a_form_with_a_mistake_is_refused_by_its_field(tmp_path: Path, body: bytes, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        take(tmp_path, body)
    assert refused.value.param == param and left(tmp_path) == []


@pytest.mark.parametrize("cut", [0, 10, 100, 300, -1, -5])
def test_a_form_that_is_cut_off_leaves_nothing(tmp_path: Path, cut: int) -> None:
    with pytest.raises(BadMultipart):
        take(tmp_path, form(b"x" * 200)[:cut].rstrip(b"-\r\n"))
    assert left(tmp_path) == []


def test_sizes_are_limited_at_the_byte(tmp_path: Path) -> None:
    take(tmp_path, form(b"x" * 1000))
    with pytest.raises(FileTooLarge) as refused:
        take(tmp_path, form(b"x" * 1001))
    assert problem_of(refused.value).status == 413
    take(tmp_path, form(b"x" * 1000), form(b"x" * 500))
    with pytest.raises(QuotaExceeded) as full:
        take(tmp_path, form(b"x"))
    assert problem_of(full.value).status == 413
    assert len(left(tmp_path)) == 3


def test_the_number_of_files_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.server.batches.upload.MAX_FILES", 2)
    take(tmp_path, form(), form())
    with pytest.raises(TooManyFiles):
        take(tmp_path, form())


def test_what_arrives_at_once_counts_together(tmp_path: Path) -> None:
    async def go() -> None:
        store = Store(tmp_path)
        uploads = Uploads(store, max_bytes=1000, quota_bytes=1500)
        gate = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            body = form(b"x" * 1000)
            yield body[:-5]
            await gate.wait()
            yield body[-5:]

        first = asyncio.create_task(uploads.take("t", CONTENT_TYPE, slow()))
        await asyncio.sleep(0.05)
        with pytest.raises(QuotaExceeded):
            await uploads.take("t", CONTENT_TYPE, pieces(form(b"x" * 600)))
        await uploads.take("another", CONTENT_TYPE, pieces(form(b"x" * 600)))
        gate.set()
        await first
        assert uploads._arriving == {}
        store.close()

    asyncio.run(go())


@pytest.mark.parametrize("method", ["write", "keep"])
def test_a_full_disk_is_said_so_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(NewFile, method, full)
    with pytest.raises(StorageFailed) as failed:
        take(tmp_path, form(b"x" * 900))
    problem = problem_of(failed.value)
    assert (problem.status, problem.code) == (507, "storage_full")
    assert left(tmp_path) == []


def test_a_folder_is_locked_private_and_of_this_version(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        Store(tmp_path / "open")
    store = Store(tmp_path / "kept")
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="used by another server"):
        Store(tmp_path / "kept")
    store.close()
    Store(tmp_path / "kept").close()
    import sqlite3

    database = sqlite3.connect(tmp_path / "kept" / "batches.sqlite3")
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(ConfigError, match="version 99"):
        Store(tmp_path / "kept")
    (tmp_path / "kept" / "batches.sqlite3").write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match="cannot be used"):
        Store(tmp_path / "kept")
