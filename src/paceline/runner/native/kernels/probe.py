"""Each kernel alone, by number, for tests and benchmarks: the same compiled code that a step runs.

Arguments are 64-bit numbers and addresses in a column, in the order of the kernel's own parameters; the last one is how
often to do it.
"""

from __future__ import annotations

from paceline.runner.native.kernels.adapters import expand, shrink
from paceline.runner.native.kernels.byte_attention import attend_rows, keep_bytes
from paceline.runner.native.kernels.draw import draw
from paceline.runner.native.kernels.emit import apart, kernel
from paceline.runner.native.kernels.products import panel
from paceline.runner.native.kernels.rowwise import activate, embed, exp, norm, quantise_row, rotate
from paceline.runner.native.kernels.scalars import float_of_bits, get_int
from paceline.runner.native.kernels.simd import load_floats, store_floats
from paceline.runner.native.layout import PROBES, S_HAS_LISTS

PANEL, QUANTISE, NORM, ATTEND, ACTIVATE, ROTATE, EXP, EMBED, DRAW, KEEP_BYTES, SHRINK, EXPAND = range(
    len(PROBES)
)


@kernel
def _panels(a, count):
    """All panels of a matrix."""
    kind, w, x, quantised, scales = (
        get_int(a),
        get_int(a + 8),
        get_int(a + 16),
        get_int(a + 24),
        get_int(a + 32),
    )
    rows, inputs, out, step, unpacked = (
        get_int(a + 40),
        get_int(a + 48),
        get_int(a + 56),
        get_int(a + 64),
        get_int(a + 72),
    )
    for index in range(count):
        panel(kind, w, index, x, quantised, scales, rows, inputs, out + 64 * index, step, unpacked)


@kernel
def _attend(a):
    rows, q, first, end, table = get_int(a), get_int(a + 8), get_int(a + 16), get_int(a + 24), get_int(a + 32)
    subs, kv, size, dim, scores = (
        get_int(a + 40),
        get_int(a + 48),
        get_int(a + 56),
        get_int(a + 64),
        get_int(a + 72),
    )
    step, out, in_bytes, x = get_int(a + 80), get_int(a + 88), get_int(a + 96), get_int(a + 104)
    attend_rows(rows, in_bytes, q, first, end, table, subs, kv, size, dim, scores, step, out, x)


@kernel
def _shrink(a):
    """A with some tokens, one after the other."""
    kind, matrix, x, inputs, ranks = (
        get_int(a),
        get_int(a + 8),
        get_int(a + 16),
        get_int(a + 24),
        get_int(a + 32),
    )
    to, step = get_int(a + 40), get_int(a + 48)
    for token in range(get_int(a + 56)):
        shrink(kind, matrix, x + token * inputs * 4, inputs, ranks, to + token * step)


@kernel
def _expand(a):
    """All panels of B with up to four tokens."""
    kind, b, ranks, low, low_step = (
        get_int(a),
        get_int(a + 8),
        get_int(a + 16),
        get_int(a + 24),
        get_int(a + 32),
    )
    rows, out, step = get_int(a + 40), get_int(a + 48), get_int(a + 56)
    for index in range(get_int(a + 64)):
        expand(kind, b, index, ranks, low, low_step, rows, out + 64 * index, step)


@apart
def probe(which, a):
    """One kernel, as often as the number at `a` says; its arguments follow."""
    times = get_int(a)
    a += 8
    for _ in range(times):
        if which == PANEL:
            _panels(a, get_int(a + 80))
        elif which == QUANTISE:
            quantise_row(
                get_int(a),
                get_int(a + 8),
                get_int(a + 16),
                get_int(a + 24),
                get_int(a + 32),
                get_int(a + 40),
                get_int(a + 48),
                get_int(a + 56),
            )
        elif which == NORM:
            norm(get_int(a), get_int(a + 8), get_int(a + 16), float_of_bits(get_int(a + 24)), get_int(a + 32))
        elif which == ATTEND:
            _attend(a)
        elif which == ACTIVATE:
            for at in range(0, 4 * get_int(a + 8), 64):
                gate, up = load_floats(get_int(a + 16) + at), load_floats(get_int(a + 24) + at)
                store_floats(get_int(a + 32) + at, activate(get_int(a), gate, up))
        elif which == ROTATE:
            rotate(get_int(a), get_int(a + 8), get_int(a + 16), get_int(a + 24))
        elif which == EXP:
            for at in range(0, 4 * get_int(a), 64):
                store_floats(get_int(a + 16) + at, exp(load_floats(get_int(a + 8) + at)))
        elif which == EMBED:
            embed(get_int(a), get_int(a + 8), get_int(a + 16), get_int(a + 24), get_int(a + 32))
        elif which == DRAW:
            draw(get_int(a), True, get_int(get_int(a) + S_HAS_LISTS) != 0, get_int(a + 8), 0)
        elif which == KEEP_BYTES:
            keep_bytes(get_int(a), get_int(a + 8), get_int(a + 16), get_int(a + 24), get_int(a + 32))
        elif which == SHRINK:
            _shrink(a)
        elif which == EXPAND:
            _expand(a)
