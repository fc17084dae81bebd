"""Usage by key, class or day: sums over a ledger, read while a server may be writing it.

Knows the ledger's columns and nothing of how sums are asked for or shown. Times are Unix milliseconds, days are UTC.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest
from paceline.server.billing.ledger_db import COMPLETE, INCOMPLETE, reading

DAY_MS = 86_400_000
GROUPS = {"key": "key", "class": "class", "model": "model", "day": f"opened_ms / {DAY_MS}"}
SUMS = {
    "requests": "count(*)",
    "complete": f"count(*) FILTER (WHERE state = '{COMPLETE}')",
    "incomplete": f"count(*) FILTER (WHERE state = '{INCOMPLETE}')",
    "open": "count(*) FILTER (WHERE state = 'open')",
    "prompt_tokens": f"coalesce(sum(prompt_tokens) FILTER (WHERE state = '{COMPLETE}'), 0)",
    "cached_tokens": "coalesce(sum(cached_tokens), 0)",
    "output_tokens": "coalesce(sum(output_tokens), 0)",
    "recomputed_tokens": "coalesce(sum(recomputed_tokens), 0)",
    "preemptions": "coalesce(sum(preemptions), 0)",
    "kv_block_us": "coalesce(sum(block_us), 0)",
    "billed_nano_units": "coalesce(sum(total_nano), 0)",
}
_AGO = re.compile(r"([0-9]{1,6})([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def read_usage(
    path: str | Path, by: Sequence[str], since_ms: int | None, until_ms: int | None
) -> list[dict[str, Any]]:
    """One row for each group, the dearest first. Raises BadLedger."""
    columns = [f"{GROUPS[name]} AS g{number}" for number, name in enumerate(by)]
    sums = [f"{text} AS {name}" for name, text in SUMS.items()]
    names = [f"g{number}" for number in range(len(by))]
    where, bounds = [], []
    for bound, test in ((since_ms, "opened_ms >= ?"), (until_ms, "opened_ms < ?")):
        if bound is not None:
            where.append(test)
            bounds.append(bound)
    statement = f"SELECT {', '.join(columns + sums)} FROM entries"
    if where:
        statement += f" WHERE {' AND '.join(where)}"
    if names:
        statement += (
            f" GROUP BY {', '.join(names)} ORDER BY billed_nano_units DESC, requests DESC, {', '.join(names)}"
        )
    with closing(reading(path)) as connection:
        found = connection.execute(statement, bounds).fetchall()
    return [dict(zip([*by, *SUMS], [*_named(row, by), *row[len(by) :]], strict=True)) for row in found]


def read_by(text: str) -> tuple[str, ...]:
    """`key,class`: what to sum by. Raises InvalidRequest."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        if name not in GROUPS or names.count(name) > 1:
            raise InvalidRequest(f"by takes {', '.join(GROUPS)}, each once, not {name!r:.40}", param="by")
    return names


def read_time(text: str, param: str, *, now_s: float | None = None) -> int:
    """A moment: so long ago (90m, 24h, 7d), a date or a date and time (UTC unless it says otherwise)."""
    ago = _AGO.fullmatch(text.strip())
    now_s = time.time() if now_s is None else now_s
    if ago is not None:
        return max(0, int((now_s - int(ago[1]) * _SECONDS[ago[2]]) * 1000))
    try:
        moment = datetime.fromisoformat(text.strip())
        moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        return max(0, (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1))
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"{param} must be a time such as 24h, 7d, 2026-01-31 or 2026-01-31T12:00, not {text!r:.40}",
            param=param,
        ) from None


def _named(row: Sequence[Any], by: Sequence[str]) -> list[Any]:
    day_0 = date(1970, 1, 1)
    return [
        (day_0 + timedelta(days=value)).isoformat() if name == "day" else value
        for name, value in zip(by, row, strict=False)
    ]
