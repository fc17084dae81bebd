"""The adapters of a seed's engine, and how long their folders take to read. Draws from a separate stream."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from paceline.config.engine import EngineConfig
from paceline.core.adapter import NO_ADAPTER
from paceline.engine.adapters import Adapters, Work
from paceline.engine.engine import Engine
from paceline.models.files.adapter_files import Adapter
from paceline.scheduler.scheduler import Scheduler
from tests.fakes import FakeRunner

NUM_FOLDERS = 6
MOST_KNOWN = 9


def _has_adapters(seed: int) -> bool:
    return random.Random(seed + 23).random() < 0.35


def draw_adapters(seed: int, config: EngineConfig) -> EngineConfig:
    """Some engines have adapters, and most of these not room for all of them."""
    if not _has_adapters(seed) or config.scheduler.mode != "continuous":
        return config
    most = random.Random(seed + 24).choice((0, 1, 2, 2, 3))
    return replace(config, scheduler=replace(config.scheduler, max_loras=most))


class SlowReads:
    """Folders are read when the engine has looked for them a few times."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._latest = rng.choice((0, 3, 8))
        self._under_way: dict[int, tuple[int, Work]] = {}

    def start(self, number: int, work: Work) -> None:
        self._under_way[number] = self._rng.randint(0, self._latest), work

    def done(self) -> list[tuple[int, Work]]:
        found = [(number, work) for number, (left, work) in self._under_way.items() if not left]
        self._under_way = {
            number: (left - 1, work) for number, (left, work) in self._under_way.items() if left
        }
        return found


class AdapterMoves:
    """Loads and unloads while requests run; the memory of the fake runner."""

    def __init__(self, seed: int, config: EngineConfig, runner: FakeRunner) -> None:
        self.is_on = _has_adapters(seed)
        self._rng = random.Random(seed + 25)
        self._memory: dict[int, int] = {}
        runner.adapters = self._memory
        self._starts: dict[int, int] = {}  # of all numbers there ever were
        self._engine: Engine | None = None
        self._share = self._rng.choice((0.5, 0.8, 1.0))

    def make(self, scheduler: Scheduler) -> Adapters:
        return Adapters(scheduler, self, self._read, SlowReads(self._rng))

    def begin(self, engine: Engine) -> None:
        self._engine = engine
        for _ in range(4 if self.is_on else 0):
            self._load()

    def put(self, number: int, adapter: Adapter) -> None:
        self._memory[number] = self._starts[number]

    def drop(self, number: int) -> None:
        del self._memory[number]

    def start(self, number: int) -> int:
        return self._starts.get(number, 0)

    def choose(self) -> int:
        """The adapter of a new request: some are popular."""
        assert self._engine is not None
        known = self._engine.adapters.infos() if self.is_on else ()
        if not known or self._rng.random() > self._share:
            return NO_ADAPTER
        return known[min(self._rng.randrange(len(known)), self._rng.randrange(len(known)))].number

    def perhaps(self) -> None:
        if not self.is_on or self._rng.random() > 0.01:
            return
        assert self._engine is not None
        known = self._engine.adapters.infos()
        if len(known) < MOST_KNOWN and self._rng.random() < 0.6:
            self._load()
        elif known:
            self._engine.unload_adapter(self._rng.choice(known).number)

    def _load(self) -> None:
        assert self._engine is not None
        folder = self._rng.randrange(NUM_FOLDERS)
        self._starts[1 + max(self._starts, default=0)] = 1 + folder
        self._engine.adapters.load("", Path(str(folder)))

    def _read(self, folder: Path) -> Adapter:
        return Adapter(identity=f"{1 + int(folder.name):064x}", rank=1, parts={})
