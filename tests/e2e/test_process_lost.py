"""Engines that die, hang, never start or are left alone: every request is answered, and nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.config.engine import ModelConfig
from paceline.process import frames
from paceline.process.channel import FrameReader, Rejects, make_header
from paceline.process.child import EngineChild
from paceline.process.client import EngineState, EngineUnavailable
from paceline.process.supervisor import EngineProcess
from tests.e2e.faults.live import is_alive
from tests.e2e.process_helpers import GIVEN, GREEDY, LONG, PROMPT, ask, config, is_clean, read, running, until
from tests.model_folder import write_model
from tests.waiting import wait_until

TIMEOUT_S = 120
ANSWERED_S = 1.0  # within which every client learns of a dead engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_TEST_FAULT", str(tmp_path / "fault"))
    return tmp_path / "fault"


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, TIMEOUT_S))


async def all_fail(engine: EngineProcess, num_streams: int, fault: Path, name: str) -> None:
    """Strike while this number of streams is read; each must end with an error in time."""
    streams = [engine.client.submit(PROMPT, replace(LONG, n=2), tenant="a") for _ in range(num_streams)]
    readers = [asyncio.create_task(read(stream, 2)) for stream in streams]
    await until(lambda: engine.client.stats.running > 0)
    pid = engine.pid
    assert pid is not None
    if name == "kill":
        os.kill(pid, signal.SIGKILL)
    else:
        fault.write_text(name)
        await until(lambda: not is_alive(pid))
    died_s = time.monotonic()
    for outcome in await asyncio.gather(*readers, return_exceptions=True):
        assert isinstance(outcome, EngineUnavailable), outcome
    assert time.monotonic() - died_s < ANSWERED_S
    assert engine.client.state is not EngineState.READY
    with pytest.raises(EngineUnavailable):
        engine.client.submit(PROMPT, GREEDY, tenant="a")
    for stream in streams:
        stream.close()
    await until(lambda: not is_alive(pid), 2)


def test_e7_a_dead_engine_is_replaced_until_the_budget_is_spent(folder: Path, fault: Path) -> None:
    async def test() -> None:
        lost: list[str] = []
        process = config(max_restarts=3, restart_backoff_s=0.05)
        async with running(folder, process, fault=fault) as engine:
            engine.on_lost = lost.append
            expected = await ask(engine)
            for restarts, name in enumerate(("kill", "segv", "exit"), 1):
                await all_fail(engine, 20, fault, name)
                await is_clean(engine)
                assert await ask(engine) == expected
                assert engine.num_restarts == restarts
                assert not lost
            await all_fail(engine, 20, fault, "kill")
            await until(lambda: bool(lost), 2)
            assert "SIGKILL" in lost[0]
            assert engine.client.state is EngineState.LOST

    run(test())


def test_e2_an_engine_that_fails_again_and_again_answers_every_request_and_is_replaced(
    folder: Path, fault: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with running(folder, fault=fault) as engine:
            pid = engine.pid
            streams = [engine.client.submit(PROMPT, LONG, tenant="a") for _ in range(20)]
            await streams[0].take()
            fault.write_text("raise 3")
            for stream in streams:
                (branch,) = await read(stream)
                assert branch.ending is not None and branch.ending.reason.value == "error"
                assert branch.ending.detail in ("engine_failed", "internal_error")
            await until(lambda: engine.pid not in (pid, None))
            await is_clean(engine)
        assert "exited with code 70" in caplog.text
        told = [record for record in caplog.records if record.name == "paceline.engine"]
        assert any(
            "gives up" in record.getMessage() and "RuntimeError: injected" in record.traceback  # type: ignore[attr-defined]
            for record in told
        )

    run(test())


def test_e8_a_step_that_hangs_is_noticed_and_the_engine_is_replaced(
    folder: Path, fault: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        process = config(stuck_after_s=1.5, restart_after_s=4.0)
        async with running(folder, process, fault=fault) as engine:
            pid = engine.pid
            stream = engine.client.submit(PROMPT, LONG, tenant="a")
            await stream.take()
            fault.write_text("hang")
            await until(lambda: engine.client.state is EngineState.STUCK)
            with pytest.raises(EngineUnavailable):
                await read(stream)
            fault.write_text("")
            await until(lambda: engine.pid not in (pid, None))
            await is_clean(engine)

    run(test())
    stacks = capfd.readouterr().err
    assert "Current thread" in stacks and "strike" in stacks


def test_e8_waiters_of_a_stopped_engine_may_be_kept(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        process = config(stuck_after_s=1.5, fail_when_stuck=False)
        async with running(folder, process) as engine:
            assert engine.pid is not None
            expected = await ask(engine, sampling=LONG)
            os.kill(engine.pid, signal.SIGSTOP)
            streams = [
                engine.client.submit(PROMPT, LONG, tenant="a", timeout_s=timeout_s)
                for timeout_s in (None, 0.6)
            ]
            await until(lambda: engine.client.state is EngineState.STUCK)
            await asyncio.sleep(0.5)
            os.kill(engine.pid, signal.SIGCONT)
            (patient,), (hasty,) = [await read(stream) for stream in streams]
            assert patient.tokens == expected
            assert hasty.ending is not None and hasty.ending.detail == "deadline"
            assert hasty.tokens == []
            await is_clean(engine)

    run(test())
    told = [record.getMessage() for record in caplog.records if record.name == "paceline"]
    assert told == ["the engine gave no sign of life for 1.5 s"]


PARENT = """
import asyncio, sys
from pathlib import Path
from tests.e2e.process_helpers import LONG, PROMPT, running

