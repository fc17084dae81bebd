"""Products: sixteen columns of weights with the inputs of a step's rows.

A row's numbers never depend on the rows beside it: the same operations in the same order whether it stands alone or in
a tile. From `MANY` rows on a 4-bit panel is unpacked once into bytes that stay in the nearest cache.
"""

from __future__ import annotations

from typing import Any

from paceline.runner.native.kernels.dots import (
    ALL,
    FINE,
    FIRST,
    NIBBLES,
    SECOND,
    SIGNED,
    UNPACKED,
    add_group,
)
from paceline.runner.native.kernels.emit import LANES, PARTS, WIDTH, apart, kernel
from paceline.runner.native.kernels.simd import (
    fma_quads,
    fma_rows,
    high_nibbles,
    load_brains,
    load_bytes,
    load_floats,
    load_halves,
    low_nibbles,
    store_bytes,
    store_floats,
    store_rows,
    zeros,
)
from paceline.runner.native.layout import (
    BF16,
    F16,
    F32,
    INPUT_SCALES,
    Q4,
    Q4_GROUP,
    Q4_UNPACKED,
    Q8,
    Q8_FINE,
    Q8_GROUP,
)

MANY = 8  # rows
# Where a vector is one register, a dense product of four rows has too few sums to keep the units busy.
HAS_ROOM = WIDTH == LANES
_SCALES = 4 * INPUT_SCALES  # bytes of the scales of a tile and group


def _tile(form: int, size: int, columns: int) -> Any:
    """A tile of up to four rows with some columns of a panel, whose groups have `size` bytes."""
    step = 256 if form == FINE else 128

    @kernel
    def tile(sums, w, x, scales, groups):
        for _ in range(groups):
            sums = add_group(sums, w, x, scales, form, columns)
            w += size
            x += step
            scales += _SCALES
        return sums

    return tile


# Sums and counts of three or four rows are as many vectors as some processors have registers: there the columns of a
# tile are computed in two halves.
_IN_HALVES = len(PARTS) > 1
_tile4, _first4, _second4 = (_tile(NIBBLES, Q4_GROUP, columns) for columns in (ALL, FIRST, SECOND))
_tile8, _first8, _second8 = (_tile(SIGNED, Q8_GROUP, columns) for columns in (ALL, FIRST, SECOND))
_fine, _fine_first, _fine_second = (_tile(FINE, Q8_GROUP, columns) for columns in (ALL, FIRST, SECOND))
_whole, _first, _second = (_tile(UNPACKED, Q4_UNPACKED, columns) for columns in (ALL, FIRST, SECOND))


@kernel
def _tall4(sums, w, x, scales, groups):
    """Three or four rows with a panel of 4 bits."""
    if _IN_HALVES:
        return _second4(_first4(sums, w, x, scales, groups), w, x, scales, groups)
    return _tile4(sums, w, x, scales, groups)


@kernel
def _tall8(sums, w, x, scales, groups):
    """The same with a panel of 8 bits."""
    if _IN_HALVES:
        return _second8(_first8(sums, w, x, scales, groups), w, x, scales, groups)
    return _tile8(sums, w, x, scales, groups)


@kernel
def _tall_fine(sums, w, x, scales, groups):
    """The same with inputs of sixteen bits."""
    if _IN_HALVES:
        return _fine_second(_fine_first(sums, w, x, scales, groups), w, x, scales, groups)
    return _fine(sums, w, x, scales, groups)


@kernel
def _unpacked(sums, w, x, scales, groups):
    """The same with a panel that `_unpack` has made."""
    if _IN_HALVES:
        return _second(_first(sums, w, x, scales, groups), w, x, scales, groups)
    return _whole(sums, w, x, scales, groups)


@kernel
def _unpack(w, to, groups):
    """A 4-bit panel as bytes, inputs 0 to 15 first, and float32 scales."""
    for _ in range(groups):
        for quad in range(4):
            v = load_bytes(w + 64 * quad)
            store_bytes(to + 64 * quad, low_nibbles(v))
            store_bytes(to + 256 + 64 * quad, high_nibbles(v))
        store_floats(to + 512, load_halves(w + 256))
        store_floats(to + 576, load_halves(w + 288))
        w += 320
        to += 640


@kernel
def _panel4(w, x, scales, rows, inputs, out, step, unpacked):
    groups = inputs // 32
    if rows >= MANY:
        _unpack(w, unpacked, groups)
        while rows >= 4:
            store_rows(_unpacked(zeros(4), unpacked, x, scales, groups), out, step)
            x += 4 * inputs
            scales += _SCALES * groups
            out += 4 * step
            rows -= 4
    elif rows >= 4:
        store_rows(_tall4(zeros(4), w, x, scales, groups), out, step)
        x += 4 * inputs
        scales += _SCALES * groups
        out += 4 * step
        rows -= 4
    if rows == 3:
        store_rows(_tall4(zeros(3), w, x, scales, groups), out, step)
    elif rows == 2:
        store_rows(_tile4(zeros(2), w, x, scales, groups), out, step)
    elif rows == 1:
        store_rows(_tile4(zeros(1), w, x, scales, groups), out, step)


