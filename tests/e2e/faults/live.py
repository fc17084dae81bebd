"""A whole server on a tiny model, as `paceline serve` starts it, and what every fault test asks of it afterwards.

Both processes are real; faults reach into them by `injection/sitecustomize.py`, signals and raw sockets. `unharmed`
is the end of every case: the next request is answered byte for byte as ever, every block is free, nothing has grown.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from tests.e2e.http_server import FakeServer, Reply, request_bytes
from tests.e2e.model_cli import COMMAND, environment
from tests.waiting import wait_until

INJECTION = Path(__file__).parent / "injection"
START_S = 120.0
PATIENCE_S = 60.0
ALWAYS = 10**9
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESET = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # SO_LINGER: the end of a connection is a reset
MODEL = "tiny"
CANARY = {
    "prompt": "the canary sings",
    "max_tokens": 12,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": 2,
    "return_token_ids": True,
}
_SAMPLE = re.compile(r"^paceline:(\w+)(?:\{.*\})? (\S+)$", re.MULTILINE)
_orders = count()


class LiveServer(FakeServer):
    """A running `paceline serve` with the tiny model of a folder."""

    def __init__(
        self,
        model: Path,
        work: Path,
        *flags: str,
        hooks: Mapping[str, str] | None = None,
        stderr: int | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.log_path = work / "log"
        self._faults = work / "faults"
        self._faults.mkdir()
        self._log = self.log_path.open("wb")
        self.side = None
        given = {
            "PACELINE_TEST_FAULTS": str(self._faults),
            "PACELINE_TEST_HOOKS": json.dumps(dict(hooks or {})),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(INJECTION), os.environ.get("PYTHONPATH")))),
            **(variables or {}),
        }
        options = [
            "--load-format",
            "dummy",
            "--port",
            "0",
            "--log-format",
            "json",
            "--stats-interval-s",
            "0.05",
        ]
        options += ["--served-model-name", MODEL]
        self.process = subprocess.Popen(
            [*COMMAND, "serve", str(model), *options, "--heartbeat-s", "0.1", *flags],
            env=environment(work, **given),
            stdout=subprocess.PIPE,
            stderr=self._log if stderr is None else stderr,
        )
        try:
            self.port = self._wait_for_card()
            self.canary = self.sing()
        except BaseException:
            self.close()
            raise
        self.baseline = self.held() if stderr is None else {}

    def _wait_for_card(self) -> int:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = re.match(rb"API: http://127\.0\.0\.1:(\d+)/v1", line)
            if found:
                return int(found.group(1))
        raise AssertionError(
            f"the server ended with {self.process.wait()}: {self.log_path.read_text()[-2000:]}"
        )

    def close(self) -> None:
        engines = self.engines
        super().close()
        for pid in engines:  # ends with its parent; if not, a test has said so
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # -- the two processes ---------------------------------------------------------------------------------

    @property
    def engines(self) -> list[int]:
        """Processes of engines; one, as a rule."""
        pid = self.process.pid
        try:
            words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            return []
        return [int(word) for word in words]

    @property
    def engine(self) -> int:
        (pid,) = self.engines
        return pid

    def log_lines(self) -> list[dict[str, Any]]:
        lines = self.log_path.read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def state(self) -> dict[str, Any]:
        """What the server writes of itself when it gets SIGUSR1."""
        before = self._states()
        self.process.send_signal(signal.SIGUSR1)
        self.wait_until(lambda: len(self._states()) > len(before), PATIENCE_S)
        return self._states()[-1]

    def _states(self) -> list[dict[str, Any]]:
        return [line for line in self.log_lines() if line["message"] == "state"]

    def held(self) -> dict[str, int]:
        """What the processes hold of the system, and the tasks of the event loop."""
        held = {"tasks": int(self.state()["tasks"])}
        for name, pid in (("http", self.process.pid), ("engine", self.engine)):
            held[f"{name} files"] = len(os.listdir(f"/proc/{pid}/fd"))
            held[f"{name} threads"] = len(os.listdir(f"/proc/{pid}/task"))
        return held

    # -- faults --------------------------------------------------------------------------------------------

    def fault(self, hook: str, kind: str, *rest: object, first: int = 1, last: int | None = None) -> None:
        """Calls number `first` to `last` of a hook from now on do something; one call unless `last` is given."""
        words = [next(_orders), first, first if last is None else last, kind, *rest]
        self._write(hook, " ".join(map(str, words)))

    def heal(self) -> None:
        """No call does anything special any more."""
        for path in self._faults.iterdir():
            path.unlink()

    def struck(self, hook: str) -> int:
        """How many calls did, since the last `heal`."""
        path = self._faults / f"{hook}.struck"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def set_clock(self, ahead_s: float) -> None:
        self._write("clock", str(ahead_s))

    def _write(self, name: str, text: str) -> None:
        beside = self._faults / f".{name}"
        beside.write_text(text)
        beside.replace(self._faults / name)

    # -- requests ------------------------------------------------------------------------------------------

    def post(self, path: str, body: Any, *headers: str) -> Reply:
        named = {"model": MODEL, **body} if isinstance(body, dict) else body
        return super().post(path, named, *headers)

    def sing(self, **changes: Any) -> Any:
        """The answer to the canary request, without what differs from request to request."""
        reply = self.post(COMPLETIONS, {**CANARY, **changes})
        assert reply.status == 200, reply.body
        return reply.json["choices"]

    def metrics(self) -> dict[str, float]:
        """The sum of each metric over its labels."""
        found: dict[str, float] = {}
        for name, value in _SAMPLE.findall(self.get("/metrics").body.decode()):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def send(self, path: str, body: dict[str, Any], *headers: str, **named: Any) -> socket.socket:
        """A connection on which a request was sent and nothing read yet."""
        client = self.connect(**named)
        client.sendall(
            request_bytes("POST", path, json.dumps({"model": MODEL, **body}).encode(), headers=headers)
        )
        return client

    def all_at_once(self, bodies: Sequence[tuple[str, dict[str, Any]]]) -> list[Reply]:
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(lambda body: self.post(*body), bodies))

    def is_idle(self) -> bool:
        """No request, no block in use, no generation, no other client."""
        found = self.metrics()
        return (
            found["num_requests_running"]
            == found["num_requests_waiting"]
            == found["kv_cache_usage_perc"]
            == 0
            and found["generations_under_way"] == 0
            and found["admission_places_taken"] == found["admission_tokens_waiting"] == 0
            and found["http_requests_under_way"] == 1
        )


@contextmanager
def live_server(*arguments: Any, **named: Any) -> Iterator[LiveServer]:
    server = LiveServer(*arguments, **named)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def unharmed(server: LiveServer) -> Iterator[LiveServer]:
    """What is done meanwhile leaves nothing behind."""
    try:
        yield server
    finally:
        server.heal()
    server.wait_until(lambda: server.get("/health/ready").status == 200, START_S)
    assert server.sing() == server.canary
    server.wait_until(server.is_idle, PATIENCE_S)
    assert server.metrics()["invariant_violations_total"] == 0
    assert len(server.engines) == 1
    server.wait_until(lambda: not grown(server.baseline, server.held()), PATIENCE_S)


def flags_of(**options: object) -> tuple[str, ...]:
    """Flags of the command line."""
    pairs = ((f"--{name.replace('_', '-')}", str(value)) for name, value in options.items())
    return tuple(word for pair in pairs for word in pair)


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """What there is more of than there was; threads of pools start when they are first needed."""
    room = {"tasks": 1, "http files": 2, "engine files": 2, "http threads": 8, "engine threads": 2}
    return {name: number for name, number in after.items() if number > before[name] + room[name]}


def reset(client: socket.socket) -> None:
    """Close a connection the rude way."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    client.close()


