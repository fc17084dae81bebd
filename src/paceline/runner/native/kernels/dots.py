"""Products of bytes: how each processor counts them, and how a group's counts become floats.

Only this module knows processors: `dots` is the instruction, or what stands for it, that multiplies four bytes at once.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from paceline.runner.native.kernels.emit import (
    BYTES,
    F32,
    FLOATS,
    I16,
    I32,
    INTS,
    ISA,
    LANES,
    PARTS,
    WIDTH,
    address,
    broadcast,
    call,
    constant,
    fused,
    ints,
    load_at,
    octets,
    pick_lanes,
    registers_of,
    widened,
)
from paceline.runner.native.kernels.simd import bundle_of, rows_of
from paceline.runner.native.layout import INPUT_SCALES, REST_STEPS


@intrinsic(prefer_literal=True)
def dots(typing, counts, weights, at, signed):
    """counts[row][column] += the sum over i < 4 of weights[4 * column + i] * inputs[4 * row + i], all of them bytes.

    The inputs at `at` are four of each row, four rows abreast. `signed`: weights are -128 to 127, else 0 to 15.
    """

    def generate(context, b, signature, values):
        rows, parts = rows_of(b, values[0], counts.count), registers_of(b, values[1])
        _dot(b, rows, dict(enumerate(parts)), values[2], 0, signed.literal_value)
        return bundle_of(context, b, counts, rows)

    return counts(counts, octets, address, signed), generate


def _dot(b: Any, rows: list[list[Any]], weights: dict[int, Any], at: Any, offset: int, signed: bool) -> None:
    """Add to some parts of `rows`, those that `weights` has, in place."""
    if ISA.name == "neon":  # one load for all rows; the product then takes a row's lane
        quads = load_at(b, at, ir.VectorType(I32, 4), offset)
        inputs = [b.bitcast(pick_lanes(b, quads, [row] * 4), BYTES) for row in range(len(rows))]
    else:
        inputs = [
            b.bitcast(broadcast(b, load_at(b, at, I32, offset + 4 * row)), BYTES) for row in range(len(rows))
        ]
    dot = (_SIGNED_DOTS if signed else _DOTS)[ISA.name]
    for part, weight in weights.items():
        for row, given in zip(rows, inputs, strict=True):
            row[part] = dot(b, row[part], weight, given)


def _neon_dot(b: Any, sums: Any, weights: Any, inputs: Any) -> Any:
    return call(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", INTS, sums, weights, inputs)


def _vnni_dot(b: Any, sums: Any, weights: Any, inputs: Any) -> Any:
    return call(b, f"llvm.x86.avx512.vpdpbusd.{32 * WIDTH}", INTS, sums, weights, inputs)


def _vnni_signed_dot(b: Any, sums: Any, weights: Any, inputs: Any) -> Any:
    """The instruction takes unsigned weights: moved up by 128 here, which `start_counts` has taken off."""
    return _vnni_dot(b, sums, b.xor(weights, constant(BYTES, -128)), inputs)


def _avx2_dot(b: Any, sums: Any, weights: Any, inputs: Any) -> Any:
    pairs = call(b, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, 16), weights, inputs)
    ones = constant(ir.VectorType(I16, 16), 1)
    return b.add(sums, call(b, "llvm.x86.avx2.pmadd.wd", INTS, pairs, ones))


def _avx2_signed_dot(b: Any, sums: Any, weights: Any, inputs: Any) -> Any:
    """Weights without their sign, inputs with it: a pair of products then fits sixteen bits."""
    size = b.select(b.icmp_signed("<", weights, constant(BYTES, 0)), b.neg(weights), weights)
    return _avx2_dot(b, sums, size, call(b, "llvm.x86.avx2.psign.b", BYTES, inputs, weights))


def _plain_dot(b: Any, sums: Any, weights: Any, inputs: Any) -> Any:
    wide = ir.VectorType(I32, 4 * WIDTH)
    products = b.mul(b.sext(weights, wide), b.sext(inputs, wide))
    for index in range(4):
        sums = b.add(sums, pick_lanes(b, products, list(range(index, 4 * WIDTH, 4))))
    return sums


_DOTS = {
    "neon": _neon_dot,
    "plain": _plain_dot,
    "avx512": _vnni_dot,
    "avxvnni": _vnni_dot,
    "avx2": _avx2_dot,
}
_SIGNED_DOTS = _DOTS | {"avx512": _vnni_signed_dot, "avxvnni": _vnni_signed_dot, "avx2": _avx2_signed_dot}


# Turning integers into floats takes NEON twice as long as other operations. There counts begin at the bits of a float
# whose last bit is worth 1: what is added to the bits is added to the float, as long as it is less than 2**22, and what
# is left when the float is taken off again is exact.
_IS_FLOAT_START = ISA.name == "neon"
_FLOAT_START = 3 << 22
_START_BITS = 0x4B400000 if _IS_FLOAT_START else 0


def _counted(b: Any, counts: Any) -> Any:
    """What `dots` counted, as floats."""
    if _IS_FLOAT_START:
        return b.fsub(b.bitcast(counts, FLOATS), constant(FLOATS, float(_FLOAT_START)))
    return b.sitofp(counts, FLOATS)


@intrinsic(prefer_literal=True)
def start_counts(typing, like, inputs, signed):
    """Integers for as many rows: what `dots` counts from in a group whose input scales stand at `inputs`."""
    kind = types.UniTuple(ints, like.count)

    def generate(context, b, signature, values):
        return bundle_of(context, b, kind, _starts(b, like.count, values[1], signed.literal_value))

    return kind(like, address, signed), generate


def _starts(
    b: Any, rows: int, inputs: Any, signed: bool, at: int = 8, otherwise: int = _START_BITS
) -> list[list[Any]]:
    """What takes off that signed weights are moved up, which stands at `at` of the scales, or a number."""
    if signed and _SIGNED_DOTS[ISA.name] is _vnni_signed_dot:
        starts = [broadcast(b, load_at(b, inputs, I32, INPUT_SCALES * row + at)) for row in range(rows)]
    else:
        starts = [constant(INTS, otherwise)] * rows
    return [[start] * len(PARTS) for start in starts]


def _joined(b: Any, counts: list[list[Any]], rests: list[list[Any]]) -> list[list[Any]]:
    """Counts of the inputs' first bytes and of what rounding left, in steps of the second ones."""
    steps = constant(INTS, REST_STEPS)
    return [
        [b.add(b.mul(count, steps), rest) for count, rest in zip(*pair, strict=True)]
        for pair in zip(counts, rests, strict=True)
    ]