async def main():
    async with running(Path(sys.argv[1])) as engine:
        stream = engine.client.submit(PROMPT, LONG, tenant="a")
        await stream.take()
        print(engine.pid, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def test_e9_an_engine_does_not_outlive_the_http_process(folder: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent:
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    _wait_for_end(pid, 2.0)


def test_e9_the_end_of_the_channel_ends_the_engine(folder: Path) -> None:
    child, exit_code = EngineChild(), None
    configure = frames.Configure(
        ModelConfig(model=str(folder), load_format="dummy"), GIVEN, 0.1, 0.05, 1 << 20
    )
    try:
        _say(child.sock, configure)
        _hear(child.sock, frames.Ready)
        _say(child.sock, frames.Add(1, bytes(16), frames.Sampling.of(LONG), "a", 0, time.monotonic(), None))
        _hear(child.sock, frames.Update)
        child.sock.close()
        _wait_for_end(child.pid, 2.0)
        exit_code = child._process.wait(2.0)  # threads may take a moment longer
    finally:
        child.kill_now()
    assert exit_code == 0


@pytest.mark.parametrize(
    ("changes", "exit_code", "message"),
    [
        ({"model": "/no/such/folder"}, 2, "/no/such/folder"),
        ({"given": {"max_model_len": 100_000}}, 2, "max-model-len"),
        ({"given": {"depth": 99}}, 2, "--depth must be at most 8"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_told_in_a_sentence(
    folder: Path, changes: dict[str, Any], exit_code: int, message: str
) -> None:
    async def test() -> None:
        model = ModelConfig(model=changes.get("model", str(folder)), load_format="dummy")
        engine = EngineProcess(model, changes.get("given", {}), config())
        await engine.start()
        with pytest.raises(EngineUnavailable, match=message) as caught:
            await engine.wait_ready()
        assert caught.value.exit_code == exit_code
        assert "\n" not in str(caught.value)
        assert engine.pid is None and engine.num_restarts == 0
        await engine.stop()

    run(test())


def test_a_process_that_cannot_be_started_is_told(folder: Path) -> None:
    async def test() -> None:
        engine = EngineProcess(ModelConfig(model=str(folder)), GIVEN, config())
        engine.command = ("/no/such/program",)
        await engine.start()
        with pytest.raises(EngineUnavailable, match="cannot be started"):
            await engine.wait_ready()
        await engine.stop()

    run(test())


def test_a_mistake_of_the_supervisor_leaves_no_request_waiting(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        lost: list[str] = []
        async with running(folder) as engine:
            engine.on_lost = lost.append
            monkeypatch.setattr(engine._budget, "spend", lambda now_s: 1 / 0)
            reader = asyncio.create_task(read(engine.client.submit(PROMPT, LONG, tenant="a")))
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineUnavailable):
                await reader
            await until(lambda: bool(lost))

    run(test())


def test_an_engine_that_dies_while_it_loads_is_told(folder: Path) -> None:
    async def test() -> None:
        engine = EngineProcess(ModelConfig(model=str(folder), load_format="dummy"), GIVEN, config())
        await engine.start()
        await until(lambda: engine.pid is not None)
        with pytest.raises(EngineUnavailable) as caught:
            engine.client.submit(PROMPT, GREEDY, tenant="a")
        assert caught.value.code == "starting"
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailable, match="SIGKILL.*while loading"):
            await engine.wait_ready()
        await engine.stop()

    run(test())


def test_a_load_that_takes_too_long_is_given_up(folder: Path) -> None:
    async def test() -> None:
        engine = EngineProcess(
            ModelConfig(model=str(folder), load_format="dummy"), GIVEN, config(ready_timeout_s=1.0)
        )
        await engine.start()
        await until(lambda: engine.pid is not None)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSTOP)
        with pytest.raises(EngineUnavailable, match="not loaded within 1 s"):
            await engine.wait_ready()
        assert engine.pid is None
        await engine.stop()

    run(test())


def test_stopping_ends_a_process_that_still_loads(folder: Path) -> None:
    async def test() -> None:
        for look in (lambda engine: True, lambda engine: engine.pid is not None):
            engine = EngineProcess(ModelConfig(model=str(folder), load_format="dummy"), GIVEN, config())
            await engine.start()
            await until(partial(look, engine))
            pid = engine.pid
            await engine.stop()
            await engine.stop()
            assert pid is None or not is_alive(pid)
            assert engine.pid is None and engine.client.state is EngineState.STOPPED
            with pytest.raises(EngineUnavailable):
                await engine.wait_ready()

    run(test())


def test_stopping_ends_a_process_that_does_not_listen(folder: Path) -> None:
    async def test() -> None:
        async with running(folder, config(stop_timeout_s=0.2)) as engine:
            pid = engine.pid
            assert pid is not None
            stream = engine.client.submit(PROMPT, LONG, tenant="a")
            os.kill(pid, signal.SIGSTOP)
            await engine.stop()
            assert not is_alive(pid)
            with pytest.raises(EngineUnavailable):
                await read(stream)

    run(test())


def test_draining_lets_what_is_under_way_end_and_takes_nothing_new(folder: Path, fault: Path) -> None:
    async def test() -> None:
        async with running(folder, fault=fault) as engine:
            reader = asyncio.create_task(read(engine.client.submit(PROMPT, LONG, tenant="a")))
            draining = asyncio.create_task(engine.drain(60))
            await asyncio.sleep(0)
            with pytest.raises(EngineUnavailable) as caught:
                engine.client.submit(PROMPT, GREEDY, tenant="a")
            assert caught.value.code == "shutting_down"
            assert await draining
            assert len((await reader)[0].tokens) == 200
        async with running(folder, fault=fault) as engine:
            fault.write_text("slow 0.05")
            reader = asyncio.create_task(read(engine.client.submit(PROMPT, LONG, tenant="a")))
            assert not await engine.drain(0.3)
            with pytest.raises(EngineUnavailable) as caught:
                await reader
            assert caught.value.code == "shutting_down"

    run(test())


def test_interrupts_are_left_to_the_http_process(folder: Path) -> None:
    async def test() -> None:
        async with running(folder) as engine:
            assert engine.pid is not None
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(engine.pid, number)
            await is_clean(engine)
            assert engine.num_restarts == 0

    run(test())


def _wait_for_end(pid: int, seconds: float) -> None:
    wait_until(lambda: not is_alive(pid), seconds, says="the engine's process is still there")


def _say(sock: socket.socket, message: frames.ToEngine) -> None:
    payload = frames.encode(message)
    sock.sendall(make_header(payload, 1) + payload)


def _hear(sock: socket.socket, kind: type) -> None:
    """Read frames until one of a kind comes."""
    sock.settimeout(TIMEOUT_S)
    reader = FrameReader(1, 1 << 20, Rejects())
    while True:
        with suppress(BlockingIOError):
            for payload in reader.feed(sock.recv(1 << 16)):
                if isinstance(frames.decode_from_engine(payload), kind):
                    return