def _bytes_panel(tall: Any, tile: Any, width: int) -> Any:
    """A panel of 8 bits with inputs of `width` bytes."""

    @kernel
    def panel_of_bytes(w, x, scales, rows, inputs, out, step):
        groups = inputs // 32
        while rows >= 4:
            store_rows(tall(zeros(4), w, x, scales, groups), out, step)
            x += 4 * inputs * width
            scales += _SCALES * groups
            out += 4 * step
            rows -= 4
        if rows == 3:
            store_rows(tall(zeros(3), w, x, scales, groups), out, step)
        elif rows == 2:
            store_rows(tile(zeros(2), w, x, scales, groups), out, step)
        elif rows == 1:
            store_rows(tile(zeros(1), w, x, scales, groups), out, step)

    return panel_of_bytes


_panel8, _panel_fine = _bytes_panel(_tall8, _tile8, 1), _bytes_panel(_tall_fine, _fine, 2)


@kernel
def dense_tile(sums, kind, w, x, inputs, x_step):
    """A tile with a panel of 16 or 32 bits; inputs are floats, a multiple of four, a row every `x_step` bytes."""
    if kind == F32:
        for _ in range(inputs // 4):
            first, second = load_floats(w), load_floats(w + 64)
            third, fourth = load_floats(w + 128), load_floats(w + 192)
            sums = fma_quads(sums, first, second, third, fourth, x, x_step)
            w += 256
            x += 16
    elif kind == BF16:
        for _ in range(inputs // 4):
            first, second = load_brains(w), load_brains(w + 32)
            third, fourth = load_brains(w + 64), load_brains(w + 96)
            sums = fma_quads(sums, first, second, third, fourth, x, x_step)
            w += 128
            x += 16
    elif kind == F16:
        for _ in range(inputs // 4):
            first, second = load_halves(w), load_halves(w + 32)
            third, fourth = load_halves(w + 64), load_halves(w + 96)
            sums = fma_quads(sums, first, second, third, fourth, x, x_step)
            w += 128
            x += 16
    return sums


@kernel
def _dense_panel(kind, w, x, rows, inputs, out, step):
    x_step = inputs * 4
    if HAS_ROOM:
        while rows >= 8:
            store_rows(dense_tile(zeros(8), kind, w, x, inputs, x_step), out, step)
            x += 8 * x_step
            out += 8 * step
            rows -= 8
    while rows >= 4:
        store_rows(dense_tile(zeros(4), kind, w, x, inputs, x_step), out, step)
        x += 4 * x_step
        out += 4 * step
        rows -= 4
    if rows == 3:
        store_rows(dense_tile(zeros(3), kind, w, x, inputs, x_step), out, step)
    elif rows == 2:
        store_rows(dense_tile(zeros(2), kind, w, x, inputs, x_step), out, step)
    elif rows == 1:
        store_rows(dense_tile(zeros(1), kind, w, x, inputs, x_step), out, step)


@kernel
def _panel(kind, w, index, x, quantised, scales, rows, inputs, out, step, unpacked):
    if kind == Q4:
        _panel4(w + index * (inputs // 32) * 320, quantised, scales, rows, inputs, out, step, unpacked)
    elif kind == Q8:
        _panel8(w + index * (inputs // 32) * 576, quantised, scales, rows, inputs, out, step)
    elif kind == Q8_FINE:
        _panel_fine(w + index * (inputs // 32) * 576, quantised, scales, rows, inputs, out, step)
    elif kind == F32:
        _dense_panel(kind, w + index * inputs * 64, x, rows, inputs, out, step)
    else:
        _dense_panel(kind, w + index * inputs * 32, x, rows, inputs, out, step)


@apart
def panel(kind, w, index, x, quantised, scales, rows, inputs, out, step, unpacked):
    """Sixteen columns of every row, to `out`, a row every `step` bytes. `x`: floats; `quantised`: the same in tiles."""
    _panel(kind, w, index, x, quantised, scales, rows, inputs, out, step, unpacked)


@kernel
def _pair_tile(a, b, kind, w, inputs, x, x_step):
    """Eight rows with two panels of 16 or 32 bits that lie one behind the other: each number of the rows is read once
    for both, and there are twice as many sums to keep the units busy. The order within each sum is that of
    `dense_tile`."""
    if kind == F32:
        v = w + inputs * 64
        for index in range(inputs):
            a = fma_rows(a, load_floats(w + 64 * index), x + 4 * index, x_step)
            b = fma_rows(b, load_floats(v + 64 * index), x + 4 * index, x_step)
    elif kind == BF16:
        v = w + inputs * 32
        for index in range(inputs):
            a = fma_rows(a, load_brains(w + 32 * index), x + 4 * index, x_step)
            b = fma_rows(b, load_brains(v + 32 * index), x + 4 * index, x_step)
    elif kind == F16:
        v = w + inputs * 32
        for index in range(inputs):
            a = fma_rows(a, load_halves(w + 32 * index), x + 4 * index, x_step)
            b = fma_rows(b, load_halves(v + 32 * index), x + 4 * index, x_step)
    return a, b


@apart
def panel_pair(kind, w, index, x, quantised, scales, rows, inputs, out, step):
    """Thirty-two columns of every row: two panels that lie one behind the other, not of 4 bits."""
    if HAS_ROOM and kind in (F32, BF16, F16):
        first = w + index * inputs * (64 if kind == F32 else 32)
        while rows >= 8:
            a, b = _pair_tile(zeros(8), zeros(8), kind, first, inputs, x, inputs * 4)
            store_rows(a, out, step)
            store_rows(b, out + 64, step)
            x += 32 * inputs
            out += 8 * step
            rows -= 8
    if rows > 0:
        _panel(kind, w, index, x, quantised, scales, rows, inputs, out, step, 0)
        _panel(kind, w, index + 1, x, quantised, scales, rows, inputs, out + 64, step, 0)
