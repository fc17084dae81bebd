"""The decision log on disk: a chain that shows every change, files that come and go, crashes that are no changes."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.audit.trail import NO_HASH, Retention, TrailDb, TrailReader, chained, trail_files, verify
from paceline.errors import InputError

SMALL = Retention(max_bytes=1, max_files=3)


def filled(folder: Path, count: int = 6, retention: Retention | None = None) -> TrailDb:
    """Pages of two entries each."""
    db = TrailDb(folder, retention)
    for number in range(count):
        db.append([(f"page {number}", 2)])
    return db


def change(folder: Path, statement: str, file: int = 0) -> None:
    """Someone with SQLite changes the file."""
    connection = sqlite3.connect(trail_files(folder)[file])
    connection.executescript(f"DROP TRIGGER no_update; DROP TRIGGER no_delete; {statement}")
    connection.commit()
    connection.close()


def test_a_chain_is_whole_and_goes_on_after_it_was_closed(tmp_path: Path) -> None:
    filled(tmp_path, 3).close()
    db = TrailDb(tmp_path)
    db.append([("more", 1), ("and more", 0)])
    db.close()
    found = verify(tmp_path)
    assert found.first is not None and (found.first.page, found.problem, found.undone) == (1, "", False)
    assert found.end == db.end == (5, 7, found.end.hash) and found.num_entries == 7
    first = next(iter(TrailReader(tmp_path)))
    assert first == (1, 1, 2, "page 0", NO_HASH, chained(NO_HASH, 1, 1, 2, "page 0"))


def test_pages_are_never_changed_by_accident(tmp_path: Path) -> None:
    filled(tmp_path).close()
    for statement in ("UPDATE pages SET body = 'x'", "DELETE FROM pages"):
        connection = sqlite3.connect(trail_files(tmp_path)[0])
        with pytest.raises(sqlite3.IntegrityError, match="never"):
            connection.execute(statement)
        connection.close()


@pytest.mark.parametrize(
    "statement, problem",
    [
        ("UPDATE pages SET body = 'lie' WHERE page = 3", "page 3 (entries 5 to 6) was changed"),
        ("UPDATE pages SET count = 1 WHERE page = 3", "page 3 (entries 5 to 5) was changed"),
        ("UPDATE pages SET first = 4 WHERE page = 3", "page 3 (entries 4 to 5) was changed"),
        ("DELETE FROM pages WHERE page = 3", "page 4 follows page 2"),
        (
            "UPDATE pages SET previous = '00' WHERE page = 4",
            "page 4 (entries 7 to 8) does not go on from the one before it",
        ),
        ("UPDATE pages SET hash = '00' WHERE page = 4", "page 4 (entries 7 to 8) was changed"),
        ("UPDATE pages SET page = page + 1 WHERE page = 6", "page 7 follows page 5"),
    ],
)
def test_what_was_changed_on_purpose_shows(statement: str, problem: str, tmp_path: Path) -> None:
    filled(tmp_path).close()
    change(tmp_path, statement)
    found = verify(tmp_path)
    assert found.problem == problem and not found.undone


def test_a_lie_with_a_hash_of_its_own_breaks_the_chain_after_it(tmp_path: Path) -> None:
    filled(tmp_path).close()
    lie = chained(list(TrailReader(tmp_path))[2].previous, 3, 5, 2, "lie")
    change(tmp_path, f"UPDATE pages SET body = 'lie', hash = '{lie}' WHERE page = 3")
    assert verify(tmp_path).problem == "page 4 (entries 7 to 8) does not go on from the one before it"


def test_an_end_that_was_cut_off_shows_to_a_reader_with_the_head(tmp_path: Path) -> None:
    db = filled(tmp_path)
    db.close()
    assert verify(tmp_path, db.end.hash).problem == ""
    change(tmp_path, "DELETE FROM pages WHERE page > 4")
    assert verify(tmp_path).problem == ""
    assert "is gone or was changed" in verify(tmp_path, db.end.hash).problem


def test_files_follow_one_another_and_the_oldest_go(tmp_path: Path) -> None:
    filled(tmp_path, 9, SMALL).close()
    names = [path.name for path in trail_files(tmp_path)]
    assert names == [f"decisions-{page:012}.db" for page in (8, 9, 10)]
    found = verify(tmp_path)
    assert found.first is not None and (found.first.page, found.end.page, found.problem) == (8, 9, "")
    assert found.first.first == 15 and found.num_entries == 4
    filled(tmp_path, 1, SMALL).close()  # goes on behind a file that is still empty
    assert (verify(tmp_path).end.page, verify(tmp_path).problem) == (10, "")


def test_old_files_go_whatever_their_number(tmp_path: Path) -> None:
    retention = Retention(max_bytes=1, max_files=100, max_age_s=3600.0)
    filled(tmp_path, 3, retention).close()
    os.utime(trail_files(tmp_path)[0], (0, 0))
    filled(tmp_path, 1, retention).close()
    assert trail_files(tmp_path)[0].name == "decisions-000000000002.db" and not verify(tmp_path).problem


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no decision log"):
        verify(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        verify(tmp_path / "nowhere")
    (tmp_path / "decisions-000000000001.db").write_bytes(b"not a database, but long enough to look at" * 9)
    with pytest.raises(InputError, match="cannot be read"):
        verify(tmp_path)
    with pytest.raises(InputError, match="cannot be opened"):
        TrailDb(tmp_path)


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "decisions-000000000001.db")
    connection.execute("CREATE TABLE entries (seq INTEGER)")
    connection.close()
    with pytest.raises(InputError, match="name another folder"):
        TrailDb(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        verify(tmp_path)


# -- a writer that dies ------------------------------------------------------------------------------------

DIES = """
import os, signal, sys
from paceline.audit.trail import TrailDb
db = TrailDb(sys.argv[1])
db.append([("first", 1), ("second", 1)])
db._connection.execute("PRAGMA cache_size=1")  # what a transaction changes goes to the file before it is complete
db._connection.execute("BEGIN")
for page in range(3, 400):
    db._connection.execute("INSERT INTO pages VALUES (?, ?, 1, ?, '', '')", (page, page, "x" * 9000))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def torn(tmp_path: Path) -> Path:
    """A log whose writer was killed in the middle of a write."""
    done = subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    path = trail_files(tmp_path)[0]
    assert path.with_name(path.name + "-journal").exists() and path.stat().st_size > 100_000
    return tmp_path


def test_a_write_that_a_crash_interrupted_is_no_change(torn: Path) -> None:
    before = {path.name: path.read_bytes() for path in torn.iterdir()}
    found = verify(torn)
    assert found.undone and found.problem == "" and found.end.page == 2
    assert {path.name: path.read_bytes() for path in torn.iterdir()} == before  # evidence is left as it was


def test_a_change_beside_an_interrupted_write_still_shows(torn: Path) -> None:
    change(torn, "UPDATE pages SET body = 'lie' WHERE page = 1")
    assert verify(torn).problem == "page 1 (entries 1 to 1) was changed"


def test_the_next_run_goes_on_after_an_interrupted_write(torn: Path) -> None:
    filled(torn, 1).close()
    found = verify(torn)
    assert not found.undone and found.problem == "" and found.end.page == 3
