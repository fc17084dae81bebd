"""`paceline serve` as a user starts it: mistakes end at once with one line, and a tiny model is really served."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import zlib
from pathlib import Path

import pytest

from paceline.runner.stores.disk_store import HEADER, MAGIC, VERSION, DiskStore
from tests.e2e.http_server import read_reply, request_bytes
from tests.e2e.model_cli import COMMAND, environment, run, run_process
from tests.waiting import wait_until


def one_line(done: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    assert done.returncode == code, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("paceline: error: ")
    for part in parts:
        assert part in last
    assert "Traceback" not in done.stderr


def test_mistakes_are_told_in_one_line(tmp_path: Path) -> None:
    one_line(run("serve", "--port", "80000", cache=tmp_path), 2, "--port")
    one_line(run("serve", "--prot", "1", cache=tmp_path), 2, "--prot")
    one_line(run("serve", "--trust-remote-code", cache=tmp_path), 2, "--trust-remote-code")
    one_line(run("serve", "--api-key", "k", cache=tmp_path), 2, "--api-keys-file")
    one_line(run_process("serve", "--host", "0.0.0.0", cache=tmp_path), 2, "--host", "--api-keys-file")
    one_line(run_process("serve", "--api-keys-file", "/nowhere", cache=tmp_path), 78, "--api-keys-file")
    config = tmp_path / "server.yaml"
    config.write_text("prot: 1\n")
    one_line(run("serve", "--config", str(config), cache=tmp_path), 2, "prot", "port")
    one_line(run("serve", cache=tmp_path, PACELINE_PORT="tcp://1.2.3.4"), 2, "PACELINE_PORT")


def test_a_folder_for_kv_that_cannot_be_used_ends_the_start(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    (folder / "letter.txt").write_text("hello")
    command = ("serve", str(tiny), "--load-format", "dummy", "--device", "cpu", "--port", "0")
    done = run_process(*command, "--kv-disk-dir", str(folder), cache=tmp_path)
    one_line(done, 2, "--kv-disk-dir", "holds other files")
    one_line(run_process(*command, "--kv-disk-size", "1G", cache=tmp_path), 2, "needs --kv-disk-dir")
    used = tmp_path / "used"
    given = (*command, "--kv-disk-dir", str(used))
    one_line(run_process(*given, "--kv-disk-size", "1K", cache=tmp_path), 2, "holds no block", "at least")
    store = DiskStore(used, size=1 << 20, place_bytes=4096, fingerprint=b"")
    one_line(run_process(*given, cache=tmp_path), 2, "in use by another server")
    store.close()
    head = HEADER.pack(MAGIC, VERSION + 1, 0, 4096, 0)[:-4]
    (used / "index").write_bytes(head + zlib.crc32(head).to_bytes(4, "little"))
    one_line(run_process(*given, cache=tmp_path), 2, "another version of paceline")


def test_a_store_that_cannot_be_used_ends_the_start_without_its_password(tiny: Path, tmp_path: Path) -> None:
    command = ("serve", str(tiny), "--load-format", "dummy", "--device", "cpu", "--port", "0")
    given = ("--kv-store", "http://me:hunter2@store", "--kv-store-key", str(tmp_path / "key"))
    for more in (given, given[:2], (*given, "--kv-disk-dir", str(tmp_path / "kv"))):
        done = run_process(*command, *more, cache=tmp_path)
        one_line(done, 2, "--kv-store")
        assert "hunter2" not in done.stderr + done.stdout


def test_a_port_in_use_is_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        one_line(run_process("serve", "--port", port, cache=tmp_path), 78, port, "--port")


def test_a_model_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    done = run_process("serve", "--port", "0", str(tmp_path / "nothing"), cache=tmp_path)
    assert done.returncode not in (0, 1)
    assert "no such file" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


class Served:
    """A real server on a unix socket, with a made-up tiny model."""

    def __init__(self, folder: Path, cache: Path, *flags: str) -> None:
        self.path = str(cache / "s")
        self.process = subprocess.Popen(
            [*COMMAND, "serve", str(folder), "--load-format", "dummy", "--uds", self.path, *flags],
            env=environment(cache),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def ask(self, method: str, path: str, body: dict[str, object] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(30)
            client.connect(self.path)
            client.sendall(request_bytes(method, path, data))
            return read_reply(client).raw

    def wait(self, status: bytes) -> None:
        def answers() -> bool:
            assert self.process.poll() is None
            return self.ask("GET", "/health").startswith(b"HTTP/1.1 " + status)

        wait_until(answers, every_s=0.05, says="the server did not start")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    from tests.model_folder import write_model

    return write_model(tmp_path / "tiny")


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_tiny_model_is_served_and_stopped(tiny: Path, tmp_path: Path) -> None:
    served = Served(tiny, tmp_path, "--served-model-name", "tiny")
    try:
        served.wait(b"200")
        assert "torch" not in Path(f"/proc/{served.process.pid}/maps").read_text()
        reply = served.ask(
            "POST", "/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 4, "ignore_eos": True}
        )
        assert b'"completion_tokens":4' in reply
        assert b"paceline:generation_tokens_total" in served.ask("GET", "/metrics")
        engines = children_of(served.process.pid)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(10) == 0
        assert served.process.stdout is not None
        card = served.process.stdout.read().decode()
        assert "model: tiny" in card
        assert "curl --unix-socket" in card
        assert engines and not [pid for pid in engines if Path(f"/proc/{pid}").exists()]
    finally:
        served.close()


def test_a_signal_while_loading_leaves_nothing_behind(tiny: Path, tmp_path: Path) -> None:
    served = Served(tiny, tmp_path)
    try:
        served.wait(b"503")
        engines = children_of(served.process.pid)
        started_s = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(10) == 0
        assert time.monotonic() - started_s < 5.0
        assert engines
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in engines), 2.0)
        assert not os.path.exists(served.path)
    finally:
        served.close()
