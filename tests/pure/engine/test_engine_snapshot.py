"""Snapshots: a runner that starts from a full plan in the middle of a run goes on as if nothing had happened."""

from typing import Any

import numpy as np
import pytest

from paceline.config.engine import GroupSpec
from tests.fakes import FakeRunner
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt


def traffic(bench: Bench) -> None:
    for start in range(6):
        bench.add_all(prompt(2 + 6 * start, start % 3), 10, n=1 + start % 2, seed=start)


CONFIGS: list[dict[str, Any]] = [
    {},
    {"num_blocks": 20, "num_host_blocks": 12, "preemption": "swap"},
    {"num_blocks": 20, "max_num_batched_tokens": 7},
    {"groups": (GroupSpec(), GroupSpec(window=6))},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", CONFIGS, ids=["plain", "swap", "chunks", "window"])
@pytest.mark.parametrize("when", [1, 2, 3, 5, 8, 12])
def test_a_runner_rebuilt_from_a_snapshot_goes_on_with_the_same_tokens(
    when: int, options: dict[str, Any]
) -> None:
    config = engine_config(max_model_len=64, **options)
    bench = Bench(config)
    traffic(bench)
    bench.step(when)
    if bench.state.rows.num_live:
        bench.runner.reset(bench.scheduler.snapshot())
    bench.run()


def test_a_snapshot_at_every_step() -> None:
    bench = Bench(engine_config(num_blocks=30))
    traffic(bench)
    while bench.engine.has_requests:
        bench.step()
        if bench.state.rows.num_live:
            bench.runner.reset(bench.scheduler.snapshot())
    bench.run()


def test_a_snapshot_lists_every_row_with_all_it_knows() -> None:
    bench = Bench(engine_config(max_num_batched_tokens=16))
    ids = [bench.add(prompt(6, 1), 9), bench.add(prompt(60, 2), 9)]
    bench.step(4)
    full = bench.scheduler.snapshot()
    assert full.full and full.seq == bench.seen[-1].plan.seq
    rows = [bench.request(name).row for name in ids]
    assert full.joins.row.tolist() == rows
    assert [tokens.tolist() for tokens in full.joins.tokens] == [
        bench.scheduler.tokens_of(name).tolist() for name in ids
    ]
    assert full.joins.num_computed.tolist() == bench.state.rows.computed[rows].tolist()
    assert full.decode_rows.added.tolist() == [rows[0]], "the other still computes its prompt"
    table = bench.state.kv.groups[0]
    for row in rows:
        mine = full.new_blocks.block[full.new_blocks.row == row]
        assert mine.tolist() == table.blocks_of(row).tolist()
    bench.run()


def test_taking_a_snapshot_changes_nothing_visible() -> None:
    bench = Bench(engine_config())
    request = bench.add(prompt(6), 20)
    bench.step(5)
    before = bench.scheduler.tokens_of(request).tolist()
    first, second = bench.scheduler.snapshot(), bench.scheduler.snapshot()
    assert bench.scheduler.tokens_of(request).tolist() == before
    assert np.array_equal(first.joins.tokens[0], second.joins.tokens[0])
    assert first.new_blocks.block.tolist() == second.new_blocks.block.tolist()
    bench.run()


def test_a_snapshot_needs_every_step_completed() -> None:
    bench = Bench(engine_config(depth=2), overlapped=True)
    bench.add(prompt(6), 20)
    bench.step(2)
    with pytest.raises(AssertionError, match="completed"):
        bench.scheduler.snapshot()
    bench.run()


def test_a_runner_that_was_not_there_before_takes_over() -> None:
    """Another rank, or a restart: the KV is gone, so everything starts again from a clean plan."""
    bench = Bench()
    traffic(bench)
    bench.step(3)
    clean = bench.scheduler.recover()
    assert clean.full and not len(clean.joins.row)
    fresh = FakeRunner(bench.config)
    fresh.reset(clean)
    bench.engine._runner = fresh  # the seam has no method for this: an engine keeps its runner
    bench.watch.after_update(None)
    bench.run()


@pytest.mark.parametrize("when", [2, 4, 6])
def test_a_snapshot_in_the_middle_of_a_padded_batch(when: int) -> None:
    config = engine_config(mode="static", batch_size=3, static_flush_s=0.0, max_num_batched_tokens=64)
    bench = Bench(config)
    for start, length in enumerate((2, 9, 5)):
        bench.add(prompt(4, start), length)
    bench.step(when)
    bench.runner.reset(bench.scheduler.snapshot())
    bench.run()
