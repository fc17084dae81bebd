"""The fitted model: recovers what made the samples, survives stalls, refuses what it cannot use."""

import json
from pathlib import Path

import numpy as np
import pytest

from paceline.costs.cost_model import StepShape
from paceline.costs.fit import MIN_SAMPLES, VERSION, FittedCost, nonnegative_least_squares
from paceline.costs.presets import device_spec, model_shape
from paceline.costs.roofline import Roofline
from paceline.errors import InputError

Samples = list[tuple[StepShape, float]]


def mixed_shapes(count: int, seed: int = 0) -> list[StepShape]:
    """Steps of a busy server: always some decoding, a prefill chunk in half of them, a swap now and then."""
    rng = np.random.default_rng(seed)
    shapes = []
    for _ in range(count):
        decode = int(2 ** rng.uniform(0, 9))
        prefill = int(2 ** rng.uniform(4, 11)) if rng.random() < 0.5 else 0
        shapes.append(
            StepShape(
                decode_rows=decode,
                decode_context=decode * int(rng.integers(50, 2000)),
                prefill_tokens=prefill,
                prefill_context_products=prefill * int(rng.integers(1, 3000)),
                logit_rows=decode + (1 if prefill and rng.random() < 0.3 else 0),
                copy_bytes=int(rng.integers(0, 1 << 28)) if rng.random() < 0.1 else 0,
            )
        )
    return shapes


def linear_seconds(shape: StepShape) -> float:
    tokens = shape.tokens
    return (
        1e-3
        + 1e-6 * tokens
        + 2e-5 * max(tokens - 256, 0)
        + 3e-8 * shape.decode_context
        + 2e-9 * shape.prefill_context_products
        + 4e-6 * shape.logit_rows
        + 2e-11 * shape.copy_bytes
    )


def linear_samples(count: int = 400) -> Samples:
    return [(shape, linear_seconds(shape)) for shape in mixed_shapes(count)]


def test_known_coefficients_are_recovered() -> None:
    fitted = FittedCost.fit(linear_samples())
    coefficients = fitted.coefficients
    assert coefficients.fixed_s == pytest.approx(1e-3, rel=1e-3)
    assert coefficients.decode_context_s == pytest.approx(3e-8, rel=1e-3)
    assert coefficients.prefill_context_products_s == pytest.approx(2e-9, rel=1e-3)
    assert coefficients.logit_rows_s == pytest.approx(4e-6, rel=1e-2)
    assert coefficients.copy_bytes_s == pytest.approx(2e-11, rel=1e-3)
    assert 256 in coefficients.knots
    assert fitted.error.mape < 1e-3
    assert fitted.error.num_samples == 400
    for shape in mixed_shapes(50, seed=9):
        assert fitted.step_seconds(shape) == pytest.approx(linear_seconds(shape), rel=1e-3)


def test_roofline_steps_are_predicted_within_a_few_percent() -> None:
    roofline = Roofline(model_shape("llama-3.1-8b"), device_spec("h200"))
    fitted = FittedCost.fit([(shape, roofline.step_seconds(shape)) for shape in mixed_shapes(600)])
    assert fitted.error.mape < 0.03
    assert fitted.error.p90 < 0.06
    unseen = mixed_shapes(200, seed=5)
    errors = [abs(fitted.step_seconds(s) / roofline.step_seconds(s) - 1) for s in unseen]
    assert float(np.mean(errors)) < 0.03


def test_stalls_do_not_move_the_fit() -> None:
    rng = np.random.default_rng(3)
    samples = [
        (shape, seconds * (20.0 if rng.random() < 0.03 else float(rng.normal(1.0, 0.01))))
        for shape, seconds in linear_samples(600)
    ]
    fitted = FittedCost.fit(samples)
    errors = [
        abs(fitted.step_seconds(shape) / linear_seconds(shape) - 1) for shape in mixed_shapes(100, seed=2)
    ]
    assert float(np.mean(errors)) < 0.02


def test_the_reported_error_is_the_noise() -> None:
    rng = np.random.default_rng(4)
    samples = [(shape, seconds * float(rng.normal(1.0, 0.05))) for shape, seconds in linear_samples(1000)]
    error = FittedCost.fit(samples).error
    assert error.mape == pytest.approx(0.05 * np.sqrt(2 / np.pi), rel=0.15)
    assert error.p90 == pytest.approx(0.05 * 1.645, rel=0.15)


def test_no_coefficient_is_negative_even_when_the_data_would_like_it() -> None:
    samples = [(s, 1e-2 - 1e-6 * s.logit_rows + 1e-8 * s.decode_context) for s in mixed_shapes(200)]
    coefficients = FittedCost.fit(samples).coefficients
    assert coefficients.logit_rows_s == 0.0
    assert min(coefficients.slopes_s) >= 0.0


