"""The folder of blocks: what it keeps over restarts, what it refuses, and that no wrong byte is ever called right."""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
import stat
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core.store import BlockHead
from paceline.errors import ConfigError
from paceline.runner.stores.disk_store import HEADER, RECORD, DiskStore

PLACE = 4096
SIZE = 1 << 20


def open_store(
    folder: Path, *, size: int = SIZE, fingerprint: bytes = b"weights", place: int = PLACE
) -> DiskStore:
    return DiskStore(folder, size=size, place_bytes=place, fingerprint=fingerprint)


def head_of(number: int) -> BlockHead:
    return BlockHead(number.to_bytes(32, "big"), number.to_bytes(16, "big"), number)


def block_of(number: int) -> bytes:
    return random.Random(number).randbytes(PLACE)


def fill(store: DiskStore, count: int) -> None:
    for number in range(count):
        data = memoryview(block_of(number))
        store.write(number, head_of(number), [data[:100], data[100:]])


def read(store: DiskStore, place: int, number: int) -> bytes | None:
    into = memoryview(bytearray(PLACE))
    return bytes(into) if store.read(place, head_of(number), [into[:100], into[100:]]) else None


def right_blocks(store: DiskStore) -> int:
    """Blocks that can be read; a wrong one fails the test."""
    right = 0
    for place, head in list(store.entries()):
        found = read(store, place, head.uses)
        assert found in (None, block_of(head.uses))
        right += found is not None
    return right


