"""The decision log: a chain that shows every change, files that come and go, a writer that never holds a step up."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.audit.trail_db import NO_HASH, Retention, TrailDb, chained, read_entries, trail_files, verify
from paceline.audit.trail_writer import TrailWriter
from paceline.core.events import Decision, DecisionKind, Rule
from paceline.core.plan import StepPlan
from paceline.core.recorder import BothRecorders, NoRecorder, StepRecord
from paceline.core.request import RequestId
from paceline.errors import InputError

SMALL = Retention(max_bytes=1, max_files=3)


def filled(folder: Path, count: int = 6, retention: Retention | None = None) -> TrailDb:
    db = TrailDb(folder, retention)
    for number in range(count):
        db.append([f"entry {number}"])
    return db


def change(folder: Path, statement: str, file: int = 0) -> None:
    """Somebody who knows SQLite."""
    connection = sqlite3.connect(trail_files(folder)[file])
    connection.executescript(f"DROP TRIGGER no_update; DROP TRIGGER no_delete; {statement}")
    connection.commit()
    connection.close()


def test_a_chain_is_whole_and_goes_on_after_it_was_closed(tmp_path: Path) -> None:
    filled(tmp_path, 3).close()
    db = TrailDb(tmp_path)
    db.append(["more", "and more"])
    seq, head = db.head
    db.close()
    found = verify(tmp_path)
    assert (found.first, found.last, found.head, found.problem) == (1, 5, head, "") and seq == 5
    first = next(read_entries(tmp_path))
    assert first == (1, "entry 0", NO_HASH, chained(NO_HASH, 1, "entry 0"))


def test_entries_are_never_changed_by_accident(tmp_path: Path) -> None:
    filled(tmp_path).close()
    for statement in ("UPDATE entries SET body = 'x'", "DELETE FROM entries"):
        connection = sqlite3.connect(trail_files(tmp_path)[0])
        with pytest.raises(sqlite3.IntegrityError, match="never"):
            connection.execute(statement)
        connection.close()


@pytest.mark.parametrize(
    "statement, problem",
    [
        ("UPDATE entries SET body = 'lie' WHERE seq = 3", "entry 3 was changed"),
        ("DELETE FROM entries WHERE seq = 3", "entry 4 follows entry 2"),
        ("UPDATE entries SET previous = '00' WHERE seq = 4", "entry 4 does not go on from the one before it"),
        ("UPDATE entries SET hash = '00' WHERE seq = 4", "entry 4 was changed"),
        ("UPDATE entries SET seq = seq + 1 WHERE seq = 6", "entry 7 follows entry 5"),
    ],
)
def test_what_was_changed_on_purpose_shows(statement: str, problem: str, tmp_path: Path) -> None:
    filled(tmp_path).close()
    change(tmp_path, statement)
    assert verify(tmp_path).problem == problem


def test_a_lie_with_a_hash_of_its_own_breaks_the_chain_after_it(tmp_path: Path) -> None:
    filled(tmp_path).close()
    previous = list(read_entries(tmp_path))[2][2]
    change(tmp_path, f"UPDATE entries SET body = 'lie', hash = '{chained(previous, 3, 'lie')}' WHERE seq = 3")
    assert verify(tmp_path).problem == "entry 4 does not go on from the one before it"


def test_an_end_that_was_cut_off_shows_to_who_noted_the_head(tmp_path: Path) -> None:
    db = filled(tmp_path)
    head = db.head[1]
    db.close()
    assert verify(tmp_path, head).problem == ""
    change(tmp_path, "DELETE FROM entries WHERE seq > 4")
    assert verify(tmp_path).problem == "" and "is gone or was changed" in verify(tmp_path, head).problem


def test_files_follow_one_another_and_the_oldest_go(tmp_path: Path) -> None:
    filled(tmp_path, 9, SMALL).close()
    names = [path.name for path in trail_files(tmp_path)]
    assert names == [f"decisions-{seq:012}.db" for seq in (8, 9, 10)]
    found = verify(tmp_path)
    assert (found.first, found.last, found.problem) == (8, 9, "")
    filled(tmp_path, 1, SMALL).close()  # goes on behind a file that is still empty
    assert (verify(tmp_path).last, verify(tmp_path).problem) == (10, "")


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


# -- the writer --------------------------------------------------------------------------------------------


def record(request: int, *decisions: Decision) -> StepRecord:
    keys: tuple[bytes, ...] = ()
    add = ("add", 1.0, request, 9, 11, 0.5, "a", 2, None, None, False, keys, 0, 0, 9, 1)
    plan = StepPlan(seq=1)
    return StepRecord(t_plan=1.0, t_done=1.0, inputs=[add], plan=plan, result=None, decisions=decisions)


def life(request: int) -> tuple[Decision, ...]:
    me = RequestId(request)
    return (
        Decision(DecisionKind.ADMIT, me, Rule.FITS, 0, 1, 1.0, 9, 9, 1, RequestId(1), 0.5),
        Decision(DecisionKind.PREEMPT, me, Rule.FORCED_RECOMPUTE, 4, 2, 1.5),
        Decision(DecisionKind.FINISH, me, Rule.LENGTH, 11, 3, 2.0),
    )


def entries(folder: Path) -> list[dict[str, object]]:
    return [json.loads(body) for _, body, _, _ in read_entries(folder)]


def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen in time")


def test_decisions_are_written_with_a_line_about_each_request_that_ended(tmp_path: Path) -> None:
    writer = TrailWriter(TrailDb(tmp_path))
    both = BothRecorders(NoRecorder(), writer)
    both.step(record(7, *life(7)[:2]))
    both.close([], life(7)[2:])
    both.close([], ())
    kinds = [entry["kind"] for entry in entries(tmp_path)]
    assert kinds == ["decision", "decision", "decision", "request"] and not verify(tmp_path).problem
    summary = entries(tmp_path)[-1]
    facts = {
        "request": 7,
        "tenant": "a",
        "priority": 2,
        "num_prompt": 9,
        "num_output": 11,
        "reason": "length",
    }
    assert {name: summary[name] for name in facts} == facts
    assert (summary["delay_s"], summary["preemptions"]) == (0.5, 1)


def test_batches_are_written_while_the_engine_runs(tmp_path: Path) -> None:
    writer = TrailWriter(TrailDb(tmp_path), interval_s=0.01)
    writer.step(record(7, *life(7)))
    until(lambda: verify(tmp_path).last == 4)
    writer.close([], ())


def test_what_a_slow_disk_does_not_take_is_counted(tmp_path: Path) -> None:
    writer = TrailWriter(TrailDb(tmp_path), interval_s=60.0, most_waiting=2)
    for request in range(4):
        writer.step(record(request, *life(request)))
    writer.close([], ())
    assert entries(tmp_path)[-1] == {"kind": "lost", "decisions": 6}


def test_a_disk_that_fails_fails_no_step(tmp_path: Path) -> None:
    db = TrailDb(tmp_path)
    writer = TrailWriter(db, interval_s=0.01)
    db.close()
    for request in range(3):
        writer.step(record(request, *life(request)))
    writer.close([], ())
    assert verify(tmp_path).last == 0