# How the weights of a group stand in memory: nibbles with halves as scales, the same unpacked to bytes with floats, and
# bytes with signs and halves, for inputs of one byte and of two.
NIBBLES, UNPACKED, SIGNED, FINE = range(4)
_WEIGHT_BYTES = {NIBBLES: 256, UNPACKED: 512, SIGNED: 512, FINE: 512}
# Columns of a group: all, or a half of the registers.
ALL, FIRST, SECOND = range(3)
_CHOSEN = {ALL: PARTS, FIRST: PARTS[: len(PARTS) // 2], SECOND: PARTS[len(PARTS) // 2 :]}


@intrinsic(prefer_literal=True)
def add_group(typing, sums, weights, inputs, scales, form, columns):
    """sums[row][column] += the product with a group of 32 inputs, whose scales stand at `scales`.

    For each column: counts * scale * input scale, then offset * input sum. Behind the weights stand 16 scales and 16
    offsets of columns.
    """

    def generate(context, b, signature, values):
        rows = rows_of(b, values[0], sums.count)
        _add_columns(b, rows, _CHOSEN[columns.literal_value], values[1:4], form.literal_value)
        return bundle_of(context, b, sums, rows)

    return sums(sums, address, address, address, form, columns), generate


def _add_columns(b: Any, rows: list[list[Any]], parts: range, at: Any, form: int) -> None:
    """`add_group` for the columns of some registers."""
    weights, inputs, scales = at
    signed = form in (SIGNED, FINE)
    counts = _starts(b, len(rows), scales, signed, otherwise=0 if form == FINE else _START_BITS)

    def load(quad: int) -> dict[int, Any]:
        return {part: load_at(b, weights, BYTES, 64 * quad + 4 * WIDTH * part) for part in parts}

    if form == NIBBLES:
        for quad in range(4):
            both = load(quad)
            low = {part: b.and_(weight, constant(BYTES, 15)) for part, weight in both.items()}
            high = {part: b.lshr(weight, constant(BYTES, 4)) for part, weight in both.items()}
            _dot(b, counts, low, inputs, 16 * quad, False)
            _dot(b, counts, high, inputs, 64 + 16 * quad, False)
    else:
        rests = _starts(b, len(rows), scales, True, at=12, otherwise=0)
        for quad in range(8):
            found = load(quad)
            _dot(b, counts, found, inputs, 16 * quad, signed)
            if form == FINE:
                _dot(b, rests, found, inputs, 128 + 16 * quad, True)
        if form == FINE:
            counts = _joined(b, counts, rests)

    def column(lane: int) -> Any:
        if form == UNPACKED:
            return load_at(b, weights, FLOATS, _WEIGHT_BYTES[form] + 4 * lane)
        return widened(b, load_at(b, weights, ir.VectorType(I16, WIDTH), _WEIGHT_BYTES[form] + 2 * lane))

    of_inputs, totals = (
        [broadcast(b, load_at(b, scales, F32, INPUT_SCALES * row + more)) for row in range(len(rows))]
        for more in (0, 4)
    )
    for part in parts:
        scale, offset = column(WIDTH * part), column(LANES + WIDTH * part)
        for row, count, of_input, total in zip(rows, counts, of_inputs, totals, strict=True):
            counted = b.sitofp(count[part], FLOATS) if form == FINE else _counted(b, count[part])
            row[part] = fused(b, b.fmul(counted, scale), of_input, row[part])
            if not signed:  # bytes with signs have no offsets
                row[part] = fused(b, offset, total, row[part])


@intrinsic
def add_counts(typing, sums, counts, columns, inputs):
    """sums[row][column] += counts * the column's scale * input scale, in this order; 16 scales at `columns`, floats."""

    def generate(context, b, signature, values):
        rows, found = rows_of(b, values[0], sums.count), rows_of(b, values[1], sums.count)
        scales = [broadcast(b, load_at(b, values[3], F32, INPUT_SCALES * row)) for row in range(sums.count)]
        for part in PARTS:
            scale = load_at(b, values[2], FLOATS, 4 * WIDTH * part)
            for row in range(sums.count):
                product = b.fmul(_counted(b, found[row][part]), scale)
                rows[row][part] = fused(b, product, scales[row], rows[row][part])
        return bundle_of(context, b, sums, rows)

    return sums(sums, counts, address, address), generate
