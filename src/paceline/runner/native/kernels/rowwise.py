"""What is done to one row at a time: exp, norm, quantise, rotation, activation, embedding."""

from __future__ import annotations

import numpy as np

from paceline.runner.native.kernels.emit import kernel
from paceline.runner.native.kernels.scalars import (
    fma_one,
    get_brain,
    get_byte,
    get_float,
    get_half,
    put_float,
    put_int32,
    square_root,
)
from paceline.runner.native.kernels.simd import (
    add,
    add_ints,
    bounded,
    div,
    fma,
    largest_size,
    load_floats,
    mul,
    round_even,
    round_to_ints,
    splat,
    store_floats,
    store_quads,
    sub,
    sum_of,
    sum_of_ints,
    times_two_to,
    to_ints,
    zero_below,
)
from paceline.runner.native.layout import (
    BF16,
    F16,
    F32,
    GELU,
    GELU_TANH,
    INPUT_SCALES,
    Q4,
    Q8,
    Q8_FINE,
    REST_STEPS,
    TILE,
)

_F = np.float32
ZERO, ONE, TOP, RESTS = _F(0), _F(1), _F(127), _F(REST_STEPS)
LOWEST, HIGHEST = _F(-87), _F(88)  # where e**x is still a normal float32
LOG2_E, LN2_HIGH, LN2_LOW = _F(1.4426950408889634), _F(-0.693145751953125), _F(-1.428606765330187e-06)
C2, C3, C4, C5, C6 = _F(0.5), _F(0.16666666), _F(0.041666635), _F(0.008333361), _F(0.0013888889)
GELU_LINE, GELU_CUBE = _F(1.5957691216057308), _F(0.044715)  # 2 * sqrt(2 / pi)


# erf(x) = x * P(x^2) / Q(x^2), within 4 units of the last place, where it is not 1 yet.
ERF_END, HALF, ROOT_HALF = _F(4), _F(0.5), _F(0.7071067811865476)
P0, P1, P2, P3 = (
    _F(-1.60960333262415e-02),
    _F(-2.95459980854025e-03),
    _F(-7.34990630326855e-04),
    _F(-5.69250639462346e-05),
)
P4, P5, P6 = _F(-2.10102402082508e-06), _F(2.77068142495902e-08), _F(-2.72614225801306e-10)
Q0, Q1, Q2 = _F(-1.42647390514189e-02), _F(-7.37332916720468e-03), _F(-1.68282697438203e-03)
Q3, Q4_ = _F(-2.13374055278905e-04), _F(-1.45660718464996e-05)


@kernel
def erf(x):
    """The error function; NaN stays NaN."""
    near = bounded(x, -ERF_END, ERF_END)
    square = mul(near, near)
    p = fma(splat(P6), square, splat(P5))
    p = fma(p, square, splat(P4))
    p = fma(p, square, splat(P3))
    p = fma(p, square, splat(P2))
    p = fma(p, square, splat(P1))
    p = fma(p, square, splat(P0))
    q = fma(splat(Q4_), square, splat(Q3))
    q = fma(q, square, splat(Q2))
    q = fma(q, square, splat(Q1))
    q = fma(q, square, splat(Q0))
    return div(mul(near, p), q)


@kernel
def exp(x):
    """e**x by the same operations, so with the same bits, on every processor; 0 below -87."""
    near = bounded(x, LOWEST, HIGHEST)
    power = round_even(mul(near, splat(LOG2_E)))
    rest = fma(power, splat(LN2_LOW), fma(power, splat(LN2_HIGH), near))
    p = fma(splat(C6), rest, splat(C5))
    p = fma(p, rest, splat(C4))
    p = fma(p, rest, splat(C3))
    p = fma(p, rest, splat(C2))
    p = fma(p, rest, splat(ONE))
    p = fma(p, rest, splat(ONE))
    return zero_below(x, splat(LOWEST), times_two_to(p, to_ints(power)))


