"""Keys and values as bytes, with a scale for each token and head: rounding at the write, and attention over them.

A token is rounded once, when it is computed, so that every later step reads the same bytes. Scores are products of
bytes: queries are rounded too, in groups of 32 as inputs of matrices are. Values become floats; their scales are part
of the weights.
"""

from __future__ import annotations

from paceline.runner.native.kernels.attention import attend, block_at, softmax
from paceline.runner.native.kernels.dots import add_counts, dots, start_counts
from paceline.runner.native.kernels.emit import apart, kernel
from paceline.runner.native.kernels.rowwise import TOP, ZERO, quantise_row
from paceline.runner.native.kernels.scalars import get_int, put_float
from paceline.runner.native.kernels.simd import (
    absolute,
    fma_rows,
    largest,
    load_bytes,
    load_floats,
    load_octets,
    load_rows,
    maximum,
    mul,
    round_even,
    splat,
    store_floats,
    store_quads,
    store_rows,
    to_ints,
    zeros,
)
from paceline.runner.native.layout import GROUP, INPUT_SCALES, SUB_BLOCK, TILE


@kernel
def keep_bytes(source, dim, to, step, scale):
    """Round one head of a token: quads of bytes, one every `step` bytes at `to`, and its scale as a float."""
    top = splat(ZERO)
    for at in range(0, dim * 4, 64):
        top = maximum(top, absolute(load_floats(source + at)))
    highest = largest(top)
    # Zeros stay zeros; a number that is not finite makes the scale not finite, which the step reports.
    inverse = splat(TOP / highest if highest != ZERO else ZERO)
    for at in range(0, dim * 4, 64):
        store_quads(to, to_ints(round_even(mul(load_floats(source + at), inverse))), step)
        to += 4 * step
    put_float(scale, highest / TOP)


@kernel
def attend_bytes(zero, queries, first, end, table, subs, kv, block_bytes, dim, scores, step, out, x):
    """As `attend`, over bytes. `x`: room for four rounded queries and their scales, 6 * dim bytes."""
    rows = len(zero)
    scales = x + TILE * dim
    low, high = get_int(first), get_int(end)
    for row in range(rows):
        low = min(low, get_int(first + 8 * row))
        high = max(high, get_int(end + 8 * row))
        quantise_row(queries + row * dim * 4, row, dim, 0, dim, x, scales, 1)
    begin, stop = low // SUB_BLOCK, (high + SUB_BLOCK - 1) // SUB_BLOCK
    for block in range(begin, stop):
        keys = block_at(table, block, subs, kv, block_bytes)
        of_keys = keys + 2 * SUB_BLOCK * dim
        sums, at, group = zero, x, scales
        for _ in range(dim // GROUP):
            counts = start_counts(zero, group, True)
            for _ in range(GROUP // 4):
                counts = dots(counts, load_bytes(keys), at, True)
                keys += 4 * SUB_BLOCK
                at += 4 * TILE
            sums = add_counts(sums, counts, of_keys, group)
            group += TILE * INPUT_SCALES
        store_rows(sums, scores + 64 * (block - begin), step)
    for row in range(rows):
        softmax(scores + row * step, get_int(first + 8 * row), get_int(end + 8 * row), begin, stop)
    for d in range(0, dim * 4, 64):
        store_rows(zero, out + d, dim * 4)
    for block in range(begin, stop):
        values = block_at(table, block, subs, kv, block_bytes) + SUB_BLOCK * dim
        weights = scores + 64 * (block - begin)
        of_values = load_floats(values + SUB_BLOCK * dim + 4 * SUB_BLOCK)
        for row in range(rows):
            store_floats(weights + row * step, mul(load_floats(weights + row * step), of_values))
        # What no query may see is not read: it may hold anything.
        start = max(0, low - SUB_BLOCK * block)
        count = min(SUB_BLOCK, high - SUB_BLOCK * block)
        for d in range(0, dim, 16):
            sums = load_rows(zero, out + 4 * d, dim * 4)
            value, weight = values + d + start * dim, weights + 4 * start
            for _ in range(count - start):
                sums = fma_rows(sums, load_octets(value), weight, step)
                value += dim
                weight += 4
            store_rows(sums, out + 4 * d, dim * 4)


@apart
def attend_rows(rows, in_bytes, q, first, end, table, subs, kv, size, dim, scores, step, out, x):
    """Up to four query vectors over floats or bytes."""
    if in_bytes:
        if rows == 4:
            attend_bytes(zeros(4), q, first, end, table, subs, kv, size, dim, scores, step, out, x)
        elif rows == 3:
            attend_bytes(zeros(3), q, first, end, table, subs, kv, size, dim, scores, step, out, x)
        elif rows == 2:
            attend_bytes(zeros(2), q, first, end, table, subs, kv, size, dim, scores, step, out, x)
        else:
            attend_bytes(zeros(1), q, first, end, table, subs, kv, size, dim, scores, step, out, x)
    elif rows == 4:
        attend(zeros(4), q, first, end, table, subs, kv, size, dim, scores, step, out)
    elif rows == 3:
        attend(zeros(3), q, first, end, table, subs, kv, size, dim, scores, step, out)
    elif rows == 2:
        attend(zeros(2), q, first, end, table, subs, kv, size, dim, scores, step, out)
    else:
        attend(zeros(1), q, first, end, table, subs, kv, size, dim, scores, step, out)
