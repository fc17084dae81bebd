"""What `paceline tune --verify` says about the bounds it was asked to keep."""

from __future__ import annotations

from dataclasses import replace

from paceline.cli.tune_run import parse_bounds
from paceline.cli.tune_verify import slo_lines
from paceline.report.summary import summarize
from paceline.sim import SimConfig, engine_config, simulate
from tests.pure.sim.sim_helpers import machine, random_workload


def test_each_bound_is_told_as_kept_or_missed_and_few_requests_are_named() -> None:
    workload = random_workload(20, 1)
    config = SimConfig(machine=machine(), engine=engine_config(machine(), workload, {}))
    seen = summarize(simulate(config, workload))
    ttft = replace(seen.ttft_s, p99=0.5)
    lines = slo_lines(parse_bounds("ttft_p99=1s,ttft_p50=1ms"), replace(seen, ttft_s=replace(ttft, p50=0.25)))
    assert lines[:2] == ["ttft_p99: kept, 500 of 1,000 ms.", "ttft_p50: missed, 250 of 1 ms."]
    assert lines[2].startswith("20 requests say little")
