"""Prompts of 131,072 tokens: what the others see of one, what is said of it, and figures beyond 32 bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.audit.codec import decode_work
from paceline.audit.runlog import RunLogWriter, read_run_log, run_header
from paceline.costs.cost_model import StepShape
from paceline.costs.presets import device_spec, model_shape
from paceline.lab.report.run_record import RunRecord
from paceline.lab.sim import Machine, SimConfig, engine_config, simulate
from paceline.lab.sim.replayer import replay
from paceline.lab.workload.workload import Workload
from tests.pure.lab.sim.sim_helpers import make_workload
from tests.pure.scheduler.test_scheduler_forecast import forecasts

LENGTH = 131_072
H200 = Machine.of(model_shape("llama-3.1-8b"), device_spec("h200"))
PACED = {"step_target_ms": 32.0, "max_num_batched_tokens": 8192, "max_num_seqs": 128}


class Coarse:
    """Steps of a device on which a pair of tokens takes a nanosecond."""

    def step_seconds(self, shape: StepShape) -> float:
        return (
            5e-3 + 25e-6 * shape.tokens + 1e-9 * shape.prefill_context_products + 3e-8 * shape.decode_context
        )


def traffic(*, long: bool) -> Workload:
    """Streams that run all the time, short prompts four times a second, and one long prompt behind the third second."""
    requests = [(0.0, 200, 1500)] * 64 + [(1.0 + 0.25 * index, 400, 20) for index in range(40)]
    requests += [(3.05, LENGTH - 8, 8)] if long else []
    arrival_s, prompt, output = map(list, zip(*sorted(requests), strict=True))
    return make_workload(arrival_s, prompt=prompt, output=output)


def config_for(workload: Workload, machine: Machine = H200, **options: Any) -> SimConfig:
    engine = engine_config(machine, workload, {**PACED, **options})
    return SimConfig(machine=machine, engine=engine)


def run(workload: Workload, machine: Machine = H200, **options: Any) -> RunRecord:
    return simulate(config_for(workload, machine, **options), workload)


def first_tokens(record: RunRecord, workload: Workload) -> Any:
    return (record.first_token_s - record.arrival_s)[workload.prompt_len == 400]


@pytest.mark.slow
def test_streams_and_short_prompts_hardly_notice_a_long_one() -> None:
    plain, beside = (run(traffic(long=long)) for long in (False, True))
    apart = [np.quantile(record.itl_s[np.isfinite(record.itl_s)], 0.99) for record in (plain, beside)]
    assert apart[1] < 1.5 * apart[0]
    assert np.quantile(first_tokens(beside, traffic(long=True)), 0.99) < 0.3


@pytest.mark.slow
def test_a_long_prompt_takes_as_long_as_its_pairs_say_and_that_is_foretold() -> None:
    workload = make_workload([0.0] * 20 + [3.0], prompt=[500] * 20 + [LENGTH - 8], output=[20] * 20 + [8])
    machine = Machine.of(model_shape("llama-3.1-8b"), device_spec("h200"), Coarse())
    with forecasts() as said:
        record = run(workload, machine)
    took_s = float((record.first_token_s - record.arrival_s)[-1])
    pairs_s = 1e-9 * 0.5 * LENGTH**2
    assert pairs_s + 25e-6 * LENGTH < took_s < 1.35 * (pairs_s + 25e-6 * LENGTH)
    assert said[-1] is not None and said[-1].first_token_s == pytest.approx(took_s, rel=0.1)


@pytest.mark.slow
def test_those_that_come_behind_a_long_prompt_are_told_what_its_share_leaves_them() -> None:
    workload = traffic(long=True)
    with forecasts() as said:
        record = run(workload)
    seen = first_tokens(record, workload)
    told = np.array([np.nan if one is None else one.first_token_s for one in said], np.float64)[
        workload.prompt_len == 400
    ]
    wrong = np.abs(told - seen)[np.isfinite(told)]
    assert len(wrong) > 30 and np.quantile(wrong, 0.9) < 0.05


@pytest.mark.slow
def test_figures_beyond_32_bits_are_counted_logged_and_replayed(tmp_path: Path) -> None:
    workload, path = make_workload([0.0], prompt=[LENGTH - 8], output=[8]), tmp_path / "run.jsonl"
    config = replace(config_for(workload), check=True)
    simulate(config, workload, recorder=RunLogWriter(path, run_header(config.engine)))
    log = read_run_log(path)
    plans = [step.plan for step in log]
    tokens = LENGTH - 8
    assert (
        sum(decode_work(plan).prefill_context_products for plan in plans)
        == tokens * (tokens + 1) // 2
        > 2**32
    )
    report = replay(log, output=tmp_path / "again.jsonl")
    assert report.is_equal and report.complete, report.difference
    assert (tmp_path / "again.jsonl").read_bytes() == path.read_bytes()
