"""Calibration: a cost model comes back from the log of a run that was made with it, and a run from its log."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.audit.runlog import RunLogWriter, read_run_log, run_header
from paceline.costs.cost_model import StepShape
from paceline.costs.fit import CostCoefficients, FitError, FittedCost, HostCosts, TimeSpread
from paceline.errors import InputError
from paceline.lab.report.run_record import OUTCOMES, RunRecord
from paceline.lab.sim.cost_files import calibrate, load_cost_model, step_errors, timed_steps
from paceline.lab.sim.recorded import compare, deviations, read_recorded, sim_config
from paceline.lab.sim.replayer import replay
from paceline.lab.sim.replica import StepSpread
from paceline.lab.sim.run import simulate
from paceline.lab.sim.settings import Machine, SimConfig
from paceline.lab.workload.workload import Workload
from tests.pure.lab.sim import sim_helpers
from tests.pure.lab.sim.sim_helpers import machine, make_workload, random_workload, small_engine

pytestmark = pytest.mark.slow

TRUE = FittedCost(
    CostCoefficients(
        fixed_s=0.02,
        knots=(8,),
        slopes_s=(0.002, 0.004),
        decode_context_s=2e-5,
        prefill_context_products_s=1e-6,
        logit_rows_s=0.001,
        copy_bytes_s=0.0,
    ),
    FitError(mape=0.0, p90=0.0, num_samples=100),
)
HOST_S = 0.005


def record(path: Path, config: SimConfig, workload: Workload) -> RunRecord:
    return simulate(config, workload, recorder=RunLogWriter(path, run_header(config.engine)))


def config(depth: int = 0, **more: Any) -> SimConfig:
    return sim_helpers.sim_config(small_engine(depth=depth), TRUE, host_step_s=HOST_S, **more)


def fitted(path: Path) -> Machine:
    return machine(calibrate([path], 0).cost)


def test_a_known_cost_model_is_recovered_from_a_simulated_log(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    record(log, config(), random_workload(80, 1, rate=4.0))
    found = calibrate([log], 0)
    assert found.cost.error.p90 < 1e-6
    for quantiles in (found.cost.spread.decode, found.cost.spread.prompts):
        assert quantiles and quantiles == pytest.approx([1.0] * len(quantiles))
    assert found.cost.host.step_s == pytest.approx(HOST_S)
    assert {kind.kind for kind in found.kinds} == {"decode", "mixed", "prefill"}
    assert sum(kind.num_steps for kind in found.kinds) == len(timed_steps(read_run_log(log)))
    for shape in (
        StepShape(decode_rows=3, decode_context=200, logit_rows=3),
        StepShape(
            decode_rows=5, decode_context=300, prefill_tokens=40, prefill_context_products=820, logit_rows=6
        ),
    ):
        assert found.cost.step_seconds(shape) == pytest.approx(TRUE.step_seconds(shape), rel=1e-3)


def test_several_logs_make_one_model_that_knows_what_each_of_them_knew(tmp_path: Path) -> None:
    """One log has many rows at once and one has hardly any: alone, each is blind where the other sees."""
    logs = [tmp_path / "busy.jsonl", tmp_path / "calm.jsonl"]
    record(logs[0], config(), random_workload(60, 1, rate=8.0))
    record(logs[1], config(depth=1), random_workload(60, 2, rate=0.2))
    both = calibrate(logs, 0)
    steps = [timed_steps(read_run_log(log)) for log in logs]
    assert sum(kind.num_steps for kind in both.kinds) == sum(map(len, steps)) == both.cost.error.num_samples
    assert both.cost.engine["depth"] == 0, "the first log says what engine it is"
    assert both.cost.error.p90 < 1e-6
    for log in logs:
        for kind in step_errors(both.cost, log, 0):
            assert kind.mape < 1e-6, (log, kind)


def test_the_time_until_the_engine_knows_of_a_request_is_recovered(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    record(log, config(request_s=0.03), random_workload(40, 2, rate=0.5))  # so few that it is often idle
    found = calibrate([log], 0).cost.host
    assert found.request_s == pytest.approx(0.03, abs=1e-6) and found.step_s == pytest.approx(HOST_S)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("rate", [1.0, 6.0])
def test_the_comparison_of_a_simulated_log_with_itself_is_exact(
    depth: int, rate: float, tmp_path: Path
) -> None:
    log = tmp_path / "run.jsonl.gz"
    given = config(depth)
    made = record(log, given, random_workload(60, 3, rate=rate, tenants=3))
    recorded = read_recorded(str(log))
    assert recorded.num_left_out == 0
    for name in ("first_token_s", "finished_s", "prompt_len", "output_len", "step_padded", "step_rows"):
        seen, was = getattr(recorded.record, name), getattr(made, name)
        # A recorded run begins with its first arrival.
        shift = made.arrival_s[0] if name.endswith("_s") else 0
        np.testing.assert_allclose(seen, was - shift, rtol=0, atol=1e-9)
    same = compare(recorded.record, recorded.workload, replace(given, engine=recorded.config))
    assert [each.error for each in same] == pytest.approx([0.0] * 10, abs=1e-9)
    assert all(each.holds for each in same)
    longer = replace(given, engine=recorded.config, host_step_s=0.05)
    if depth == 0:
        found = compare(recorded.record, recorded.workload, longer)
        assert any(each.holds is False for each in found), "a wrong model must be found out"


def test_a_model_fitted_to_one_run_predicts_another(tmp_path: Path) -> None:
    record(tmp_path / "one.jsonl", config(), random_workload(120, 4, rate=4.0))
    record(tmp_path / "other.jsonl", config(), random_workload(60, 5, rate=6.0))
    recorded = read_recorded(str(tmp_path / "other.jsonl"))
    errors = compare(recorded.record, recorded.workload, sim_config(recorded, fitted(tmp_path / "one.jsonl")))
    assert max(abs(each.error or 0.0) for each in errors) < 0.02


def test_prefixes_priorities_and_tenants_are_repeated(tmp_path: Path) -> None:
    workload = replace(
        make_workload(
            [0.0, 5.0, 10.0],
            prompt=40,
            tenant=[0, 1, 0],
            prefix_ids=[(1, 2, 3), (1, 9, 8), (1, 2, 7)],
            prefix_block=16,
        ),
        priority=np.array([3, 0, -1], np.int32),
    )
    made = record(tmp_path / "run.jsonl", config(), workload)
    recorded = read_recorded(str(tmp_path / "run.jsonl"))
    assert made.cached_tokens.tolist() == recorded.record.cached_tokens.tolist() == [0, 0, 32]
    assert recorded.workload.priority is not None and recorded.workload.priority.tolist() == [3, 0, -1]
    assert recorded.workload.tenants == ("tenant0", "tenant1")
    again = simulate(replace(config(), engine=recorded.config), recorded.workload)
    assert again.cached_tokens.tolist() == [0, 0, 32]


def test_a_log_that_does_not_replay_cannot_be_compared(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    record(log, config(), random_workload(5, 6))
    log.write_text(log.read_text().replace('"decode_rows":{"added":[0]', '"decode_rows":{"added":[7]', 1))
    with pytest.raises(InputError, match=r"does not replay.*record it again"):
        read_recorded(str(log))


def test_a_run_without_a_token_has_nothing_to_compare(tmp_path: Path) -> None:
    writer = RunLogWriter(tmp_path / "run.jsonl", run_header(small_engine()))
    writer.close()
    with pytest.raises(InputError, match="no request of the run got a token"):
        read_recorded(str(tmp_path / "run.jsonl"))


def test_requests_that_were_refused_are_refused_again(tmp_path: Path) -> None:
    workload = make_workload([0.0, 1.0, 2.0], prompt=[20, 5000, 20], output=3)
    made = record(tmp_path / "run.jsonl", config(), workload)
    recorded = read_recorded(str(tmp_path / "run.jsonl"))
    refused = OUTCOMES.index("refused")
    assert made.outcome.tolist() == recorded.record.outcome.tolist() == [0, refused, 0]


def test_a_measure_that_is_missing_is_no_error(tmp_path: Path) -> None:
    made = record(tmp_path / "run.jsonl", config(), make_workload([0.0], output=1))
    from paceline.lab.report.summary import summarize

    summary = summarize(made)
    by_name = {each.name: each for each in deviations(summary, summary)}
    assert by_name["ITL p50"].error is None and by_name["ITL p50"].holds is None
    assert by_name["TTFT p50"].error == 0.0


def test_a_step_that_waited_for_the_one_before_it_is_timed_from_its_end(tmp_path: Path) -> None:
    """A device that has steps queued says when a step was given to it, not when it began."""
    log = tmp_path / "run.jsonl"
    record(log, config(depth=1), random_workload(80, 1, rate=4.0))
    header, *lines = log.read_text().splitlines()
    given = []
    for line in map(json.loads, lines):
        if (line.get("result") or {}).get("times"):
            line["result"]["times"][0] = line["t_plan"]
        given.append(json.dumps(line))
    log.write_text("\n".join([header, *given]) + "\n")
    found = calibrate([log], 0).cost
    assert found.error.p90 < 0.01
    shape = StepShape(
        decode_rows=3, decode_context=100, prefill_tokens=0, prefill_context_products=0, logit_rows=3
    )
    assert found.step_seconds(shape) == pytest.approx(TRUE.step_seconds(shape), rel=0.02)


# -- how steps of one shape differ -------------------------------------------------------------------------


def test_factors_have_the_quantiles_they_are_drawn_from() -> None:
    known = TimeSpread(decode=(0.5, 0.9, 1.0, 1.1, 3.0), prompts=(2.0, 2.0))
    spread = StepSpread(known, seed=1, replica=0)
    drawn = np.array([spread.stretch(False) for _ in range(20_000)])
    assert drawn.min() >= 0.5 and drawn.max() <= 3.0
    assert np.quantile(drawn, [0.25, 0.5, 0.75]) == pytest.approx([0.9, 1.0, 1.1], abs=0.02)
    assert spread.stretch(True) == 2.0
    again = StepSpread(known, seed=1, replica=0)
    assert [again.stretch(False) for _ in range(50)] == drawn[:50].tolist()
    other = StepSpread(known, seed=1, replica=1)
    assert [other.stretch(False) for _ in range(50)] != drawn[:50].tolist()
    assert StepSpread(TimeSpread(), seed=1, replica=0).stretch(True) == 1.0


def test_a_spread_stretches_steps_and_is_found_again(tmp_path: Path) -> None:
    given = config(spread=TimeSpread(decode=(0.8, 0.95, 1.0, 1.1, 1.5), prompts=(0.5, 0.8, 1.0, 1.3, 2.0)))
    made = record(tmp_path / "run.jsonl", given, random_workload(150, 7, rate=4.0))
    assert simulate(config(), random_workload(150, 7, rate=4.0)).duration_s != made.duration_s
    found = calibrate([tmp_path / "run.jsonl"], 0).cost.spread
    assert np.quantile(found.decode, [0.25, 0.5, 0.75]) == pytest.approx([0.95, 1.0, 1.1], abs=0.05)
    # A fit of relative errors lies below the middle of steps that differ this much; the factors make up for it.
    low, middle, high = np.quantile(found.prompts, [0.25, 0.5, 0.75])
    assert (low / middle, high / middle) == pytest.approx((0.8, 1.3), abs=0.1)


def test_what_a_model_knows_beside_steps_survives_its_file(tmp_path: Path) -> None:
    cost = FittedCost(
        TRUE.coefficients,
        TRUE.error,
        host=HostCosts(step_s=0.001, request_s=0.002),
        spread=TimeSpread(decode=(0.9, 1.1), prompts=(0.8, 1.2)),
        engine={"depth": 0, "block_size": 16},
    )
    cost.save(tmp_path / "costs.json")
    read = FittedCost.load(tmp_path / "costs.json")
    assert (read.host, read.spread, read.engine) == (cost.host, cost.spread, cost.engine)
    older = {
        name: value
        for name, value in cost.to_json().items()
        if name not in ("host_step_s", "request_s", "spread", "engine")
    }
    assert (
        FittedCost.from_json(older).host == HostCosts() and FittedCost.from_json(older).spread == TimeSpread()
    )
    for name, wrong in (("engine", 3), ("engine", {"depth": "x"}), ("spread", "x"), ("request_s", -1)):
        (tmp_path / "bad.json").write_text(json.dumps({**cost.to_json(), name: wrong}))
        with pytest.raises(InputError, match=f"{name}.*fit it again"):
            FittedCost.load(tmp_path / "bad.json")


def test_a_log_that_is_compressed_serves_as_a_cost_model(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl.gz"
    record(log, config(), random_workload(60, 8, rate=4.0))
    assert load_cost_model(log, 0).host.step_s == pytest.approx(HOST_S)


def test_a_log_that_is_still_being_written_is_read_as_far_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, growing = tmp_path / "whole.jsonl", tmp_path / "growing.jsonl"
    record(whole, config(), random_workload(20, 1, rate=4.0))
    lines = whole.read_text().splitlines(keepends=True)
    half = len(lines) // 2
    growing.write_text("".join(lines[:half]))
    before = read_recorded(str(growing)).record

    def later(*given: Any, **more: Any) -> Any:
        growing.write_text("".join(lines))
        return replay(*given, **more)

    monkeypatch.setattr("paceline.lab.sim.recorded.replay", later)
    after = read_recorded(str(growing)).record
    assert len(before.step_start_s) == half - 1  # the header is no step
    assert after.step_start_s.tolist() == before.step_start_s.tolist()
