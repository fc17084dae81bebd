"""How fast a device multiplies matrices, by rows and by the size of the layer.

A `MatmulCurve` is a measurement: the rate reached by the matrix products of one layer shape at some row
counts. `layers_seconds` and `head_seconds` turn a device's curves into functions of rows for any model:
the time of a layer is taken as a fixed part plus a part in proportion to its parameters, which is the line
through the two measured shapes. Nothing here is ever faster than the device's memory or its best rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.costs.piecewise import PiecewiseLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulCurve:
    """FLOP/s reached on a layer of `layer_parameters` weights at each row count, rows ascending."""

    layer_parameters: int
    rows: tuple[float, ...]
    flops: tuple[float, ...]

    def seconds_per_parameter(self) -> PiecewiseLinear:
        """Seconds per weight as a function of rows. Few rows cost what the first point costs (a pass over
        the weights); many go on at the rate of the last point."""
        seconds = [2.0 * rows / rate for rows, rate in zip(self.rows, self.flops, strict=True)]
        return PiecewiseLinear(self.rows, seconds, 2.0 / self.flops[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulLimits:
    """What no product can beat: reading its weights once, and the best rate the device reached."""

    read_bandwidth: float  # bytes/s
    peak_flops: float

    def seconds_per_parameter(self, rows: float, element_bytes: int) -> float:
        return max(element_bytes / self.read_bandwidth, 2.0 * rows / self.peak_flops)

    def ridge_rows(self, element_bytes: int) -> float:
        """Rows at which reading the weights and multiplying with them take equally long."""
        return element_bytes * self.peak_flops / (2.0 * self.read_bandwidth)


def layers_seconds(
    curves: Sequence[MatmulCurve],
    limits: MatmulLimits,
    *,
    layer_parameters: int,
    num_layers: int,
    element_bytes: int,
) -> PiecewiseLinear:
    """Seconds of the matrix products of all layers, as a function of rows."""
    ordered = sorted(curves, key=lambda curve: curve.layer_parameters)
    knots = _knots(ordered)
    values = []
    for rows in knots:
        floor = limits.seconds_per_parameter(rows, element_bytes) * layer_parameters
        values.append(max(floor, _layer_seconds(ordered, rows, layer_parameters)) * num_layers)
    # The slope after the last knot: what one more row costs when the rate no longer changes.
    return PiecewiseLinear(knots, values, values[-1] / knots[-1])


def head_seconds(
    curves: Sequence[MatmulCurve], limits: MatmulLimits, *, parameters: int, element_bytes: int
) -> PiecewiseLinear:
    """Seconds of the LM head, one matrix far larger than a layer's: at the rate of the largest shape."""
    largest = max(curves, key=lambda curve: curve.layer_parameters)
    rate = largest.seconds_per_parameter()
    values = [
        parameters * max(limits.seconds_per_parameter(rows, element_bytes), rate(rows))
        for rows in largest.rows
    ]
    return PiecewiseLinear(largest.rows, values, values[-1] / largest.rows[-1])


def scale_curve(
    curve: MatmulCurve, measured_on: MatmulLimits, wanted_on: MatmulLimits, element_bytes: int
) -> MatmulCurve:
    """The curve as another device of the same kind would show it: the same share of its own limits at the
    same place relative to its ridge, the row count where memory and arithmetic balance."""
    stretch = wanted_on.ridge_rows(element_bytes) / measured_on.ridge_rows(element_bytes)
    measured = curve.seconds_per_parameter()
    rates = []
    for rows in curve.rows:
        slowdown = measured(rows) / measured_on.seconds_per_parameter(rows, element_bytes)
        seconds = slowdown * wanted_on.seconds_per_parameter(rows * stretch, element_bytes)
        rates.append(2.0 * rows * stretch / seconds)
    return MatmulCurve(
        layer_parameters=curve.layer_parameters,
        rows=tuple(rows * stretch for rows in curve.rows),
        flops=tuple(rates),
    )


def _knots(curves: Sequence[MatmulCurve]) -> list[float]:
    return sorted({rows for curve in curves for rows in curve.rows})


def _layer_seconds(ordered: Sequence[MatmulCurve], rows: float, parameters: int) -> float:
    """On the line through the measured shapes; beyond the largest in proportion to it."""
    largest = ordered[-1]
    if len(ordered) == 1 or parameters >= largest.layer_parameters:
        return largest.seconds_per_parameter()(rows) * parameters
    above = next(i for i, curve in enumerate(ordered) if parameters <= curve.layer_parameters)
    small, large = ordered[max(above - 1, 0)], ordered[max(above, 1)]
    small_s = small.seconds_per_parameter()(rows) * small.layer_parameters
    large_s = large.seconds_per_parameter()(rows) * large.layer_parameters
    share = (parameters - small.layer_parameters) / (large.layer_parameters - small.layer_parameters)
    return small_s + (large_s - small_s) * share
