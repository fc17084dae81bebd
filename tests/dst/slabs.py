"""Memory that other models take and give back: slabs of blocks come and go, and now and then the model sleeps."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from paceline.config.engine import EngineConfig
from paceline.core.plan import Runner
from paceline.core.standing import ALL_LOST, DEVICE_LOST
from paceline.engine.engine import Engine


def draw_slabs(seed: int, config: EngineConfig) -> EngineConfig:
    """Some engines share memory with others. At its smallest a pool is as large as it would be alone."""
    rng, kv = random.Random(seed + 31), config.kv
    own = any(group.num_blocks is not None for group in kv.groups)
    if rng.random() < 0.8 or config.scheduler.mode != "continuous" or own:
        return config
    size = rng.choice((2, 3, 5))
    floor = -(-kv.num_blocks // size)
    num_slabs = 1 + floor + rng.randint(1, max(2, floor))
    shared = replace(
        kv, num_blocks=num_slabs * size, slab_blocks=size, least_blocks=floor * size, most_slabs=num_slabs
    )
    return replace(config, kv=shared)


class SlabMoves:
    """What the other models do. `counts` hears of it."""

    def __init__(self, seed: int, config: EngineConfig, engine: Engine, counts: Counter[str]) -> None:
        self._rng, self._kv, self._engine = random.Random(seed + 37), config.kv, engine
        self._counts = counts
        if self._kv.slab_blocks:
            self._gain_floor()

    def _gain_floor(self) -> None:
        for slab in self._rng.sample(self._absent(), self._kv.least_blocks // self._kv.slab_blocks):
            assert self._engine.move_slab(slab, gained=True)

    def _absent(self) -> list[int]:
        have = set(self._engine.scheduler.state.kv.slabs.numbers())
        return [slab for slab in range(1, self._kv.num_blocks // self._kv.slab_blocks) if slab not in have]

    def perhaps(self, runner: Runner) -> bool:
        """Whether steps may have ended meanwhile."""
        if not self._kv.slab_blocks or self._rng.random() > 0.3:
            return False
        engine, kv = self._engine, self._engine.scheduler.state.kv
        have, absent = kv.slabs.numbers(), self._absent()
        if absent and self._rng.random() < 0.5:
            engine.move_slab(self._rng.choice(absent), gained=True)
            self._counts["slab gained"] += 1
        elif self._rng.random() < 0.16:
            # The runner is the same: what is on a level below the device may stay or be forgotten.
            engine.sleep(levels_lost=DEVICE_LOST + int(ALL_LOST * self._rng.random()))
            for slab in have:
                assert engine.move_slab(slab, gained=False)
            self._gain_floor()
            engine.wake(runner)
            self._counts["wake"] += 1
        elif len(have) * kv.slabs.size > self._kv.least_blocks:
            spare = kv.slabs.spare()
            by_force = not spare or self._rng.random() < 0.3
            slab = self._rng.choice(have) if by_force else spare[0]
            lost = engine.move_slab(slab, gained=False)
            self._counts["slab lost by force" if by_force else "slab lost"] += lost
        return True
