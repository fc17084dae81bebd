"""Streams that survive the deaths of their engines: kill -9, again and again, under mixed traffic.

    python -m benchmarks.failover --engines 3 --streams 300 --kills 20

Every stream (greedy, seeded, two branches, stop strings, logprobs, penalties) is compared with the same one on a server
nobody disturbs. Kills are spread over the run, one after so many streams have ended. The model is a tiny one with
made-up weights, or --model. Fails unless all texts are equal, none saw an error, and each has one entry in the ledger.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import sqlite3
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.harness import HOST, Benchmark, Found, Given, call, flag, served
from tests.model_folder import write_model

FORMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.1},
    {"temperature": 1.2, "n": 2},
    {"temperature": 1.0, "stop": ["qz", "7 "]},
    {"temperature": 0.9, "logprobs": 2},
    {"temperature": 1.0, "frequency_penalty": 0.6, "presence_penalty": 0.3},
)
AT_ONCE = 12

bench = Benchmark(__doc__)


def body_of(number: int, tokens: int) -> dict[str, Any]:
    form = FORMS[number % len(FORMS)]
    prompt = f"Story {number % 50}: once upon a time"
    return {
        "prompt": prompt,
        "max_tokens": tokens,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        **form,
    }


def stream(port: int, body: dict[str, Any]) -> dict[str, Any]:
    """What a client is told: texts, logprobs and reasons by branch, errors, and whether it was complete."""
    found: dict[str, Any] = {"texts": {}, "logprobs": [], "reasons": {}, "errors": [], "done": False}
    connection = http.client.HTTPConnection(HOST, port, timeout=600)
    with closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            return {**found, "errors": [answer.read().decode()]}
        for line in answer:
            if line.startswith(b"data: [DONE]"):
                found["done"] = True
            elif line.startswith(b"data: "):
                note(found, json.loads(line[6:]))
    return found


def note(found: dict[str, Any], chunk: dict[str, Any]) -> None:
    found["errors"] += [chunk["error"]] if "error" in chunk else []
    for choice in chunk.get("choices", ()):
        index, texts = choice["index"], found["texts"]
        texts[index] = texts.get(index, "") + choice["text"]
        found["logprobs"] += (choice.get("logprobs") or {}).get("token_logprobs", [])
        if choice.get("finish_reason"):
            found["reasons"][index] = choice["finish_reason"]


class Killer:
    """Ends a random engine after every so many streams, as soon as another one is there too and some seconds after the
    last one: a stream goes on twice, and one that meets three deaths ends."""

    def __init__(self, port: int, every: int, kills: int, apart_s: float) -> None:
        self._port, self._every, self._kills, self._apart_s = port, every, kills, apart_s
        self._killed_s = -apart_s
        self._lock, self._ended, self._random = threading.Lock(), 0, random.Random(5)
        self.num_kills = 0

    def ended(self) -> None:
        with self._lock:
            self._ended += 1
            now_s = time.monotonic()
            is_early = now_s < self._killed_s + self._apart_s
            if is_early or min(self._ended // self._every, self._kills) <= self.num_kills:
                return
            engines = json.loads(call(self._port, "/v1/admin/fleet")[1])["engines"]
            ready = [each["pid"] for each in engines if each["state"] == "ready"]
            if len(ready) > 1:
                os.kill(self._random.choice(ready), signal.SIGKILL)
                self.num_kills, self._killed_s = self.num_kills + 1, now_s


def told_by(port: int, given: Given, killer: Killer | None = None) -> tuple[list[dict[str, Any]], float]:
    def one(number: int) -> dict[str, Any]:
        found = stream(port, body_of(number, given.tokens))
        if killer is not None:
            killer.ended()
        return found

    began_s = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        told = list(pool.map(one, range(given.streams)))
    return told, time.monotonic() - began_s


@bench.part(
    flag("--engines", 3, "engines of the server"),
    flag("--streams", 300, "streams in all, 12 at a time"),
    flag("--kills", 20, "engines that are killed"),
    flag("--apart-s", 5.0, "seconds between two of them, at least"),
    flag("--tokens", 240, "tokens of each"),
    flag("--model", "", "model; none: a tiny one with made-up weights"),
)
def failover(given: Given) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or str(write_model(Path(folder) / "model", max_position_embeddings=4096))
        options = [model, *([] if given.model else ["--load-format", "dummy"])]
        with served(options) as server:
            expected, undisturbed_s = told_by(server.port, given)
        ledger = Path(folder) / "ledger.db"
        fleet = ["--replicas", str(given.engines), "--max-restarts", "1000", "--restart-backoff-s", "0"]
        with served([*options, *fleet, "--ledger", str(ledger)], Path(folder) / "log") as server:
            killer = Killer(
                server.port, max(1, given.streams // (given.kills + 1)), given.kills, given.apart_s
            )
            told, seconds = told_by(server.port, given, killer)
            page = call(server.port, "/metrics")[1].decode()
        with closing(sqlite3.connect(ledger)) as entries:
            query = "SELECT count(*), count(DISTINCT id) FROM opened JOIN closed USING (seq) WHERE state = 'complete'"
            complete, distinct = entries.execute(query).fetchone()
    errors = [error for each in told for error in each["errors"]]
    equal = sum(mine == theirs for mine, theirs in zip(told, expected, strict=True))
    counted = [
        line.split(" ")[-1] for line in page.splitlines() if "failovers_total{" in line and "resumed" in line
    ]
    found = {
        "streams": given.streams,
        "equal": equal,
        "errors": len(errors),
        "ledger_entries": complete,
        "kills": killer.num_kills,
        "resumed": sum(map(float, counted)),
        "seconds": round(seconds, 1),
        "undisturbed_seconds": round(undisturbed_s, 1),
    }
    print(found, *errors[:3], sep="\n")
    if not (equal == complete == distinct == given.streams and not errors):
        raise SystemExit("streams were lost, changed, or billed otherwise than once")
    return found


if __name__ == "__main__":
    bench.main()