def test_blocks_outlive_the_server(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    fill(store, 8)
    key = store.key
    store.close()
    again = open_store(tmp_path / "kv")
    assert again.key == key
    assert list(again.entries()) == [(number, head_of(number)) for number in range(8)]
    assert right_blocks(again) == 8
    again.close()


def test_a_place_holds_what_was_written_last(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, 3)
    store.write(1, head_of(7), [memoryview(block_of(7))])
    assert read(store, 1, 1) is None
    assert read(store, 1, 7) == block_of(7)
    store.close()
    again = open_store(tmp_path)
    assert (1, head_of(7)) in list(again.entries())
    assert read(again, 1, 7) == block_of(7)
    again.close()


def test_only_the_owner_may_look_and_no_other_server_may_write(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    store = open_store(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    with pytest.raises(ConfigError, match="is in use by another server"):
        open_store(folder)
    store.close()
    open_store(folder).close()


def test_all_files_together_stay_below_the_size(tmp_path: Path) -> None:
    store = open_store(tmp_path, size=40 * PLACE)
    for round_ in range(200):
        for place in range(store.num_places):
            store.write(place, head_of(place + round_), [memoryview(block_of(place + round_))])
        used = sum(path.stat().st_size for path in tmp_path.iterdir() if path.name in ("data", "index"))
        assert used <= 40 * PLACE
    store.close()
    again = open_store(tmp_path, size=40 * PLACE)
    assert right_blocks(again) == store.num_places
    again.close()


def flip_data(folder: Path) -> None:
    with (folder / "data").open("r+b") as file:
        for place in range(0, 8, 2):
            file.seek(place * PLACE + 77)
            byte = file.read(1)
            file.seek(place * PLACE + 77)
            file.write(bytes([byte[0] ^ 4]))


def flip_index(folder: Path) -> None:
    text = bytearray((folder / "index").read_bytes())
    text[HEADER.size + 3 * RECORD.size + 20] ^= 1
    (folder / "index").write_bytes(text)


def cut_index(folder: Path) -> None:
    os.truncate(folder / "index", HEADER.size + 5 * RECORD.size + 11)


def cut_data(folder: Path) -> None:
    os.truncate(folder / "data", 3 * PLACE + 5)


def other_data(folder: Path) -> None:
    data = (folder / "data").read_bytes()
    (folder / "data").write_bytes(data[PLACE : 2 * PLACE] + data[:PLACE] + data[2 * PLACE :])


def other_key(folder: Path) -> None:
    (folder / "key").write_bytes(b"x" * 32)


def short_key(folder: Path) -> None:
    (folder / "key").write_bytes(b"x")


def no_index(folder: Path) -> None:
    (folder / "index").unlink()


def noise_for_an_index(folder: Path) -> None:
    (folder / "index").write_bytes(os.urandom(5000))


def no_data(folder: Path) -> None:
    (folder / "data").unlink()


@pytest.mark.parametrize(
    ("spoil", "left"),
    [
        (flip_data, 4),
        (flip_index, 3),
        (cut_index, 5),
        (cut_data, 3),
        (other_data, 6),
        (other_key, 0),
        (short_key, 0),
        (no_index, 0),
        (noise_for_an_index, 0),
        (no_data, 0),
    ],
)
def test_what_was_spoilt_is_missed_and_the_rest_is_right(
    tmp_path: Path, spoil: Callable[[Path], None], left: int
) -> None:
    store = open_store(tmp_path)
    fill(store, 8)
    store.close()
    spoil(tmp_path)
    again = open_store(tmp_path)
    assert right_blocks(again) == left
    fill(again, 8)
    assert right_blocks(again) == 8
    again.close()
    third = open_store(tmp_path)
    assert right_blocks(third) == 8
    third.close()


def test_files_of_another_folder_are_not_believed(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 100)):
        store = open_store(tmp_path / name)
        for place in range(8):
            store.write(place, head_of(first + place), [memoryview(block_of(first + place))])
        store.close()
    shutil.copy(tmp_path / "a" / "data", tmp_path / "b" / "data")
    again = open_store(tmp_path / "b")
    assert right_blocks(again) == 0
    again.close()
    shutil.copy(tmp_path / "a" / "index", tmp_path / "b" / "index")
    again = open_store(tmp_path / "b")
    assert list(again.entries()) == []  # it was made with the key of the other folder
    again.close()


def test_blocks_of_other_weights_are_not_offered_and_their_places_are_used(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, 8)
    store.close()
    other = open_store(tmp_path, fingerprint=b"other weights")
    assert list(other.entries()) == []
    other.close()
    smaller = open_store(tmp_path, place=PLACE // 2)
    assert list(smaller.entries()) == []
    smaller.close()


def test_a_smaller_folder_keeps_what_still_fits(tmp_path: Path) -> None:
    store = open_store(tmp_path, size=64 * PLACE)
    places = store.num_places
    fill(store, places)
    store.close()
    less = open_store(tmp_path, size=40 * PLACE)
    assert 8 < less.num_places < places
    assert right_blocks(less) == less.num_places
    less.close()


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: (folder / "letter.txt").write_text("hello"), "holds other files"),
        (lambda folder: folder.chmod(0o500), "cannot be used"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(
    tmp_path: Path, prepare: Callable[[Path], object], message: str
) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    prepare(folder)
    if message == "cannot be used" and os.access(folder, os.W_OK):
        folder.rmdir()
        folder.write_text("a file")  # for a user who may write everywhere
    with pytest.raises(ConfigError, match=message):
        open_store(folder)


def test_another_version_and_sizes_that_cannot_be_are_refused(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    text = bytearray((tmp_path / "index").read_bytes())
    text[12] = 99
    text[HEADER.size - 4 : HEADER.size] = struct.pack("<I", zlib.crc32(text[: HEADER.size - 4]))
    (tmp_path / "index").write_bytes(text)
    with pytest.raises(ConfigError, match="another version"):
        open_store(tmp_path)
    with pytest.raises(ConfigError, match="holds no block"):
        open_store(tmp_path / "small", size=100)
    with pytest.raises(ConfigError, match="cannot be allocated"):
        open_store(tmp_path / "large", size=1 << 60, place=1 << 40)
    assert (tmp_path / "large" / "data").stat().st_size == 0


def test_measuring_spoils_nothing_that_survived(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, 8)
    assert all(rate > 0 for rate in store.measure())
    assert right_blocks(store) == 8
    fill(store, store.num_places)
    store.measure()
    assert right_blocks(store) == store.num_places - 1
    store.close()


def test_what_was_learned_is_kept_and_a_spoilt_file_is_left_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store.load_tables() == ()
    store.save_tables(((0.1, 1e-300), (), (3.0,)))
    store.close()
    again = open_store(tmp_path)
    assert again.load_tables() == ((0.1, 1e-300), (), (3.0,))
    text = (tmp_path / "tables").read_text()
    for spoilt in (text.replace("3.0", "4.0"), text[:9], "", "x\ny\n", "1\n[1]\n"):
        (tmp_path / "tables").write_text(spoilt)
        assert again.load_tables() == ()
    again.close()


def test_blocks_that_pass_the_page_cache_by_are_the_same_bytes(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    aligned = memoryview(mmap.mmap(-1, PLACE))
    for number in range(8):
        aligned[:] = block_of(number)
        store.write(number, head_of(number), [aligned])
    assert right_blocks(store) == 8  # read in two parts, through the cache
    fill(store, 8)
    for number in range(8):
        assert store.read(number, head_of(number), [aligned])
        assert bytes(aligned) == block_of(number)
    store.close()


def test_a_file_system_that_refuses_to_pass_the_cache_by_is_used_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    direct, write = store._direct, os.pwritev

    def refuse(handle: int, parts: list[memoryview], start: int) -> int:
        if handle == direct:
            raise OSError(errno.EINVAL, "not here")
        return write(handle, parts, start)

    monkeypatch.setattr(os, "pwritev", refuse)
    aligned = memoryview(mmap.mmap(-1, PLACE))
    aligned[:] = block_of(3)
    store.write(3, head_of(3), [aligned])
    assert right_blocks(store) == 1
    store.close()
