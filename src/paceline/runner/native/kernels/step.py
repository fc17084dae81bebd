"""A decoder step as one compiled function: threads take pieces of work from a counter and meet between phases.

    embed | rows heads attention output rows gated down | ... every layer ... | last logits draw

Where rows have adapters, a phase before each product makes what they add to it (`adapters`). The layers of an encoder
have their own order (`_encode`), and those of an encoder of pictures are computed unit by unit (`_see`).

`rows` adds what the phase before computed to the residual, norms it and quantises it; `heads` makes queries, keys and
values of one head; `output` and `down` are products back to the model's width. Which thread takes which piece never
changes a number. Every thread passes every meeting, also without work. Everything is read by address from the
parameters that `layout` names.
"""

from __future__ import annotations

import numpy as np

from paceline.runner.native import layout as at
from paceline.runner.native.kernels.adapters import add_adapters, shrink_inputs
from paceline.runner.native.kernels.byte_attention import attend_rows, keep_bytes
from paceline.runner.native.kernels.draw import draw
from paceline.runner.native.kernels.emit import apart, kernel
from paceline.runner.native.kernels.encoder import (
    attend_units,
    block_product,
    center_rows,
    choose_states,
    copy_row,
    embed_texts,
    inner_rows,
    place_result,
    take_in,
)
from paceline.runner.native.kernels.experts import feed_experts, gate_and_up
from paceline.runner.native.kernels.products import panel
from paceline.runner.native.kernels.rowwise import (
    add_row,
    embed,
    mean_square,
    norm,
    quantise_row,
    rotate,
    scale_row,
)
from paceline.runner.native.kernels.scalars import (
    fetch_add,
    float_of_bits,
    get_float,
    get_int,
    nanoseconds,
    peek,
    poke,
    put_float,
    put_int,
    sleep_on,
    wake,
    yield_processor,
)
from paceline.runner.native.kernels.simd import load_floats, store_floats
from paceline.runner.native.kernels.threads import (
    LAP_ATTENTION,
    LAP_GATED,
    LAP_HEADS,
    LAP_LOGITS,
    LAP_PRODUCTS,
    LAP_ROWS,
    LAP_STARTED,
    join,
    leave,
    meet,
    take,
)

IDLE_LOOKS = 20000  # between steps, before a thread sleeps
HEAD_PANELS = 16  # of the output matrix, of a piece
# Rows that one thread takes in sooner than two could meet behind them: on free processors, and where a thread that
# waits may sleep and has to be woken.
FEW_ROWS, FEW_ROWS_SHARED = 4, 16


@kernel
def _embed(p):
    sync, count, hidden = get_int(p + at.S_SYNC), get_int(p + at.S_NUM_TOKENS), get_int(p + at.S_HIDDEN)
    kind, table, tokens = (
        get_int(p + at.S_EMBEDDING_KIND),
        get_int(p + at.S_EMBEDDING),
        get_int(p + at.S_TOKENS),
    )
    scale, seen = float_of_bits(get_int(p + at.S_EMBED_SCALE)), get_int(p + at.S_SEEN)
    while True:
        row = take(sync, 1)
        if row >= count:
            break
        to = get_int(p + at.S_RESIDUAL) + row * hidden * 4
        vector = 0
        if seen != 0:
            vector = get_int(seen + 8 * row)
        if vector != 0:
            copy_row(vector, hidden, to)
        else:
            embed(kind, table, get_int(tokens + 8 * row), hidden, to)
            if scale != np.float32(1):
                scale_row(to, scale, hidden)


@kernel
def _add_delta(p, row, after, bias, scratch):
    """Residual += delta of one row, with its bias and behind its own norm where the model has them."""
    hidden, eps = get_int(p + at.S_HIDDEN), float_of_bits(get_int(p + at.S_NORM_EPS))
    delta = get_int(p + at.S_DELTA) + row * hidden * 4
    if bias != 0:
        add_row(delta, bias, hidden)
    if after != 0:
        norm(delta, hidden, after, eps, scratch)
        delta = scratch
    add_row(get_int(p + at.S_RESIDUAL) + row * hidden * 4, delta, hidden)


