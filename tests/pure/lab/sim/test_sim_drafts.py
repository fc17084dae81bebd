"""Drafts in the simulator: which are right is drawn, and what they cost and bring follows from that."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from paceline.audit.codec import decode_time
from paceline.audit.runlog import RunLogWriter, read_run_log, run_header
from paceline.config.speculative import DRAFT_BUCKETS, PROBE_EVERY, DraftConfig
from paceline.core.clock import ManualClock
from paceline.core.plan import AT_LENGTH, RowJoins, RowSet, StepPlan, StepWork, i32, whole_rows
from paceline.core.sampling import SamplingParams
from paceline.costs.cost_model import StepShape
from paceline.costs.presets import device_spec, model_shape
from paceline.errors import InputError
from paceline.lab.report.summary import summarize
from paceline.lab.sim import SimConfig, engine_config, simulate
from paceline.lab.sim.acceptance import Acceptance
from paceline.lab.sim.replayer import replay
from paceline.lab.sim.settings import Machine
from paceline.lab.sim.simulated_runner import SimulatedDrafts, TimedRunner, step_shape
from tests.pure.lab.sim.sim_helpers import PerToken, make_workload, sim_config, small_engine

SIZES = (1, 2, 4, 8, 16, 32, 64)
SIZED = {"sizes": SIZES, "seconds": tuple(0.01 + 1e-4 * size for size in SIZES)}


def config(acceptance: str | None, width: int = 7, depth: int = 1, *, sized: bool = False) -> SimConfig:
    of = small_engine(depth=depth)
    drafts = None if acceptance is None else DraftConfig(width=width, fixed_s=0.01, token_s=1e-4)
    if drafts is not None and sized:
        drafts = replace(drafts, **SIZED)  # type: ignore[arg-type]
    of = replace(of, scheduler=replace(of.scheduler, drafts=drafts))
    given = None if acceptance is None else Acceptance.read(acceptance)
    return sim_config(of, acceptance=given, check=True)


LOAD = make_workload(
    [0.02 * number for number in range(24)], output=[30 + number % 11 for number in range(24)]
)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("sized", [False, True])
def test_tokens_come_sooner_and_are_as_many(depth: int, sized: bool) -> None:
    means = []
    for given in (None, "0", "0.7", "1"):
        summary = summarize(simulate(config(given, depth=depth, sized=sized), LOAD))
        assert summary.requests["finished"] == len(LOAD)
        assert summary.itl_s.count == LOAD.output_len.sum() - len(LOAD)
        assert summary.itl_s.mean is not None
        means.append(summary.itl_s.mean)
    plain, never, often, always = means
    assert never == pytest.approx(plain, rel=0.02)
    assert always < (0.65 if sized else 0.6) * often  # steps of a GPU that read prompts have none
    assert often < 0.67 * plain


def drafting(acceptance: str, sizes: tuple[int, ...] = (), **plan: float) -> tuple[TimedRunner, StepPlan]:
    """Four rows that decode, with 2, 5, 100 and 100 tokens to come."""
    given = SimulatedDrafts(Acceptance.read(acceptance), sizes)
    runner = TimedRunner(PerToken(), ManualClock(), 4, drafts=given)
    joins = whole_rows(range(4), [[1] * 8] * 4, [10, 13, 108, 108], SamplingParams(), num_computed=7)
    values = {"draft_width": 3, "draft_tokens": 12, "draft_floor": 0.1, **plan}
    first = StepPlan(seq=1, joins=joins, decode_rows=RowSet(added=i32(range(4))), **values)  # type: ignore[arg-type]
    trust = np.full(32, 0.9, np.float32)
    return runner, first._replace(work=StepWork(decode_rows=4, logit_rows=4), trust=trust)


def test_rows_get_the_drafts_that_are_right_and_end_where_they_must() -> None:
    runner, plan = drafting("1")
    result = runner.submit(plan).wait()
    assert result.verified.tolist() == [1, 3, 3, 3] and result.count.tolist() == [2, 4, 4, 4]
    assert (result.finished == AT_LENGTH).tolist() == [True, False, False, False]
    assert result.times.end_s == pytest.approx(0.01 + 1e-4 * 14)
    assert result.drafts is not None and result.drafts.compared[0] == result.drafts.equal[0] == 10
    runner, plan = drafting("0")
    result = runner.submit(plan).wait()
    assert result.verified.tolist() == [1, 3, 3, 3] and result.count.tolist() == [1] * 4
    assert result.drafts is not None and (result.drafts.compared[0], result.drafts.equal[0]) == (4, 0)


def test_the_budget_and_the_floor_hold() -> None:
    runner, plan = drafting("1", draft_tokens=5)
    assert runner.submit(plan).wait().verified.tolist() == [1, 2, 1, 1]
    runner, plan = drafting("1", draft_floor=0.85)
    assert runner.submit(plan).wait().verified.tolist() == [1, 1, 1, 1]
    runner, plan = drafting("1", draft_width=0, draft_tokens=0)
    result = runner.submit(plan).wait()
    assert not len(result.verified) and result.count.tolist() == [1] * 4
    # The first of each is compared all the same.
    assert result.drafts is not None and result.drafts.equal[0] == 4


def test_a_step_of_a_gpu_takes_as_long_as_its_size() -> None:
    runner, plan = drafting("1", SIZES)
    result = runner.submit(plan).wait()
    assert result.verified.tolist() == [1, 3, 3, 3]
    assert result.times.end_s - result.times.start_s == pytest.approx(0.01 + 1e-4 * 16)
    assert result.drafts is not None and result.drafts.offered[0] == 4
    only = plan._replace(joins=RowJoins(), decode_rows=RowSet(), draft_width=0, draft_tokens=0)
    compared = []
    for seq in range(2, 2 + 2 * PROBE_EVERY):
        result = runner.submit(only._replace(seq=seq)).wait()
        assert not len(result.verified) and result.count[2:].tolist() == [1, 1]
        assert result.times.end_s - result.times.start_s == pytest.approx(0.01 + 1e-4 * 4)
        compared.append(result.drafts is not None)
    assert np.flatnonzero(compared).tolist() == [PROBE_EVERY - 1, 2 * PROBE_EVERY - 1]


def test_engines_of_gpus_have_sizes_of_steps_with_drafts() -> None:
    drafts = []
    for device in ("h200", "cpu-2core"):
        machine = Machine.of(model_shape("smollm2-135m"), device_spec(device))
        drafts.append(engine_config(machine, LOAD, {}, DraftConfig()).scheduler.drafts)
    sized, line = drafts
    assert sized is not None and line is not None
    assert sized.sizes == (1, *DRAFT_BUCKETS) and sorted(sized.seconds) == list(sized.seconds)
    assert not line.sizes and line.fixed_s > 0.0


def test_a_draft_costs_a_token_and_no_reading_of_keys() -> None:
    work = StepWork(decode_rows=2, decode_context=50, logit_rows=2)
    assert step_shape(work, 0, 3) == StepShape(decode_rows=5, decode_context=50, logit_rows=5)


OWNERS, PLACES = np.arange(20_000) << 32 | 1, np.arange(20_000) % 97


def test_chances_are_those_that_were_given() -> None:
    given = Acceptance.read("0.7")
    kind = given.kinds(0, OWNERS, PLACES)
    right = given.right(0, OWNERS, PLACES, kind)
    assert not kind.any()
    assert [np.mean(right >= depth) for depth in (1, 2, 5)] == pytest.approx([0.7, 0.49, 0.168], abs=0.01)
    assert (right == given.right(0, OWNERS, PLACES, kind)).all()
    assert (right != given.right(1, OWNERS, PLACES, kind)).any()


def test_requests_differ_and_stay_as_they_are() -> None:
    given = Acceptance.read("beta:2,1")
    kind = given.kinds(0, OWNERS, PLACES)
    assert (kind == given.kinds(0, OWNERS, PLACES + 1)).all() and len(set(kind.tolist())) > 25
    assert np.mean(given.chances[kind]) == pytest.approx(2 / 3, abs=0.01)
    assert np.std(given.chances[kind]) == pytest.approx((1 / 18) ** 0.5, abs=0.01)


def test_a_recorded_run_says_what_its_drafts_were_like(tmp_path: Path) -> None:
    path, of = tmp_path / "run.jsonl", config("0.6")
    simulate(of, LOAD, recorder=RunLogWriter(path, run_header(of.engine)))
    given = Acceptance.read(str(path))
    assert given.chances[0] == pytest.approx(0.6, abs=0.05) and not given.chances[1:].any()
    assert 0.85 < given.shares[0] <= 1.0  # of a request's first token nothing is drafted
    kind = given.kinds(0, OWNERS, PLACES)
    assert np.mean(kind == -1) == pytest.approx(1.0 - given.shares[0], abs=0.01)
    assert not given.right(0, OWNERS, PLACES, kind)[kind == -1].any()
    assert replay(read_run_log(path)).is_equal


@pytest.mark.parametrize(
    "text", ["1.5", "-0.1", "nan", "beta:1", "beta:0,1", "beta:x,1", "nothing.jsonl", ""]
)
def test_what_cannot_be_read(text: str) -> None:
    with pytest.raises(InputError, match="--acceptance"):
        Acceptance.read(text)


def test_a_run_without_drafts_says_nothing(tmp_path: Path) -> None:
    path, of = tmp_path / "run.jsonl", config(None)
    simulate(of, LOAD, recorder=RunLogWriter(path, run_header(of.engine)))
    with pytest.raises(InputError, match="made no drafts"):
        Acceptance.read(str(path))


def test_a_run_with_sizes_replays(tmp_path: Path) -> None:
    path, of = tmp_path / "run.jsonl", config("0.8", sized=True)
    simulate(of, LOAD, recorder=RunLogWriter(path, run_header(of.engine)))
    assert replay(read_run_log(path)).is_equal


def test_how_many_are_worth_their_time_is_on_record_and_replays(tmp_path: Path) -> None:
    path, of = tmp_path / "run.jsonl", config("0.8")
    simulate(of, LOAD, recorder=RunLogWriter(path, run_header(of.engine)))
    decided = [each for logged in read_run_log(path) for each in logged.decisions if each[0] == "draft"]
    assert decided[0][1:4] == [-1, "more are worth their time", 7]
    assert decided[0][-1].startswith("from=0 to=7 tokens=7 rows=1 floor=0.0")
    times = [decode_time(each[5]) for each in decided]
    assert all(later - earlier >= 1.0 for earlier, later in pairwise(times))
    assert replay(read_run_log(path)).is_equal
