"""The ledger: nothing twice, nothing changed, what a killed server leaves behind, and a disk that does not take it."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paceline.server.billing import ledger_db
from paceline.server.billing.charge import Charge
from paceline.server.billing.ledger import Ledger
from paceline.server.billing.ledger_db import BadLedger, LedgerDb, Voiding, reading
from paceline.server.billing.pricing import Pricing
from paceline.server.errors import LedgerUnavailable
from tests.pure.billing.billing_helpers import PRICES, ended, opening, record
from tests.waiting import wait_until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def rows(path: Path, columns: str = "seq, state, reason, output_tokens, total_nano") -> list[tuple[Any, ...]]:
    with closing(reading(path)) as connection:
        return connection.execute(f"SELECT {columns} FROM entries ORDER BY seq").fetchall()


def killed(db: LedgerDb, path: Path) -> Path:
    """The files as they lie there when the process ends now."""
    folder = path.parent / "after"
    folder.mkdir()
    for file in path.parent.glob("ledger.db*"):
        shutil.copy(file, folder / file.name)
    return folder / path.name


# ---------------------------------------------------------------- the file


def test_entries_are_added_once_and_stay_as_they_are(path: Path) -> None:
    db = LedgerDb(path)
    db.write([opening(1), opening(2)], [ended(1)])
    db.write([], [ended(1, output_tokens=99, output_nano=1)])  # again: the first one holds
    assert rows(path)[0] == (1, "complete", "stop", 5, 4100)
    with pytest.raises(sqlite3.IntegrityError):
        db.write([opening(3), opening(1)], [])
    assert [row[0] for row in rows(path)] == [1, 2], "all of a transaction or none of it"
    for statement in ("UPDATE closed SET output_nano = 0", "DELETE FROM opened", "DELETE FROM closed"):
        with pytest.raises(sqlite3.IntegrityError, match="kept as they are"):
            db.connection.execute(statement)
    db.close()


def test_an_id_that_comes_again_is_told_apart(path: Path) -> None:
    db = LedgerDb(path)
    db.write([opening(1, id="same")], [])
    db.write([opening(2, id="same")], [ended(2)])
    db.close()
    assert rows(path, "id, state") == [("same", "open"), ("same#2", "complete")]


def test_what_a_killed_server_left_open_is_incomplete_and_costs_nothing(path: Path) -> None:
    db = LedgerDb(path)
    db.write([opening(1), opening(2), opening(3)], [ended(1), ended(2)])
    db.marks.note(1)  # the last frame of 1 was sent, that of 2 was not
    left = killed(db, path)
    db.close()
    after = LedgerDb(left)
    assert after.num_lost == 2 and after.next_seq == 4
    after.close()
    assert rows(left) == [
        (1, "complete", "stop", 5, 4100),
        (2, "incomplete", "server_lost", 0, 0),
        (3, "incomplete", "server_lost", 0, 0),
    ]
    again = LedgerDb(left)
    assert again.num_lost == 0
    again.close()


@pytest.mark.parametrize("case", ["another boot", "no marks", "ended"])
def test_marks_that_say_nothing_void_nothing(path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    db = LedgerDb(path)
    db.write([opening(1)], [ended(1)])
    left = killed(db, path)
    db.close()
    if case == "another boot":
        monkeypatch.setattr(ledger_db, "_BOOT_ID", path.parent / "no such file")
    if case == "no marks":
        Path(f"{left}.sent").unlink()
    after = LedgerDb(path if case == "ended" else left)
    assert after.num_lost == 0
    after.close()
    assert rows(path if case == "ended" else left)[0][1] == "complete"


def test_a_mark_that_was_cut_off_is_none(path: Path) -> None:
    db = LedgerDb(path)
    db.write([opening(1)], [ended(1)])
    db.marks.note(1)
    left = killed(db, path)
    db.close()
    with open(f"{left}.sent", "ab") as file:
        file.write(b"\x02\x00")
    after = LedgerDb(left)
    assert after.num_lost == 0
    after.close()


def test_two_servers_cannot_share_a_ledger(path: Path) -> None:
    db = LedgerDb(path)
    with pytest.raises(BadLedger, match="in use by another server"):
        LedgerDb(path)
    db.close()
    LedgerDb(path).close()


def test_what_is_no_ledger_is_left_alone(tmp_path: Path) -> None:
    text, other = tmp_path / "notes.txt", tmp_path / "other.db"
    text.write_text("not a database, but long enough to look at " * 50)
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE things (x)")
    for file in (text, other):
        before = file.read_bytes()
        with pytest.raises(BadLedger, match=r"is no ledger|not a database"):
            LedgerDb(file)
        with pytest.raises(BadLedger):
            reading(file)
        assert file.read_bytes() == before
    with pytest.raises(BadLedger, match="there is no ledger"):
        reading(tmp_path / "nothing")
    with pytest.raises(BadLedger, match="cannot be used"):
        LedgerDb(tmp_path / "no" / "folder.db")


# ---------------------------------------------------------------- the thread


@pytest.fixture
def db(path: Path) -> LedgerDb:
    """The file behind `ledger`, which closes it."""
    return LedgerDb(path)


@pytest.fixture
def ledger(db: LedgerDb) -> Iterator[Ledger]:
    made = Ledger(db)
    yield made
    made.close()


def open_charge(ledger: Ledger, number: int = 1) -> Charge:
    seq = ledger.open(opening(0, id=f"r{number}"))
    return Charge(Pricing().quote(PRICES, "standard", 0), (ledger, seq))


def test_many_that_end_together_share_a_write(ledger: Ledger, path: Path) -> None:
    async def run() -> None:
        charges = [open_charge(ledger, number) for number in range(200)]
        await asyncio.gather(*(charge.settle(record()) for charge in charges))
        for charge in charges:
            charge.release(record())

    asyncio.run(run())
    assert len(rows(path)) == 200 and {row[1] for row in rows(path)} == {"complete"}
    assert ledger.num_entries == 200 and ledger.num_writes < 50


def test_a_settled_entry_is_on_the_disk(ledger: Ledger, path: Path) -> None:
    charge, done = open_charge(ledger), record()

    async def run() -> None:
        await charge.settle(done)
        assert rows(path)[0][1] == "complete"

    asyncio.run(run())
    charge.release(done)
    charge.give_up(done)
    assert charge.amounts.total == rows(path)[0][4] > 0


def after_close(ledger: Ledger, path: Path) -> tuple[Any, ...]:
    ledger.close()
    (row,) = rows(path)
    return row[1:]


def test_settled_and_not_sent_costs_nothing(ledger: Ledger, path: Path) -> None:
    charge = open_charge(ledger)
    asyncio.run(charge.settle(record()))
    charge.give_up(record(finish_reason="abort"))
    assert after_close(ledger, path) == ("incomplete", "not_sent", 0, 0)
    assert charge.amounts.total == 0


def test_a_client_that_left_pays_for_what_was_sent(ledger: Ledger, path: Path) -> None:
    charge = open_charge(ledger)
    charge.give_up(record(finish_reason="abort", num_sent=3))
    # 100 prompt tokens at the cheaper price, three tokens out
    assert after_close(ledger, path) == ("incomplete", "abort", 3, 100 * 50 + 3 * 600)


@pytest.mark.parametrize(
    "changes",
    [
        {"finish_reason": "abort", "num_sent": 0},
        {"finish_reason": "error", "error_code": "internal_error", "num_sent": 3},
        {"finish_reason": "abort", "error_code": "engine_unavailable", "num_sent": 3},
    ],
)
def test_nothing_sent_or_our_failure_costs_nothing(
    ledger: Ledger, path: Path, changes: dict[str, Any]
) -> None:
    charge = open_charge(ledger)
    charge.give_up(record(**changes))
    row = after_close(ledger, path)
    assert row[0] == "incomplete" and row[2:] == (0, 0)


def test_a_full_disk_rejects_waiting_and_new_requests(db: LedgerDb, ledger: Ledger, path: Path) -> None:
    connection = db.connection
    first = open_charge(ledger, 1)
    asyncio.run(first.settle(record()))
    first.release(record())
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    failed: list[Charge] = []

    async def fill() -> None:
        for number in range(2, 2000):
            charge = open_charge(ledger, number)
            try:
                await charge.settle(record())
            except LedgerUnavailable:
                failed.append(charge)
                return
            charge.release(record())

    asyncio.run(fill())
    assert failed and ledger.problem == "database or disk is full"
    failed[0].give_up(record())
    with pytest.raises(LedgerUnavailable, match="cannot be written"):
        ledger.check()
    connection.execute("PRAGMA max_page_count = 1000000")
    wait_until(lambda: not ledger.problem)
    ledger.check()
    states = [row[1] for row in rows(path)]
    assert states.count("incomplete") == 1 and states[-1] == "incomplete"
    assert set(states) == {"complete", "incomplete"}


def test_a_ledger_that_another_process_has_locked(
    db: LedgerDb, ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.connection.execute("PRAGMA busy_timeout = 20")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        charge = open_charge(ledger)
        with pytest.raises(LedgerUnavailable):
            asyncio.run(charge.settle(record()))
        assert "locked" in ledger.problem
        other.execute("ROLLBACK")
    wait_until(lambda: not ledger.problem)
    assert after_close(ledger, path) == ("incomplete", "ledger_unavailable", 0, 0)


def test_voids_are_written_in_any_order_of_batches(path: Path) -> None:
    db = LedgerDb(path)
    db.write([opening(1)], [ended(1)], [Voiding(seq=1, voided_ms=5, reason="not_sent")])
    db.close()
    assert rows(path)[0][1:] == ("incomplete", "not_sent", 0, 0)


def test_closing_ends_the_thread_and_lets_go_of_the_file(path: Path) -> None:
    ledger = Ledger(LedgerDb(path))
    open_charge(ledger)
    ledger.close()
    assert not any(thread.name == "paceline-ledger" for thread in threading.enumerate())
    assert rows(path, "state") == [("open",)]
    LedgerDb(path).close()
    assert rows(path, "state") == [("incomplete",)]