@kernel
def _add_deep(p, row, layers):
    """Behind one of the first layers: residual += what a picture has for this place."""
    hidden, vector = get_int(p + at.S_HIDDEN), get_int(get_int(p + at.S_SEEN) + 8 * row)
    if vector != 0:
        add_row(get_int(p + at.S_RESIDUAL) + row * hidden * 4, vector + layers * hidden * 4, hidden)


@kernel
def _rows(p, weight, after, bias, has_delta, layers, scratch):
    """The residual takes in the last product; its norm is the next one's input. `layers`: that are behind it, where the
    last of them ends here."""
    sync, count, hidden = get_int(p + at.S_SYNC), get_int(p + at.S_NUM_TOKENS), get_int(p + at.S_HIDDEN)
    eps, width = float_of_bits(get_int(p + at.S_NORM_EPS)), get_int(p + at.S_INPUT_BYTES)
    is_deep = 0 < layers <= get_int(p + at.S_DEEP) and get_int(p + at.S_SEEN) != 0
    while True:
        row = take(sync, 1)
        if row >= count:
            break
        if has_delta:
            _add_delta(p, row, after, bias, scratch)
        if is_deep:
            _add_deep(p, row, layers)
        to = get_int(p + at.S_NORMED) + row * hidden * 4
        norm(get_int(p + at.S_RESIDUAL) + row * hidden * 4, hidden, weight, eps, to)
        if width:
            x, scales = get_int(p + at.S_NORMED_Q), get_int(p + at.S_NORMED_SCALES)
            quantise_row(to, row, hidden, 0, hidden, x, scales, width)


@kernel
def _are_few(p):
    few = FEW_ROWS_SHARED if get_int(p + at.S_SLEEPS) else FEW_ROWS
    return get_int(p + at.S_NUM_TOKENS) <= few


@kernel
def _meet_in_rows(p, laps, phase, weight, after, bias, has_delta, layers, scratch):
    """All have ended the phase; then the phase of rows, by all threads or, of few rows, by one."""
    alone = _are_few(p)
    computes = join(p, laps, phase, alone)
    if computes:
        _rows(p, weight, after, bias, has_delta, layers, scratch)
    if alone:
        leave(p, laps, LAP_ROWS, computes)
    else:
        meet(p, laps, LAP_ROWS)


