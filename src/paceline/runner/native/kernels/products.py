"""Products: sixteen columns of weights with the inputs of a step's rows.

A row's numbers never depend on the rows beside it: the same operations in the same order whether it stands alone or in
a tile. From `MANY` rows on a 4-bit panel is unpacked once into bytes that stay in the nearest cache.
"""

from __future__ import annotations

from paceline.runner.native.kernels.emit import apart, kernel
from paceline.runner.native.kernels.simd import (
    add_scaled,
    dots,
    fma_rows,
    high_nibbles,
    load_brains,
    load_bytes,
    load_floats,
    load_halves,
    low_nibbles,
    start_counts,
    store_bytes,
    store_floats,
    store_rows,
    zeros,
)
from paceline.runner.native.layout import BF16, F16, F32, INPUT_SCALES, Q4, Q8

MANY = 8  # rows
_SCALES = 4 * INPUT_SCALES  # bytes of the scales of a tile and group


@kernel
def _tile4(sums, w, x, scales, groups):
    """A tile of up to four rows with a panel of 4 bits."""
    for _ in range(groups):
        counts = start_counts(sums, scales, False)
        v = load_bytes(w)
        counts = dots(counts, low_nibbles(v), x, False)
        counts = dots(counts, high_nibbles(v), x + 64, False)
        v = load_bytes(w + 64)
        counts = dots(counts, low_nibbles(v), x + 16, False)
        counts = dots(counts, high_nibbles(v), x + 80, False)
        v = load_bytes(w + 128)
        counts = dots(counts, low_nibbles(v), x + 32, False)
        counts = dots(counts, high_nibbles(v), x + 96, False)
        v = load_bytes(w + 192)
        counts = dots(counts, low_nibbles(v), x + 48, False)
        counts = dots(counts, high_nibbles(v), x + 112, False)
        sums = add_scaled(sums, counts, w + 256, scales, True)
        w += 320
        x += 128
        scales += _SCALES
    return sums


@kernel
def _tile8(sums, w, x, scales, groups):
    """A tile with a panel of 8 bits."""
    for _ in range(groups):
        counts = start_counts(sums, scales, True)
        counts = dots(counts, load_bytes(w), x, True)
        counts = dots(counts, load_bytes(w + 64), x + 16, True)
        counts = dots(counts, load_bytes(w + 128), x + 32, True)
        counts = dots(counts, load_bytes(w + 192), x + 48, True)
        counts = dots(counts, load_bytes(w + 256), x + 64, True)
        counts = dots(counts, load_bytes(w + 320), x + 80, True)
        counts = dots(counts, load_bytes(w + 384), x + 96, True)
        counts = dots(counts, load_bytes(w + 448), x + 112, True)
        sums = add_scaled(sums, counts, w + 512, scales, True)
        w += 576
        x += 128
        scales += _SCALES
    return sums


@kernel
def _tile_unpacked(sums, w, x, scales, groups):
    """A tile with a panel that `_unpack` has made."""
    for _ in range(groups):
        counts = start_counts(sums, scales, False)
        counts = dots(counts, load_bytes(w), x, False)
        counts = dots(counts, load_bytes(w + 64), x + 16, False)
        counts = dots(counts, load_bytes(w + 128), x + 32, False)
        counts = dots(counts, load_bytes(w + 192), x + 48, False)
        counts = dots(counts, load_bytes(w + 256), x + 64, False)
        counts = dots(counts, load_bytes(w + 320), x + 80, False)
        counts = dots(counts, load_bytes(w + 384), x + 96, False)
        counts = dots(counts, load_bytes(w + 448), x + 112, False)
        sums = add_scaled(sums, counts, w + 512, scales, False)
        w += 640
        x += 128
        scales += _SCALES
    return sums


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
            store_rows(_tile_unpacked(zeros(4), unpacked, x, scales, groups), out, step)
            x += 4 * inputs
            scales += _SCALES * groups
            out += 4 * step
            rows -= 4
    elif rows >= 4:
        store_rows(_tile4(zeros(4), w, x, scales, groups), out, step)
        x += 4 * inputs
        scales += _SCALES * groups
        out += 4 * step
        rows -= 4
    if rows == 3:
        store_rows(_tile4(zeros(3), w, x, scales, groups), out, step)
    elif rows == 2:
        store_rows(_tile4(zeros(2), w, x, scales, groups), out, step)
    elif rows == 1:
        store_rows(_tile4(zeros(1), w, x, scales, groups), out, step)


@kernel
def _panel8(w, x, scales, rows, inputs, out, step):
    groups = inputs // 32
    while rows >= 4:
        store_rows(_tile8(zeros(4), w, x, scales, groups), out, step)
        x += 4 * inputs
        scales += _SCALES * groups
        out += 4 * step
        rows -= 4
    if rows == 3:
        store_rows(_tile8(zeros(3), w, x, scales, groups), out, step)
    elif rows == 2:
        store_rows(_tile8(zeros(2), w, x, scales, groups), out, step)
    elif rows == 1:
        store_rows(_tile8(zeros(1), w, x, scales, groups), out, step)


@kernel
def dense_tile(sums, kind, w, x, inputs, x_step):
    """A tile with a panel of 16 or 32 bits; inputs are floats, a row every `x_step` bytes."""
    if kind == F32:
        for _ in range(inputs):
            sums = fma_rows(sums, load_floats(w), x, x_step)
            w += 64
            x += 4
    elif kind == BF16:
        for _ in range(inputs):
            sums = fma_rows(sums, load_brains(w), x, x_step)
            w += 32
            x += 4
    elif kind == F16:
        for _ in range(inputs):
            sums = fma_rows(sums, load_halves(w), x, x_step)
            w += 32
            x += 4
    return sums


@kernel
def _dense_panel(kind, w, x, rows, inputs, out, step):
    x_step = inputs * 4
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


@apart
def panel(kind, w, index, x, quantised, scales, rows, inputs, out, step, unpacked):
    """Sixteen columns of every row, to `out`, a row every `step` bytes. `x`: floats; `quantised`: the same in tiles."""
    if kind == Q4:
        _panel4(w + index * (inputs // 32) * 320, quantised, scales, rows, inputs, out, step, unpacked)
    elif kind == Q8:
        _panel8(w + index * (inputs // 32) * 576, quantised, scales, rows, inputs, out, step)
    elif kind == F32:
        _dense_panel(kind, w + index * inputs * 64, x, rows, inputs, out, step)
    else:
        _dense_panel(kind, w + index * inputs * 32, x, rows, inputs, out, step)
