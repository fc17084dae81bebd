"""What an encoder does differently: norms take the mean off, inner layers have biases and may lack a gate; products of
many rows go by blocks; the states that vectors of pictures are made of.

Norms stand before the parts of a layer or behind them. Behind them, what is normed is the residual itself: then both
have one address, and nothing here knows the difference.
"""

from __future__ import annotations

import numpy as np

from paceline.runner.native import layout as at
from paceline.runner.native.kernels.attention import attend_tile
from paceline.runner.native.kernels.emit import kernel
from paceline.runner.native.kernels.products import panel, panel_pair
from paceline.runner.native.kernels.rowwise import (
    ONE,
    ZERO,
    activate,
    add_row,
    mean_square,
    norm,
    quantise_row,
)
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
def _normed(p, source, count, weight, bias, to):
    """By the norm of this encoder; `weight` 0: as it is."""
    eps = float_of_bits(get_int(p + at.S_NORM_EPS))
    if weight == 0:
        if to != source:
            copy_row(source, count, to)
    elif get_int(p + at.S_IS_RMS) != 0:
        norm(source, count, weight, eps, to)
    else:
        center(source, count, weight, bias, eps, to)


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
    width = get_int(p + at.S_INPUT_BYTES)
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
        _normed(p, residual, hidden, weight, norm_bias, to)
        if is_last:
            square = mean_square(to, hidden)
            put_int(get_int(p + at.S_FINITE) + 8 * row, 1 if square - square == ZERO else 0)
        elif width:
            x, scales = get_int(p + at.S_NORMED_Q), get_int(p + at.S_NORMED_SCALES)
            quantise_row(to, row, hidden, 0, hidden, x, scales, width)