@kernel
def _heads(p, layer, first, end, scratch, unpacked):
    """Product of one head for a block of rows; queries to their place, keys and values to the cache. Of all of them,
    in this order, those from `first` to `end`."""
    sync, count, hidden = get_int(p + at.S_SYNC), get_int(p + at.S_NUM_TOKENS), get_int(p + at.S_HIDDEN)
    heads, kv_heads, dim = get_int(p + at.S_HEADS), get_int(p + at.S_KV_HEADS), get_int(p + at.S_HEAD_DIM)
    blocks = (count + at.ROW_BLOCK - 1) // at.ROW_BLOCK
    is_adapted = get_int(p + at.S_ADAPTED) != 0
    while True:
        piece = take(sync, 1)
        if piece >= (end - first) * blocks:
            break
        head, start = first + piece // blocks, piece % blocks * at.ROW_BLOCK
        rows = min(at.ROW_BLOCK, count - start)
        if head < heads:
            part, kind, w, index = at.PART_Q, get_int(layer + at.L_Q_KIND), get_int(layer + at.L_Q), head
        elif head < heads + kv_heads:
            part, index = at.PART_K, head - heads
            kind, w = get_int(layer + at.L_K_KIND), get_int(layer + at.L_K)
        else:
            part, index = at.PART_V, head - heads - kv_heads
            kind, w = get_int(layer + at.L_V_KIND), get_int(layer + at.L_V)
        x = get_int(p + at.S_NORMED) + start * hidden * 4
        quantised = get_int(p + at.S_NORMED_Q) + start * hidden * get_int(p + at.S_INPUT_BYTES)
        scales = get_int(p + at.S_NORMED_SCALES) + start * (hidden // 32) * 16
        for column in range(dim // at.COLUMNS):
            number = index * (dim // at.COLUMNS) + column
            panel(
                kind, w, number, x, quantised, scales, rows, hidden, scratch + 64 * column, dim * 4, unpacked
            )
            if is_adapted:
                add_adapters(p, layer, part, number, start, rows, scratch + 64 * column, dim * 4)
        for row in range(rows):
            _place_head(p, layer, head, start + row, scratch + row * dim * 4)


@kernel
def _place_head(p, layer, head, token, values):
    """Bias, norm and rotation of one head of a token; then it is a query, or is stored."""
    heads, kv_heads, dim = get_int(p + at.S_HEADS), get_int(p + at.S_KV_HEADS), get_int(p + at.S_HEAD_DIM)
    eps, half = float_of_bits(get_int(p + at.S_NORM_EPS)), get_int(p + at.S_ROTARY_DIM) // 2
    bias = get_int(layer + at.L_QKV_BIAS)
    if bias != 0:
        add_row(values, bias + head * dim * 4, dim)
    if head < heads + kv_heads:
        weight = get_int(layer + (at.L_Q_NORM if head < heads else at.L_K_NORM))
        if weight != 0:
            norm(values, dim, weight, eps, values)
        if half != 0:
            turn = get_int(get_int(p + at.S_POSITIONS) + 8 * token) * half * 4
            rotate(values, half, get_int(layer + at.L_COS) + turn, get_int(layer + at.L_SIN) + turn)
    if head < heads:
        group = heads // kv_heads
        place = ((head // group) * get_int(p + at.S_NUM_TOKENS) + token) * group + head % group
        scale_row(values, float_of_bits(get_int(p + at.S_SOFTMAX_SCALE)), dim)
        to = get_int(p + at.S_QUERIES) + place * dim * 4
        for offset in range(0, dim * 4, 64):
            store_floats(to + offset, load_floats(values + offset))
        return
    slot = get_int(get_int(layer + at.L_SLOTS) + 8 * token)
    if slot < 0:  # padding, or a row that has ended: nothing is stored
        return
    base = get_int(layer + at.L_KV) + slot // at.SUB_BLOCK * get_int(layer + at.L_BLOCK_BYTES)
    base += (head - heads) % kv_heads * (get_int(layer + at.L_BLOCK_BYTES) // kv_heads)
    place = slot % at.SUB_BLOCK
    if get_int(p + at.S_KV_IN_BYTES):
        scales = base + 2 * at.SUB_BLOCK * dim + 4 * place
        if head < heads + kv_heads:
            keep_bytes(values, dim, base + 4 * place, 4 * at.SUB_BLOCK, scales)
        else:
            keep_bytes(values, dim, base + (at.SUB_BLOCK + place) * dim, 4, scales + 4 * at.SUB_BLOCK)
    elif head < heads + kv_heads:
        for i in range(dim):
            put_float(base + 64 * i + 4 * place, get_float(values + 4 * i))
    else:
        to = base + dim * 64 + place * dim * 4
        for offset in range(0, dim * 4, 64):
            store_floats(to + offset, load_floats(values + offset))


@kernel
def _attention(p, layer, scratch):
    """A tile of queries and a kv head. `scratch`: bounds, results, bytes and scores of four query vectors."""
    sync, kv_heads, dim = get_int(p + at.S_SYNC), get_int(p + at.S_KV_HEADS), get_int(p + at.S_HEAD_DIM)
    count, group = get_int(p + at.S_NUM_TOKENS), get_int(p + at.S_HEADS) // kv_heads
    window, ends = get_int(layer + at.L_WINDOW), get_int(p + at.S_ENDS)
    subs, block_bytes = get_int(layer + at.L_SUBS), get_int(layer + at.L_BLOCK_BYTES)
    first, end, out = scratch, scratch + 64, scratch + 128
    x, scores = scratch + 128 + 16 * dim, scratch + 128 + 24 * dim
    step, in_bytes = get_int(p + at.S_SCORES_STEP), get_int(p + at.S_KV_IN_BYTES)
    while True:
        piece = take(sync, 1)
        if piece >= get_int(p + at.S_NUM_TILES) * kv_heads:
            break
        tile, head = get_int(p + at.S_TILES) + piece // kv_heads * at.QUERY_TILE_BYTES, piece % kv_heads
        token, row = get_int(tile + at.T_FIRST), get_int(tile + at.T_ROW)
        table = get_int(layer + at.L_TABLE) + row * get_int(layer + at.L_TABLE_WIDTH) * 8
        kv = get_int(layer + at.L_KV) + head * (block_bytes // kv_heads)
        vectors = get_int(tile + at.T_COUNT) * group
        for start in range(0, vectors, 4):
            rows = min(4, vectors - start)
            for i in range(rows):
                stop = get_int(ends + 8 * (token + (start + i) // group))
                begin = max(0, stop - window) if window > 0 else 0
                put_int(end + 8 * i, stop)
                put_int(first + 8 * i, begin)
            q = get_int(p + at.S_QUERIES) + ((head * count + token) * group + start) * dim * 4
            attend_rows(
                rows, in_bytes, q, first, end, table, subs, kv, block_bytes, dim, scores, step, out, x
            )
            for i in range(rows):
                place_result(
                    p, token + (start + i) // group, head * group + (start + i) % group, out + i * dim * 4
                )


@kernel
def _product(p, layer, part, kind, w, x, quantised, scales, inputs, unpacked):
    """delta = a product back to the model's width, a panel at a time."""
    sync, count, hidden = get_int(p + at.S_SYNC), get_int(p + at.S_NUM_TOKENS), get_int(p + at.S_HIDDEN)
    delta, panels, is_adapted = (
        get_int(p + at.S_DELTA),
        hidden // at.COLUMNS,
        get_int(p + at.S_ADAPTED) != 0,
    )
    while True:
        piece = take(sync, 1)
        if piece >= panels:
            break
        panel(kind, w, piece, x, quantised, scales, count, inputs, delta + 64 * piece, hidden * 4, unpacked)
        if is_adapted:
            add_adapters(p, layer, part, piece, 0, count, delta + 64 * piece, hidden * 4)


@kernel
def _gated(p, layer, scratch, unpacked):
    """activation(gate) * up, 32 columns at a time: an input of the product down."""
    sync, count, hidden = get_int(p + at.S_SYNC), get_int(p + at.S_NUM_TOKENS), get_int(p + at.S_HIDDEN)
    inner, x, kinds = get_int(p + at.S_INNER), get_int(p + at.S_NORMED), layer + at.L_GATE_KIND
    quantised, scales = get_int(p + at.S_NORMED_Q), get_int(p + at.S_NORMED_SCALES)
    adapted = layer if get_int(p + at.S_ADAPTED) != 0 else 0
    while True:
        piece = take(sync, 1)
        if piece >= inner // 32:
            break
        gate_and_up(
            p, kinds, piece, x, quantised, scales, 0, count, hidden, inner, scratch, unpacked, adapted
        )


@kernel
def _last(p, after, has_delta, scratch):
    """The residual of every row is complete: whether it is finite, and the norm of rows that are sampled."""
    sync, count, hidden = get_int(p + at.S_SYNC), get_int(p + at.S_NUM_TOKENS), get_int(p + at.S_HIDDEN)
    eps, sampled = float_of_bits(get_int(p + at.S_NORM_EPS)), get_int(p + at.S_SAMPLED)
    layers = get_int(p + at.S_NUM_LAYERS)
    is_deep = layers <= get_int(p + at.S_DEEP) and get_int(p + at.S_SEEN) != 0
    while True:
        row = take(sync, 1)
        if row >= count:
            break
        if has_delta:
            _add_delta(p, row, after, 0, scratch)
            if is_deep:
                _add_deep(p, row, layers)
        residual = get_int(p + at.S_RESIDUAL) + row * hidden * 4
        square = mean_square(residual, hidden)
        put_int(get_int(p + at.S_FINITE) + 8 * row, 1 if square - square == np.float32(0) else 0)
        place = get_int(sampled + 8 * row)
        if place >= 0:
            to = get_int(p + at.S_NORMED) + place * hidden * 4
            norm(residual, hidden, get_int(p + at.S_LAST_NORM), eps, to)
            if get_int(p + at.S_INPUT_BYTES):
                x, scales = get_int(p + at.S_NORMED_Q), get_int(p + at.S_NORMED_SCALES)
                quantise_row(to, place, hidden, 0, hidden, x, scales, get_int(p + at.S_INPUT_BYTES))


@kernel
def _logits(p, unpacked):
    """Rows of the output matrix, for the tokens that are sampled."""
    sync, count, hidden = get_int(p + at.S_SYNC), get_int(p + at.S_NUM_SAMPLED), get_int(p + at.S_HIDDEN)
    panels, kind, w = (
        get_int(p + at.S_VOCABULARY) // at.COLUMNS,
        get_int(p + at.S_HEAD_KIND),
        get_int(p + at.S_HEAD),
    )
    x, quantised, scales = (
        get_int(p + at.S_NORMED),
        get_int(p + at.S_NORMED_Q),
        get_int(p + at.S_NORMED_SCALES),
    )
    logits, step = get_int(p + at.S_LOGITS), get_int(p + at.S_LOGITS_STEP)
    while True:
        piece = take(sync, HEAD_PANELS)
        if piece >= panels:
            break
        for number in range(piece, min(piece + HEAD_PANELS, panels)):
            panel(kind, w, number, x, quantised, scales, count, hidden, logits + 64 * number, step, unpacked)


@kernel
def _layer(p, layer, index, before, scratch, unpacked, laps):
    """One layer, from the meeting behind what was before it; `before` is the layer before it."""
    after, width = (
        get_int(before + at.L_NORM_AFTER_FEED_FORWARD),
        get_int(p + at.S_HEADS) * get_int(p + at.S_HEAD_DIM),
    )
    normed, hidden, is_adapted = (
        get_int(p + at.S_NORMED),
        get_int(p + at.S_HIDDEN),
        get_int(p + at.S_ADAPTED) != 0,
    )
    phase = LAP_PRODUCTS if index > 0 else LAP_ROWS
    weight = get_int(layer + at.L_NORM_BEFORE_ATTENTION)
    _meet_in_rows(p, laps, phase, weight, after, 0, index > 0, index, scratch)
    if is_adapted:
        shrink_inputs(p, layer, at.PART_Q, 3, normed, hidden, laps)
    heads, kv_heads = get_int(p + at.S_HEADS), get_int(p + at.S_KV_HEADS)
    _heads(p, layer, 0, heads + 2 * kv_heads, scratch, unpacked)
    meet(p, laps, LAP_HEADS)
    _attention(p, layer, scratch)
    meet(p, laps, LAP_ATTENTION)
    kind, w = get_int(layer + at.L_OUTPUT_KIND), get_int(layer + at.L_OUTPUT)
    x, quantised, scales = (
        get_int(p + at.S_ATTENDED),
        get_int(p + at.S_ATTENDED_Q),
        get_int(p + at.S_ATTENDED_SCALES),
    )
    if is_adapted:
        shrink_inputs(p, layer, at.PART_O, 1, x, width, laps)
    _product(p, layer, at.PART_O, kind, w, x, quantised, scales, width, unpacked)
    after, bias = get_int(layer + at.L_NORM_AFTER_ATTENTION), get_int(layer + at.L_OUTPUT_BIAS)
    weight = get_int(layer + at.L_NORM_BEFORE_FEED_FORWARD)
    _meet_in_rows(p, laps, LAP_PRODUCTS, weight, after, bias, True, 0, scratch)
    if get_int(layer + at.L_ROUTER) != 0:
        feed_experts(p, layer, scratch, unpacked, laps)
        return
    if is_adapted:
        shrink_inputs(p, layer, at.PART_GATE, 2, normed, hidden, laps)
    _gated(p, layer, scratch, unpacked)
    meet(p, laps, LAP_GATED)
    kind, w = get_int(layer + at.L_DOWN_KIND), get_int(layer + at.L_DOWN)
    x, quantised, scales = get_int(p + at.S_GATED), get_int(p + at.S_GATED_Q), get_int(p + at.S_GATED_SCALES)
    if is_adapted:
        shrink_inputs(p, layer, at.PART_DOWN, 1, x, get_int(p + at.S_INNER), laps)
    _product(p, layer, at.PART_DOWN, kind, w, x, quantised, scales, get_int(p + at.S_INNER), unpacked)


@kernel
def _encode(p, scratch, unpacked, laps):
    """All layers of an encoder: texts in, normed states out."""
    layers, count, heads = get_int(p + at.S_LAYERS), get_int(p + at.S_NUM_LAYERS), get_int(p + at.S_HEADS)
    bias = 0
    embed_texts(p)
    meet(p, laps, LAP_ROWS)
    for index in range(count):
        layer = layers + index * at.LAYER_BYTES
        weight, shift = (
            get_int(layer + at.L_NORM_BEFORE_ATTENTION),
            get_int(layer + at.L_NORM_BIAS_BEFORE_ATTENTION),
        )
        center_rows(p, weight, shift, bias, index > 0, False)
        meet(p, laps, LAP_ROWS)
        _heads(p, layer, 0, 3 * heads, scratch, unpacked)
        meet(p, laps, LAP_HEADS)
        _attend_and_feed(p, layer, scratch, laps)
        bias = get_int(layer + at.L_DOWN_BIAS)
    center_rows(p, get_int(p + at.S_LAST_NORM), get_int(p + at.S_LAST_NORM_BIAS), bias, True, True)
    meet(p, laps, LAP_ROWS)


@kernel
def _attend_and_feed(p, layer, scratch, laps):
    """What follows the heads in a layer of an encoder."""
    attend_units(p, layer, scratch)
    meet(p, laps, LAP_ATTENTION)
    x, quantised, scales = (
        get_int(p + at.S_ATTENDED),
        get_int(p + at.S_ATTENDED_Q),
        get_int(p + at.S_ATTENDED_SCALES),
    )
    width = get_int(p + at.S_HEADS) * get_int(p + at.S_HEAD_DIM)
    kind, w = get_int(layer + at.L_OUTPUT_KIND), get_int(layer + at.L_OUTPUT)
    block_product(p, kind, w, x, quantised, scales, width, get_int(p + at.S_HIDDEN))
    meet(p, laps, LAP_PRODUCTS)
    weight, shift = (
        get_int(layer + at.L_NORM_BEFORE_FEED_FORWARD),
        get_int(layer + at.L_NORM_BIAS_BEFORE_FEED_FORWARD),
    )
    center_rows(p, weight, shift, get_int(layer + at.L_OUTPUT_BIAS), True, False)
    meet(p, laps, LAP_ROWS)
    _feed(p, layer, get_int(p + at.S_HIDDEN), scratch, laps)


@kernel
def _feed(p, layer, outputs, scratch, laps):
    """The inner layer of a part of an encoder, where it has one, and the product behind it."""
    if get_int(layer + at.L_GATE) != 0:
        inner_rows(p, layer, scratch)
        meet(p, laps, LAP_GATED)
    x, quantised, scales = get_int(p + at.S_GATED), get_int(p + at.S_GATED_Q), get_int(p + at.S_GATED_SCALES)
    kind, w = get_int(layer + at.L_DOWN_KIND), get_int(layer + at.L_DOWN)
    block_product(p, kind, w, x, quantised, scales, get_int(p + at.S_INNER), outputs)
    meet(p, laps, LAP_PRODUCTS)


@kernel
def _see(p, stage, scratch, unpacked, laps):
    """One stage of some units of pictures (`layout.KEYS` and what follows it)."""
    layer, heads = get_int(p + at.S_LAYERS), get_int(p + at.S_HEADS)
    if stage == at.STATES:
        choose_states(p)
        meet(p, laps, LAP_ROWS)
        return
    if stage == at.VECTORS:
        weight, shift = (
            get_int(layer + at.L_NORM_BEFORE_FEED_FORWARD),
            get_int(layer + at.L_NORM_BIAS_BEFORE_FEED_FORWARD),
        )
        if weight != 0:
            center_rows(p, weight, shift, 0, False, False)
            meet(p, laps, LAP_ROWS)
        _feed(p, layer, get_int(p + at.S_OUTPUTS), scratch, laps)
        return
    patches = get_int(p + at.S_PATCHES)
    if patches != 0:
        kind, w = get_int(p + at.S_EMBEDDING_KIND), get_int(p + at.S_EMBEDDING)
        inputs = get_int(p + at.S_PATCH_INPUTS)
        block_product(p, kind, w, patches, 0, 0, inputs, get_int(p + at.S_HIDDEN))
        meet(p, laps, LAP_PRODUCTS)
    weight, shift = (
        get_int(layer + at.L_NORM_BEFORE_ATTENTION),
        get_int(layer + at.L_NORM_BIAS_BEFORE_ATTENTION),
    )
    center_rows(p, weight, shift, 0, patches != 0, False)
    meet(p, laps, LAP_ROWS)
    if stage == at.KEYS:
        _heads(p, layer, heads, 3 * heads, scratch, unpacked)
        meet(p, laps, LAP_HEADS)
        return
    _heads(p, layer, 0, heads, scratch, unpacked)
    meet(p, laps, LAP_HEADS)
    _attend_and_feed(p, layer, scratch, laps)
    take_in(p, get_int(layer + at.L_DOWN_BIAS))
    meet(p, laps, LAP_ROWS)


@kernel
def _step(thread, p):
    """One step, as one of its threads."""
    scratch = get_int(p + at.S_SCRATCH) + thread * get_int(p + at.S_SCRATCH_STEP)
    unpacked = get_int(p + at.S_UNPACKED) + thread * get_int(p + at.S_UNPACKED_STEP)
    laps = get_int(p + at.S_LAPS)
    if laps != 0:
        laps += thread * at.LAP_BYTES
        put_int(laps + 8 * LAP_STARTED, nanoseconds())
    if get_int(p + at.S_IS_ENCODER) != 0:
        stage = get_int(p + at.S_STAGE)
        if stage == at.WHOLE:
            _encode(p, scratch, unpacked, laps)
        else:
            _see(p, stage, scratch, unpacked, laps)
        return
    layers, count = get_int(p + at.S_LAYERS), get_int(p + at.S_NUM_LAYERS)
    layer = layers + (count - 1) * at.LAYER_BYTES
    is_whole = get_int(p + at.S_ONLY_LOGITS) == 0
    # Read now: behind its last meeting a step has ended, and the parameters may be those of the next one.
    has_draws = get_int(p + at.S_NUM_DRAWS) != 0
    has_lists = has_draws and get_int(p + at.S_HAS_LISTS) != 0
    if is_whole:
        _embed(p)
        for index in range(count):
            before = layer
            layer = layers + index * at.LAYER_BYTES
            _layer(p, layer, index, before, scratch, unpacked, laps)
        meet(p, laps, LAP_PRODUCTS)
    _last(p, get_int(layer + at.L_NORM_AFTER_FEED_FORWARD), is_whole, scratch)
    meet(p, laps, LAP_ROWS)
    _logits(p, unpacked)
    meet(p, laps, LAP_LOGITS)
    draw(p, has_draws, has_lists, scratch, laps)


@kernel
def _stay(thread, p):
    """A worker's life: wait for a step, first by looking, then asleep; compute it; until it is told to stop."""
    seen = peek(p + at.S_STEP)
    mine = get_int(p + at.S_SLEEPING) + at.LINE * thread
    poke(mine + 8, 1)  # it is here
    while True:
        looks = 0
        while peek(p + at.S_STEP) == seen:
            looks += 1
            if looks > IDLE_LOOKS:
                # Added, not stored: a processor may look at the step before others see what it has stored. A step that
                # begins just then would take this thread to be awake, and would wait for it for ever.
                fetch_add(mine, 1)
                if peek(p + at.S_STEP) == seen:
                    sleep_on(get_int(p + at.S_SEMAPHORES) + at.LINE * thread)
                poke(mine, 0)
                looks = 0
        seen = peek(p + at.S_STEP)
        if peek(p + at.S_STOP):
            break
        if thread < seen % at.MOST_THREADS:
            poke(mine + 16, 1)
            _step(thread, p)
            poke(mine + 16, 0)
    poke(mine + 8, 0)


@kernel
def _wait_for_late(p, threads):
    """Until all threads of the last step have left its last meeting.

    In a step with the same threads the second meeting waits for them. One with others would go on without one that
    still falls asleep, and could take the wake-up that is meant for it.
    """
    for other in range(1, threads):
        while peek(get_int(p + at.S_SLEEPING) + at.LINE * other + 16):
            yield_processor()


@apart
def enter(thread, p):
    """The one entry: thread 0 computes a step with the others and returns, the others stay."""
    if thread != 0:
        _stay(thread, p)
        return
    # The number of threads is part of the step's number: one that is late reads both or neither. Added, not stored:
    # the step has to be seen before it is asked who sleeps (`_stay`).
    last = peek(p + at.S_STEP)
    if last % at.MOST_THREADS != get_int(p + at.S_THREADS):
        _wait_for_late(p, last % at.MOST_THREADS)
    next_step = (last // at.MOST_THREADS + 1) * at.MOST_THREADS + get_int(p + at.S_THREADS)
    fetch_add(p + at.S_STEP, next_step - last)
    for other in range(1, get_int(p + at.S_THREADS)):
        if peek(get_int(p + at.S_SLEEPING) + at.LINE * other):
            wake(get_int(p + at.S_SEMAPHORES) + at.LINE * other)
    _step(0, p)