def stop_and_check(server: LiveServer, seconds: float, code: int = 0) -> None:
    """The server ends in time after a signal, and its engine and its port with it."""
    engines = server.engines
    started_s = time.monotonic()
    assert server.process.wait(seconds + 20.0) == code
    assert time.monotonic() - started_s <= seconds
    wait_for_end(engines)
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", server.port))


def wait_for_end(pids: Sequence[int], seconds: float = 5.0) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), seconds, says="a process is still there")


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def events_of(reply: Reply) -> list[Any]:
    """The events of a stream, without the mark of its end."""
    frames = [frame for frame in reply.body.decode().split("\n\n") if frame.startswith("data: ")]
    return [json.loads(frame[6:]) for frame in frames if frame != "data: [DONE]"]


def error_of(reply: Reply) -> dict[str, Any] | None:
    """What went wrong, whether it came as a status or as the last event of a stream."""
    if reply.status != 200:
        error: dict[str, Any] = reply.json["error"]
        return error
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return None
    events = events_of(reply)
    if b"data: [DONE]" in reply.body:
        assert not [event for event in events if "error" in event]
        return None
    assert list(events[-1]) == ["error"], "a stream ends with [DONE] or with an error"
    last: dict[str, Any] = events[-1]["error"]
    return last


def said(reply: Reply) -> Any:
    """The answer itself: all choices with text and tokens, however the stream was cut into pieces.

    Probabilities are left out: their last digits depend on the size of the batch.
    """
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return without_fractions(reply.json["choices"])
    choices: dict[int, dict[str, Any]] = {}
    for event in events_of(reply):
        for choice in event["choices"]:
            whole = choices.setdefault(choice["index"], {"text": "", "tokens": [], "logprobs": []})
            delta = choice.get("delta", choice)
            whole["text"] += delta.get("content") or delta.get("text") or ""
            whole["tokens"] += choice.get("token_ids") or []
            found = choice.get("logprobs") or {}
            whole["logprobs"] += found.get("content") or found.get("token_logprobs") or []
            whole["ending"] = choice.get("finish_reason")
    return without_fractions(choices)


def without_fractions(value: Any) -> Any:
    if isinstance(value, list):
        return [without_fractions(item) for item in value]
    if isinstance(value, dict):
        return {name: without_fractions(item) for name, item in value.items()}
    return "a number" if isinstance(value, float) else value
