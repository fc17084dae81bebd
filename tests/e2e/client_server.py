"""A real `paceline serve` with a tiny made-up model for client libraries: keys, a free port, its metrics.

Three keys are let in: one that may do anything, one with a single request at a time and one that is disabled.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.http_server import Reply
from tests.e2e.model_cli import COMMAND, ENDLESS_CONTEXT, environment
from tests.model_folder import TEMPLATE, write_model
from tests.waiting import wait_until

MODEL = "tiny"
KEY, NARROW_KEY, DISABLED_KEY = "key-of-anybody", "key-for-one-at-a-time", "key-of-nobody"
ADMIN = "key-of-the-operator"  # for servers whose environment names it
COMPLETION = {"model": MODEL, "prompt": "hello there", "max_tokens": 5}
PATIENCE_S = 60.0
# Far more than a test waits for; what asks for it does not end before its client leaves.
ENDLESS = ENDLESS_CONTEXT // 2


class ClientServer:
    """A running server process."""

    template = TEMPLATE  # of the model's chat
    command: Sequence[str] = COMMAND

    def __init__(self, folder: Path, *flags: str, **variables: str) -> None:
        self.folder = folder
        self.port = _free_port()
        self._errors = (folder / "stderr").open("wb")
        self.process = subprocess.Popen(
            [
                *(*self.command, "serve", *self._model_flags(), "--port", str(self.port)),
                *("--num-gpu-blocks-override", "16384", "--drain-timeout", "0.2", *flags),
            ],
            env=environment(folder, **variables),
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )

    def _model_flags(self) -> list[str]:
        changes = {"max_position_embeddings": ENDLESS_CONTEXT}
        model = write_model(self.folder / MODEL, template=self.template, **changes)
        keys = keys_file(self.folder / "keys")
        named = ["--load-format", "dummy", "--served-model-name", MODEL]
        return [str(model), *named, "--api-keys-file", str(keys)]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_for(self, status: int) -> None:
        """Until /health answers so: 503 while the model is being loaded, 200 from then on."""
        self.wait_until(lambda: self.ask("GET", "/health").status == status)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        def is_met() -> bool:
            assert self.process.poll() is None, f"the server has ended: {self.log()}"
            return condition()

        wait_until(is_met, PATIENCE_S, every_s=0.02)

    def page(self) -> str:
        """All metrics, as Prometheus reads them."""
        return self.ask("GET", "/metrics").body.decode()

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        lines = self.page().splitlines()
        found = [line for line in lines if line.startswith((f"paceline:{name}{{", f"paceline:{name} "))]
        assert found, f"there is no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def is_running(self) -> bool:
        return self.metric("num_requests_running") > 0 and self.metric("kv_cache_usage_perc") > 0

    def is_idle(self) -> bool:
        """Nothing runs, nothing waits, and no block is held."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(self.metric(name) for name in names)

    def log(self) -> str:
        return Path(self._errors.name).read_text()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._errors.close()

    def ask(self, method: str, path: str, body: object = None, *, key: str = KEY, **headers: str) -> Reply:
        """A request and its whole answer; an empty `key` sends none."""
        with self.open(method, path, body, key=key, **headers) as answer:
            named = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, named, answer.read())

    def complete(self, *, key: str = KEY, **fields: object) -> Reply:
        return self.ask("POST", "/v1/completions", {**COMPLETION, **fields}, key=key)

    def open(
        self, method: str, path: str, body: object = None, *, key: str = KEY, **headers: str
    ) -> http.client.HTTPResponse:
        """An answer that is still to be read; closing it hangs up."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        given = {"Content-Type": "application/json", "Connection": "close", **headers}
        if key:
            given["Authorization"] = f"Bearer {key}"
        try:
            connection.request(method, path, None if body is None else json.dumps(body), given)
            return connection.getresponse()
        except BaseException:
            connection.close()
            raise


@contextmanager
def client_server(
    folder: Path, *flags: str, kind: type[ClientServer] = ClientServer, **variables: str
) -> Iterator[ClientServer]:
    """`variables` go into the server's environment."""
    server = kind(folder, *flags, **variables)
    try:
        yield server
    except BaseException:
        print(server.log())  # pytest shows it beside what failed
        raise
    finally:
        server.close()


def keys_file(path: Path) -> Path:
    entries = [
        {"name": "anybody", "sha256": _hash(KEY)},
        {"name": "narrow", "sha256": _hash(NARROW_KEY), "max_concurrency": 1},
        {"name": "nobody", "sha256": _hash(DISABLED_KEY), "enabled": False},
    ]
    path.write_text("\n".join(map(json.dumps, entries)))
    path.chmod(0o600)
    return path


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
