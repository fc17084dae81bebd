"""Deltas of a run that is watched afterwards: by its own clock, never too many, and nothing lost between them."""

from __future__ import annotations

import pytest

from paceline.watch.trace import PeriodicTrace, TraceDelta
from tests.dst.world import World
from tests.pure.watch.test_trace import Picture, column


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_deltas_taken_inside_a_run_agree_with_its_state(seed: int) -> None:
    world, deltas = World(seed), list[TraceDelta]()
    trace = PeriodicTrace(world.engine.scheduler.state, deltas.append, interval_s=0.05, doubles_after=10_000)
    world.engine.watcher = trace
    world.run(120)
    trace.take_delta(world.engine.now_s)
    picture, steps = Picture(), 0
    for delta in deltas:
        picture.show(delta)
        shown = {row: who for row, who in picture.rows.items() if row not in delta.snapshot.left}
        assert shown == dict(zip(column(delta, "row"), column(delta, "request"), strict=True))
        assert delta.dropped == 0
        steps += len(delta.steps)
    assert steps == world.engine.num_submitted
    times = [delta.snapshot.time_s for delta in deltas]
    assert times == sorted(times)


@pytest.mark.slow
def test_deltas_of_a_long_run_come_less_and_less_often() -> None:
    world, deltas = World(3), list[TraceDelta]()
    trace = PeriodicTrace(world.engine.scheduler.state, deltas.append, interval_s=1e-4, doubles_after=4)
    world.engine.watcher = trace
    world.run(120)
    trace.take_delta(world.engine.now_s)
    sizes = [len(delta.steps) for delta in deltas]
    assert sum(sizes) == world.engine.num_submitted
    assert sizes[0] == 1 and max(sizes) > 1
