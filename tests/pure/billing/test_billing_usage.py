"""Sums over a ledger, and the words they are asked for with."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import InvalidRequest
from paceline.server.billing.ledger_db import INCOMPLETE, LedgerDb, Voiding
from paceline.server.billing.usage_report import DAY_MS, read_by, read_time, read_usage
from tests.pure.billing.billing_helpers import ended, opening


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    db = LedgerDb(tmp_path / "ledger.db")
    openings = [
        opening(1, key="a", opened_ms=DAY_MS),
        opening(2, key="b", opened_ms=DAY_MS + 5, service_class="batch"),
        opening(3, key="a", opened_ms=2 * DAY_MS, model="other"),
        opening(4, key="a", opened_ms=2 * DAY_MS + 1),
        opening(5, key="a", opened_ms=2 * DAY_MS + 2),
    ]
    closings = [ended(1), ended(2), ended(3, state=INCOMPLETE, output_nano=0), ended(4)]
    db.write(openings, closings, [Voiding(seq=4, voided_ms=9, reason="not_sent")])
    db.close()
    return tmp_path / "ledger.db"


def test_sums_by_key(ledger: Path) -> None:
    first, second = read_usage(ledger, ("key",), None, None)
    assert first == {
        "key": "a",
        "requests": 4,
        "complete": 1,
        "incomplete": 2,
        "open": 1,
        "prompt_tokens": 10,
        "cached_tokens": 12,
        "output_tokens": 10,
        "recomputed_tokens": 0,
        "preemptions": 0,
        "kv_block_us": 4_500_000,
        "billed_nano_units": 4100 + 1100,  # the one that was voided costs nothing
    }
    assert (second["key"], second["requests"], second["billed_nano_units"]) == ("b", 1, 4100)


def test_several_at_once_and_between_two_times(ledger: Path) -> None:
    found = read_usage(ledger, ("day", "class"), None, 2 * DAY_MS)
    assert [(row["day"], row["class"], row["requests"]) for row in found] == [
        ("1970-01-02", "batch", 1),
        ("1970-01-02", "standard", 1),
    ]
    (whole,) = read_usage(ledger, (), 2 * DAY_MS, None)
    assert whole["requests"] == 3 and "key" not in whole
    assert read_usage(ledger, ("model",), 9 * DAY_MS, None) == []


def test_words_for_times() -> None:
    assert read_time("24h", "since", now_s=200_000.0) == 113_600_000
    assert read_time("1970-01-03", "since") == 2 * DAY_MS
    assert read_time("1970-01-03T01:00+01:00", "since") == 2 * DAY_MS
    assert read_time("9w", "since", now_s=1.0) == 0
    for text in ("yesterday", "24", "-3h", "2026-13-01", ""):
        with pytest.raises(InvalidRequest, match="until must be a time such as 24h") as refused:
            read_time(text, "until")
        assert refused.value.param == "until"


def test_words_for_groups() -> None:
    assert read_by("key, day") == ("key", "day") and read_by("") == ()
    for text in ("name", "key,key"):
        with pytest.raises(InvalidRequest, match="by takes key, class, model, day"):
            read_by(text)
