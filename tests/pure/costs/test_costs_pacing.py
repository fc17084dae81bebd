"""What a pace is kept by: a cost model as numbers, the speed of the machine, a line that follows its points."""

import random
from itertools import pairwise

import pytest

from paceline.costs.cost_model import StepShape
from paceline.costs.presets import device_spec, model_shape
from paceline.costs.roofline import SIZES, Roofline, step_costs
from paceline.costs.step_speed import FEWEST, RunningLine, StepSpeed


class Linear:
    """A model that is what the numbers say."""

    def step_seconds(self, shape: StepShape) -> float:
        return (
            0.001
            + 2e-5 * shape.tokens
            + 3e-8 * shape.decode_context
            + 2e-9 * shape.prefill_context_products
            + 5e-6 * shape.logit_rows
        )


class Odd:
    """A larger step takes less time."""

    def step_seconds(self, shape: StepShape) -> float:
        return 1.0 / shape.tokens


def test_a_linear_model_is_taken_down_exactly() -> None:
    costs = step_costs(Linear())
    assert costs.sizes == SIZES
    assert costs.seconds == pytest.approx([0.001 + 2e-5 * size + 5e-6 for size in SIZES])
    assert costs.context_s == pytest.approx(3e-8) and costs.product_s == pytest.approx(2e-9)
    assert costs.row_s == pytest.approx(5e-6)


def test_seconds_never_fall() -> None:
    assert step_costs(Odd(), (4, 8)).seconds == (0.25, 0.25)


def test_a_roofline_predicts_mixed_steps_through_them() -> None:
    model = Roofline(model_shape("llama-3.1-8b"), device_spec("h200"))
    costs = step_costs(model)
    for low, high in pairwise(costs.seconds):
        assert low < high
    shape = StepShape(
        decode_rows=100,
        decode_context=130_000,
        prefill_tokens=1180,
        prefill_context_products=1_000_000,
        logit_rows=101,
    )
    seconds = costs.seconds[SIZES.index(1280)] + costs.context_s * shape.decode_context
    seconds += costs.product_s * shape.prefill_context_products + costs.row_s * shape.decode_rows
    assert seconds == pytest.approx(model.step_seconds(shape), rel=0.02)


# ----------------------------------------------------------------
# How long steps take: what tokens cost is remembered, how fast the machine is is followed.


def seconds(decoding: int, prompt_tokens: int) -> float:
    """A machine whose steps with prompts cost more than plain ones."""
    return 0.02 + 0.002 * decoding + (0.03 + 0.003 * prompt_tokens if prompt_tokens else 0.0)


def trained(steps: int = 200, slower: float = 1.0, speed: StepSpeed | None = None) -> StepSpeed:
    draw, found = random.Random(3), speed or StepSpeed()
    for _ in range(steps):
        decoding, prompt = draw.randint(0, 20), draw.choice((0, 0, 40, 200))
        found.learn(decoding, prompt, slower * seconds(decoding, prompt) * draw.uniform(0.9, 1.1))
    return found


def test_nothing_is_known_before_steps_with_prompts_have_run() -> None:
    speed = StepSpeed()
    for _ in range(2 * FEWEST):
        speed.learn(4, 0, 0.03)
    assert not speed.is_known
    speed.learn(0, 40, 0.2)
    speed.learn(0, 200, 0.7)
    assert speed.is_known
    assert speed.seconds(0, 120) == pytest.approx(0.45, rel=0.3)


@pytest.mark.parametrize(("decoding", "prompt"), [(1, 0), (20, 0), (0, 40), (10, 200)])
def test_what_tokens_cost_is_learnt_for_both_kinds(decoding: int, prompt: int) -> None:
    assert trained().seconds(decoding, prompt) == pytest.approx(seconds(decoding, prompt), rel=0.2)


@pytest.mark.parametrize("slower", [0.25, 4.0])
def test_a_change_of_speed_is_followed_within_some_steps(slower: float) -> None:
    speed = trained()
    trained(40, slower, speed)
    assert speed.seconds(10, 200) == pytest.approx(slower * seconds(10, 200), rel=0.3)


def test_a_stall_is_forgotten() -> None:
    speed = trained()
    before = speed.seconds(10, 200)
    speed.learn(10, 0, 60.0)
    assert speed.seconds(10, 200) < 1.3 * before
    trained(20, speed=speed)
    assert speed.seconds(10, 200) == pytest.approx(before, rel=0.15)


# ----------------------------------------------------------------
# A line that follows the points that come.


def test_a_line_is_found() -> None:
    draw, line = random.Random(1), RunningLine(memory=100)
    for _ in range(300):
        x = draw.uniform(1, 1000)
        line.learn(x, 5.0 + 0.02 * x)
    assert line.at(0) == pytest.approx(5.0)
    assert line.at(500) == pytest.approx(15.0)


def test_the_newest_points_count() -> None:
    draw, line = random.Random(2), RunningLine(memory=50)
    for fixed in (5.0, 9.0):
        for _ in range(400):
            x = draw.uniform(1, 1000)
            line.learn(x, fixed + 0.02 * x)
    assert line.at(0) == pytest.approx(9.0, abs=0.05)


@pytest.mark.parametrize(
    "points", [[(10, 3.0)] * 20, [(10, 9.0), (90, 1.0)] * 20, [(10, 1.0), (20, 90.0)] * 20]
)
def test_neither_part_is_negative(points: list[tuple[float, float]]) -> None:
    """All alike, falling, and rising so steeply that the line would begin below zero."""
    line = RunningLine(memory=1000)
    for x, y in points:
        line.learn(x, y)
    assert line.slope() >= 0.0 <= line.at(0)
    middle = sum(x for x, _ in points) / len(points)
    assert line.at(middle) == pytest.approx(sum(y for _, y in points) / len(points))


def test_nothing_learnt_is_nothing_said() -> None:
    assert RunningLine(memory=10).at(100) == 0.0
