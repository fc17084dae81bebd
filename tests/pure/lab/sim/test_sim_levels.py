"""Levels in the whole engine on simulated links: what they find, that such runs replay, and the flags that compare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.audit.runlog import RunLogWriter, read_run_log, run_header
from paceline.cli.sim.flags import SimOptions
from paceline.cli.sim.run import plan_runs
from paceline.config.engine import PreemptionCosts
from paceline.errors import InputError
from paceline.lab.report.summary import summarize
from paceline.lab.sim import SimConfig, simulate
from paceline.lab.sim.replayer import replay
from paceline.lab.workload import Workload
from tests.pure.lab.sim.sim_helpers import make_workload, sim_config, small_engine

COSTS = PreemptionCosts(token_s=1e-2, block_s=1e-3, step_s=1e-3, disk_block_s=1e-2, disk_write_s=2e-2)


def returning_users() -> Workload:
    """Every 4 s a user comes with a conversation of 4 blocks; 40 take turns, which is more than a device holds."""
    ids = [tuple(10 * (number % 40) + part for part in range(4)) for number in range(160)]
    times = [4.0 * number for number in range(160)]
    return make_workload(times, prompt=70, output=2, prefix_ids=ids, prefix_block=16)


def config_of(host: int, disk: int = 0) -> SimConfig:
    engine = small_engine(num_blocks=40)
    kv = replace(
        engine.kv, num_host_blocks=host, num_disk_blocks=disk, cache_on_host=host > 0, eviction="lru"
    )
    scheduler = replace(engine.scheduler, preemption_costs=COSTS)
    return sim_config(replace(engine, kv=kv, scheduler=scheduler))


def test_each_level_finds_more() -> None:
    workload = returning_users()
    shares = [
        summarize(simulate(config_of(*sizes), workload)).prefix_hit_share or 0.0
        for sizes in ((0, 0), (400, 0), (60, 0), (60, 600))
    ]
    assert shares[0] < 0.02 < shares[1]
    assert shares[2] < 0.02 < shares[3]


def test_a_run_with_levels_replays_byte_for_byte(tmp_path: Path) -> None:
    config, path = config_of(60, 600), tmp_path / "run.jsonl"
    simulate(config, returning_users(), recorder=RunLogWriter(path, run_header(config.engine)))
    text = path.read_text()
    assert '"store"' in text and '"fetch"' in text and '"swap_in"' in text
    report = replay(read_run_log(path), output=tmp_path / "again.jsonl")
    assert report.is_equal and report.complete
    assert (tmp_path / "again.jsonl").read_bytes() == path.read_bytes()


def test_flags_give_a_column_without_levels_first() -> None:
    options = SimOptions(
        evictions="lru,reuse", host_kv_gib=2.0, disk_kv_gib=8.0, disk_gbps=2.0, num_requests=5
    )
    alone, lru, reuse = plan_runs(options, {})
    assert [run.label for run in (alone, lru, reuse)] == ["lru alone", "lru", "reuse"]
    assert not alone.config.engine.kv.cache_on_host and alone.config.engine.kv.eviction == "lru"
    for run in (lru, reuse):
        kv, costs = run.config.engine.kv, run.config.engine.scheduler.preemption_costs
        assert kv.num_host_blocks * run.config.block_bytes == pytest.approx(2 << 30, rel=0.01)
        assert kv.num_disk_blocks == pytest.approx(4 * kv.num_host_blocks, abs=4)
        assert costs is not None
        assert costs.disk_block_s == run.config.block_bytes / 2e9 == costs.disk_write_s / 2


def test_a_disk_without_host_memory_is_refused() -> None:
    with pytest.raises(InputError, match="--host-kv-gib"):
        plan_runs(SimOptions(disk_kv_gib=8.0, num_requests=5), {})
