"""How long a server takes from its start to its first answer, and where the time goes.

    python benchmarks/startup.py [--model MODEL] [--runs 3] [--json FILE]

Starts `paceline serve` with a model that is in the cache already (PACELINE_CACHE_ROOT) and asks until it answers.
The times of both processes come from outside: the listener from a connection, the engine's process from /proc, its
imports from the libraries it has mapped, loading and readiness from the card and /health, the answer from the answer.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 8,
}
PATIENCE_S = 300.0
STAGES = ("listening", "engine started", "torch mapped", "live", "ready", "answered")


class Start:
    """One start, watched."""

    def __init__(self, model: str | None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.times_s: dict[str, float] = {}
        self.card = ""
        command = [
            sys.executable,
            "-m",
            "paceline",
            "serve",
            "--port",
            str(self.port),
            "--served-model-name",
            "m",
        ]
        self.began_s = time.monotonic()
        self.process = subprocess.Popen(
            [*command, *([model] if model else [])], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._reader = threading.Thread(target=self._read_card)
        self._reader.start()

    def watch(self) -> dict[str, float]:
        try:
            while "ready" not in self.times_s:
                if time.monotonic() - self.began_s > PATIENCE_S or self.process.poll() is not None:
                    raise SystemExit("the server did not start; is the model in the cache?")
                self._look()
                time.sleep(0.01)
            answer = self._ask("POST", "/v1/chat/completions", json.dumps(BODY))
            assert answer == 200, answer
            self._note("answered")
            return self.times_s
        finally:
            self.process.terminate()
            self.process.wait(60)
            self._reader.join()

    def _look(self) -> None:
        if "listening" not in self.times_s:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", self.port)) == 0:
                    self._note("listening")
        engine = next(iter(_children(self.process.pid)), None)
        if engine is not None:
            self._note("engine started")
            if "torch mapped" not in self.times_s and "libtorch" in _maps(engine):
                self._note("torch mapped")
        if "listening" in self.times_s:
            status = self._ask("GET", "/health")
            if status:
                self._note("live")
            if status == 200:
                self._note("ready")

    def _ask(self, method: str, path: str, body: str | None = None) -> int:
        # Before the event loop runs, a connection waits in the system's queue: do not wait with it.
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60 if body else 0.2)
        try:
            connection.request(method, path, body, headers={"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            return answer.status
        except OSError:
            return 0
        finally:
            connection.close()

    def _note(self, stage: str) -> None:
        self.times_s.setdefault(stage, round(time.monotonic() - self.began_s, 3))

    def _read_card(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            self.card = self.process.stdout.read().decode()


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    runs = []
    for _ in range(arguments.runs):
        start = Start(arguments.model)
        runs.append(start.watch())
        loaded = next((line for line in start.card.splitlines() if line.startswith("runs on")), "")
        print("  ".join(f"{stage} {runs[-1][stage]:.2f}" for stage in STAGES), f"| {loaded}", flush=True)
    median = {stage: statistics.median(run[stage] for run in runs) for stage in STAGES}
    found = {"seconds": median, "runs": runs, "machine": platform.machine(), "load": os.getloadavg()[0]}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
