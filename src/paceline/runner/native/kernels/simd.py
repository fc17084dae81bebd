"""Operations on vectors of sixteen 32-bit lanes and on bundles of a few of them, for functions that numba compiles.

A bundle is a tuple of vectors, one for each of up to four rows; an operation on a bundle goes register by register over
all rows, which is the order in which the fewest registers are alive. Every operation is written once; only `dots.py`
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


@operation(floats, types.float32, types.float32, out=floats)
def bounded(b, x, low, high):
    """Not below `low` nor above `high`, neither of them 0; NaN stays. One instruction each, where the two above are
    several."""
    least, most = broadcast(b, low), broadcast(b, high)
    found = []
    for part in x:
        above = b.select(b.fcmp_ordered("<", part, least), least, part)
        found.append(b.select(b.fcmp_ordered(">", above, most), most, above))
    return found


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


@operation(floats, out=ints)
def round_to_ints(b, x):
    """The nearest integer, of two the even one, of numbers up to 2**22; of others any.

    Behind 1.5 * 2**23 the last bit of a float is worth 1: the sum is rounded, and its bits are the integer.
    """
    start = constant(FLOATS, float(3 << 22))
    return [b.sub(b.bitcast(b.fadd(part, start), INTS), constant(INTS, 0x4B400000)) for part in x]


@operation(floats, floats, out=types.float32)
def largest_size(b, x, y):
    """The largest of both without their signs. As integers: the bits of a larger number are more, of NaN most."""

    def size(part: Any) -> Any:
        return b.and_(b.bitcast(part, INTS), constant(INTS, 0x7FFFFFFF))

    def join(one: Any, other: Any) -> Any:
        return b.select(b.icmp_signed(">", one, other), one, other)

    sizes = [join(size(one), size(other)) for one, other in zip(x, y, strict=True)]
    return b.bitcast(_tree(b, sizes, join), F32)


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


def rows_of(b: Any, bundle: Any, count: int) -> list[list[Any]]:
    return [registers_of(b, b.extract_value(bundle, row)) for row in range(count)]


def bundle_of(context: Any, b: Any, kind: Any, rows: list[list[Any]]) -> Any:
    return context.make_tuple(b, kind, [vector_of(b, kind.dtype, row) for row in rows])


def _stride(b: Any, at: Any, step: Any, row: int) -> Any:
    return b.add(at, b.mul(step, ir.Constant(I64, row)))


@intrinsic(prefer_literal=True)
def zeros(typing, rows):
    """A bundle of `rows` vectors of zeros. The number of rows is part of the type."""
    kind = types.UniTuple(floats, rows.literal_value)

    def generate(context, b, signature, values):
        return bundle_of(context, b, kind, [[constant(FLOATS, 0.0) for _ in PARTS]] * kind.count)

    return kind(rows), generate


@intrinsic
def fma_rows(typing, sums, vector, at, step):
    """sums[row] += vector * the number at `at + row * step`."""

    def generate(context, b, signature, values):
        rows, parts = rows_of(b, values[0], sums.count), registers_of(b, values[1])
        factors = [
            broadcast(b, load_at(b, _stride(b, values[2], values[3], row), F32)) for row in range(sums.count)
        ]
        for part in PARTS:
            for row in range(sums.count):
                rows[row][part] = fused(b, parts[part], factors[row], rows[row][part])
        return bundle_of(context, b, sums, rows)

    return sums(sums, floats, address, address), generate


@intrinsic
def fma_quads(typing, sums, first, second, third, fourth, at, step):
    """`fma_rows` of four vectors, in order, with numbers that stand beside each other.

    NEON multiplies by a lane of a register: it loads the four numbers of a row at once.
    """

    def generate(context, b, signature, values):
        rows = rows_of(b, values[0], sums.count)
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
        return bundle_of(context, b, sums, rows)

    return sums(sums, floats, floats, floats, floats, address, address), generate


@intrinsic
def load_rows(typing, like, at, step):
    def generate(context, b, signature, values):
        rows = []
        for row in range(like.count):
            start = _stride(b, values[1], values[2], row)
            rows.append([load_at(b, start, FLOATS, 4 * WIDTH * part) for part in PARTS])
        return bundle_of(context, b, like, rows)

    return like(like, address, address), generate


@intrinsic
def store_rows(typing, sums, at, step):
    def generate(context, b, signature, values):
        for row, parts in enumerate(rows_of(b, values[0], sums.count)):
            start = _stride(b, values[1], values[2], row)
            for part in PARTS:
                store_at(b, parts[part], start, 4 * WIDTH * part)
        return context.get_dummy_value()

    return types.void(sums, address, address), generate
