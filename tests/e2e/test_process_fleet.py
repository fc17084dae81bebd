"""Engines of a fleet in real processes: a request that ends its engine does not walk through all of them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.config.engine import ModelConfig
from paceline.config.model_set import ModelEntry, ModelSet
from paceline.config.server import FleetConfig
from paceline.core.sampling import SamplingParams
from paceline.process.child import EngineChild, deal_out
from paceline.process.client import EngineState, EngineUnavailable
from paceline.process.fleet.processes import FleetProcess
from tests.e2e.process_helpers import GIVEN, PROMPT, config, read, until
from tests.model_folder import write_model

TIMEOUT_S = 120
POISON = 66
STREAM = SamplingParams(temperature=1.0, seed=4, max_tokens=220, ignore_eos=True)


@asynccontextmanager
async def fleet(folder: Path, count: int, num_blocks: int = 512) -> AsyncIterator[FleetProcess]:
    command = (sys.executable, str(Path(__file__).parent / "faulty_engine.py"))
    model = ModelConfig(model=str(folder), load_format="dummy")
    models = ModelSet(entries=[ModelEntry(model=model, given={**GIVEN, "num_blocks": num_blocks})])
    children = [EngineChild(command, place) for place in deal_out(count)]
    process = config(max_restarts=20, restart_backoff_s=0.0)
    made = FleetProcess(models, process, FleetConfig(replicas=count, router="round-robin"), children)
    for engine in made.engines:
        engine.command = command
    await made.start()
    try:
        await made.wait_ready()
        yield made
    finally:
        await made.stop()


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_TEST_FAULT", str(tmp_path / "fault"))
    return tmp_path / "fault"


def test_a_poisonous_request_ends_two_engines_and_no_more_and_others_go_on(
    tmp_path: Path, fault: Path
) -> None:
    async def test() -> None:
        async with fleet(write_model(tmp_path / "model"), 3) as running:
            client = running.client
            (expected,) = await read(client.submit(PROMPT, STREAM, tenant="a"))
            fault.write_text(f"poison {POISON}")
            streams = [client.submit(PROMPT, STREAM, tenant="a") for _ in range(5)]
            readers = [asyncio.create_task(read(stream)) for stream in streams]
            await until(lambda: all(stream.outputs[0] for stream in streams))  # type: ignore[attr-defined]
            poison = client.submit([POISON, *PROMPT], STREAM, tenant="b")
            with pytest.raises(EngineUnavailable) as raised:
                await read(poison)
            poison.close()
            assert raised.value.code == "engine_lost_twice"
            for reader in readers:
                (branch,) = await reader
                assert branch.tokens == expected.tokens and branch.ending is not None
            with pytest.raises(EngineUnavailable) as refused:
                client.submit([POISON, *PROMPT], STREAM, tenant="c")
            assert refused.value.code == "engine_lost_twice"
            assert sum(engine.num_restarts for engine in running.engines) == 2
            assert client.num_open == 0

    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


def test_what_engines_have_cached_is_known_until_they_evict_it_or_are_lost(
    tmp_path: Path, fault: Path
) -> None:
    async def test() -> None:
        async with fleet(write_model(tmp_path / "model"), 2, num_blocks=64) as running:
            client = running.client
            known, short = client.view.prefixes, SamplingParams(temperature=0, max_tokens=2)
            prompts = [[(7 * number + each) % 100 for each in range(80)] for number in range(2)]
            for prompt in prompts:  # in turn
                await read(client.submit(prompt, short, tenant="a"))
            keys = [set(client.prefixes.keys(prompt, client.info.block_size, "a")) for prompt in prompts]
            assert all(len(each) == 5 for each in keys)
            await until(lambda: all(known.held(number) >= keys[number] for number in range(2)))
            assert not known.held(0) & keys[1]
            pid = running.engines[1].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda: not known.held(1))
            assert known.held(0) >= keys[0]
            await until(lambda: client.members[1].engine.state is EngineState.READY)
            filling = [client.submit([number % 97] * 120, short, tenant=f"{number}") for number in range(30)]
            await asyncio.gather(*(read(stream) for stream in filling))
            await until(lambda: not known.held(0) & keys[0])
            most = client.members[0].engine.info.usable_blocks
            assert all(0 < len(known.held(number)) <= most for number in range(2))

    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


def test_an_engine_that_hangs_loses_its_streams_to_another(tmp_path: Path, fault: Path) -> None:
    async def test() -> None:
        async with fleet(write_model(tmp_path / "model"), 2) as running:
            client = running.client
            for engine in running.engines:
                engine._config = replace(engine._config, stuck_after_s=0.5)
            (expected,) = await read(client.submit(PROMPT, STREAM, tenant="a"))
            stream = client.submit(PROMPT, STREAM, tenant="a")
            reader = asyncio.create_task(read(stream))
            await until(lambda: bool(stream.outputs[0]))  # type: ignore[attr-defined]
            pid = running.engines[stream.engine].pid  # type: ignore[attr-defined]
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            (branch,) = await reader
            os.kill(pid, signal.SIGCONT)
            assert branch.tokens == expected.tokens and stream.failovers == 1

    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))
