"""What a layer of an encoder does differently: norms take the mean off, inner layers have biases and may lack a gate.

Norms stand before the parts of a layer or behind them. Behind them, what is normed is the residual itself: then both
have one address, and nothing here knows the difference.
"""

from __future__ import annotations

import numpy as np

from paceline.runner.native import layout as at
from paceline.runner.native.kernels.emit import kernel
from paceline.runner.native.kernels.products import panel
from paceline.runner.native.kernels.rowwise import ONE, ZERO, activate, add_row, mean_square, quantise_row
from paceline.runner.native.kernels.scalars import float_of_bits, get_int, put_int, square_root
from paceline.runner.native.kernels.simd import (
    add,
    fma,
    load_floats,
    mul,
    splat,
    store_floats,
    sub,
    sum_of,
)
from paceline.runner.native.kernels.threads import take

_F = np.float32


@kernel
def copy_row(source, count, to):
    for offset in range(0, count * 4, 64):
        store_floats(to + offset, load_floats(source + offset))


@kernel
def center(source, count, weight, bias, eps, to):
    """Take the mean off, divide by the root of the mean square, then scale and shift; `bias` 0: no shift."""
    total = splat(ZERO)
    for offset in range(0, count * 4, 64):
        total = add(total, load_floats(source + offset))
    mean = splat(sum_of(total) / _F(count))
    for offset in range(0, count * 4, 64):
        store_floats(to + offset, sub(load_floats(source + offset), mean))
    scale = splat(ONE / square_root(mean_square(to, count) + eps))
    for offset in range(0, count * 4, 64):
        value, shift = mul(load_floats(to + offset), scale), splat(ZERO)
        if bias != 0:
            shift = load_floats(bias + offset)
        store_floats(to + offset, fma(value, load_floats(weight + offset), shift))


@kernel
def embed_texts(p):
    """A token's vector and that of its place, normed: the residual."""
    sync, count, hidden = get_int(p + at.S_SYNC), get_int(p + at.S_NUM_TOKENS), get_int(p + at.S_HIDDEN)
    eps, places = float_of_bits(get_int(p + at.S_NORM_EPS)), get_int(p + at.S_PLACE_VECTORS)
    weight, bias = get_int(p + at.S_FIRST_NORM), get_int(p + at.S_FIRST_NORM_BIAS)
    seconds = get_int(p + at.S_SECONDS)
    while True:
        row = take(sync, 1)
        if row >= count:
            break
        to = get_int(p + at.S_RESIDUAL) + row * hidden * 4
        token = get_int(get_int(p + at.S_TOKENS) + 8 * row)
        copy_row(get_int(p + at.S_EMBEDDING) + token * hidden * 4, hidden, to)
        if places != 0:
            add_row(to, places + get_int(get_int(p + at.S_POSITIONS) + 8 * row) * hidden * 4, hidden)
        if seconds != 0 and get_int(seconds + 8 * row) != 0:
            add_row(to, get_int(p + at.S_SECOND_VECTOR), hidden)
        center(to, hidden, weight, bias, eps, to)


@kernel
def center_rows(p, weight, norm_bias, bias, has_delta, is_last):
    """The residual takes in the last product; its norm is the next one's input. `weight` 0: it is taken as it is."""
    sync, count, hidden = get_int(p + at.S_SYNC), get_int(p + at.S_NUM_TOKENS), get_int(p + at.S_HIDDEN)
    eps, width = float_of_bits(get_int(p + at.S_NORM_EPS)), get_int(p + at.S_INPUT_BYTES)
    while True:
        row = take(sync, 1)
        if row >= count:
            break
        residual = get_int(p + at.S_RESIDUAL) + row * hidden * 4
        to = get_int(p + at.S_NORMED) + row * hidden * 4
        if has_delta:
            add_row(residual, get_int(p + at.S_DELTA) + row * hidden * 4, hidden)
            if bias != 0:
                add_row(residual, bias, hidden)
        if weight != 0:
            center(residual, hidden, weight, norm_bias, eps, to)
        elif to != residual:
            copy_row(residual, hidden, to)
        if is_last:
            square = mean_square(to, hidden)
            put_int(get_int(p + at.S_FINITE) + 8 * row, 1 if square - square == ZERO else 0)
        elif width:
            x, scales = get_int(p + at.S_NORMED_Q), get_int(p + at.S_NORMED_SCALES)
            quantise_row(to, row, hidden, 0, hidden, x, scales, width)


@kernel
def inner_rows(p, layer, scratch, unpacked):
    """32 columns of activation(product + bias) of a block of rows: an input of the product down."""
    sync, count, hidden = get_int(p + at.S_SYNC), get_int(p + at.S_NUM_TOKENS), get_int(p + at.S_HIDDEN)
    inner, blocks = get_int(p + at.S_INNER), (count + at.ROW_BLOCK - 1) // at.ROW_BLOCK
    kind, w, bias = (
        get_int(layer + at.L_GATE_KIND),
        get_int(layer + at.L_GATE),
        get_int(layer + at.L_GATE_BIAS),
    )
    activation, width = get_int(p + at.S_ACTIVATION), get_int(p + at.S_INPUT_BYTES)
    while True:
        piece = take(sync, 1)
        if piece >= inner // 32 * blocks:
            break
        pair, start = piece // blocks, piece % blocks * at.ROW_BLOCK
        rows = min(at.ROW_BLOCK, count - start)
        x = get_int(p + at.S_NORMED) + start * hidden * 4
        quantised = get_int(p + at.S_NORMED_Q) + start * hidden * width
        scales = get_int(p + at.S_NORMED_SCALES) + start * (hidden // 32) * at.INPUT_SCALES
        for half in range(2):
            number, values = pair * 2 + half, scratch + 64 * half
            panel(kind, w, number, x, quantised, scales, rows, hidden, values, 128, unpacked)
            shift = splat(ZERO)
            if bias != 0:
                shift = load_floats(bias + 64 * number)
            for row in range(rows):
                value = activate(activation, add(load_floats(values + 128 * row), shift), splat(ONE))
                store_floats(values + 128 * row, value)
        for row in range(rows):
            source = scratch + 128 * row
            if width:
                to, to_scales = get_int(p + at.S_GATED_Q), get_int(p + at.S_GATED_SCALES)
                quantise_row(source, start + row, inner, pair * 32, 32, to, to_scales, width)
            else:
                copy_row(source, 32, get_int(p + at.S_GATED) + ((start + row) * inner + pair * 32) * 4)
