"""An engine on two ranks that loses one: every request is answered, and no process stays behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path

import pytest

from paceline.config.engine import ModelConfig
from paceline.process.client import EngineState, EngineUnavailable
from paceline.process.supervisor import EngineProcess
from tests.e2e.faults.live import is_alive
from tests.e2e.process_helpers import GIVEN, LONG, PROMPT, ask, config, read, until
from tests.model_folder import write_model

START_S = 300.0  # two processes load torch on a machine that may be busy
ANSWERED_S, GONE_S = 1.5, 2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def children_of(pid: int) -> list[int]:
    parts = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for part in parts for child in part.read_text().split()]


async def lose_one(engine: EngineProcess, rng: random.Random) -> None:
    """Kill the lead or its follower while streams are read; each must end with an error in time."""
    pid = engine.pid
    assert pid is not None
    ranks = [pid, *children_of(pid)]
    assert len(ranks) == 2
    streams = [engine.client.submit(PROMPT, LONG, tenant="a") for _ in range(4)]
    readers = [asyncio.create_task(read(stream, 1)) for stream in streams]
    await until(lambda: engine.client.stats.running > 0)
    await asyncio.sleep(rng.random() * 0.2)
    os.kill(rng.choice(ranks), signal.SIGKILL)
    died_s = time.monotonic()
    outcomes = await asyncio.gather(*readers, return_exceptions=True)
    assert time.monotonic() - died_s < ANSWERED_S
    assert all(
        isinstance(outcome, EngineUnavailable) or not isinstance(outcome, Exception) for outcome in outcomes
    )
    for stream in streams:
        stream.close()
    await until(lambda: not any(map(is_alive, ranks)), GONE_S)
    await until(lambda: engine.pid not in (pid, None) and engine.client.state is EngineState.READY, START_S)


# More by hand: PACELINE_KILLS=50.
@pytest.mark.parametrize(
    "kills", [1, pytest.param(int(os.environ.get("PACELINE_KILLS", "8")), marks=pytest.mark.campaign)]
)
def test_an_engine_that_loses_a_rank_answers_and_is_replaced(folder: Path, kills: int) -> None:
    async def test() -> None:
        model = ModelConfig(model=str(folder), load_format="dummy", device="cpu", tensor_parallel_size=2)
        process = config(max_restarts=kills + 1, restart_backoff_s=0.05, ready_timeout_s=START_S)
        engine = EngineProcess(model, GIVEN, process)
        await engine.start()
        try:
            await engine.wait_ready()
            assert engine.client.info.runner["ranks"] == 2
            before = await ask(engine)
            for kill in range(kills):
                await lose_one(engine, random.Random(kill))
            assert (await ask(engine)) == before
            assert engine.pid is not None
            ranks = [engine.pid, *children_of(engine.pid)]
        finally:
            await engine.stop()
        await until(lambda: not any(map(is_alive, ranks)), GONE_S)

    asyncio.run(test())
