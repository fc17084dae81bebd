"""A mixture of experts: each token through the few feed-forward parts its router likes best.

Tokens are sorted by expert, and those of one expert stand in tiles of their own, so that an expert's panels are read
once for all of its tokens. A token's parts are added up in the order of the experts: its sum does not depend on the
tokens beside it.

    entries   expert 0: token 3, token 7, -, -      expert 2: token 0, token 3, token 9, -      (tiles of four)
"""

from __future__ import annotations

import numpy as np

from paceline.runner.native import layout as at
from paceline.runner.native.kernels.adapters import add_adapters
from paceline.runner.native.kernels.emit import kernel
from paceline.runner.native.kernels.products import panel
from paceline.runner.native.kernels.rowwise import activate, exp, quantise_row
from paceline.runner.native.kernels.scalars import get_float, get_int, put_float, put_int
from paceline.runner.native.kernels.simd import (
    add,
    fma,
    largest,
    load_floats,
    maximum,
    only_lanes,
    splat,
    store_floats,
    sub,
    sum_of,
)
from paceline.runner.native.kernels.threads import LAP_GATED, LAP_PRODUCTS, LAP_ROWS, join, leave, meet, take

_F = np.float32


@kernel
def route(kind, router, x, hidden, experts, chosen, per_token, normalize, scratch):
    """One token: the experts it goes to and their weights, two columns of `per_token` at `chosen`."""
    panels = (experts + at.COLUMNS - 1) // at.COLUMNS
    for index in range(panels):
        panel(kind, router, index, x, 0, 0, 1, hidden, scratch + 64 * index, 64, 0)
    last = scratch + 64 * (panels - 1)
    store_floats(last, only_lanes(load_floats(last), 0, experts - at.COLUMNS * (panels - 1)))
    top = load_floats(scratch)
    for index in range(1, panels):
        top = maximum(top, load_floats(scratch + 64 * index))
    top = splat(largest(top))
    total = splat(_F(0))
    for index in range(panels):
        weight = exp(sub(load_floats(scratch + 64 * index), top))
        store_floats(scratch + 64 * index, weight)
        total = add(total, weight)
    whole = sum_of(total)
    weights, kept = chosen + 8 * per_token, _F(0)
    for place in range(per_token):
        best, value = 0, _F(-1)
        for expert in range(experts):
            found = get_float(scratch + 4 * expert)
            if found > value:  # the lowest number among equals
                best, value = expert, found
        put_int(chosen + 8 * place, best)
        put_float(weights + 4 * place, value / whole)
        kept += value / whole
        put_float(scratch + 4 * best, _F(-2))
    if normalize:
        for place in range(per_token):
            put_float(weights + 4 * place, get_float(weights + 4 * place) / kept)


@kernel
def sort_by_expert(count, experts, per_token, chosen, chosen_step, firsts, sizes, entries, places):
    """Entries of each expert from `firsts[expert]` on, in the order of tokens; where each token's entries stand."""
    for expert in range(experts):
        put_int(sizes + 8 * expert, 0)
    for token in range(count):
        for place in range(per_token):
            mine = sizes + 8 * get_int(chosen + token * chosen_step + 8 * place)
            put_int(mine, get_int(mine) + 1)
    start = 0
    for expert in range(experts):
        put_int(firsts + 8 * expert, start)
        start += (get_int(sizes + 8 * expert) + at.TILE - 1) // at.TILE * at.TILE
        put_int(sizes + 8 * expert, 0)
    put_int(firsts + 8 * experts, start)
    for entry in range(start):
        put_int(entries + 8 * entry, -1)
    for token in range(count):
        for place in range(per_token):
            expert = get_int(chosen + token * chosen_step + 8 * place)
            size = get_int(sizes + 8 * expert)
            entry = get_int(firsts + 8 * expert) + size
            put_int(sizes + 8 * expert, size + 1)
            put_int(entries + 8 * entry, token)
            put_int(places + 8 * (token * per_token + place), entry)


@kernel
def add_experts(chosen, per_token, places, parts, hidden, to):
    """The weighted sum of a token's parts, in the order of the experts."""
    weights = chosen + 8 * per_token
    for offset in range(0, hidden * 4, 64):
        store_floats(to + offset, splat(_F(0)))
    last = -1
    for _ in range(per_token):
        best, place = 1 << 62, 0
        for index in range(per_token):
            expert = get_int(chosen + 8 * index)
            if last < expert < best:
                best, place = expert, index
        last = best
        weight = splat(get_float(weights + 4 * place))
        source = parts + get_int(places + 8 * place) * hidden * 4
        for offset in range(0, hidden * 4, 64):
            store_floats(to + offset, fma(load_floats(source + offset), weight, load_floats(to + offset)))


