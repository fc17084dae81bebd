"""A cost model as the numbers a pace is kept by."""

from itertools import pairwise

import pytest

from paceline.costs.model import StepShape
from paceline.costs.presets import device_spec, model_shape
from paceline.costs.roofline import SIZES, Roofline, step_costs


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
