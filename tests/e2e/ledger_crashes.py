"""Kills a real server at random moments, again and again on one ledger, and compares the ledger with what clients got.

    python -m tests.e2e.ledger_crashes --kills 50 --seed 1

Clients stream or wait for whole answers, and some leave on purpose. Each request of a life has a separate prompt
length, so that its entry is known even where no byte of an answer came. What has to hold is in `judge`.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import random
import sqlite3
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.server.billing.ledger_db import COMPLETE, INCOMPLETE, LedgerDb, reading
from tests.e2e.client_server import MODEL, ClientServer

KEY = "key-that-pays"
PRICES = {"prompt": 2, "cached_prompt": 0.5, "output": 8.25, "kv_block_second": 0.001}
NUM_CLIENTS = 6
SHORTEST = 8


@dataclass
class Sent:
    """One request, as its client saw it."""

    life: int
    prompt_tokens: int
    is_stream: bool
    leaves: bool
    received: int = 0  # output tokens
    has_ended: bool = False  # its last frame came, or its whole body
    nano_units: int = 0


@dataclass
class Run:
    """Everything that was sent, and where each life's entries begin."""

    sent: list[Sent] = field(default_factory=list)
    first_seq: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self, life: int, choices: random.Random) -> Sent:
        with self.lock:
            number = sum(sent.life == life for sent in self.sent)
            sent = Sent(life, SHORTEST + number, choices.random() < 0.6, choices.random() < 0.1)
            self.sent.append(sent)
            return sent


def keys_file(folder: Path) -> Path:
    path = folder / "paying-keys"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    path.write_text(json.dumps({"name": "payer", "sha256": digest, "prices": PRICES}))
    path.chmod(0o600)
    return path


def ask(port: int, sent: Sent, max_tokens: int) -> None:
    """Send a request and read what comes; an end of the connection is the end of it."""
    body = {
        "model": MODEL,
        "prompt": "p" * sent.prompt_tokens,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": sent.is_stream,
        "return_token_ids": True,
    }
    if sent.is_stream:
        body["stream_options"] = {"include_usage": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        if not sent.is_stream:
            if sent.leaves:
                return
            _take(sent, json.loads(answer.read()))
            sent.has_ended = True
            return
        for event in _events(answer):
            if event is None:
                sent.has_ended = True
                return
            _take(sent, event)
            if sent.leaves and sent.received > 2:
                return
    finally:
        connection.close()


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any] | None]:
    """The events of a stream; None for its last frame."""
    for line in answer:
        if line.startswith(b"data: ") and line.endswith(b"\n"):
            data = line[6:].strip()
            yield None if data == b"[DONE]" else json.loads(data)


def _take(sent: Sent, body: dict[str, Any]) -> None:
    for choice in body["choices"]:
        sent.received += len(choice.get("token_ids") or ())
    if body.get("usage"):
        sent.nano_units = body["usage"]["paceline"]["price"]["total_nano_units"]


def client(server: ClientServer, run: Run, life: int, seed: int, stop: threading.Event) -> None:
    choices = random.Random(seed)
    while not stop.is_set():
        sent = run.next(life, choices)
        try:
            ask(server.port, sent, choices.choice((1, 2, 3, 8, 20)))
        except (OSError, http.client.HTTPException, ValueError):  # a body that breaks off is no JSON
            if not stop.is_set():
                time.sleep(0.01)


def one_life(folder: Path, ledger: Path, run: Run, life: int, choices: random.Random) -> None:
    """Start a server, send it traffic, kill it while it answers."""
    flags = ("--ledger", str(ledger), "--api-keys-file", str(keys_file(folder)))
    server = ClientServer(folder, *flags, "--disable-log-requests")
    stop = threading.Event()
    try:
        server.wait_for(200)
        with closing(reading(ledger)) as connection:
            (last,) = connection.execute("SELECT coalesce(max(seq), 0) FROM opened").fetchone()
        run.first_seq.append(last + 1)
        threads = [
            threading.Thread(target=client, args=(server, run, life, choices.getrandbits(32), stop))
            for _ in range(NUM_CLIENTS)
        ]
        for thread in threads:
            thread.start()
        time.sleep(choices.uniform(0.02, 1.5))
        server.process.kill()
        stop.set()
        for thread in threads:
            thread.join(40)
            assert not thread.is_alive()
    finally:
        stop.set()
        server.close()


def judge(run: Run, ledger: Path) -> Counter[str]:
    """Hold the ledger against what clients saw; returns how often each case came up."""
    LedgerDb(ledger).close()  # as the next server does: what was left open is closed
    with closing(reading(ledger)) as connection:
        connection.row_factory = sqlite3.Row
        rows = connection.execute("SELECT * FROM entries ORDER BY seq").fetchall()
    entries: dict[tuple[int, int], list[sqlite3.Row]] = {}
    for row in rows:
        life = sum(first <= row["seq"] for first in run.first_seq) - 1
        entries.setdefault((life, row["prompt_tokens"]), []).append(row)
    cases: Counter[str] = Counter()
    for sent in run.sent:
        found = entries.pop((sent.life, sent.prompt_tokens), [])
        assert len(found) <= 1, f"two entries: {sent}"
        cases[_case(sent, found[0] if found else None)] += 1
    assert not entries, "entries of requests that were not sent"
    return cases


def _case(sent: Sent, entry: sqlite3.Row | None) -> str:
    if sent.has_ended:
        assert entry is not None and entry["state"] == COMPLETE, f"received and not in the ledger: {sent}"
        assert entry["output_tokens"] == sent.received and entry["total_nano"] == sent.nano_units, dict(entry)
        return "ended, complete"
    if entry is None:
        return "not ended, no entry"
    if entry["state"] == COMPLETE:
        if sent.leaves:  # it asked for fewer tokens than it waits for, or left while the end was on its way
            return "left, complete"
        # Between the mark and the frame: microseconds, and a stream has had all it pays for.
        assert not sent.is_stream or entry["output_tokens"] == sent.received, dict(entry)
        return "marked, and killed before the frame"
    assert entry["state"] == INCOMPLETE
    assert sent.leaves or entry["output_tokens"] <= sent.received, dict(entry)
    if entry["output_tokens"] == 0:
        assert entry["total_nano"] == 0, dict(entry)
    return "not ended, incomplete"


def crash(folder: Path, kills: int, seed: int) -> Counter[str]:
    run, choices = Run(), random.Random(seed)
    ledger = folder / "ledger.db"
    for life in range(kills):
        one_life(_made(folder / f"life{life}"), ledger, run, life, choices)
        cases = judge(run, ledger)
    return cases


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases = crash(Path(folder), options.kills, options.seed)
    print(
        json.dumps({"kills": options.kills, "seed": options.seed, "requests": sum(cases.values()), **cases})
    )


if __name__ == "__main__":
    main()