@kernel
def gate_and_up(
    p, kinds, piece, x, quantised, scales, first, rows, hidden, inner, scratch, unpacked, adapted
):
    """32 columns of activation(gate) * up of some rows, into the inputs of the product down from row `first` on.

    At `kinds` stand kind and address of the gate's panels, then of the others. `adapted`: the layer whose adapters add
    to both, where tokens have some; else 0.
    """
    activation, width = get_int(p + at.S_ACTIVATION), get_int(p + at.S_INPUT_BYTES)
    gate_kind, gate, up_kind, up = (
        get_int(kinds),
        get_int(kinds + 8),
        get_int(kinds + 16),
        get_int(kinds + 24),
    )
    ups = scratch + rows * 128
    for half in range(2):
        gates, number = scratch + 64 * half, piece * 2 + half
        panel(gate_kind, gate, number, x, quantised, scales, rows, hidden, gates, 128, unpacked)
        panel(up_kind, up, number, x, quantised, scales, rows, hidden, ups, 64, unpacked)
        if adapted != 0:
            add_adapters(p, adapted, at.PART_GATE, number, 0, rows, gates, 128)
            add_adapters(p, adapted, at.PART_UP, number, 0, rows, ups, 64)
        for row in range(rows):
            value = activate(activation, load_floats(gates + 128 * row), load_floats(ups + 64 * row))
            store_floats(gates + 128 * row, value)
    for row in range(rows):
        source = scratch + 128 * row
        if width:
            to, to_scales = get_int(p + at.S_GATED_Q), get_int(p + at.S_GATED_SCALES)
            quantise_row(source, first + row, inner, piece * 32, 32, to, to_scales, width)
        if adapted != 0 or not width:
            to = get_int(p + at.S_GATED) + ((first + row) * inner + piece * 32) * 4
            store_floats(to, load_floats(source))
            store_floats(to + 64, load_floats(source + 64))


@kernel
def _route_tokens(p, layer, scratch):
    sync, count, hidden = get_int(p + at.S_SYNC), get_int(p + at.S_NUM_TOKENS), get_int(p + at.S_HIDDEN)
    experts, per_token = get_int(p + at.S_NUM_EXPERTS), get_int(p + at.S_PER_TOKEN)
    while True:
        token = take(sync, 1)
        if token >= count:
            break
        x, chosen = (
            get_int(p + at.S_NORMED) + token * hidden * 4,
            get_int(p + at.S_CHOSEN) + token * per_token * 16,
        )
        normalize = get_int(p + at.S_NORMALIZE)
        route(
            get_int(layer + at.L_ROUTER_KIND),
            get_int(layer + at.L_ROUTER),
            x,
            hidden,
            experts,
            chosen,
            per_token,
            normalize,
            scratch,
        )


@kernel
def _sort(p):
    if take(get_int(p + at.S_SYNC), 1) == 0:
        per_token = get_int(p + at.S_PER_TOKEN)
        sort_by_expert(
            get_int(p + at.S_NUM_TOKENS),
            get_int(p + at.S_NUM_EXPERTS),
            per_token,
            get_int(p + at.S_CHOSEN),
            per_token * 16,
            get_int(p + at.S_FIRSTS),
            get_int(p + at.S_SIZES),
            get_int(p + at.S_ENTRIES),
            get_int(p + at.S_PLACES),
        )


@kernel
def _gather(p):
    """The inputs of every entry, side by side with those of the same expert."""
    sync, hidden = get_int(p + at.S_SYNC), get_int(p + at.S_HIDDEN)
    count = get_int(get_int(p + at.S_FIRSTS) + 8 * get_int(p + at.S_NUM_EXPERTS))
    while True:
        entry = take(sync, 1)
        if entry >= count:
            break
        token = get_int(get_int(p + at.S_ENTRIES) + 8 * entry)
        if token >= 0:
            source = get_int(p + at.S_NORMED) + token * hidden * 4
            if get_int(p + at.S_INPUT_BYTES):
                x, scales = get_int(p + at.S_EXPERT_X_Q), get_int(p + at.S_EXPERT_X_SCALES)
                quantise_row(source, entry, hidden, 0, hidden, x, scales, get_int(p + at.S_INPUT_BYTES))
            else:
                to = get_int(p + at.S_EXPERT_X) + entry * hidden * 4
                for offset in range(0, hidden * 4, 64):
                    store_floats(to + offset, load_floats(source + offset))


