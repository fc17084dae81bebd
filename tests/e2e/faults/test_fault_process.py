"""T1-T5 and R1-R6: signals, logs that do not flow, and a machine that is short of files, memory, time or processors."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.faults.live import (
    ALWAYS,
    COMPLETIONS,
    LiveServer,
    error_of,
    flags_of,
    live_server,
    stop_and_check,
    unharmed,
)
from tests.e2e.http_server import read_reply, request_bytes

HOOKS = {
    "forward": "paceline.runner.native.step:NativeStep.forward",
    "turn": "paceline.process.engine_service:EngineService._turn",
    "tokenize": "paceline.text.tokenizer:Tokenizer._encode",
    "json": "paceline.server.http.asgi:read_object",
}
SIZES = {"num_gpu_blocks_override": 400, "max_num_seqs": 16}
LONG = {"prompt": "on and on", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
FLAGS = flags_of(**SIZES)
VARIABLES = {"PACELINE_TEST_CLOCK": "1"}


# ---------------------------------------------------------------- signals


def test_t1_t5_it_ends_in_time_whatever_is_open_and_with_a_log_that_is_not_read(
    model: Path, tmp_path: Path
) -> None:
    flags = flags_of(**SIZES, drain_delay=1.0, drain_timeout=1.0)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with live_server(model, tmp_path / "w", *flags, hooks=HOOKS, stderr=full) as server:
            assert server.process.stdout is not None
            server.process.stdout.close()
            for _ in range(30):
                assert server.sing() == server.canary
            assert server.metrics()["log_lines_dropped_total"] > 0
            drain_with_everything_open(server)
    finally:
        os.close(full)


def drain_with_everything_open(server: LiveServer) -> None:
    """Fifty requests, a stalled reader, a half-sent body and an idle connection when the signal comes."""
    server.fault("forward", "wait", 0.1, last=ALWAYS)
    half, idle = server.connect(), server.connect()
    stalled = server.send(COMPLETIONS, {**LONG, "stream": True}, receive_bytes=4096)
    clients = [server.send(COMPLETIONS, {**LONG, "stream": number % 2 == 0}) for number in range(50)]
    with half, idle, stalled:
        half.sendall(request_bytes("POST", COMPLETIONS, b"{", headers=("Content-Length: 50",)))
        server.wait_until(lambda: server.metrics()["admission_places_taken"] == 51)
        server.process.send_signal(signal.SIGTERM)
        server.wait_until(lambda: server.get("/health/ready").status == 503)
        for client in clients:
            with client:
                error = error_of(read_reply(client))
                assert error is not None and error["code"] == "shutting_down"
        stop_and_check(server, 1.0 + 1.0 + 2.0 + 5.0)


def test_t2_a_second_signal_ends_it_at_once(model: Path, tmp_path: Path) -> None:
    flags = flags_of(**SIZES, drain_timeout=60.0)
    with live_server(model, tmp_path / "w", *flags, hooks=HOOKS) as server:
        server.fault("forward", "wait", 0.1, last=ALWAYS)
        with server.send(COMPLETIONS, LONG):
            server.wait_until(lambda: server.metrics()["num_requests_running"] == 1)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            assert server.process.poll() is None
            server.process.send_signal(signal.SIGINT)
            stop_and_check(server, 2.0 + 5.0, 130)


def test_t4_other_signals_do_no_harm(server: LiveServer) -> None:
    engine = server.engine
    for pid in (server.process.pid, engine):
        for number in (signal.SIGHUP, signal.SIGPIPE, signal.SIGUSR1):
            os.kill(pid, number)
    server.wait_until(lambda: b"Current thread" in server.log_path.read_bytes())
    assert server.state()["engine"] == "ready"
    assert server.sing() == server.canary
    assert server.engine == engine


# ---------------------------------------------------------------- a machine that is short of something


def test_r1_without_file_descriptors_it_waits_and_recovers(server: LiveServer) -> None:
    pid = server.process.pid
    used = len(os.listdir(f"/proc/{pid}/fd"))
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 6, before_hard(pid)))
    clients = [server.connect() for _ in range(30)]
    try:
        server.wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) >= used + 5)
        busy_s = processor_s(pid)
        time.sleep(0.5)
        assert processor_s(pid) - busy_s < 0.35  # it does not spin
    finally:
        for client in clients:
            client.close()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    server.wait_until(lambda: server.get("/health/ready").status == 200)


def before_hard(pid: int) -> int:
    return resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("hook", ["tokenize", "json"])
def test_r2_a_request_there_is_no_memory_for_is_refused_alone(server: LiveServer, hook: str) -> None:
    server.fault(hook, "memory")
    reply = server.post(COMPLETIONS, LONG)
    assert (reply.status, reply.code) == (503, "out_of_memory")


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
def test_r3_a_wall_clock_that_jumps_ends_nothing(server: LiveServer, ahead_s: float) -> None:
    with server.send(COMPLETIONS, {**LONG, "stream": True}) as client:
        first = client.recv(1)
        server.set_clock(ahead_s)
        now_s = time.time()
        created = server.post(COMPLETIONS, {**LONG, "max_tokens": 1}).json["created"]
        assert abs(created - now_s - ahead_s) < 600
        data = [first]
        while part := client.recv(65536):
            data.append(part)
    assert b"data: [DONE]" in b"".join(data)
    assert min(value for value in server.metrics().values()) >= 0


def test_r4_other_work_on_the_machine_is_no_reason_to_give_up(server: LiveServer) -> None:
    engine = server.engine
    burn = [sys.executable, "-c", "while True: pass"]
    burners = [subprocess.Popen(burn) for _ in range((os.cpu_count() or 2) * 2)]
    try:
        until_s = time.monotonic() + 3.0
        while time.monotonic() < until_s:
            assert server.get("/health/live").status == 200
            assert server.get("/health/ready").status == 200
            assert server.sing() == server.canary
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert server.engine == engine


FORKED = """
import os, random, sys
from paceline.server.http.request_headers import new_id
random.seed(7)
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, new_id().encode())
    os._exit(0)
os.wait()
print(os.read(reader, 99).decode(), new_id())
"""


def test_r5_ids_of_processes_with_the_same_seed_differ() -> None:
    words = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True)
        words += done.stdout.split()
    assert len(set(words)) == len(words) == 4


def test_r6_a_collection_at_every_step_changes_nothing(server: LiveServer) -> None:
    server.fault("turn", "collect", last=ALWAYS)
    for _ in range(5):
        assert server.sing() == server.canary
    assert server.struck("turn") > 20


def test_r6_without_collections_nothing_piles_up(model: Path, tmp_path: Path) -> None:
    variables = {"PACELINE_TEST_GC": "off"}
    with (
        live_server(model, tmp_path / "w", *flags_of(**SIZES), variables=variables) as server,
        unharmed(server),
    ):
        body = (COMPLETIONS, {**LONG, "max_tokens": 8})
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "stream": True}
        bodies = [body] * 8 + [("/v1/chat/completions", chat)] * 8
        for _ in range(3):
            server.all_at_once(bodies)
        before = {pid: memory_of(pid) for pid in (server.process.pid, server.engine)}
        for _ in range(15):
            assert {reply.status for reply in server.all_at_once(bodies)} == {200}
        for pid, used in before.items():
            assert memory_of(pid) - used < 16 << 20


def memory_of(pid: int) -> int:
    """Bytes of memory that are a process's own."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
