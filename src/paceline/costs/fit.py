"""A cost model learned from steps that were timed.

seconds = fixed + a piecewise linear function of tokens + linear terms in KV read, attention products,
sampled rows and copied bytes; no coefficient is negative, so more work never costs less. Relative error is
what is minimised, since a step of 3 ms matters as much as one of 60. Owns the small versioned file such a
model is kept in. It does not know where the samples came from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.costs.cost_model import CostModel, PiecewiseLinear, StepShape
from paceline.costs.network import LINKS, Link
from paceline.costs.presets import DeviceSpec, ModelShape
from paceline.costs.roofline import Roofline
from paceline.errors import InputError

Array = NDArray[np.float64]


def nonnegative_least_squares(matrix: Array, target: Array) -> Array:
    """x >= 0 that minimises |matrix @ x - target|, by the active-set method of Lawson and Hanson.

    Columns may be zero or linearly dependent. The rows are folded into a square triangle first, so that the cost of a
    solve does not depend on how many samples there are.
    """
    num_columns = matrix.shape[1]
    norms = np.linalg.norm(matrix, axis=0)
    norms[norms == 0.0] = 1.0
    orthogonal, triangle = np.linalg.qr(matrix / norms)
    scaled: Array = _active_set(triangle, orthogonal.T @ target, num_columns) / norms
    return scaled


def _active_set(matrix: Array, target: Array, num_columns: int) -> Array:
    solution = np.zeros(num_columns)
    passive = np.zeros(num_columns, dtype=bool)
    tolerance = 1e-12 * max(1.0, float(np.abs(matrix.T @ target).max(initial=0.0)))
    # Each round admits one column; dependent columns could make it cycle, hence the bound.
    for _ in range(10 * num_columns):
        gradient = matrix.T @ (target - matrix @ solution)
        gradient[passive] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        passive[best] = True
        solution = _feasible(matrix, target, solution, passive)
    return solution


def _feasible(matrix: Array, target: Array, solution: Array, passive: NDArray[np.bool_]) -> Array:
    """Solve over the passive columns, dropping those that would turn negative; changes `passive`."""
    while passive.any():
        trial = np.zeros_like(solution)
        trial[passive] = np.linalg.lstsq(matrix[:, passive], target, rcond=None)[0]
        blocking = passive & (trial <= 0.0)
        if not blocking.any():
            return trial
        gap = solution[blocking] - trial[blocking]
        steps = np.divide(solution[blocking], gap, out=np.zeros_like(gap), where=gap > 0.0)
        solution = solution + float(steps.min()) * (trial - solution)
        passive &= solution > 1e-15
        solution[~passive] = 0.0
    return np.zeros_like(solution)


# Models that come with the package: DEVICE.MODEL.json, written by `paceline sim --calibrate` (docs/reference/costs.md).
RECORDED = Path(__file__).parent / "recorded"
FORMAT = "paceline-costs"
VERSION = 1
MIN_SAMPLES = 20

_MEDIA = ("encode_positions", "encode_products", "placed_tokens")  # older files have none of these
_LINEAR = ("decode_context", "prefill_context_products", "logit_rows", "copy_bytes", *_MEDIA)
_CANDIDATE_KNOTS = (8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_FOLDS = 5
_SPREAD_PARTS = 128  # parts of equal share that the range of timed / predicted is kept in
_ROBUST_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """How far predictions were from steps the fit had not seen: |predicted - timed| / timed."""

    mape: float
    p90: float
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCoefficients:
    """The numbers of a fit: all non-negative, in seconds per unit."""

    fixed_s: float
    knots: tuple[int, ...]  # token counts at which the slope changes, ascending, 0 not included
    slopes_s: tuple[float, ...]  # seconds per token before the first knot, between knots, after the last
    decode_context_s: float
    prefill_context_products_s: float
    logit_rows_s: float
    copy_bytes_s: float
    encode_positions_s: float = 0.0
    encode_products_s: float = 0.0
    placed_tokens_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """What is spent outside of steps, in seconds."""

    step_s: float | None = None  # between two steps, where there is work; None: not measured
    request_s: float = 0.0  # from the arrival of a request to the moment the engine knows of it


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpread:
    """How far steps of one shape differ: quantiles of timed / predicted, evenly spaced from the least to the largest;
    empty: not known."""

    decode: tuple[float, ...] = ()  # of steps in which all rows decode
    prompts: tuple[float, ...] = ()  # of steps that read prompts


class FittedCost(CostModel):
    """Coefficients and their error. Made by `fit` or `load`.

    `engine` holds sizes of the engine whose steps were timed, by the names of its options.
    """

    def __init__(
        self,
        coefficients: CostCoefficients,
        error: FitError,
        *,
        host: HostCosts | None = None,
        spread: TimeSpread = TimeSpread(),  # noqa: B008 - frozen
        engine: Mapping[str, int] | None = None,
    ) -> None:
        self.engine = dict(engine or {})
        self.coefficients = coefficients
        self.error = error
        self.host = host if host is not None else HostCosts()
        self.spread = spread
        self._tokens_s = _tokens_function(coefficients)

    @classmethod
    def fit(
        cls,
        samples: Sequence[tuple[StepShape, float]],
        *,
        host: HostCosts | None = None,
        engine: Mapping[str, int] | None = None,
    ) -> FittedCost:
        """Fit to (shape, seconds) pairs. Error and spread are measured on samples held out in turn."""
        shapes, seconds = _checked(samples)
        reads = np.array([shape.prefill_tokens > 0 for shape in shapes])
        knots = _chosen_knots([shape.tokens for shape in shapes])
        features = _features(shapes, knots)
        predicted = np.empty(len(seconds))
        for fold in range(_FOLDS):
            held_out = np.arange(len(seconds)) % _FOLDS == fold
            solution = _robust_solution(features[~held_out], seconds[~held_out], reads[~held_out])
            predicted[held_out] = features[held_out] @ solution
        errors = np.abs(predicted / seconds - 1.0)
        error = FitError(
            mape=float(errors.mean()), p90=float(np.quantile(errors, 0.9)), num_samples=len(seconds)
        )
        coefficients = _coefficients(_robust_solution(features, seconds, reads), knots)
        spread = TimeSpread(
            decode=_spread(seconds, predicted, ~reads), prompts=_spread(seconds, predicted, reads)
        )
        return cls(coefficients, error, host=host, spread=spread, engine=engine)

    def step_seconds(self, shape: StepShape) -> float:
        c = self.coefficients
        return (
            c.fixed_s
            + self._tokens_s(shape.decode_rows + shape.prefill_tokens)
            + c.decode_context_s * shape.decode_context
            + c.prefill_context_products_s * shape.prefill_context_products
            + c.logit_rows_s * shape.logit_rows
            + c.copy_bytes_s * shape.copy_bytes
            + c.encode_positions_s * shape.encode_positions
            + c.encode_products_s * shape.encode_products
            + c.placed_tokens_s * shape.placed_tokens
        )

    def to_json(self) -> dict[str, object]:
        c, error = self.coefficients, self.error
        return {
            "format": FORMAT,
            "version": VERSION,
            "fixed_s": c.fixed_s,
            "knots": list(c.knots),
            "slopes_s": list(c.slopes_s),
            **{f"{name}_s": getattr(c, f"{name}_s") for name in _LINEAR},
            "error": {"mape": error.mape, "p90": error.p90, "num_samples": error.num_samples},
            "host_step_s": self.host.step_s,
            "request_s": self.host.request_s,
            "spread": {"decode": list(self.spread.decode), "prompts": list(self.spread.prompts)},
            "engine": self.engine,
        }

    @classmethod
    def from_json(cls, value: object, *, name: str = "cost model") -> FittedCost:
        """Read what `to_json` wrote; `name` is what an error calls it, a path for instance."""
        fields = _checked_header(value, name)
        knots = tuple(int(knot) for knot in _numbers(fields, "knots", name))
        slopes = _numbers(fields, "slopes_s", name)
        if (
            len(slopes) != len(knots) + 1
            or any(knot < 1 for knot in knots)
            or list(knots) != sorted(set(knots))
        ):
            raise InputError(
                f"{name}: 'knots' must ascend and have one entry fewer than 'slopes_s'; fit it again"
            )
        error = fields.get("error")
        if not isinstance(error, Mapping):
            raise InputError(f"{name}: 'error' is missing; fit it again")
        coefficients = CostCoefficients(
            fixed_s=_number(fields, "fixed_s", name),
            knots=knots,
            slopes_s=tuple(slopes),
            **{
                f"{key}_s": _number(fields, f"{key}_s", name)
                for key in _LINEAR
                if key not in _MEDIA or f"{key}_s" in fields
            },
        )
        return cls(
            coefficients,
            FitError(
                mape=_number(error, "mape", name),
                p90=_number(error, "p90", name),
                num_samples=int(_number(error, "num_samples", name)),
            ),
            host=_host(fields, name),
            spread=_read_spread(fields, name),
            engine=_sizes(fields, name),
        )

    def save(self, path: str | Path) -> None:
        try:
            Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as problem:
            raise InputError(f"cannot write cost model {path}: {problem.strerror or problem}") from problem

    @classmethod
    def load(cls, path: str | Path) -> FittedCost:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            reason = problem.strerror if isinstance(problem, OSError) else "it is not text"
            raise InputError(f"cannot read cost model {path}: {reason}") from problem
        try:
            value = json.loads(text)
        except json.JSONDecodeError as problem:
            raise InputError(
                f"cost model {path} is not JSON (line {problem.lineno}); fit it again"
            ) from problem
        return cls.from_json(value, name=f"cost model {path}")


def preset_cost(
    model: ModelShape, device: DeviceSpec, ranks: int = 1, link: Link = LINKS["nvlink4"]
) -> CostModel:
    """From a recorded run of the model on the device, else from its shape and the rates of device and link."""
    path = RECORDED / f"{device.name}.{model.name}.json"
    if ranks == 1 and path.is_file():
        return FittedCost.load(path)
    return Roofline(model, device, ranks, link)


def _checked(samples: Sequence[tuple[StepShape, float]]) -> tuple[list[StepShape], Array]:
    if len(samples) < MIN_SAMPLES:
        raise InputError(
            f"{len(samples)} timed steps are too few to fit a cost model; give at least {MIN_SAMPLES}"
        )
    shapes = [shape for shape, _ in samples]
    seconds = np.array([time_s for _, time_s in samples], dtype=np.float64)
    bad = np.flatnonzero(~(np.isfinite(seconds) & (seconds > 0.0)))
    if bad.size:
        raise InputError(
            f"timed step {bad[0]} took {seconds[bad[0]]} s; durations must be finite and above 0"
        )
    if len({shape.tokens for shape in shapes}) < 3:
        raise InputError(
            "the timed steps have fewer than three different token counts, so the cost of a token cannot be "
            "told from the cost of a step; time steps of more sizes"
        )
    return shapes, seconds


def _chosen_knots(tokens: Sequence[int]) -> tuple[int, ...]:
    """The candidates that leave at least two different token counts in every segment."""
    distinct = sorted(set(tokens))
    knots: list[int] = []
    previous = -1
    for knot in _CANDIDATE_KNOTS:
        inside = sum(previous < count <= knot for count in distinct)
        beyond = sum(count > knot for count in distinct)
        if inside >= 2 and beyond >= 2:
            knots.append(knot)
            previous = knot
    return tuple(knots)


def _features(shapes: Sequence[StepShape], knots: tuple[int, ...]) -> Array:
    """Columns: one, tokens within each segment, then the linear terms."""
    tokens = np.array([shape.tokens for shape in shapes], dtype=np.float64)
    edges = (0.0, *(float(knot) for knot in knots), math.inf)
    segments = [np.clip(tokens - low, 0.0, high - low) for low, high in pairwise(edges)]
    linear = [np.array([getattr(shape, name) for shape in shapes], dtype=np.float64) for name in _LINEAR]
    return np.column_stack([np.ones_like(tokens), *segments, *linear])


def _robust_solution(features: Array, seconds: Array, reads: NDArray[np.bool_]) -> Array:
    """Relative least squares, repeated with less weight on the steps that stick out (a stall, a compile) among
    their like: steps that read prompts differ more than others do by nature."""
    relative = features / seconds[:, None]
    weights = np.ones(len(seconds))
    solution = np.zeros(features.shape[1])
    for _ in range(_ROBUST_ROUNDS):
        solution = nonnegative_least_squares(relative * weights[:, None], weights)
        residual = np.abs(relative @ solution - 1.0)
        for alike in (reads, ~reads):
            if alike.any():
                # 1.5 standard deviations, estimated from the median so that outliers do not widen it.
                bound = max(1.5 * 1.4826 * float(np.median(residual[alike])), 1e-6)
                weights[alike] = np.sqrt(np.minimum(1.0, bound / np.maximum(residual[alike], bound)))
    return solution


def _spread(seconds: Array, predicted: Array, alike: NDArray[np.bool_]) -> tuple[float, ...]:
    """Quantiles of timed / predicted; a prediction of nothing says nothing about the spread."""
    there = alike & (predicted > 0.0)
    if not there.any():
        return ()
    shares = np.linspace(0.0, 1.0, _SPREAD_PARTS + 1)
    return tuple(round(float(value), 5) for value in np.quantile(seconds[there] / predicted[there], shares))


def _coefficients(solution: Array, knots: tuple[int, ...]) -> CostCoefficients:
    values = [float(value) for value in solution]
    first_linear = 2 + len(knots)
    return CostCoefficients(
        fixed_s=values[0],
        knots=knots,
        slopes_s=tuple(values[1:first_linear]),
        **{f"{name}_s": values[first_linear + i] for i, name in enumerate(_LINEAR)},
    )


def _tokens_function(coefficients: CostCoefficients) -> PiecewiseLinear:
    knots = (0, *coefficients.knots)
    values = [0.0]
    for i in range(1, len(knots)):
        values.append(values[-1] + coefficients.slopes_s[i - 1] * (knots[i] - knots[i - 1]))
    return PiecewiseLinear(knots, values, coefficients.slopes_s[-1])


def _checked_header(value: object, name: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping) or value.get("format") != FORMAT:
        raise InputError(f"{name} is not a Paceline cost model; make one by fitting a run's step times")
    if value.get("version") != VERSION:
        raise InputError(f"{name} has version {value.get('version')}; this program reads version {VERSION}")
    return value


def _host(fields: Mapping[str, object], name: str) -> HostCosts:
    """What files of before these fields existed leave open stays open."""
    step_s = None if fields.get("host_step_s") is None else _number(fields, "host_step_s", name)
    return HostCosts(step_s=step_s, request_s=_number({"request_s": 0.0, **fields}, "request_s", name))


def _sizes(fields: Mapping[str, object], name: str) -> dict[str, int]:
    sizes = fields.get("engine", {})
    if not isinstance(sizes, Mapping):
        raise InputError(f"{name}: 'engine' must hold sizes by name; fit it again")
    return {str(key): int(_checked_number(value, f"engine.{key}", name)) for key, value in sizes.items()}


def _number(fields: Mapping[str, object], key: str, name: str) -> float:
    return _checked_number(fields.get(key), key, name)


def _read_spread(fields: Mapping[str, object], name: str) -> TimeSpread:
    given = fields.get("spread", {})
    if not isinstance(given, Mapping):
        raise InputError(
            f"{name}: 'spread' must have lists of numbers for 'decode' and 'prompts'; fit it again"
        )
    parts = {"decode": [], "prompts": [], **given}
    return TimeSpread(**{part: tuple(_numbers(parts, part, name)) for part in ("decode", "prompts")})


def _numbers(fields: Mapping[str, object], key: str, name: str) -> list[float]:
    values = fields.get(key)
    if not isinstance(values, list):
        raise InputError(f"{name}: '{key}' must be a list of numbers; fit it again")
    return [_checked_number(value, key, name) for value in values]


def _checked_number(value: object, key: str, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < math.inf:
        raise InputError(f"{name}: '{key}' must be a number that is not negative; fit it again")
    return float(value)
