"""A server on a machine whose cores other processes use, beside the same server on the quiet machine.

    python -m benchmarks.busy_machine [--model MODEL] [--runs 5] [--json FILE]

Starts one busy loop for each core and stops them again; they end by themselves if this program does. Measured through
`paceline serve`, in turns: a prompt of 200 tokens with 40 tokens of output, quiet and busy; the size of steps, and how
long after the loops it is what it was; what the card and the log say; and a prompt of 801 tokens in steps of 256, of
which no answer may be a 503. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.live import environment, served

PROMPT, OUTPUT, LONG_PROMPT, LARGE_STEP = 200, 40, 801, 256
PROBE_PROMPT, PROBE_OUTPUT = 64, 2
SETTLE_S, MOST_S = 3.0, 60.0
NEARLY = 0.75  # of the sizes on the quiet machine: two starts there differ by a tenth
BUSY = "the machine is busy"
# Ends with the program that started it, however that ends.
LOOP = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


class Loops:
    """One busy loop for each core, while they are wanted."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self._running = [
            subprocess.Popen([sys.executable, "-c", LOOP, str(core)])
            for core in sorted(os.sched_getaffinity(0))
        ]
        time.sleep(SETTLE_S)

    def stop(self) -> None:
        for one in self._running:
            one.kill()
        for one in self._running:
            one.wait()
        self._running = []


@contextlib.contextmanager
def stopped(loops: Loops) -> Iterator[Loops]:
    try:
        yield loops
    finally:
        loops.stop()


class Client:
    """Sends prompts of made-up tokens, none like another."""

    def __init__(self, port: int, seed: int = 0) -> None:
        self._port = port
        self._rng = random.Random(seed)
        _, models = self._ask("GET", "/v1/models")
        self._model = json.loads(models)["data"][0]["id"]

    def complete(self, prompt: int, output: int) -> tuple[int, float]:
        """Status and seconds of one request."""
        body = {
            "model": self._model,
            "prompt": [self._rng.randrange(100, 4000) for _ in range(prompt)],
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
        }
        started_s = time.perf_counter()
        status, answer = self._ask("POST", "/v1/completions", json.dumps(body))
        took_s = time.perf_counter() - started_s
        if status not in (200, 503):
            raise SystemExit(f"the server answered {status}: {answer[:500].decode(errors='replace')}")
        return status, took_s

    def budget(self) -> tuple[int, int]:
        """Tokens of a step beside decoding rows, and of one in which nobody decodes."""
        _, answer = self._ask("GET", "/v1/admin/dial")
        limits = json.loads(answer)["limits"]
        return limits["max_step_tokens"], limits["max_prompt_tokens"]

    def _ask(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def measure(client: Client, runs: int) -> dict[str, Any]:
    """Seconds of some requests one after the other, and the size of steps after them."""
    answers = [client.complete(PROMPT, OUTPUT) for _ in range(runs)]
    seconds = [took_s for _, took_s in answers]
    return {
        "median_s": round(statistics.median(seconds), 3),
        "all_s": [round(took_s, 3) for took_s in seconds],
        "answers_503": sum(status == 503 for status, _ in answers),
        "budget": client.budget(),
    }


def back_after(client: Client, wanted: tuple[int, int]) -> float | None:
    """Seconds until steps are about as large as they were, with a small request now and then; None: not in a minute."""
    started_s = time.perf_counter()
    while time.perf_counter() - started_s < MOST_S:
        client.complete(PROBE_PROMPT, PROBE_OUTPUT)
        now = client.budget()
        if all(size >= NEARLY * before for size, before in zip(now, wanted, strict=True)):
            return round(time.perf_counter() - started_s, 1)
        time.sleep(0.5)
    return None


def study(options: list[str], runs: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with stopped(Loops()) as loops:
        with served(options, folder / "quiet") as port:
            client = Client(port)
            client.complete(PROMPT, OUTPUT)  # the first one pays for memory and threads
            quiet = found["quiet"] = measure(client, runs)
            loops.start()
            found["busy"] = measure(client, runs)
            loops.stop()
            found["budget_back_s"] = back_after(client, quiet["budget"])
            found["quiet_again"] = measure(client, runs)
        found["log_says_busy"] = BUSY in (folder / "quiet").read_text()
        loops.start()
        with served(options, folder / "busy") as port:
            client = Client(port)
            found["card_says_busy"] = BUSY in (folder / "busy").read_text()
            found["started_busy"] = measure(client, runs)
            loops.stop()
            found["started_busy_budget_back_s"] = back_after(client, quiet["budget"])
            found["started_busy_budget"] = client.budget()
        loops.start()
        with served([*options, "--max-num-batched-tokens", str(LARGE_STEP)], folder / "long") as port:
            client = Client(port)
            answers = [client.complete(LONG_PROMPT, 1) for _ in range(runs)]
            found["long_prompt"] = {
                "median_s": round(statistics.median(took_s for _, took_s in answers), 3),
                "answers_503": sum(status == 503 for status, _ in answers),
                "answers_200": sum(status == 200 for status, _ in answers),
            }
    found["slowdown"] = round(found["busy"]["median_s"] / quiet["median_s"], 2)
    found["slowdown_started_busy"] = round(found["started_busy"]["median_s"] / quiet["median_s"], 2)
    return found


def show(found: dict[str, Any]) -> None:
    rows = [
        (f"{PROMPT} tokens and {OUTPUT} more, quiet", f"{found['quiet']['median_s']} s"),
        ("the same, a loop on each core", f"{found['busy']['median_s']} s ({found['slowdown']} times)"),
        (
            "the same, started so",
            f"{found['started_busy']['median_s']} s ({found['slowdown_started_busy']} times)",
        ),
        ("the same, quiet again", f"{found['quiet_again']['median_s']} s"),
        ("tokens of a step, quiet", "{} and {}".format(*found["quiet"]["budget"])),
        ("with the loops", "{} and {}".format(*found["busy"]["budget"])),
        ("back after the loops", f"{found['budget_back_s']} s"),
        (
            "the same, started busy",
            "{} s, {} and {}".format(found["started_busy_budget_back_s"], *found["started_busy_budget"]),
        ),
        ("the card says busy", str(found["card_says_busy"])),
        ("the log says busy", str(found["log_says_busy"])),
        (
            f"{LONG_PROMPT} tokens in steps of {LARGE_STEP}",
            f"{found['long_prompt']['median_s']} s, {found['long_prompt']['answers_503']} answers of 503",
        ),
    ]
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        print(f"{label:<{width}}  {text}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="model to serve; nothing for the default model")
    parser.add_argument("--runs", type=int, default=5, help="requests of each kind")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    options = [*([given.model] if given.model else []), "--device", "cpu", "--no-enable-prefix-caching"]
    with tempfile.TemporaryDirectory() as folder:
        found = study(options, given.runs, Path(folder))
    show(found)
    if given.json is not None:
        given.json.write_text(json.dumps({"environment": environment(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
