"""When a first token would come: what is said when a request arrives, against what happens then."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.core.events import Forecast
from paceline.core.request import FinishReason, Request, RequestId
from paceline.core.sampling import SamplingParams
from paceline.costs.cost_model import CostModel, StepShape
from paceline.costs.presets import device_spec, model_shape
from paceline.costs.step_speed import FEWEST
from paceline.lab.sim import Machine, SimConfig, engine_config, simulate
from paceline.lab.workload.workload import Workload
from paceline.scheduler.forecast import PART, Cost, StepProjection
from paceline.scheduler.scheduler import Scheduler
from paceline.scheduler.step.pace import ExpectedRoom, StepRoom
from paceline.scheduler.tenants import MOST_TENANTS, OutputStats
from tests.pure.lab.sim.sim_helpers import make_workload


class Laptop:
    """Steps of a small model on a CPU."""

    def step_seconds(self, shape: StepShape) -> float:
        return 0.02 + 0.0035 * shape.tokens + 2e-6 * shape.decode_context


def varying(count: int, gap_s: float) -> Workload:
    """The middle third comes three times as fast."""
    draw = np.random.default_rng(5)
    gaps = draw.exponential(gap_s, count)
    gaps[count // 3 : 2 * count // 3] /= 3
    return make_workload(
        np.cumsum(gaps).tolist(),
        prompt=draw.integers(10, 200, count).tolist(),
        output=draw.integers(5, 80, count).tolist(),
    )


@contextmanager
def forecasts() -> Iterator[list[Forecast | None]]:
    """What is said of each request just before it is added, in the order of arrival."""
    said: list[Forecast | None] = []
    add = Scheduler.add

    def asking(self: Scheduler, requests: Any) -> None:
        said.extend(self.forecast(request) for request in requests)
        add(self, requests)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "add", asking)
        yield said


def errors(
    workload: Workload, cost: CostModel | None = None, **options: Any
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """|said - seen| of the first token, over what was seen or 200 ms."""
    machine = Machine.of(model_shape("llama-3.1-8b"), device_spec("h200"), cost or Laptop())
    sizes = {"max_num_seqs": 32, "max_num_batched_tokens": 64, "num_blocks": 2000, "depth": 1, **options}
    with forecasts() as said:
        engine = engine_config(machine, workload, sizes)
        record = simulate(SimConfig(machine=machine, engine=engine), workload)
    seen = record.first_token_s - record.arrival_s
    known = [index for index, forecast in enumerate(said) if forecast is not None]
    assert len(known) >= len(workload) - FEWEST
    told = np.array([forecast.first_token_s for forecast in said if forecast is not None])
    wrong: np.ndarray[tuple[int], np.dtype[np.float64]] = np.abs(told - seen[known]) / np.maximum(
        seen[known], 0.2
    )
    return wrong


@pytest.mark.parametrize("gap_s", [3.0, 1.0, 0.5])
def test_half_of_the_forecasts_are_close_at_any_load(gap_s: float) -> None:
    assert np.median(errors(varying(100, gap_s))) < 0.15


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"max_num_seqs": 4}, {"num_blocks": 90}, {"scheduling_policy": "shortest"}, {"depth": 0}],
    ids=["few rows", "few blocks", "another order", "one by one"],
)
def test_rows_blocks_and_the_order_are_thought_of(options: dict[str, Any]) -> None:
    assert np.median(errors(varying(100, 1.0), **options)) < 0.25


class Shared:
    """A laptop that others use too: steps take anything from usual to four times as long, and now and then a stall."""

    def __init__(self) -> None:
        self._draw = np.random.default_rng(11)
        self._load, self._left = 1.0, 0

    def step_seconds(self, shape: StepShape) -> float:
        if not self._left:
            self._load, self._left = float(self._draw.uniform(1.0, 4.0)), int(self._draw.integers(50, 400))
        self._left -= 1
        noise = float(self._draw.lognormal(0.0, 0.3)) * (8.0 if self._draw.random() < 0.005 else 1.0)
        return noise * self._load * Laptop().step_seconds(shape)


@pytest.mark.slow
@pytest.mark.parametrize("gap_s", [6.0, 3.0, 2.0])
def test_forecasts_follow_the_speed_of_a_machine_that_others_use_too(gap_s: float) -> None:
    assert np.median(errors(varying(150, gap_s), cost=Shared())) < 0.25


def test_prompts_that_are_cached_are_not_counted_as_if_they_were_read() -> None:
    workload = varying(120, 0.4)
    prompts = 160
    ids = tuple((0,) * (prompts // 16) for _ in range(len(workload)))
    shared = replace(
        workload,
        prompt_len=np.full(len(workload), prompts + 8, np.int32),
        prefix_ids=ids,
        prefix_block=16,
    )
    assert np.median(errors(shared, max_num_seqs=6, block_size=16)) < 0.25


@pytest.mark.slow
def test_asking_changes_nothing() -> None:
    workload = varying(60, 0.5)
    machine = Machine.of(model_shape("llama-3.1-8b"), device_spec("h200"), Laptop())
    config = SimConfig(
        machine=machine, engine=engine_config(machine, workload, {"max_num_seqs": 4}), check=True
    )
    plain = simulate(config, workload)
    with forecasts():
        asked = simulate(config, workload)
    assert np.array_equal(plain.first_token_s, asked.first_token_s)
    assert np.array_equal(plain.step_end_s, asked.step_end_s)


def test_more_ahead_is_a_later_token() -> None:
    """The same request, asked about before and after another was added."""
    workload = varying(40, 1.0)
    later: list[bool] = []
    add = Scheduler.add

    def twice(self: Scheduler, requests: list[Request]) -> None:
        before = self.forecast(requests[0])
        add(self, requests)
        after = self.forecast(requests[0])
        if before is not None and after is not None:
            later.append(after.first_token_s > before.first_token_s and after.ahead == before.ahead + 1)

    machine = Machine.of(model_shape("llama-3.1-8b"), device_spec("h200"), Laptop())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "add", twice)
        sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
        simulate(SimConfig(machine=machine, engine=engine_config(machine, workload, sizes)), workload)
    assert len(later) > 20 and all(later)


# ----------------------------------------------------------------
# A walk over the steps to come, against the same counted step by step.


def cost(decoding: float, prompt_tokens: float, pairs: float = 0.0) -> float:
    return 1.0 + 0.01 * (decoding + prompt_tokens) + 1e-3 * pairs


def plain(decoding: float, prompt_tokens: float, pairs: float = 0.0) -> float:
    """The same where attention costs nothing."""
    return cost(decoding, prompt_tokens)


class Room(ExpectedRoom):
    """Steps of a number of tokens, by how far the long prompt is; `long`: from how many tokens on a prompt is one."""

    def __init__(self, tokens: int | Callable[[int], int], long: float = math.inf, for_long: int = 0) -> None:
        self._tokens, self._long, self._for_long = tokens, long, for_long

    def is_long(self, num_tokens: int) -> bool:
        return num_tokens >= self._long

    def __call__(self, decoding: int, done: int = -1, *, others: bool = False) -> StepRoom:
        tokens = self._tokens if isinstance(self._tokens, int) else self._tokens(done)
        return StepRoom(tokens, self._for_long or tokens)


def projection(
    *lives: float,
    budget: int | ExpectedRoom = 10,
    free_rows: int = 8,
    free_blocks: float = 1000.0,
    share: float = 1.0,
    by: Cost = plain,
) -> StepProjection:
    return StepProjection(
        by,
        Room(budget) if isinstance(budget, int) else budget,
        endings=[(life, 2.0) for life in lives],
        free_rows=free_rows,
        free_blocks=free_blocks,
        block_size=16,
        share=share,
    )


def test_a_prompt_that_fits_takes_one_step_of_its_size() -> None:
    walk = projection()
    assert walk.first_token_s(walk.read(4)) == pytest.approx(plain(0, 4))


def test_prompts_share_steps_and_long_ones_take_several() -> None:
    walk = projection()
    walk.read(6)
    prompt = walk.read(18)  # 10 + 10 + 4
    assert walk.first_token_s(prompt) == pytest.approx(2 * plain(0, 10) + plain(0, 4))


def test_a_prompt_behind_a_long_one_takes_what_the_share_of_that_leaves() -> None:
    walk = projection(share=0.7)
    walk.read(700)
    walk.admit(1)
    prompt = walk.read(6)  # 3 beside 7, twice
    assert walk.first_token_s(prompt) == pytest.approx(2 * plain(0, 10))


def test_one_more_prompt_waits_until_a_step_has_tokens_for_it() -> None:
    walk = projection(share=0.5)
    walk.read(20)
    walk.read(20)
    walk.admit(1)
    prompt = walk.read(3)  # both are read at half of a step, which takes four
    assert walk.first_token_s(prompt) == pytest.approx(4 * plain(0, 10) + plain(0, 3))


def test_what_tokens_attend_to_is_counted_once_however_steps_are_counted_together() -> None:
    walk = projection(by=cost)
    assert walk.first_token_s(walk.read(100, at=1000)) == pytest.approx(
        sum(cost(0, 10, 10 * (1000 + 10 * step) + 50) for step in range(10))
    )


def test_the_budget_is_asked_for_anew_the_further_a_long_prompt_is() -> None:
    walk = projection(budget=Room(lambda done: 1024 if done < 2 * PART else 256, long=PART))
    assert walk.first_token_s(walk.read(3 * PART)) == pytest.approx(
        2 * PART // 1024 * plain(0, 1024) + PART // 256 * plain(0, 256)
    )


def test_a_long_prompt_leaves_to_others_what_it_may_not_take() -> None:
    walk = projection(budget=Room(100, long=1000, for_long=20))
    walk.read(5000)
    walk.admit(1)
    prompt = walk.read(160)  # 80 at a time
    assert walk.first_token_s(prompt) == pytest.approx(2 * plain(0, 100))


def test_rows_that_decode_leave_less_of_a_step_until_they_end() -> None:
    walk = projection(2.0, 2.0)
    prompt = walk.read(30)  # 8, 8, then 10 and 4
    assert walk.first_token_s(prompt) == pytest.approx(2 * plain(2, 8) + plain(0, 10) + plain(0, 4))


def test_without_a_row_the_next_ending_is_waited_for() -> None:
    walk = projection(5.0, 9.0, free_rows=0)
    walk.admit(1)
    assert walk.seconds == pytest.approx(5 * plain(2, 0))
    assert walk.first_token_s(walk.read(3)) == pytest.approx(5 * plain(2, 0) + plain(1, 3))


def test_without_blocks_as_many_endings_as_free_them_are_waited_for() -> None:
    walk = projection(3.0, 6.0, 9.0, free_blocks=0.0)
    walk.admit(3)
    assert walk.decoding == 1  # two of them had to end


def test_a_request_whose_prompt_was_read_decodes_and_ends() -> None:
    walk = projection(free_rows=1)
    walk.admit(1)
    walk.read(10, decodes=(4.0, 1.0))
    walk.admit(1)  # waits for it
    assert walk.seconds == pytest.approx(plain(0, 10) + 4 * plain(1, 0))


def test_without_a_row_to_wait_for_nothing_is_waited_for() -> None:
    walk = projection(free_rows=0, free_blocks=0.0)
    walk.admit(5)
    assert walk.first_token_s(walk.read(1)) == pytest.approx(plain(0, 1))


class Recounting(StepProjection):
    """Counts all prompts again for each one more."""

    def _has_room(self) -> bool:
        self._open = None
        return super()._has_room()


@pytest.mark.parametrize("seed", range(20))
def test_what_is_counted_as_prompts_come_is_what_counting_all_of_them_gives(seed: int) -> None:
    draw = np.random.default_rng(seed)
    budget = Room(lambda done: 40 if done < PART else 25, long=300, for_long=int(draw.integers(1, 30)))
    ends = draw.integers(1, 40, 3).astype(float)
    share = float(draw.uniform(0.2, 1.0))
    num_free = int(draw.integers(1, 30))
    walks = [
        kind(
            cost,
            budget,
            endings=[(end, 3.0) for end in ends],
            free_rows=num_free,
            free_blocks=200.0,
            block_size=16,
            share=share,
        )
        for kind in (StepProjection, Recounting)
    ]
    for _ in range(150):
        tokens, at, blocks = (
            int(draw.integers(1, 400)),
            int(draw.integers(0, 50)),
            float(draw.integers(1, 30)),
        )
        decodes = None if draw.random() < 0.3 else (float(draw.integers(1, 50)), blocks)
        for walk in walks:
            walk.admit(blocks)
            walk.read(tokens, at, decodes)
        assert walks[0].seconds == walks[1].seconds
    assert walks[0].first_token_s(walks[0].read(9)) == walks[1].first_token_s(walks[1].read(9))


def test_a_line_of_short_prompts_is_walked_once_and_not_again_for_each_of_them() -> None:
    asked = []

    class Asked(Room):
        def __call__(self, decoding: int, done: int = -1, *, others: bool = False) -> StepRoom:
            asked.append(done)
            return super().__call__(decoding, done, others=others)

    walk = projection(budget=Asked(100), free_rows=1000)
    for _ in range(400):
        walk.admit(1)
        walk.read(5)
    assert walk.first_token_s(walk.read(5)) == pytest.approx(20 * plain(0, 100) + plain(0, 5))
    assert len(asked) <= 2 * 21  # for each step: what it has room for, and what is read in it


# ----------------------------------------------------------------
# Output statistics: lengths of answers by tenant, and how much of prompts is cached.


def ended(
    stats: OutputStats, tenant: int, num_output: int, *, stopped: bool, times: int = 60, cached: int = 0
) -> None:
    for _ in range(times):
        request = Request(RequestId(0), np.arange(100, dtype=np.int32), SamplingParams())
        request.num_cached = cached
        stats.ended(tenant, request, num_output, FinishReason.STOP if stopped else FinishReason.LENGTH)


def left(stats: OutputStats, tenant: int, allowed: int) -> float:
    return float(stats.outputs_left(np.array([tenant]), np.array([allowed]))[0])


def test_before_anything_has_ended_answers_are_as_long_as_they_may_be() -> None:
    assert left(OutputStats(), 0, 4000) == 4000


def test_answers_that_stop_by_themselves_do_not_count_with_what_they_were_allowed() -> None:
    stats = OutputStats()
    ended(stats, 0, 50, stopped=True)
    assert left(stats, 0, 4000) == pytest.approx(50, rel=0.2)
    assert left(stats, 0, 10) == 10  # never more than it may


def test_answers_that_run_to_their_length_do() -> None:
    stats = OutputStats()
    ended(stats, 0, 50, stopped=False)
    assert left(stats, 0, 700) == 700


def test_tenants_have_averages_of_their_own_and_new_ones_those_of_all() -> None:
    stats = OutputStats()
    for _ in range(60):
        ended(stats, 0, 20, stopped=True, times=1, cached=80)
        ended(stats, 1, 400, stopped=True, times=1)
    assert left(stats, 0, 4000) < 100 < 300 < left(stats, 1, 4000)
    assert left(stats, 0, 4000) < left(stats, 2, 4000) < left(stats, 1, 4000)
    shares = stats.cached_share(np.array([0, 1, 0]))
    assert shares[0] == shares[2] > 0.6 > 0.2 > shares[1]


def test_tenants_do_not_pile_up() -> None:
    stats = OutputStats()
    for tenant in range(MOST_TENANTS + 10):
        ended(stats, tenant, 5, stopped=True, times=1)
    assert len(stats._by_tenant) == MOST_TENANTS
