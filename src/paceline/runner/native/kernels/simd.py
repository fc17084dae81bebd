"""Operations on vectors of sixteen 32-bit lanes and on bundles of a few of them, for functions that numba compiles.

A bundle is a tuple of vectors, one for each of up to four rows; an operation on a bundle goes register by register over
all rows, which is the order in which the fewest registers are alive. Every operation is written once; only `dots`
knows processors. There is no fast-math and every fused product is explicit, so that equal inputs give equal bits
on every processor.

    bundle   row 0: vector, row 1: vector, ...                             at most four rows
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from paceline.runner.native.kernels.emit import (
    BYTES,
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTS,
    ISA,
    LANES,
    PARTS,
    WIDTH,
    address,
    broadcast,
    call,
    constant,
    each_register,
    floats,
    fused,
    ints,
    load_at,
    octets,
    operation,
    pick_lanes,
    registers_of,
    store_at,
    vector_of,
    widened,
)
from paceline.runner.native.layout import INPUT_SCALES

_SIXTEEN = ir.VectorType(F32, LANES)

# -- one vector ----------------------------------------------------------------------------------------------


@operation(address, out=floats)
def load_floats(b, at):
    return [load_at(b, at, FLOATS, 4 * WIDTH * part) for part in PARTS]


@operation(address, out=floats)
def load_halves(b, at):
    return [widened(b, load_at(b, at, ir.VectorType(I16, WIDTH), 2 * WIDTH * part)) for part in PARTS]


@operation(address, out=floats)
def load_brains(b, at):
    """Sixteen bfloat16: the upper halves of float32."""
    found = []
    for part in PARTS:
        wide = b.zext(load_at(b, at, ir.VectorType(I16, WIDTH), 2 * WIDTH * part), INTS)
        found.append(b.bitcast(b.shl(wide, constant(INTS, 16)), FLOATS))
    return found


@operation(address, out=floats)
def load_octets(b, at):
    """Sixteen bytes with signs."""
    wide = b.sitofp(b.sext(load_at(b, at, ir.VectorType(I8, LANES)), ir.VectorType(I32, LANES)), _SIXTEEN)
    return [pick_lanes(b, wide, list(range(WIDTH * part, WIDTH * (part + 1)))) for part in PARTS]


@operation(address, out=octets)
def load_bytes(b, at):
    return [load_at(b, at, BYTES, 4 * WIDTH * part) for part in PARTS]


@operation(address, floats, out=types.void)
def store_floats(b, at, vector):
    for part in PARTS:
        store_at(b, vector[part], at, 4 * WIDTH * part)


@intrinsic(prefer_literal=True)
def load_fourths(typing, at, first):
    """Sixteen of 64 floats: every fourth one from `first` on."""

    def generate(context, b, signature, values):
        parts = []
        for part in PARTS:
            four = load_at(b, values[0], ir.VectorType(F32, 4 * WIDTH), 16 * WIDTH * part)
            parts.append(pick_lanes(b, four, list(range(first.literal_value, 4 * WIDTH, 4))))
        return vector_of(b, floats, parts)

    return floats(address, first), generate


@operation(address, ints, out=types.void)
def store_ints(b, at, vector):
    for part in PARTS:
        store_at(b, vector[part], at, 4 * WIDTH * part)


@operation(address, octets, out=types.void)
def store_bytes(b, at, vector):
    for part in PARTS:
        store_at(b, vector[part], at, 4 * WIDTH * part)


@operation(address, ints, address, out=types.void)
def store_quads(b, at, vector, step):
    """Sixteen small integers as bytes; every four of them go `step` bytes further."""
    for part in PARTS:
        small = b.trunc(vector[part], ir.VectorType(I8, WIDTH))
        for quad in range(WIDTH // 4):
            lanes = list(range(4 * quad, 4 * quad + 4))
            store_at(b, pick_lanes(b, small, lanes), _stride(b, at, step, part * WIDTH // 4 + quad))


@operation(types.float32, out=floats)
def splat(b, value):
    return [broadcast(b, value)] * len(PARTS)


@operation(floats, floats, floats, out=floats)
def fma(b, x, y, z):
    return [fused(b, *parts) for parts in zip(x, y, z, strict=True)]


@operation(floats, floats, out=floats)
def mul(b, x, y):
    return [b.fmul(*parts) for parts in zip(x, y, strict=True)]


@operation(floats, floats, out=floats)
def add(b, x, y):
    return [b.fadd(*parts) for parts in zip(x, y, strict=True)]


@operation(floats, floats, out=floats)
def sub(b, x, y):
    return [b.fsub(*parts) for parts in zip(x, y, strict=True)]


@operation(floats, floats, out=floats)
def div(b, x, y):
    return [b.fdiv(*parts) for parts in zip(x, y, strict=True)]


# A number that is not finite must stay visible: the larger and the smaller of NaN and anything is NaN.


@operation(floats, floats, out=floats)
def maximum(b, x, y):
    """The larger one; NaN where either is."""
    return each_register(f"llvm.maximum.v{WIDTH}f32")(b, x, y)


@operation(floats, floats, out=floats)
def minimum(b, x, y):
    return each_register(f"llvm.minimum.v{WIDTH}f32")(b, x, y)


@operation(floats, out=floats)
def absolute(b, x):
    return each_register(f"llvm.fabs.v{WIDTH}f32")(b, x)


@operation(floats, out=floats)
def round_even(b, x):
    return each_register(f"llvm.roundeven.v{WIDTH}f32")(b, x)


@operation(floats, out=ints)
def to_ints(b, x):
    """Towards zero; what does not fit goes to the nearest that does, NaN to 0."""
    return [call(b, f"llvm.fptosi.sat.v{WIDTH}i32.v{WIDTH}f32", INTS, part) for part in x]


@operation(ints, ints, out=ints)
def add_ints(b, x, y):
    return [b.add(*parts) for parts in zip(x, y, strict=True)]


@operation(ints, ints, out=ints)
def xor_ints(b, x, y):
    return [b.xor(*parts) for parts in zip(x, y, strict=True)]


def _wide_products(b: Any, x: Any, y: Any) -> Any:
    """Products of 64 bits of integers without signs, as pairs of words."""
    wide, found = ir.VectorType(I64, WIDTH // 2), []
    for half in (range(WIDTH // 2), range(WIDTH // 2, WIDTH)):
        one, other = (b.zext(pick_lanes(b, vector, list(half)), wide) for vector in (x, y))
        found.append(b.bitcast(b.mul(one, other), INTS))
    return found


def _every_second(b: Any, pairs: Any, first: int) -> Any:
    lanes = ir.Constant(ir.VectorType(I32, WIDTH), list(range(first, 2 * WIDTH, 2)))
    return b.shuffle_vector(*pairs, lanes)


# Both halves come from one product of 64 bits: processors have that one, and compute it once.


@operation(ints, ints, out=ints)
def multiply_low(b, x, y):
    """The lower 32 bits of each product."""
    return [_every_second(b, _wide_products(b, *parts), 0) for parts in zip(x, y, strict=True)]


@operation(ints, ints, out=ints)
def multiply_high(b, x, y):
    """The upper 32 bits of each product of integers without signs."""
    return [_every_second(b, _wide_products(b, *parts), 1) for parts in zip(x, y, strict=True)]


@operation(ints, ints, out=ints)
def larger_words(b, x, y):
    """The larger one of integers without signs."""
    return [b.select(b.icmp_unsigned(">", *parts), *parts) for parts in zip(x, y, strict=True)]


@operation(ints, out=types.int64)
def largest_word(b, x):
    def join(one, other):
        return b.select(b.icmp_unsigned(">", one, other), one, other)

    return b.zext(_tree(b, x, join), I64)


@operation(types.int64, out=ints)
def splat_word(b, value):
    return [broadcast(b, b.trunc(value, I32))] * len(PARTS)


@operation(types.int64, out=ints)
def count_from(b, first):
    """first, first + 1, ... first + 15."""
    start = broadcast(b, b.trunc(first, I32))
    return [b.add(start, ir.Constant(INTS, list(range(WIDTH * part, WIDTH * (part + 1))))) for part in PARTS]


@operation(ints, out=floats)
def float_words(b, x):
    """Integers without signs as floats."""
    return [b.uitofp(part, FLOATS) for part in x]


@operation(floats, out=floats)
def float_bits(b, x):
    """The bits of each lane as an integer with a sign, and that as a float."""
    return [b.sitofp(b.bitcast(part, INTS), FLOATS) for part in x]


@operation(floats, floats, out=ints)
def at_least(b, x, bound):
    """1 where x is not below the bound, else 0."""
    return [b.zext(b.fcmp_ordered(">=", part, limit), INTS) for part, limit in zip(x, bound, strict=True)]


@operation(floats, ints, out=floats)
def times_two_to(b, x, power):
    """x * 2**power, where the result is neither subnormal nor infinite."""
    return [
        b.bitcast(b.add(b.bitcast(part, INTS), b.shl(count, constant(INTS, 23))), FLOATS)
        for part, count in zip(x, power, strict=True)
    ]


@operation(floats, floats, floats, out=floats)
def zero_below(b, x, bound, otherwise):
    """0 where x is below the bound."""
    return [
        b.select(b.fcmp_ordered("<", part, limit), constant(FLOATS, 0.0), other)
        for part, limit, other in zip(x, bound, otherwise, strict=True)
    ]


@operation(floats, floats, floats, out=floats)
def zero_from(b, x, bound, otherwise):
    """0 where x is not below the bound."""
    return [
        b.select(b.fcmp_ordered(">=", part, limit), constant(FLOATS, 0.0), other)
        for part, limit, other in zip(x, bound, otherwise, strict=True)
    ]


@operation(floats, address, address, out=floats)
def only_lanes(b, x, first, end):
    """Lanes before `first` and from `end` on become minus infinity."""
    low, high = (broadcast(b, b.trunc(bound, I32)) for bound in (first, end))
    found = []
    for part in PARTS:
        lanes = ir.Constant(INTS, list(range(WIDTH * part, WIDTH * (part + 1))))
        inside = b.and_(b.icmp_signed(">=", lanes, low), b.icmp_signed("<", lanes, high))
        found.append(b.select(inside, x[part], constant(FLOATS, float("-inf"))))
    return found


@operation(octets, out=octets)
def low_nibbles(b, x):
    return [b.and_(part, constant(BYTES, 15)) for part in x]


@operation(octets, out=octets)
def high_nibbles(b, x):
    return [b.lshr(part, constant(BYTES, 4)) for part in x]


def _tree(b: Any, parts: list[Any], join: Callable[[Any, Any], Any]) -> Any:
    """Lanes meet 8 apart, then 4, 2 and 1: one order on every processor."""
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [join(parts[index], parts[index + half]) for index in range(half)]
    vector, count = parts[0], WIDTH
    while count > 1:
        count //= 2
        vector = join(
            pick_lanes(b, vector, list(range(count))), pick_lanes(b, vector, list(range(count, 2 * count)))
        )
    return b.extract_element(vector, ir.Constant(I32, 0))


@operation(floats, out=types.float32)
def sum_of(b, x):
    return _tree(b, x, b.fadd)


@operation(floats, out=types.float32)
def largest(b, x):
    def join(one, other):
        return call(b, f"llvm.maximum.v{one.type.count}f32", one.type, one, other)

    return _tree(b, x, join)


@operation(ints, out=types.int32)
def sum_of_ints(b, x):
    return _tree(b, x, b.add)


# -- bundles -------------------------------------------------------------------------------------------------


def _rows(b: Any, bundle: Any, count: int) -> list[list[Any]]:
    return [registers_of(b, b.extract_value(bundle, row)) for row in range(count)]


def _bundle(context: Any, b: Any, kind: Any, rows: list[list[Any]]) -> Any:
    return context.make_tuple(b, kind, [vector_of(b, kind.dtype, row) for row in rows])


def _stride(b: Any, at: Any, step: Any, row: int) -> Any:
    return b.add(at, b.mul(step, ir.Constant(I64, row)))


@intrinsic(prefer_literal=True)
def zeros(typing, rows):
    """A bundle of `rows` vectors of zeros. The number of rows is part of the type."""
    kind = types.UniTuple(floats, rows.literal_value)

    def generate(context, b, signature, values):
        return _bundle(context, b, kind, [[constant(FLOATS, 0.0) for _ in PARTS]] * kind.count)

    return kind(rows), generate


@intrinsic
def fma_rows(typing, sums, vector, at, step):
    """sums[row] += vector * the number at `at + row * step`."""

    def generate(context, b, signature, values):
        rows, parts = _rows(b, values[0], sums.count), registers_of(b, values[1])
        factors = [
            broadcast(b, load_at(b, _stride(b, values[2], values[3], row), F32)) for row in range(sums.count)
        ]
        for part in PARTS:
            for row in range(sums.count):
                rows[row][part] = fused(b, parts[part], factors[row], rows[row][part])
        return _bundle(context, b, sums, rows)

    return sums(sums, floats, address, address), generate


@intrinsic
def fma_quads(typing, sums, first, second, third, fourth, at, step):
    """`fma_rows` of four vectors, in order, with numbers that stand beside each other.

    NEON multiplies by a lane of a register: it loads the four numbers of a row at once.
    """

    def generate(context, b, signature, values):
        rows = _rows(b, values[0], sums.count)
        starts = [_stride(b, values[5], values[6], row) for row in range(sums.count)]
        if ISA.name == "neon":
            quads = [load_at(b, start, FLOATS) for start in starts]
        for index, vector in enumerate(values[1:5]):
            if ISA.name == "neon":
                factors = [pick_lanes(b, quad, [index] * WIDTH) for quad in quads]
            else:
                factors = [broadcast(b, load_at(b, start, F32, 4 * index)) for start in starts]
            for part, register in enumerate(registers_of(b, vector)):
                for row, factor in zip(rows, factors, strict=True):
                    row[part] = fused(b, register, factor, row[part])
        return _bundle(context, b, sums, rows)

    return sums(sums, floats, floats, floats, floats, address, address), generate


@intrinsic
def load_rows(typing, like, at, step):
    def generate(context, b, signature, values):
        rows = []
        for row in range(like.count):
            start = _stride(b, values[1], values[2], row)
            rows.append([load_at(b, start, FLOATS, 4 * WIDTH * part) for part in PARTS])
        return _bundle(context, b, like, rows)

    return like(like, address, address), generate


@intrinsic
def store_rows(typing, sums, at, step):
    def generate(context, b, signature, values):
        for row, parts in enumerate(_rows(b, values[0], sums.count)):
            start = _stride(b, values[1], values[2], row)
            for part in PARTS:
                store_at(b, parts[part], start, 4 * WIDTH * part)
        return context.get_dummy_value()

    return types.void(sums, address, address), generate


@intrinsic(prefer_literal=True)
def dots(typing, counts, weights, at, signed):
    """counts[row][column] += the sum over i < 4 of weights[4 * column + i] * inputs[4 * row + i], all of them bytes.

    The inputs at `at` are four of each row, four rows abreast. `signed`: weights are -128 to 127, else 0 to 15.
    """

    def generate(context, b, signature, values):
        rows, parts = _rows(b, values[0], counts.count), registers_of(b, values[1])
        _dot(b, rows, dict(enumerate(parts)), values[2], 0, signed.literal_value)
        return _bundle(context, b, counts, rows)

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
_FLOAT_START, _FLOAT_START_BITS = 3 << 22, 0x4B400000


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
        return _bundle(context, b, kind, _starts(b, like.count, values[1], signed.literal_value))

    return kind(like, address, signed), generate


def _starts(b: Any, rows: int, inputs: Any, signed: bool) -> list[list[Any]]:
    if signed and _SIGNED_DOTS[ISA.name] is _vnni_signed_dot:
        starts = [broadcast(b, load_at(b, inputs, I32, INPUT_SCALES * row + 8)) for row in range(rows)]
    else:
        starts = [constant(INTS, _FLOAT_START_BITS if _IS_FLOAT_START else 0)] * rows
    return [[start] * len(PARTS) for start in starts]


# How the weights of a group stand in memory: nibbles with halves as scales, the same unpacked to bytes with floats, and
# bytes with signs and halves.
NIBBLES, UNPACKED, SIGNED = range(3)
_WEIGHT_BYTES = {NIBBLES: 256, UNPACKED: 512, SIGNED: 512}
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
        rows = _rows(b, values[0], sums.count)
        _add_columns(b, rows, _CHOSEN[columns.literal_value], values[1:4], form.literal_value)
        return _bundle(context, b, sums, rows)

    return sums(sums, address, address, address, form, columns), generate


def _add_columns(b: Any, rows: list[list[Any]], parts: range, at: Any, form: int) -> None:
    """`add_group` for the columns of some registers."""
    weights, inputs, scales = at
    counts = _starts(b, len(rows), scales, form == SIGNED)

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
        for quad in range(8):
            _dot(b, counts, load(quad), inputs, 16 * quad, form == SIGNED)

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
            row[part] = fused(b, b.fmul(_counted(b, count[part]), scale), of_input, row[part])
            row[part] = fused(b, offset, total, row[part])


@intrinsic
def add_counts(typing, sums, counts, columns, inputs):
    """sums[row][column] += counts * the column's scale * input scale, in this order; 16 scales at `columns`, floats."""

    def generate(context, b, signature, values):
        rows, found = _rows(b, values[0], sums.count), _rows(b, values[1], sums.count)
        scales = [broadcast(b, load_at(b, values[3], F32, INPUT_SCALES * row)) for row in range(sums.count)]
        for part in PARTS:
            scale = load_at(b, values[2], FLOATS, 4 * WIDTH * part)
            for row in range(sums.count):
                product = b.fmul(_counted(b, found[row][part]), scale)
                rows[row][part] = fused(b, product, scales[row], rows[row][part])
        return _bundle(context, b, sums, rows)

    return sums(sums, counts, address, address), generate
