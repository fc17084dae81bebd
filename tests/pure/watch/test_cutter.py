"""Cuts of a run that is watched afterwards: by its own clock, never too many, and nothing lost between them."""

from __future__ import annotations

import pytest

from paceline.watch.cutter import Cutter
from paceline.watch.film import Cut
from tests.dst.world import World
from tests.pure.watch.test_film import Picture, column


@pytest.mark.parametrize("seed", range(10))
def test_cuts_made_inside_a_run_tell_the_same_as_its_state(seed: int) -> None:
    world, cuts = World(seed), list[Cut]()
    cutter = Cutter(world.engine.scheduler.state, cuts.append, interval_s=0.05, doubles_after=10_000)
    world.engine.watcher = cutter
    world.run(120)
    cutter.cut(world.engine.now_s)
    picture, steps = Picture(), 0
    for cut in cuts:
        picture.show(cut)
        shown = {row: who for row, who in picture.rows.items() if row not in cut.scene.left}
        assert shown == dict(zip(column(cut, "row"), column(cut, "request"), strict=True))
        assert cut.dropped == 0
        steps += len(cut.steps)
    assert steps == world.engine.num_submitted
    times = [cut.scene.time_s for cut in cuts]
    assert times == sorted(times)


def test_a_long_run_is_cut_less_and_less_often() -> None:
    world, cuts = World(3), list[Cut]()
    cutter = Cutter(world.engine.scheduler.state, cuts.append, interval_s=1e-4, doubles_after=4)
    world.engine.watcher = cutter
    world.run(120)
    cutter.cut(world.engine.now_s)
    sizes = [len(cut.steps) for cut in cuts]
    assert sum(sizes) == world.engine.num_submitted
    assert sizes[0] == 1 and max(sizes) > 1
