"""Objectives of requests: which are rejected and when, which go first, how long steps get, which end."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.audit.runlog import RunLogWriter, read_run_log, run_header
from paceline.core.events import Decision, DecisionKind, Forecast, Rule
from paceline.core.request import FinishReason, Request, RequestId, sooner
from paceline.core.sampling import MAX_OBJECTIVE_MS, SamplingParams
from paceline.errors import DeadlineImpossible, DeadlineInfeasible, InvalidRequest, PacelineError
from paceline.lab.report.run_record import OUTCOMES, RunRecord
from paceline.lab.sim import SimConfig, engine_config, simulate
from paceline.lab.sim.replayer import replay
from paceline.lab.workload.workload import Workload
from paceline.scheduler.policy.deadline import HOPELESS_S
from paceline.scheduler.rejections import CERTAIN, LATE, late_rejection
from paceline.scheduler.scheduler import Scheduler
from tests.pure.engine.engine_helpers import Bench, prompt
from tests.pure.engine.engine_helpers import engine_config as small_engine
from tests.pure.lab.sim.sim_helpers import PerToken, machine, make_workload
from tests.pure.scheduler.test_scheduler_pace import FRESH, pace
from tests.pure.scheduler.test_scheduler_policies import ranked, slack, view_of

FINISHED, REFUSED = OUTCOMES.index("finished"), OUTCOMES.index("refused")
FORECAST = Forecast(
    first_token_s=4.0,
    finish_s=9.0,
    ahead=3,
    waited_s=0.0,
    soonest_first_s=1.0,
    soonest_finish_s=5.0,
    alone_first_s=0.5,
    alone_finish_s=3.0,
    between_s=0.05,
    num_cached=0,
    num_output=51.0,
)


def wanting(**objectives: Any) -> Request:
    return Request(RequestId(1), np.zeros(8, np.int32), SamplingParams(max_tokens=64, **objectives))


def test_a_refusal_names_what_was_asked_for_however_long_it_has_waited() -> None:
    for name in ("itl_slo_ms", "ttft_slo_ms", "deadline_ms"):
        rejection = late_rejection(wanting(**{name: 10}), replace(FORECAST, waited_s=2.0))
        assert rejection is not None and str(rejection.error).startswith(f"{name} is 10, but")


# -- the values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deadline_ms", "ttft_slo_ms", "itl_slo_ms"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "100", MAX_OBJECTIVE_MS + 1])
def test_an_objective_is_a_positive_whole_number_of_at_most_a_day(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    most: dict[str, Any] = {name: MAX_OBJECTIVE_MS}
    SamplingParams(**most)


def test_what_to_do_with_the_infeasible_is_one_of_two() -> None:
    with pytest.raises(InvalidRequest, match="refuse, try"):
        SamplingParams(on_infeasible="hope")
    assert SamplingParams(on_infeasible="try").on_infeasible == "try"


def test_the_sooner_of_two_deadlines_counts() -> None:
    assert sooner(None, 5.0, None) is None
    assert sooner(7.0, 5.0, None) == 7.0
    assert sooner(None, 5.0, 1500) == 6.5
    assert sooner(6.0, 5.0, 1500) == 6.0
    assert sooner(9.0, 5.0, 1500) == 6.5


# -- the rule ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objectives", "refused", "param"),
    [
        ({}, None, None),
        ({"ttft_slo_ms": 399}, DeadlineImpossible, "ttft_slo_ms"),  # 0.8 of half a second
        ({"ttft_slo_ms": 401}, DeadlineInfeasible, "ttft_slo_ms"),
        ({"ttft_slo_ms": 799}, DeadlineInfeasible, "ttft_slo_ms"),  # 0.8 of a second, going first
        ({"ttft_slo_ms": 1999}, DeadlineInfeasible, "ttft_slo_ms"),  # four seconds are more than twice that
        ({"ttft_slo_ms": 2001}, None, None),
        ({"deadline_ms": 2399}, DeadlineImpossible, "deadline_ms"),
        ({"deadline_ms": 3999}, DeadlineInfeasible, "deadline_ms"),
        ({"deadline_ms": 4501}, None, None),
        ({"itl_slo_ms": 39}, DeadlineImpossible, "itl_slo_ms"),
        ({"itl_slo_ms": 41}, None, None),
        ({"ttft_slo_ms": 3000, "deadline_ms": 100}, DeadlineImpossible, "deadline_ms"),
        ({"ttft_slo_ms": 1, "on_infeasible": "try"}, None, None),
    ],
)
def test_a_request_that_cannot_make_its_times_is_rejected(
    objectives: dict[str, Any], refused: type[PacelineError] | None, param: str | None
) -> None:
    assert (CERTAIN, LATE) == (0.8, 2.0)
    rejection = late_rejection(wanting(**objectives), FORECAST)
    assert (None if rejection is None else type(rejection.error)) is refused
    if rejection is not None:
        assert getattr(rejection.error, "param", None) == param
        assert str(param) in str(rejection.error) and "on_infeasible" in str(rejection.error)


def test_when_to_come_again_is_when_the_forecast_fits() -> None:
    rejection = late_rejection(wanting(ttft_slo_ms=1000), FORECAST)
    assert rejection is not None and isinstance(rejection.error, DeadlineInfeasible)
    assert rejection.error.retry_after_s == pytest.approx(3.0)


def test_what_a_request_has_waited_already_counts() -> None:
    waited = replace(FORECAST, waited_s=1.0)
    assert late_rejection(wanting(ttft_slo_ms=2500), FORECAST) is None
    assert late_rejection(wanting(ttft_slo_ms=2500), waited) is not None


# -- in the scheduler ----------------------------------------------------------------------------------------


def crowd(count: int, gap_s: float, objectives: tuple[int, int, int]) -> Workload:
    """The first dozen teach how long steps take, and want nothing."""
    workload = make_workload((np.arange(count) * gap_s).tolist(), prompt=200, output=20)
    columns = np.zeros((count, 3), np.int32)
    columns[12:] = objectives
    return replace(workload, objectives=columns)


def configured(workload: Workload, **options: Any) -> SimConfig:
    here = machine(PerToken(fixed=0.01, per_token=0.001))
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_blocks": 400, "block_size": 16}
    engine = engine_config(here, workload, {**sizes, **options})
    return SimConfig(machine=here, engine=engine, on_infeasible="refuse", check=True)


def simulated(workload: Workload) -> RunRecord:
    return simulate(configured(workload), workload)


def test_under_overload_a_request_that_would_come_too_late_is_rejected_before_another_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusals: list[tuple[int, Decision]] = []
    add = Scheduler.add

    def watched(self: Scheduler, requests: Any) -> None:
        submitted = self.state.kv.submitted
        try:
            add(self, requests)
        except DeadlineInfeasible:
            refusals.append((submitted, self.state.decisions[-1]))
            raise

    monkeypatch.setattr(Scheduler, "add", watched)
    record = simulated(crowd(60, 0.05, (0, 1000, 0)))
    assert np.count_nonzero(record.outcome == REFUSED) == len(refusals) > 10
    for submitted, decision in refusals:
        assert (decision.kind, decision.reason) == (DecisionKind.REFUSE, Rule.DEADLINE_INFEASIBLE)
        assert decision.step == submitted + 1  # of the plan that comes next: none was made in between
    taken = record.outcome == FINISHED
    taken[:12] = False
    waited_s = (record.first_token_s - record.arrival_s)[taken]
    assert len(waited_s) and np.all(waited_s < 1.25 * LATE)  # they were told at most twice what they wanted


@pytest.mark.slow
def test_with_time_enough_no_request_is_rejected() -> None:
    record = simulated(crowd(40, 0.5, (8_000, 4_000, 400)))
    assert np.all(record.outcome == FINISHED)


def test_what_no_machine_could_do_is_refused_as_impossible() -> None:
    record = simulated(crowd(20, 0.5, (0, 5, 0)))
    assert np.all(record.outcome[12:] == REFUSED)


def test_refusals_replay(tmp_path: Path) -> None:
    """A log has what was wanted and what steps took, so that a replay refuses the same."""
    workload = crowd(60, 0.05, (3_000, 1_000, 40))
    config = configured(workload, depth=1)
    writer = RunLogWriter(tmp_path / "run.jsonl", run_header(config.engine, seed=0))
    record = simulate(config, workload, recorder=writer)
    assert np.any(record.outcome == REFUSED)
    report = replay(read_run_log(tmp_path / "run.jsonl"), output=tmp_path / "again.jsonl")
    assert report.is_equal, report.difference
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "run.jsonl").read_bytes()


def test_a_request_ends_at_its_deadline() -> None:
    bench = Bench(small_engine())
    (one,) = bench.engine.add(prompt(4), SamplingParams(max_tokens=50, deadline_ms=500))
    (other,) = bench.engine.add(prompt(4, 1), SamplingParams(max_tokens=50), deadline_s=0.2)
    assert bench.state.requests[one].deadline_s == 0.5
    for _ in range(3):
        bench.engine.step()
    bench.clock.advance(0.3)
    assert [(e.request, e.reason, e.detail) for e in bench.engine.step().finished] == [
        (other, FinishReason.ABORT, "deadline")
    ]
    bench.clock.advance(0.3)
    (ending,) = bench.engine.step().finished
    assert (ending.request, ending.detail, ending.num_output) == (one, "deadline", 4)


# -- the order and the steps ---------------------------------------------------------------------------------


def test_least_slack_thinks_of_the_first_token_that_is_wanted() -> None:
    policy = slack(0.0, 0.1)
    view = view_of(3, arrival_s=[0, 1, 2], first_due_s=[np.inf, 20.0, 12.0])
    assert ranked(policy, view) == [2, 1, 0]
    spoken = replace(view, num_tokens=view.num_tokens + 1)  # they have it: only patience is left
    assert ranked(policy, spoken) == [0, 1, 2]


def test_a_late_request_without_a_deadline_is_still_served_in_bounded_time() -> None:
    policy = slack(0.0, 0.1, ageing_s=5.0)
    view = view_of(2, arrival_s=[0, 9], first_due_s=[3.0, np.inf], deadline_s=[np.inf, np.inf])
    scores = policy.order(view)
    assert np.all(scores < HOPELESS_S) and ranked(policy, view) == [0, 1]


def test_the_least_objective_between_tokens_bounds_a_step_and_prompts_go_on() -> None:
    steps = pace(10.0)
    free = steps.budget(0, 0, FRESH, 0.0)
    assert steps.budget(0, 0, FRESH, 0.0, most_s=0.005) < free
    assert steps.budget(0, 0, FRESH, 0.0, most_s=1.0) == free  # an objective never makes a step longer
    assert steps.budget(10, 0, FRESH, 0.0, most_s=1e-6) >= 10 + 100


def test_rows_are_asked_what_they_want_as_long_as_they_run() -> None:
    bench = Bench(small_engine())
    bench.add(prompt(4), 3, itl_slo_ms=20)
    bench.add(prompt(4, 1), 6)
    bench.step()
    rows = bench.state.rows
    assert rows.num_itl == 1 and rows.itl_s.min() == 0.02
    bench.run()
    assert rows.num_itl == 0 and np.all(np.isinf(rows.itl_s))
