"""Adapters in a step's products: x A^T B^T for the tokens of rows that have one.

A phase before a product makes what is between the two matrices, a token's `low`, from the product's inputs, block by
block of tokens of one adapter; the product then adds B's columns to its own before anything else is done with them.
Sums go over a token's own numbers in one written order: a token has the same bits whatever stands beside it.

    low      [token][part][rank]  float32
    A        [rank][inputs], ranks a multiple of four;   B   panels of 16 outputs, [rank][16]
"""

from __future__ import annotations

import numpy as np

from paceline.runner.native import layout as at
from paceline.runner.native.kernels.emit import kernel
from paceline.runner.native.kernels.products import dense_tile
from paceline.runner.native.kernels.scalars import get_int, put_float
from paceline.runner.native.kernels.simd import (
    fma,
    load_brains,
    load_floats,
    load_halves,
    load_rows,
    splat,
    store_rows,
    sum_of,
    zeros,
)
from paceline.runner.native.kernels.threads import LAP_PRODUCTS, meet, take

_ZERO = np.float32(0)


@kernel
def shrink(kind, a, x, inputs, ranks, to):
    """`ranks` sums of one token at `x`, to `to`: a product with A."""
    size = 4 if kind == at.F32 else 2
    step = inputs * size
    for rank in range(0, ranks, 4):
        first = a + rank * step
        second, third, fourth = first + step, first + 2 * step, first + 3 * step
        s0, s1, s2, s3 = splat(_ZERO), splat(_ZERO), splat(_ZERO), splat(_ZERO)
        if kind == at.F32:
            for i in range(0, inputs * 4, 64):
                v = load_floats(x + i)
                s0 = fma(load_floats(first + i), v, s0)
                s1 = fma(load_floats(second + i), v, s1)
                s2 = fma(load_floats(third + i), v, s2)
                s3 = fma(load_floats(fourth + i), v, s3)
        elif kind == at.BF16:
            for i in range(0, inputs * 2, 32):
                v = load_floats(x + 2 * i)
                s0 = fma(load_brains(first + i), v, s0)
                s1 = fma(load_brains(second + i), v, s1)
                s2 = fma(load_brains(third + i), v, s2)
                s3 = fma(load_brains(fourth + i), v, s3)
        else:
            for i in range(0, inputs * 2, 32):
                v = load_floats(x + 2 * i)
                s0 = fma(load_halves(first + i), v, s0)
                s1 = fma(load_halves(second + i), v, s1)
                s2 = fma(load_halves(third + i), v, s2)
                s3 = fma(load_halves(fourth + i), v, s3)
        put_float(to + 4 * rank, sum_of(s0))
        put_float(to + 4 * rank + 4, sum_of(s1))
        put_float(to + 4 * rank + 8, sum_of(s2))
        put_float(to + 4 * rank + 12, sum_of(s3))


@kernel
def expand(kind, b, index, ranks, low, low_step, rows, out, step):
    """Add sixteen columns of a product with B, panel `index`, to up to four rows, one every `step` bytes."""
    w = b + index * ranks * (64 if kind == at.F32 else 32)
    if rows == 4:
        store_rows(dense_tile(load_rows(zeros(4), out, step), kind, w, low, ranks, low_step), out, step)
    elif rows == 3:
        store_rows(dense_tile(load_rows(zeros(3), out, step), kind, w, low, ranks, low_step), out, step)
    elif rows == 2:
        store_rows(dense_tile(load_rows(zeros(2), out, step), kind, w, low, ranks, low_step), out, step)
    else:
        store_rows(dense_tile(load_rows(zeros(1), out, step), kind, w, low, ranks, low_step), out, step)


@kernel
def add_adapters(p, layer, part, index, start, count, out, step):
    """Sixteen columns, panel `index` of a part, of `count` tokens from `start` on: what their adapters add."""
    of_tokens = get_int(p + at.S_ADAPTED) + 8 * start
    low_step, low_part = get_int(p + at.S_LOW_STEP), get_int(p + at.S_LOW_PART)
    low = get_int(p + at.S_LOW) + start * low_step + part * low_part
    number = (layer - get_int(p + at.S_LAYERS)) // at.LAYER_BYTES
    mine = (number * at.NUM_PARTS + part) * at.PART_MATRICES_BYTES
    token = 0
    while token < count:
        adapter, rows = get_int(of_tokens + 8 * token), 1
        while rows < 4 and token + rows < count and get_int(of_tokens + 8 * (token + rows)) == adapter:
            rows += 1
        if adapter != 0:
            matrices = adapter + mine
            b = get_int(matrices + at.M_B)
            if b != 0:
                kind, ranks = get_int(matrices + at.M_B_KIND), get_int(matrices + at.M_RANKS)
                expand(
                    kind, b, index, ranks, low + token * low_step, low_step, rows, out + token * step, step
                )
        token += rows


@kernel
def shrink_inputs(p, layer, first_part, num_parts, x, inputs, laps):
    """A phase: what the parts of a product need of its inputs at `x`, for every token that has an adapter."""
    sync, blocks = get_int(p + at.S_SYNC), get_int(p + at.S_ADAPTED_BLOCKS)
    low_step, low_part = get_int(p + at.S_LOW_STEP), get_int(p + at.S_LOW_PART)
    number = (layer - get_int(p + at.S_LAYERS)) // at.LAYER_BYTES
    while True:
        piece = take(sync, 1)
        if piece >= get_int(p + at.S_NUM_ADAPTED_BLOCKS) * num_parts:
            break
        block, part = blocks + piece // num_parts * at.ADAPTED_BLOCK_BYTES, first_part + piece % num_parts
        matrices = get_int(block + at.B_ADAPTER) + (number * at.NUM_PARTS + part) * at.PART_MATRICES_BYTES
        a = get_int(matrices + at.M_A)
        if a != 0:
            kind, ranks = get_int(matrices + at.M_A_KIND), get_int(matrices + at.M_RANKS)
            tokens = get_int(p + at.S_ADAPTED_TOKENS) + 8 * get_int(block + at.B_FIRST)
            for index in range(get_int(block + at.B_COUNT)):
                token = get_int(tokens + 8 * index)
                to = get_int(p + at.S_LOW) + token * low_step + part * low_part
                shrink(kind, a, x + token * inputs * 4, inputs, ranks, to)
    meet(p, laps, LAP_PRODUCTS)
