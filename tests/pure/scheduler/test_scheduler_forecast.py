"""When a first token would come: what is said when a request arrives, against what happens then."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.core.events import Forecast
from paceline.core.request import Request
from paceline.costs.model import CostModel, StepShape
from paceline.costs.presets import device_spec, model_shape
from paceline.costs.step_speed import FEWEST
from paceline.lab.sim import Machine, SimConfig, engine_config, simulate
from paceline.lab.workload.workload import Workload
from paceline.scheduler.scheduler import Scheduler
from tests.pure.sim.sim_helpers import make_workload


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
