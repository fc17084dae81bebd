"""What a fleet's engine tells of its cached prefixes is all there is, whatever was evicted meanwhile."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.config.engine import ModelConfig
from paceline.config.model_set import ModelShare
from paceline.core.counters import CPUWork
from paceline.engine.conductor import Needs, Seat
from paceline.engine.engine import Engine
from paceline.factory import build_engine
from paceline.kv.prefix import PrefixCache
from paceline.process import frames, model_service
from paceline.process.fleet.known_prefixes import FleetPrefixes
from paceline.process.model_service import ModelService
from paceline.routing.prefix_map import KEY_BYTES, PrefixMap
from tests.fakes import FakeRunner
from tests.pure.engine.engine_helpers import engine_config

SAMPLING = frames.Sampling(n=1, max_tokens=6, temperature=0.0)


class Served:
    """A service around an engine with few blocks, and the front that hears it."""

    def __init__(self, *, in_fleet: bool = True, **options: Any) -> None:
        self.known = PrefixMap()
        self.prefixes = FleetPrefixes(self.known)
        self.frames: list[frames.PrefixNews] = []
        self.next = 1
        config = engine_config(num_blocks=24, max_num_seqs=4, max_model_len=64, **options)
        self.engine: Engine = build_engine(config, FakeRunner(config))
        loaded: Any = SimpleNamespace(
            engine=self.engine,
            sleeper=None,
            checkpoint=SimpleNamespace(spec=SimpleNamespace(vocab_size=1 << 20)),
            cpu_work=CPUWork,
            free=None,
        )
        configure = frames.Configure(
            ModelConfig(), {}, 0.1, 0.1, 1 << 20, fleet_key=self.prefixes.key if in_fleet else b""
        )
        seat = Seat(config=ModelShare(), needs=Needs(awake=0))
        self.service = ModelService(loaded, configure, seat, lambda: 0)

    @property
    def cache(self) -> PrefixCache:
        return self.engine.scheduler.state.kv.groups[0].cache

    @property
    def names(self) -> set[bytes]:
        """Of the blocks that can be hit."""
        return {name[:KEY_BYTES] for name in self.cache.by_name}

    def add(self, tokens: list[int], tenant: str = "a") -> None:
        self.service.apply(
            frames.Add(
                first=self.next,
                tokens=np.array(tokens, frames.TOKEN).tobytes(),
                sampling=SAMPLING,
                tenant=tenant,
                priority=0,
                age_s=0.0,
                left_s=None,
            )
        )
        self.next += 1

    def turn(self) -> None:
        """As the engine's process does, and all its frames arrive."""
        if self.service.nap_s(time.monotonic()) == 0:
            self.service.step()
        self.service.note_prefixes()
        for payload in self.service.tell():
            frame = frames.decode_from_engine(payload)
            if isinstance(frame, frames.PrefixNews):
                self.frames.append(frame)
                self.prefixes.told(0, frame)

    def until(self, reached: Callable[[], bool]) -> None:
        until_s = time.monotonic() + 20
        while not reached():
            assert time.monotonic() < until_s, "it never happens"
            self.turn()


@pytest.mark.parametrize("depth", [0, 2])
def test_the_map_is_what_the_engine_has_after_every_turn(depth: int) -> None:
    rng, served = random.Random(7), Served(depth=depth)
    starts = [[1000 * number + each for each in range(32)] for number in range(5)]
    for _ in range(120):
        tokens = rng.choice(starts)[: rng.randrange(4, 33)] + [rng.randrange(9) for _ in range(6)]
        served.add(tokens, rng.choice("ab"))
        for _ in range(rng.randrange(4)):
            served.turn()
            assert served.known.held(0) == served.names
        served.until(lambda: not served.engine.has_requests or rng.random() < 0.1)
    served.until(lambda: not served.engine.has_requests)
    served.turn()
    assert served.known.held(0) == served.names
    assert served.engine.scheduler.state.kv.num_evicted > 100, "there was room for all"
    told = sum(len(each.stored) + len(each.evicted) for each in served.frames) // KEY_BYTES
    assert told < 120 * 2 * 10, "what has not changed was told again"
    # The front finds a prompt by keys of its own.
    served.add(starts[0])
    served.until(lambda: not served.engine.has_requests)
    keys = served.prefixes.keys(starts[0], 4, "a")
    assert served.known.blocks_held(keys, 1).tolist() == [8]


def test_a_turn_tells_a_bounded_part_and_the_next_ones_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_service, "MOST_NEWS", 1)
    served = Served()
    served.add(list(range(56)))
    served.until(lambda: not served.engine.has_requests)
    assert served.known.held(0) < served.names
    served.until(lambda: served.known.held(0) == served.names)
    assert max(len(each.stored + each.evicted) for each in served.frames) == KEY_BYTES
    served.engine.scheduler.state.kv.reset_cache()
    served.until(lambda: not served.known.held(0))
    assert not served.names


def test_a_single_engine_notes_and_tells_nothing() -> None:
    served = Served(in_fleet=False)
    served.add(list(range(56)))
    served.until(lambda: not served.engine.has_requests)
    served.turn()
    assert served.names and not served.frames and served.cache._changed is None