@kernel
def _gated_by_expert(p, layer, scratch, unpacked):
    sync, hidden, inner = get_int(p + at.S_SYNC), get_int(p + at.S_HIDDEN), get_int(p + at.S_EXPERT_INNER)
    columns = inner // 32
    while True:
        piece = take(sync, 1)
        if piece >= get_int(p + at.S_NUM_EXPERTS) * columns:
            break
        expert = piece // columns
        first, rows = (
            get_int(get_int(p + at.S_FIRSTS) + 8 * expert),
            get_int(get_int(p + at.S_SIZES) + 8 * expert),
        )
        if rows > 0:
            kinds = get_int(layer + at.L_EXPERTS) + expert * at.EXPERT_BYTES
            x = get_int(p + at.S_EXPERT_X) + first * hidden * 4
            quantised = get_int(p + at.S_EXPERT_X_Q) + first * hidden * get_int(p + at.S_INPUT_BYTES)
            scales = get_int(p + at.S_EXPERT_X_SCALES) + first * (hidden // 32) * at.INPUT_SCALES
            gate_and_up(
                p,
                kinds,
                piece % columns,
                x,
                quantised,
                scales,
                first,
                rows,
                hidden,
                inner,
                scratch,
                unpacked,
                0,
            )


@kernel
def _down_by_expert(p, layer, unpacked):
    sync, hidden, inner = get_int(p + at.S_SYNC), get_int(p + at.S_HIDDEN), get_int(p + at.S_EXPERT_INNER)
    panels = hidden // at.COLUMNS
    while True:
        piece = take(sync, 1)
        if piece >= get_int(p + at.S_NUM_EXPERTS) * panels:
            break
        expert, number = piece // panels, piece % panels
        first, rows = (
            get_int(get_int(p + at.S_FIRSTS) + 8 * expert),
            get_int(get_int(p + at.S_SIZES) + 8 * expert),
        )
        if rows > 0:
            mine = get_int(layer + at.L_EXPERTS) + expert * at.EXPERT_BYTES
            x = get_int(p + at.S_GATED) + first * inner * 4
            quantised = get_int(p + at.S_GATED_Q) + first * inner * get_int(p + at.S_INPUT_BYTES)
            scales = get_int(p + at.S_GATED_SCALES) + first * (inner // 32) * at.INPUT_SCALES
            out = get_int(p + at.S_EXPERT_PARTS) + first * hidden * 4 + 64 * number
            kind, w = get_int(mine + at.E_DOWN_KIND), get_int(mine + at.E_DOWN)
            panel(kind, w, number, x, quantised, scales, rows, inner, out, hidden * 4, unpacked)


@kernel
def _sum_tokens(p):
    sync, count, hidden = get_int(p + at.S_SYNC), get_int(p + at.S_NUM_TOKENS), get_int(p + at.S_HIDDEN)
    per_token = get_int(p + at.S_PER_TOKEN)
    while True:
        token = take(sync, 1)
        if token >= count:
            break
        chosen = get_int(p + at.S_CHOSEN) + token * per_token * 16
        places = get_int(p + at.S_PLACES) + token * per_token * 8
        to = get_int(p + at.S_DELTA) + token * hidden * 4
        add_experts(chosen, per_token, places, get_int(p + at.S_EXPERT_PARTS), hidden, to)


@kernel
def feed_experts(p, layer, scratch, unpacked, laps):
    """The feed-forward part of a layer with experts; the result is the delta of every token, the last phase open."""
    _route_tokens(p, layer, scratch)
    computes = join(p, laps, LAP_ROWS, True)
    if computes:
        _sort(p)
    leave(p, laps, LAP_ROWS, computes)
    _gather(p)
    meet(p, laps, LAP_ROWS)
    _gated_by_expert(p, layer, scratch, unpacked)
    meet(p, laps, LAP_GATED)
    _down_by_expert(p, layer, unpacked)
    meet(p, laps, LAP_PRODUCTS)
    _sum_tokens(p)