def test_decode_only_samples_fit_although_their_columns_depend_on_each_other() -> None:
    shapes = [StepShape(decode_rows=n, decode_context=n * 300, logit_rows=n) for n in range(1, 60)]
    fitted = FittedCost.fit([(shape, 2e-3 + 1e-5 * shape.decode_rows) for shape in shapes])
    assert fitted.step_seconds(shapes[30]) == pytest.approx(2e-3 + 1e-5 * 31, rel=1e-3)


def test_too_few_samples() -> None:
    with pytest.raises(InputError, match=f"{MIN_SAMPLES - 1} timed steps are too few"):
        FittedCost.fit(linear_samples(MIN_SAMPLES - 1))
    with pytest.raises(InputError, match="0 timed steps"):
        FittedCost.fit([])
    FittedCost.fit(linear_samples(MIN_SAMPLES))


def test_samples_of_one_size_cannot_be_fitted() -> None:
    with pytest.raises(InputError, match="different token counts"):
        FittedCost.fit([(StepShape(decode_rows=8, decode_context=i), 1e-3) for i in range(100)])


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_durations_are_named(seconds: float) -> None:
    samples = linear_samples(40)
    samples[7] = (samples[7][0], seconds)
    with pytest.raises(InputError, match="timed step 7 took"):
        FittedCost.fit(samples)


def test_a_saved_model_loads_to_the_same_predictions(tmp_path: Path) -> None:
    fitted = FittedCost.fit(linear_samples())
    path = tmp_path / "costs.json"
    fitted.save(path)
    loaded = FittedCost.load(path)
    assert loaded.coefficients == fitted.coefficients
    assert loaded.error == fitted.error
    assert loaded.to_json() == fitted.to_json()
    for shape in mixed_shapes(20, seed=1):
        assert loaded.step_seconds(shape) == fitted.step_seconds(shape)


def broken(**changes: object) -> dict[str, object]:
    fields = FittedCost.fit(linear_samples(60)).to_json()
    fields.update(changes)
    return {key: value for key, value in fields.items() if value != "absent"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "not a Paceline cost model"),
        ({"version": VERSION + 1}, f"has version {VERSION + 1}; this program reads version {VERSION}"),
        ({"fixed_s": "absent"}, "'fixed_s' must be a number"),
        ({"fixed_s": -1.0}, "not negative"),
        ({"logit_rows_s": float("nan")}, "'logit_rows_s'"),
        ({"copy_bytes_s": True}, "'copy_bytes_s'"),
        ({"slopes_s": [1e-6]}, "'knots' must ascend"),
        ({"knots": "absent"}, "'knots' must be a list"),
        ({"knots": [32, 8], "slopes_s": [0.0, 0.0, 0.0]}, "'knots' must ascend"),
        ({"slopes_s": ["fast"]}, "'slopes_s'"),
        ({"error": "absent"}, "'error' is missing"),
    ],
)
def test_bad_fields_are_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(broken(**changes)))
    with pytest.raises(InputError, match=message) as raised:
        FittedCost.load(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b"\xff\xfe\x00"])
def test_files_that_are_something_else(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match="cost model"):
        FittedCost.load(path)


def test_absent_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read cost model.*No such file"):
        FittedCost.load(tmp_path / "none.json")
    with pytest.raises(InputError, match="cannot write cost model"):
        FittedCost.fit(linear_samples(40)).save(tmp_path / "none" / "costs.json")


def test_nonnegative_least_squares_against_brute_force() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        matrix, target = rng.normal(size=(12, 4)), rng.normal(size=12)
        found = nonnegative_least_squares(matrix, target)
        assert (found >= 0.0).all()
        best = min(
            _residual_of_subset(matrix, target, [i for i in range(4) if mask >> i & 1]) for mask in range(16)
        )
        assert float(np.linalg.norm(matrix @ found - target)) == pytest.approx(best, abs=1e-9)


def test_nonnegative_least_squares_with_zero_and_repeated_columns() -> None:
    column = np.array([1.0, 2.0, 3.0])
    matrix = np.column_stack([column, np.zeros(3), column])
    found = nonnegative_least_squares(matrix, 2.0 * column)
    assert matrix @ found == pytest.approx(2.0 * column)
    assert found[1] == 0.0


def _residual_of_subset(matrix: np.ndarray, target: np.ndarray, columns: list[int]) -> float:
    """Best residual with only these columns, or infinity when that solution has a negative entry."""
    if not columns:
        return float(np.linalg.norm(target))
    solution = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
    if (solution < 0.0).any():
        return float("inf")
    return float(np.linalg.norm(matrix[:, columns] @ solution - target))
