"""An engine in a real process on a tiny model, and what tests ask of it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config.engine import ModelConfig
from paceline.config.server import ProcessConfig
from paceline.core.events import Finished
from paceline.core.plan import RowLogprobs
from paceline.core.sampling import SamplingParams
from paceline.process.client import EngineState, EngineStream
from paceline.process.supervisor import EngineProcess

TIMEOUT_S = 60
GIVEN: dict[str, Any] = {
    "num_blocks": 96,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "check_every": 1,
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PROMPT = [5, 6, 7, 8]


def config(**changes: Any) -> ProcessConfig:
    return ProcessConfig(**{"heartbeat_s": 0.1, "stats_interval_s": 0.05, **changes})


@asynccontextmanager
async def running(
    folder: Path, process: ProcessConfig | None = None, *, fault: Path | None = None, **given: Any
) -> AsyncIterator[EngineProcess]:
    """An engine that is ready; `fault` is the file of `faulty_engine`."""
    model = ModelConfig(model=str(folder), load_format="dummy")
    engine = EngineProcess(model, {**GIVEN, **given}, process or config())
    if fault is not None:
        engine.command = (sys.executable, str(Path(__file__).parent / "faulty_engine.py"))
    await engine.start()
    try:
        await engine.wait_ready()
        yield engine
    finally:
        await engine.stop()


@dataclass
class Read:
    """Everything one branch said."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)
    ending: Finished | None = None


async def read(stream: EngineStream, num_branches: int = 1) -> list[Read]:
    """Read a stream to its end."""
    branches = [Read() for _ in range(num_branches)]
    while any(branch.ending is None for branch in branches):
        for update in await stream.take():
            branch = branches[update.branch]
            assert branch.ending is None, "nothing comes after an ending"
            branch.tokens += update.tokens
            branch.logprobs += update.logprobs
            branch.ending = update.ending
    stream.close()
    return branches


async def ask(
    engine: EngineProcess, tokens: Sequence[int] = PROMPT, sampling: SamplingParams = GREEDY
) -> list[int]:
    """The whole answer to a prompt, which must come to a good end."""
    stream = engine.client.submit(tokens, sampling, tenant="test")
    (branch,) = await read(stream)
    assert branch.ending is not None and branch.ending.reason.value in ("stop", "length"), branch.ending
    return branch.tokens


async def until(condition: Callable[[], bool], seconds: float = TIMEOUT_S) -> float:
    """Wait for something; returns how long that took."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() - started_s < seconds, "it did not happen in time"
        await asyncio.sleep(0.005)
    return time.monotonic() - started_s


async def is_clean(engine: EngineProcess) -> None:
    """Nothing is held, no invariant is broken, and the next request is served."""
    await until(lambda: engine.client.state is EngineState.READY)
    assert len(await ask(engine)) == GREEDY.max_tokens
    client = engine.client
    client.ping()
    await until(lambda: client.stats.blocks_total > 0 and client.stats.blocks_used == 0)
    assert (client.stats.running, client.stats.waiting, client.num_open) == (0, 0, 0)
    assert client.stats.violations == 0
