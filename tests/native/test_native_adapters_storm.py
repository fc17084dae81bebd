"""Many adapters come, go, are evicted and read again while requests run: each gets its own adapter's tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from paceline.config.engine import EngineConfig, KVConfig, SchedulerConfig
from paceline.core.sampling import SamplingParams
from paceline.engine.adapters import Adapters
from paceline.engine.engine import Engine
from paceline.factory import build_engine
from paceline.models.files.adapter_files import Adapter
from paceline.runner.cpu import CPURunner
from paceline.runner.native.step import NativeStep
from tests.kernels import host_code
from tests.native.adapters import make_adapter
from tests.native.random_steps import model

KIND, PROMPT = "four bits", [5, 9, 33, 14, 60, 7, 21]
SAMPLING = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@cache
def folder(number: int) -> Adapter:
    """What a folder holds; large, so that every one says something else."""
    made = make_adapter(model(KIND).spec, 1 + number % 6, seed=number, size=1.5)
    return Adapter(identity=f"{number + 1:x}", rank=made.rank, parts=made.parts)


@contextmanager
def engine_of(places: int) -> Iterator[Engine]:
    config = EngineConfig(
        kv=KVConfig(num_blocks=40, block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=12, max_model_len=32, max_loras=places, max_queue=64),
        depth=1,
        check_every=1,
    )
    step = NativeStep(model(KIND), config, host_code(), 1)
    try:
        yield build_engine(
            config,
            CPURunner(config, step),
            make_adapters=lambda scheduler: Adapters(
                scheduler, step.adapters, lambda path: step.adapters.prepare(folder(int(path.name)))
            ),
        )
    finally:
        step.close()


def tokens_of(engine: Engine, said: dict[int, list[int]]) -> None:
    """One step; what it says is put to what was said before."""
    events = engine.step_overlapped()
    assert engine.last_error is None, engine.last_error
    for batch in events.tokens:
        for request, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
            said.setdefault(request, []).append(token)


def storm(num_folders: int, num_requests: int, places: int) -> None:
    with engine_of(0) as engine:
        alone: list[list[int]] = []
        for number in range(num_folders):
            info = engine.adapters.load("", Path(str(number)))
            said: dict[int, list[int]] = {}
            (request,) = engine.add(PROMPT, SAMPLING, adapter=info.number)
            while engine.has_requests:
                tokens_of(engine, said)
            alone.append(said[request])
            engine.unload_adapter(info.number)
    assert len({tuple(each) for each in alone}) > num_folders // 2
    draw, said = random.Random(3), {}
    asked: dict[int, int] = {}  # requests and the folders of their adapters
    with engine_of(places) as engine:
        there = {engine.adapters.load("", Path(str(number))).number: number for number in range(num_folders)}
        while len(asked) < num_requests:
            if draw.random() < 0.02:  # one goes, and one comes under a new number
                number = draw.choice(list(there))
                engine.unload_adapter(number)
                gone = there.pop(number)
                again = gone if draw.random() < 0.5 else draw.randrange(num_folders)
                there[engine.adapters.load("", Path(str(again))).number] = again
            while len(engine.scheduler.state.requests) < 24 and len(asked) < num_requests:
                popular = draw.random() < 0.5
                number = draw.choice(list(there)[:4] if popular else list(there))
                asked[engine.add(PROMPT, SAMPLING, adapter=number)[0]] = there[number]
            tokens_of(engine, said)
        while engine.has_requests:
            tokens_of(engine, said)
        places_of = engine.scheduler.state.adapters
        assert said == {request: alone[number] for request, number in asked.items()}
        assert places_of.evicted > num_requests // 20 and len(places_of.resident) <= places
        for number in there:
            engine.unload_adapter(number)
        engine.drain()
        engine.step()
        assert not engine.adapters.is_leaving and not places_of.identities and not places_of.resident
        assert engine.checker is None or not getattr(engine.checker, "violations", None)


def test_a_storm() -> None:
    storm(num_folders=30, num_requests=200, places=5)


@pytest.mark.campaign
def test_a_large_storm() -> None:
    storm(num_folders=1000, num_requests=10_000, places=32)
