"""Attention over a paged cache: up to four query vectors of one kv head against the tokens each may see.

Decode and prompts are the same function. The queries of a bundle share every load of keys and values; what one of
them must not see gets the weight 0 exactly, so that its numbers do not depend on the others.
"""

from __future__ import annotations

import numpy as np

from paceline.runner.native.kernels.emit import LANES, WIDTH, apart, kernel
from paceline.runner.native.kernels.rowwise import exp
from paceline.runner.native.kernels.scalars import get_int
from paceline.runner.native.kernels.simd import (
    add,
    fma_quads,
    fma_rows,
    largest,
    load_floats,
    load_rows,
    maximum,
    mul,
    only_lanes,
    splat,
    store_floats,
    store_rows,
    sub,
    sum_of,
    zeros,
)
from paceline.runner.native.layout import SUB_BLOCK

_F = np.float32
ZERO, ONE = _F(0), _F(1)
# Where a vector is one register, there are registers for the sums of four vectors beside each other: a sum waits for
# its last product, and four of them leave the units idle. The order within each sum is the same.
HAS_ROOM = WIDTH == LANES
CHUNK = 4  # sub-blocks


@kernel
def block_at(table, number, subs, kv, block_bytes):
    """Address of sub-block `number` of a row; `subs` of them are a block of its table."""
    return kv + (get_int(table + 8 * (number // subs)) * subs + number % subs) * block_bytes


@kernel
def attend(zero, queries, begins, ends, table, subs, kv, block_bytes, dim, scores, step, out):
    """Query vectors every `dim` floats at `queries`; each may see tokens `begins[row]` to `ends[row]`, two addresses.

    The result goes to `out`, a row every `dim` floats. `scores` has room for all sub-blocks of each row.
    """
    rows = len(zero)
    low, high = get_int(begins), get_int(ends)
    for row in range(1, rows):
        low = min(low, get_int(begins + 8 * row))
        high = max(high, get_int(ends + 8 * row))
    begin, stop = low // SUB_BLOCK, (high + SUB_BLOCK - 1) // SUB_BLOCK
    for block in range(begin, stop, CHUNK):
        end, at = min(block + CHUNK, stop), scores + 64 * (block - begin)
        _scores(zero, queries, table, block, end, subs, kv, block_bytes, dim, at, step)
    for row in range(rows):
        softmax(scores + row * step, get_int(begins + 8 * row), get_int(ends + 8 * row), begin, stop)
    for d in range(0, dim * 4, 64):
        store_rows(zero, out + d, dim * 4)
    for block in range(begin, stop):
        values = block_at(table, block, subs, kv, block_bytes) + dim * 64
        weights = scores + 64 * (block - begin)
        # What no query may see is not read: it may hold anything.
        start = max(0, low - SUB_BLOCK * block)
        count = min(SUB_BLOCK, high - SUB_BLOCK * block)
        _add_values(zero, values, weights, step, start, count, dim, out)


@apart
def attend_tile(rows, queries, begins, ends, table, subs, kv, block_bytes, dim, scores, step, out):
    """`attend` for any number of query vectors, with the same bits: four by four, and all of them a chunk of keys or
    values at a time, which stays near meanwhile."""
    low, high = get_int(begins), get_int(ends)
    for row in range(1, rows):
        low = min(low, get_int(begins + 8 * row))
        high = max(high, get_int(ends + 8 * row))
    begin, stop = low // SUB_BLOCK, (high + SUB_BLOCK - 1) // SUB_BLOCK
    for block in range(begin, stop, CHUNK):
        end = min(block + CHUNK, stop)
        for row in range(0, rows, 4):
            q, at, left = queries + row * dim * 4, scores + row * step + 64 * (block - begin), rows - row
            if left >= 4:
                _scores(zeros(4), q, table, block, end, subs, kv, block_bytes, dim, at, step)
            elif left == 3:
                _scores(zeros(3), q, table, block, end, subs, kv, block_bytes, dim, at, step)
            elif left == 2:
                _scores(zeros(2), q, table, block, end, subs, kv, block_bytes, dim, at, step)
            else:
                _scores(zeros(1), q, table, block, end, subs, kv, block_bytes, dim, at, step)
    for row in range(rows):
        softmax(scores + row * step, get_int(begins + 8 * row), get_int(ends + 8 * row), begin, stop)
        for d in range(0, dim * 4, 64):
            store_floats(out + row * dim * 4 + d, splat(ZERO))
    for block in range(begin, stop):
        values = block_at(table, block, subs, kv, block_bytes) + dim * 64
        start = max(0, low - SUB_BLOCK * block)
        count = min(SUB_BLOCK, high - SUB_BLOCK * block)
        for row in range(0, rows, 4):
            weights, to, left = scores + row * step + 64 * (block - begin), out + row * dim * 4, rows - row
            if left >= 4:
                _add_values(zeros(4), values, weights, step, start, count, dim, to)
            elif left == 3:
                _add_values(zeros(3), values, weights, step, start, count, dim, to)
            elif left == 2:
                _add_values(zeros(2), values, weights, step, start, count, dim, to)
            else:
                _add_values(zeros(1), values, weights, step, start, count, dim, to)


@kernel
def _scores(zero, queries, table, block, end, subs, kv, block_bytes, dim, scores, step):
    """Of up to four sub-blocks."""
    if HAS_ROOM and block + CHUNK <= end:
        _four_scores(zero, queries, table, block, subs, kv, block_bytes, dim, scores, step)
        return
    for number in range(block, end):
        keys = block_at(table, number, subs, kv, block_bytes)
        sums = zero
        at = queries
        for _ in range(dim // 4):
            first, second = load_floats(keys), load_floats(keys + 64)
            third, fourth = load_floats(keys + 128), load_floats(keys + 192)
            sums = fma_quads(sums, first, second, third, fourth, at, dim * 4)
            keys += 256
            at += 16
        store_rows(sums, scores + 64 * (number - block), step)


@kernel
def _add_values(zero, values, weights, step, start, count, dim, out):
    """Of tokens `start` to `count` of a sub-block, by their weights."""
    done = 0
    if HAS_ROOM:
        while done + 256 <= dim * 4:
            value, weight = values + done + start * dim * 4, weights + 4 * start
            _add_four(zero, value, weight, step, count - start, dim, out + done)
            done += 256
        if done + 128 <= dim * 4:
            value, weight = values + done + start * dim * 4, weights + 4 * start
            _add_two(zero, value, weight, step, count - start, dim, out + done)
            done += 128
    for d in range(done, dim * 4, 64):
        sums = load_rows(zero, out + d, dim * 4)
        value, weight = values + d + start * dim * 4, weights + 4 * start
        for _ in range((count - start) // 4):
            first, second = load_floats(value), load_floats(value + dim * 4)
            third, fourth = load_floats(value + dim * 8), load_floats(value + dim * 12)
            sums = fma_quads(sums, first, second, third, fourth, weight, step)
            value += dim * 16
            weight += 16
        for _ in range((count - start) % 4):
            sums = fma_rows(sums, load_floats(value), weight, step)
            value += dim * 4
            weight += 4
        store_rows(sums, out + d, dim * 4)


@kernel
def _four_scores(zero, queries, table, block, subs, kv, block_bytes, dim, scores, step):
    """Of four sub-blocks, one beside the other."""
    first = block_at(table, block, subs, kv, block_bytes)
    second = block_at(table, block + 1, subs, kv, block_bytes)
    third = block_at(table, block + 2, subs, kv, block_bytes)
    fourth = block_at(table, block + 3, subs, kv, block_bytes)
    a, b, c, d = zero, zero, zero, zero
    for index in range(dim):
        at, key = queries + 4 * index, 64 * index
        a = fma_rows(a, load_floats(first + key), at, dim * 4)
        b = fma_rows(b, load_floats(second + key), at, dim * 4)
        c = fma_rows(c, load_floats(third + key), at, dim * 4)
        d = fma_rows(d, load_floats(fourth + key), at, dim * 4)
    store_rows(a, scores, step)
    store_rows(b, scores + 64, step)
    store_rows(c, scores + 128, step)
    store_rows(d, scores + 192, step)


@kernel
def _add_four(zero, values, weights, step, count, dim, out):
    """Add values of some tokens, sixty-four numbers of each, by their weights."""
    a = load_rows(zero, out, dim * 4)
    b = load_rows(zero, out + 64, dim * 4)
    c = load_rows(zero, out + 128, dim * 4)
    d = load_rows(zero, out + 192, dim * 4)
    for index in range(count):
        value, weight = values + index * dim * 4, weights + 4 * index
        a = fma_rows(a, load_floats(value), weight, step)
        b = fma_rows(b, load_floats(value + 64), weight, step)
        c = fma_rows(c, load_floats(value + 128), weight, step)
        d = fma_rows(d, load_floats(value + 192), weight, step)
    store_rows(a, out, dim * 4)
    store_rows(b, out + 64, dim * 4)
    store_rows(c, out + 128, dim * 4)
    store_rows(d, out + 192, dim * 4)


@kernel
def _add_two(zero, values, weights, step, count, dim, out):
    """The same, thirty-two numbers of each."""
    a = load_rows(zero, out, dim * 4)
    b = load_rows(zero, out + 64, dim * 4)
    for index in range(count):
        value, weight = values + index * dim * 4, weights + 4 * index
        a = fma_rows(a, load_floats(value), weight, step)
        b = fma_rows(b, load_floats(value + 64), weight, step)
    store_rows(a, out, dim * 4)
    store_rows(b, out + 64, dim * 4)


@kernel
def softmax(scores, first, end, begin, stop):
    """Scores of sub-blocks `begin` to `stop` become weights; those of tokens outside first to end become 0."""
    for block in range(begin, stop):
        low, high = first - SUB_BLOCK * block, end - SUB_BLOCK * block
        if low > 0 or high < SUB_BLOCK:
            at = scores + 64 * (block - begin)
            store_floats(at, only_lanes(load_floats(at), low, high))
    count = stop - begin
    top = load_floats(scores)
    for index in range(1, count):
        top = maximum(top, load_floats(scores + 64 * index))
    top = splat(largest(top))
    total = splat(ZERO)
    for index in range(count):
        weight = exp(sub(load_floats(scores + 64 * index), top))
        store_floats(scores + 64 * index, weight)
        total = add(total, weight)
    inverse = splat(ONE / sum_of(total))
    for index in range(count):
        store_floats(scores + 64 * index, mul(load_floats(scores + 64 * index), inverse))
