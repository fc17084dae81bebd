"""The server under test as a user starts it, seen from outside: its log, its /metrics, and /proc."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.adapter_folders import adapter_arrays, write_adapter
from tests.kernels import with_kernels
from tests.model_folder import write_model, write_weights
from tests.pure.models.made import spec_of
from tests.soak.inspected import FOLDER_VARIABLE
from tests.soak.plans import (
    ADAPTERS,
    ADMIN,
    ASKED,
    CONTEXT,
    KEYS,
    LIMITED,
    MODEL,
    OTHER,
    SPARE_ADAPTER,
    key_header,
)
from tests.waiting import wait_until

COMMAND = (sys.executable, "-m", "tests.soak.inspected")
ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
HEADER_TIMEOUT_S = 3.0
# A quarter of what 32 users and the stalled readers hold when all are served at once: 10 blocks a user, 40 a reader.
NUM_BLOCKS = {MODEL: 80, OTHER: 72}
DISK_BYTES = 600_000
FLAGS = {
    "port": "0",
    "max-model-len": str(CONTEXT),
    "max-num-seqs": "48",
    "decision-ring": "256",
    "max-num-batched-tokens": "256",
    "request-timeout": "45",  # times that have not come are kept: soon as many as there will be
    "header-timeout": str(HEADER_TIMEOUT_S),
    "stalled-client-timeout": "2",
    "log-format": "json",
}
_SAMPLE = re.compile(r"""^paceline:([a-z_]+)(?:\{((?:[^"}]|"[^"]*")*)\})? ([0-9.e+-]+)$""", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """What the system says of one process."""

    files: int
    threads: int
    memory_kib: int  # anonymous, in memory or swapped out


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a process holds after a collection, see `inspected`."""

    objects: int
    malloc_kib: int


class Metrics:
    """One page of /metrics."""

    def __init__(self, text: str) -> None:
        self._samples = [
            (name, dict(_LABEL.findall(labels)), float(value))
            for name, labels, value in _SAMPLE.findall(text)
        ]

    def value(self, name: str, **labels: str) -> float:
        """The sum of all samples of that name and those labels."""
        return sum(
            value
            for found, with_labels, value in self._samples
            if found == name and labels.items() <= with_labels.items()
        )

    def texts(self, name: str, *labels: str) -> list[str]:
        """What these labels say in the samples of that name, without those that say nothing."""
        found = [with_labels for sample, with_labels, _ in self._samples if sample == name]
        return [said for with_labels in found for label in labels if (said := with_labels[label])]

    def by(self, name: str, label: str, **only: str) -> Counter[str]:
        """The samples of that name, summed by one label."""
        counts: Counter[str] = Counter()
        for found, labels, value in self._samples:
            if found == name and only.items() <= labels.items():
                counts[labels[label]] += round(value)
        return counts


class Served:
    """A server process. `close` it whatever happens."""

    def __init__(self, folder: Path, command: Sequence[str] = COMMAND) -> None:
        models = _write_models(folder)
        flags = [word for name, value in FLAGS.items() for word in (f"--{name}", value)]
        flags += ["--api-keys-file", str(_write_keys(folder))]
        environment = {**os.environ, "PACELINE_CACHE_ROOT": str(with_kernels(folder)), "OMP_NUM_THREADS": "1"}
        environment |= {FOLDER_VARIABLE: str(folder), "PACELINE_ADMIN_KEY": ADMIN}
        self._folder = folder
        self.num_asked = 0
        self.process = subprocess.Popen(
            [*command, "serve", "--models", str(models), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env=environment,
        )
        self.log = LogReader(self.process)
        try:
            self.port = self._wait_for_card()
            self.engine = children_of(self.process.pid)[0]
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> dict[str, int]:
        return {"http": self.process.pid, "engine": self.engine}

    def states(self) -> dict[str, ProcessState]:
        return {name: process_state(pid) for name, pid in self.pids.items()}

    def get(self, path: str) -> tuple[int, bytes]:
        return self._exchange("GET", path)

    def ask(self) -> dict[str, str]:
        """Short greedy answers of all models and adapters, always to the same question."""
        return {name: self._ask(name) for name in ASKED}

    def _ask(self, name: str) -> str:
        body = {"model": name, "prompt": "hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        status, answer = self._exchange("POST", "/v1/completions", json.dumps(body))
        assert status == 200, answer
        self.num_asked += 1
        return str(json.loads(answer)["choices"][0]["text"])

    def disk_bytes(self) -> int:
        """Bytes of the folder that has the KV."""
        return sum(place.stat().st_size for place in (self._folder / "kv").rglob("*") if place.is_file())

    def _exchange(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            name, _, value = key_header("red").partition(": ")
            headers = {name: value, "Connection": "close", "Content-Type": "application/json"}
            connection.request(method, path, body, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def metrics(self) -> Metrics:
        return Metrics(self.get("/metrics")[1].decode())

    def num_tasks(self) -> int:
        """Tasks of the event loop, from the line a signal makes the server write."""
        before = len(self.log.states)
        self.process.send_signal(signal.SIGUSR1)
        wait_until(lambda: len(self.log.states) > before, 30.0, says="the server did not write its state")
        return self.log.states[-1]

    def held(self) -> dict[str, Held]:
        """What both processes hold. Ask at rest."""
        return {name: self._held(pid) for name, pid in self.pids.items()}

    def _held(self, pid: int) -> Held:
        place = self._folder / str(pid)
        place.unlink(missing_ok=True)
        os.kill(pid, signal.SIGUSR2)
        wait_until(place.exists, 30.0, says="a process did not tell what it holds")
        return Held(**json.loads(place.read_text()))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60.0)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.log.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _wait_for_card(self) -> int:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(b"API: "):
                return int(line.split(b":")[-1].partition(b"/")[0])
        raise RuntimeError("the server ended before it was ready:\n" + "\n".join(self.log.last))


class LogReader(threading.Thread):
    """Reads the log to its end and keeps what matters of it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        super().__init__(daemon=True)
        assert process.stderr is not None
        self._lines = process.stderr
        self.states: list[int] = []  # tasks, each time the state was written
        self.complaints: list[str] = []  # warnings and errors
        self.num_requests = 0
        self.last: list[str] = []
        self.start()

    def run(self) -> None:
        with self._lines:
            for line in self._lines:
                self._take(line.decode())

    def _take(self, line: str) -> None:
        self.last = [*self.last[-30:], line.rstrip()]
        try:
            found = json.loads(line)
        except ValueError:
            return
        # What other processes do to the machine is not the server's fault.
        is_of_others = found["message"].startswith(("the machine is busy", "the machine is free again"))
        if found["level"] in ("warning", "error") and not is_of_others:
            self.complaints = [*self.complaints[:99], line[:2000]]
        if found["message"] == "state":
            self.states.append(found["tasks"])
        if "status" in found and "time_s" in found:
            self.num_requests += 1


def process_state(pid: int) -> ProcessState:
    place = Path(f"/proc/{pid}")
    fields: Mapping[str, str] = dict(
        line.split(":", 1) for line in (place / "status").read_text().splitlines()
    )
    memory = sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap"))
    return ProcessState(
        files=len(os.listdir(place / "fd")), threads=int(fields["Threads"]), memory_kib=memory
    )


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _write_models(folder: Path) -> Path:
    """The models, the adapters of the first, and the file that names them."""
    tiny = write_weights(write_model(folder / MODEL, max_position_embeddings=CONTEXT))
    other = write_weights(write_model(folder / OTHER, max_position_embeddings=CONTEXT, intermediate_size=96))
    spec = spec_of(json.loads((tiny / "config.json").read_text()))
    for seed, name in enumerate((*ADAPTERS, SPARE_ADAPTER)):
        write_adapter(folder / "adapters" / name, adapter_arrays(spec, seed=seed))
    first: dict[str, Any] = {
        "model": str(tiny),
        "lora_dir": str(folder / "adapters"),
        "lora_modules": ",".join(f"{name}={folder / 'adapters' / name}" for name in ADAPTERS),
        "max_loras": 2,
        "kv_disk_dir": str(folder / "kv"),
        "kv_disk_size": DISK_BYTES,
    }
    models: list[dict[str, Any]] = [
        {"name": MODEL, **first},
        {"name": OTHER, "model": str(other), "idle_sleep_s": 0.1},
    ]
    entries = [{**entry, "num_blocks": NUM_BLOCKS[entry["name"]]} for entry in models]
    place = folder / "models.json"  # which is YAML too
    place.write_text(json.dumps({"models": entries}))
    return place


def _write_keys(folder: Path) -> Path:
    """A key for each tenant; one of them may not have many requests under way."""
    place = folder / "keys.jsonl"
    entries = [
        {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest()}
        | ({"max_concurrency": 8} if name == LIMITED else {})
        for name, key in KEYS.items()
    ]
    place.touch(mode=0o600)
    place.write_text("\n".join(map(json.dumps, entries)))
    return place