@kernel
def quantise(source, count, x, scales, width):
    """`count` floats into one row of a tile, as `width` bytes each; `x` and `scales` point at the row's place in the
    first group."""
    for _ in range(count // 32):
        low = load_floats(source)
        high = load_floats(source + 64)
        top = largest_size(low, high)
        # A group of zeros stays zeros; a number that is not finite makes the scale, and so the product, not finite.
        inverse = splat(TOP / top if top != ZERO else ZERO)
        low, high = mul(low, inverse), mul(high, inverse)
        low_ints, high_ints = round_to_ints(low), round_to_ints(high)
        # Four rows lie abreast.
        store_quads(x, low_ints, 4 * TILE)
        store_quads(x + 64, high_ints, 4 * TILE)
        scale = top / TOP
        total = sum_of_ints(add_ints(low_ints, high_ints))
        put_float(scales, scale)
        put_float(scales + 4, scale * _F(total))
        put_int32(scales + 8, -128 * total)
        if width == 2:
            low_ints = round_to_ints(mul(sub(low, round_even(low)), splat(RESTS)))
            high_ints = round_to_ints(mul(sub(high, round_even(high)), splat(RESTS)))
            store_quads(x + 128, low_ints, 4 * TILE)
            store_quads(x + 192, high_ints, 4 * TILE)
            put_float(scales, scale / RESTS)
            put_int32(scales + 12, -128 * sum_of_ints(add_ints(low_ints, high_ints)))
        source += 128
        x += 4 * TILE * 8 * width
        scales += TILE * INPUT_SCALES


@kernel
def quantise_row(source, row, inputs, first, count, x, scales, width):
    """Inputs `first` to `first + count` of a row, at `source`, into the tiles at `x` and `scales`."""
    tile, lane = row // TILE, row % TILE
    at = x + (tile * TILE * inputs + first * TILE) * width + lane * 4
    groups = inputs // 32
    place = scales + ((tile * groups + first // 32) * TILE + lane) * INPUT_SCALES
    quantise(source, count, at, place, width)


@kernel
def mean_square(source, count):
    total = splat(ZERO)
    for at in range(0, count * 4, 64):
        value = load_floats(source + at)
        total = fma(value, value, total)
    return sum_of(total) / _F(count)


@kernel
def norm(source, count, weight, eps, to):
    """Divide by the root of the mean square, then scale; returns the mean square."""
    square = mean_square(source, count)
    scale = splat(ONE / square_root(square + eps))
    for at in range(0, count * 4, 64):
        store_floats(to + at, mul(mul(load_floats(source + at), scale), load_floats(weight + at)))
    return square


@kernel
def add_row(to, source, count):
    for at in range(0, count * 4, 64):
        store_floats(to + at, add(load_floats(to + at), load_floats(source + at)))


@kernel
def scale_row(to, factor, count):
    by = splat(factor)
    for at in range(0, count * 4, 64):
        store_floats(to + at, mul(load_floats(to + at), by))


@kernel
def activate(kind, gate, up):
    """silu(gate) * up, gelu by erf, or by tanh: gate * sigmoid(2 * sqrt(2 / pi) * (gate + 0.044715 * gate^3))."""
    if kind == GELU:
        half = mul(gate, splat(HALF))
        return mul(fma(half, erf(mul(gate, splat(ROOT_HALF))), half), up)
    inner = gate
    if kind == GELU_TANH:
        cube = mul(mul(gate, gate), gate)
        inner = mul(splat(GELU_LINE), fma(splat(GELU_CUBE), cube, gate))
    return mul(div(gate, add(splat(ONE), exp(sub(splat(ZERO), inner)))), up)


@kernel
def rotate(head, half, cos, sin):
    """Entry i and entry half + i are a pair: (a cos - b sin, b cos + a sin)."""
    whole = half // 16 * 64
    for at in range(0, whole, 64):
        a = load_floats(head + at)
        b = load_floats(head + half * 4 + at)
        c = load_floats(cos + at)
        s = load_floats(sin + at)
        store_floats(head + at, sub(mul(a, c), mul(b, s)))
        store_floats(head + half * 4 + at, fma(a, s, mul(b, c)))
    for at in range(whole, half * 4, 4):
        a = get_float(head + at)
        b = get_float(head + half * 4 + at)
        c = get_float(cos + at)
        s = get_float(sin + at)
        put_float(head + at, a * c - b * s)
        put_float(head + half * 4 + at, fma_one(a, s, b * c))


@kernel
def embed(kind, table, token, hidden, to):
    """One column of the embedding's panels: the vector of a token."""
    index, column = token // 16, token % 16
    if kind in (Q4, Q8, Q8_FINE):
        size = 320 if kind == Q4 else 576
        words = 256 if kind == Q4 else 512
        for group in range(hidden // 32):
            at = table + (index * (hidden // 32) + group) * size
            scale = get_half(at + words + 2 * column)
            offset = get_half(at + words + 32 + 2 * column)
            for i in range(32):
                if kind != Q4:
                    q = get_byte(at + i // 4 * 64 + column * 4 + i % 4)
                else:
                    pair = get_byte(at + i % 16 // 4 * 64 + column * 4 + i % 4) & 255
                    q = pair & 15 if i < 16 else pair >> 4
                put_float(to + (group * 32 + i) * 4, fma_one(_F(q), scale, offset))
    elif kind == F32:
        for i in range(hidden):
            put_float(to + 4 * i, get_float(table + ((index * hidden + i) * 16 + column) * 4))
    elif kind == BF16:
        for i in range(hidden):
            put_float(to + 4 * i, get_brain(table + ((index * hidden + i) * 16 + column) * 2))
    elif kind == F16:
        for i in range(hidden):
            put_float(to + 4 * i, get_half(table + ((index * hidden + i) * 16 + column) * 2))
