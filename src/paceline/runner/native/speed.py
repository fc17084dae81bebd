"""How fast one core multiplies on this machine: for `paceline doctor` and the kernels' benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.runner.native.checks import aligned
from paceline.runner.native.code import Code
from paceline.runner.native.layout import (
    COLUMNS,
    GROUP,
    INPUT_SCALES,
    Q4,
    Q4_UNPACKED,
    Q8_FINE,
    TILE,
    panel_bytes,
)

ROWS, OUTPUTS, INPUTS = 32, 576, 1536  # a product of SmolLM2-135M


def core_gops(code: Code, enough_s: float = 0.05) -> float:
    """Operations of a 4-bit product, 10^9 a second on one core; two for each weight and row."""
    took_s = call_seconds(Product(code, Q4, OUTPUTS, INPUTS, ROWS), enough_s)
    return 2e-9 * ROWS * OUTPUTS * INPUTS / took_s


class Product:
    """All panels of a matrix with some rows; `weights` are its packed bytes, else they are made up."""

    def __init__(
        self,
        code: Code,
        kind: int,
        outputs: int,
        inputs: int,
        rows: int,
        weights: NDArray[np.uint8] | None = None,
    ) -> None:
        rng = np.random.default_rng(0)
        if weights is None:
            weights = aligned(outputs // COLUMNS * panel_bytes(kind, inputs))
            weights[:] = rng.integers(0, 60, len(weights))  # halves of such bytes are small numbers
        whole = -(-rows // TILE) * TILE
        x = rng.normal(0, 1, (whole, inputs)).astype(np.float32)
        width = 2 if kind == Q8_FINE else 1
        quantised, scales = aligned(whole * inputs * width), aligned(whole * inputs // GROUP * INPUT_SCALES)
        for number in range(whole):
            places = (x[number], number, inputs, 0, inputs, quantised, scales, width)
            code.probe("quantise", _column(places))
        out, unpacked = np.empty((whole, outputs), np.float32), aligned(inputs // GROUP * Q4_UNPACKED)
        # Addresses do not keep what they point to.
        self._arrays = (weights, x, quantised, scales, out, unpacked)
        given = (kind, weights, x, quantised, scales, rows, inputs, out, outputs * 4, unpacked)
        self._arguments = _column((*given, outputs // COLUMNS))
        self._code = code

    def __call__(self, times: int) -> None:
        self._code.probe("panel", self._arguments, times)


def _column(values: Sequence[Any]) -> NDArray[np.int64]:
    """Numbers, and arrays by their addresses."""
    return np.array([value.ctypes.data if isinstance(value, np.ndarray) else value for value in values])


def call_seconds(call: Callable[[int], None], enough_s: float) -> float:
    """The least time of one of `times` calls, of the thread that calls: what others do meanwhile does not count."""
    call(1)
    started = time.thread_time()
    call(1)
    times = max(1, int(enough_s / 10 / max(time.thread_time() - started, 1e-7)))
    best, until = float("inf"), time.monotonic() + enough_s
    while time.monotonic() < until:
        started = time.thread_time()
        call(times)
        best = min(best, (time.thread_time() - started) / times)
    return best
