"""The ledger that docs/guides/billing.md sums up: four requests of two keys."""

from __future__ import annotations

from pathlib import Path

from paceline.server.billing.ledger_db import INCOMPLETE, LedgerDb
from tests.pure.billing.billing_helpers import ended, opening


def write_ledger(path: Path) -> None:
    db = LedgerDb(path)
    sizes = {"cached_tokens": 40, "output_tokens": 7, "block_us": 3_000_000}
    amounts = {"prompt_nano": 9000, "cached_nano": 2000, "output_nano": 1245}
    whole = {**sizes, **amounts}
    again = {**whole, "block_us": 6_500_000, "recomputed_tokens": 12, "preemptions": 2, "kv_nano": 20_000}
    left = {"cached_tokens": 0, "output_tokens": 11, "block_us": 1_000_000, "output_nano": 15_835}
    db.write(
        [opening(n, key="team-b" if n == 4 else "team-a", prompt_tokens=100) for n in (1, 2, 3, 4)],
        [
            ended(1, **whole),
            ended(2, **again),
            ended(3, state=INCOMPLETE, prompt_nano=900, cached_nano=0, **left),
            ended(4, **whole),
        ],
    )
    db.close()