@kernel
def attend_units(p, layer, scratch):
    """A tile of queries and a head of an encoder, which sees in both directions. Head by head: keys and values of one
    stay near. `scratch`: bounds, results and scores of all queries of a tile."""
    sync, heads, dim = get_int(p + at.S_SYNC), get_int(p + at.S_HEADS), get_int(p + at.S_HEAD_DIM)
    count, tiles, ends = get_int(p + at.S_NUM_TOKENS), get_int(p + at.S_NUM_TILES), get_int(p + at.S_ENDS)
    reach, positions = get_int(layer + at.L_REACH), get_int(p + at.S_POSITIONS)
    block_bytes, step = get_int(layer + at.L_BLOCK_BYTES), get_int(p + at.S_SCORES_STEP)
    first, end, out = scratch, scratch + 8 * at.MOST_QUERY_TOKENS, scratch + 16 * at.MOST_QUERY_TOKENS
    scores = out + at.MOST_QUERY_TOKENS * dim * 4
    while True:
        piece = take(sync, 1)
        if piece >= tiles * heads:
            break
        head, tile = piece // tiles, get_int(p + at.S_TILES) + piece % tiles * at.QUERY_TILE_BYTES
        token, rows = get_int(tile + at.T_FIRST), get_int(tile + at.T_COUNT)
        table = get_int(layer + at.L_TABLE) + get_int(tile + at.T_ROW) * 8
        kv = get_int(layer + at.L_KV) + head * (block_bytes // heads)
        for row in range(rows):
            begin, stop = 0, get_int(ends + 8 * (token + row))
            if reach > 0:
                place = get_int(positions + 8 * (token + row))
                begin, stop = max(0, place - reach), min(stop, place + reach + 1)
            put_int(first + 8 * row, begin)
            put_int(end + 8 * row, stop)
        q = get_int(p + at.S_QUERIES) + (head * count + token) * dim * 4
        attend_tile(rows, q, first, end, table, 1, kv, block_bytes, dim, scores, step, out)
        for row in range(rows):
            place_result(p, token + row, head, out + row * dim * 4)


@kernel
def place_result(p, token, head, values):
    """What one head of a token found: an input of the output product."""
    dim = get_int(p + at.S_HEAD_DIM)
    width = get_int(p + at.S_HEADS) * dim
    input_bytes = get_int(p + at.S_INPUT_BYTES)
    if input_bytes:
        x, scales = get_int(p + at.S_ATTENDED_Q), get_int(p + at.S_ATTENDED_SCALES)
        quantise_row(values, token, width, head * dim, dim, x, scales, input_bytes)
    if get_int(p + at.S_ADAPTED) != 0 or not input_bytes:
        to = get_int(p + at.S_ATTENDED) + (token * width + head * dim) * 4
        for offset in range(0, dim * 4, 64):
            store_floats(to + offset, load_floats(values + offset))


@kernel
def inner_rows(p, layer, scratch):
    """32 columns of activation(product + bias) of a block of rows, times another product with its bias where the layer
    has one: an input of the product down."""
    sync, count, hidden = get_int(p + at.S_SYNC), get_int(p + at.S_NUM_TOKENS), get_int(p + at.S_HIDDEN)
    inner, blocks = get_int(p + at.S_INNER), (count + at.ROW_BLOCK - 1) // at.ROW_BLOCK
    kind, w, bias = (
        get_int(layer + at.L_GATE_KIND),
        get_int(layer + at.L_GATE),
        get_int(layer + at.L_GATE_BIAS),
    )
    up_kind, up, up_bias = (
        get_int(layer + at.L_UP_KIND),
        get_int(layer + at.L_UP),
        get_int(layer + at.L_UP_BIAS),
    )
    activation, width = get_int(p + at.S_ACTIVATION), get_int(p + at.S_INPUT_BYTES)
    ups = scratch + 128 * at.ROW_BLOCK
    while True:
        piece = take(sync, 1)
        if piece >= inner // 32 * blocks:
            break
        pair, start = piece // blocks, piece % blocks * at.ROW_BLOCK
        rows = min(at.ROW_BLOCK, count - start)
        x = get_int(p + at.S_NORMED) + start * hidden * 4
        quantised = get_int(p + at.S_NORMED_Q) + start * hidden * width
        scales = get_int(p + at.S_NORMED_SCALES) + start * (hidden // 32) * at.INPUT_SCALES
        panel_pair(kind, w, 2 * pair, x, quantised, scales, rows, hidden, scratch, 128)
        if up != 0:
            panel_pair(up_kind, up, 2 * pair, x, quantised, scales, rows, hidden, ups, 128)
        for half in range(2):
            values, factors, shift, factor_shift = (
                scratch + 64 * half,
                ups + 64 * half,
                splat(ZERO),
                splat(ZERO),
            )
            if bias != 0:
                shift = load_floats(bias + 64 * (2 * pair + half))
            if up_bias != 0:
                factor_shift = load_floats(up_bias + 64 * (2 * pair + half))
            for row in range(rows):
                factor = splat(ONE)
                if up != 0:
                    factor = add(load_floats(factors + 128 * row), factor_shift)
                value = activate(activation, add(load_floats(values + 128 * row), shift), factor)
                store_floats(values + 128 * row, value)
        for row in range(rows):
            source = scratch + 128 * row
            if width:
                to, to_scales = get_int(p + at.S_GATED_Q), get_int(p + at.S_GATED_SCALES)
                quantise_row(source, start + row, inner, pair * 32, 32, to, to_scales, width)
            else:
                copy_row(source, 32, get_int(p + at.S_GATED) + ((start + row) * inner + pair * 32) * 4)


@kernel
def block_product(p, kind, w, x, quantised, scales, inputs, outputs):
    """delta = a product of some inputs, a panel and a block of rows at a time: a block stays near while its panels go
    by."""
    sync, count = get_int(p + at.S_SYNC), get_int(p + at.S_NUM_TOKENS)
    delta, width, pairs = get_int(p + at.S_DELTA), get_int(p + at.S_INPUT_BYTES), (outputs + 31) // 32
    blocks = (count + at.ROW_BLOCK - 1) // at.ROW_BLOCK
    while True:
        piece = take(sync, 1)
        if piece >= pairs * blocks:
            break
        number, start = 2 * (piece % pairs), piece // pairs * at.ROW_BLOCK
        rows, first = min(at.ROW_BLOCK, count - start), x + start * inputs * 4
        q, scale = quantised + start * inputs * width, scales + start * (inputs // 32) * at.INPUT_SCALES
        out = delta + (start * outputs + at.COLUMNS * number) * 4
        if (number + 1) * at.COLUMNS < outputs:
            panel_pair(kind, w, number, first, q, scale, rows, inputs, out, outputs * 4)
        else:
            panel(kind, w, number, first, q, scale, rows, inputs, out, outputs * 4, 0)


@kernel
def take_in(p, bias):
    """The residual takes in a product, and nothing else."""
    sync, count, hidden = get_int(p + at.S_SYNC), get_int(p + at.S_NUM_TOKENS), get_int(p + at.S_HIDDEN)
    while True:
        row = take(sync, 1)
        if row >= count:
            break
        residual = get_int(p + at.S_RESIDUAL) + row * hidden * 4
        add_row(residual, get_int(p + at.S_DELTA) + row * hidden * 4, hidden)
        if bias != 0:
            add_row(residual, bias, hidden)


@kernel
def choose_states(p):
    """The states of chosen units, normed, one behind the other."""
    sync, count, hidden = get_int(p + at.S_SYNC), get_int(p + at.S_NUM_TOKENS), get_int(p + at.S_HIDDEN)
    weight, bias = get_int(p + at.S_LAST_NORM), get_int(p + at.S_LAST_NORM_BIAS)
    while True:
        row = take(sync, 1)
        if row >= count:
            break
        unit = get_int(get_int(p + at.S_CHOSEN_UNITS) + 8 * row)
        source, to = (
            get_int(p + at.S_RESIDUAL) + unit * hidden * 4,
            get_int(p + at.S_NORMED) + row * hidden * 4,
        )
        _normed(p, source, hidden, weight, bias, to)
