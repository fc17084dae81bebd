"""What the ledger costs: requests that end per second and share writes, and how long sums over a long ledger take.

    python benchmarks/ledger_cost.py --entries 1000000 --at-once 64

Prints one line of JSON. Writes to a folder of its own, under --folder where the disk of a server is to be measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from contextlib import closing
from pathlib import Path

from paceline.server.billing.ledger import Ledger
from paceline.server.billing.ledger_db import COMPLETE, Closing, LedgerDb, Opening, now_ms, reading
from paceline.server.billing.usage_report import read_usage

DAYS, KEYS = 90, 50
CLASSES = ("interactive", "standard", "spot", "batch")


def opening(seq: int, opened_ms: int) -> Opening:
    return Opening(
        seq=seq,
        id=f"{seq:032x}",
        opened_ms=opened_ms,
        key=f"team-{seq % KEYS}",
        service_class=CLASSES[seq % len(CLASSES)],
        model="a-model-of-some-size",
        route="/v1/chat/completions",
        prompt_tokens=700,
        factor=1_000_000,
        prompt_rate=150_000,
        cached_rate=50_000,
        output_rate=600_000,
        kv_rate=0,
    )


def ended(seq: int) -> Closing:
    sizes = {"cached_tokens": 300, "output_tokens": 200, "block_us": 90_000_000}
    return Closing(
        seq=seq,
        closed_ms=now_ms(),
        state=COMPLETE,
        reason="stop",
        **sizes,
        prompt_nano=60_000,
        output_nano=120_000,
    )


def fill(path: Path, entries: int) -> float:
    """A ledger of so many entries over `DAYS` days; returns the seconds it took."""
    began_s, first_ms = time.perf_counter(), now_ms() - DAYS * 86_400_000
    db = LedgerDb(path)
    for start in range(1, entries + 1, 50_000):
        numbers = range(start, min(entries + 1, start + 50_000))
        times = [first_ms + number * DAYS * 86_400_000 // entries for number in numbers]
        db.write([opening(n, t) for n, t in zip(numbers, times, strict=True)], [ended(n) for n in numbers])
    db.close()
    return time.perf_counter() - began_s


def query_seconds(path: Path) -> dict[str, float]:
    day_ms = now_ms() - 86_400_000
    found = {}
    for name, by, since in (
        ("by_key_24h", ("key",), day_ms),
        ("by_key_all", ("key",), None),
        ("by_day_class_all", ("day", "class"), None),
    ):
        began_s = time.perf_counter()
        rows = read_usage(path, by, since, None)
        assert rows
        found[name] = round(time.perf_counter() - began_s, 3)
    return found


async def finish(ledger: Ledger, at_once: int, seconds: float) -> tuple[int, float]:
    """So many requests under way, each opened, settled and marked again and again: entries, and mean wait."""
    until_s, waited_s, count = time.perf_counter() + seconds, 0.0, 0

    async def client() -> None:
        nonlocal waited_s, count
        while time.perf_counter() < until_s:
            seq = ledger.open(opening(0, now_ms()))
            began_s = time.perf_counter()
            await ledger.complete(ended(seq))
            ledger.release(seq)
            waited_s += time.perf_counter() - began_s
            count += 1

    await asyncio.gather(*(client() for _ in range(at_once)))
    return count, waited_s / max(1, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "ledger.db"
        fill_s = fill(path, options.entries)
        seconds = query_seconds(path)
        ledger = Ledger(LedgerDb(path))
        count, wait_s = asyncio.run(finish(ledger, options.at_once, options.seconds))
        writes = ledger.num_writes
        ledger.close()
        with closing(reading(path)) as connection:
            (total,) = connection.execute("SELECT count(*) FROM entries WHERE state = 'complete'").fetchone()
        assert total == options.entries + count, "every entry is there, once"
        report = {
            "entries": options.entries,
            "fill_s": round(fill_s, 1),
            "ledger_mib": round(path.stat().st_size / 2**20, 1),
            "query_s": seconds,
            "at_once": options.at_once,
            "entries_per_s": round(count / options.seconds),
            "mean_wait_ms": round(wait_s * 1e3, 2),
            "entries_per_write": round(count / max(1, writes), 1),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
