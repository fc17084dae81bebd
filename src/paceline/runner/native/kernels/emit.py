"""What the kernels' operations are made of: LLVM's types for a processor, and functions that emit its instructions.

A vector is as many registers as the processor needs for sixteen lanes: four (NEON), two (AVX2) or one (AVX-512).

    vector   |  0  1  2  3 |  4  5  6  7 |  8  9 10 11 | 12 13 14 15 |     NEON: four registers
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import PassManager
from numba.core.typed_passes import (
    IRLegalization,
    NativeLowering,
    NoPythonBackend,
    NopythonTypeInference,
    PreLowerStripPhis,
)
from numba.core.untyped_passes import (
    DeadBranchPrune,
    FixupArgs,
    GenericRewrites,
    IRProcessing,
    ReconstructSSA,
    TranslateByteCode,
)
from numba.extending import intrinsic, models, register_model

from paceline.runner.native.checks import is_checking
from paceline.runner.native.isa import BY_NAME
from paceline.runner.native.layout import symbol_of

ISA = BY_NAME[os.environ.get("PACELINE_KERNEL_ISA", "plain")]
CHECKED = is_checking()
LANES = 16
WIDTH = ISA.lanes
PARTS = range(LANES // WIDTH)

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
FLOATS, INTS, BYTES = ir.VectorType(F32, WIDTH), ir.VectorType(I32, WIDTH), ir.VectorType(I8, 4 * WIDTH)
address = types.intp


class _Passes(CompilerBase):
    """What numba must do to a kernel. Its passes for closures, contexts, arrays and exceptions have nothing to do."""

    def define_pipelines(self) -> list[PassManager]:
        passes = PassManager("kernel")
        for step in (
            TranslateByteCode,
            FixupArgs,
            IRProcessing,
            DeadBranchPrune,
            GenericRewrites,
            ReconstructSSA,
            NopythonTypeInference,
            PreLowerStripPhis,
            IRLegalization,
            NativeLowering,
            NoPythonBackend,
        ):
            passes.add_pass(step, step.__name__)
        passes.finalize()
        return [passes]


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function without bounds, exceptions, interpreter: all is an address, a number or a vector."""
    made = numba.njit(
        nogil=True,
        boundscheck=False,
        error_model="numpy",
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
        _nrt=False,
        pipeline_class=_Passes,
    )(function)
    find = made.get_call_template
    # A constant argument is a number like any other: numba would compile the function once more for each.
    made.get_call_template = lambda args, kws: find([types.unliteral(kind) for kind in args], kws)
    return made


APART: dict[str, Any] = {}  # kernels that are compiled beside their callers, by name


def apart(function: Callable[..., Any]) -> Any:
    """A kernel whose callers know its name alone, so that both can be compiled at once, and in either order.

    It takes numbers of 64 bits and returns nothing.
    """
    name, count = function.__name__, function.__code__.co_argcount
    APART[name] = kernel(function)

    def build(b: Any, *args: Any) -> None:
        # Where numba's functions put a value and an error; there are none.
        returned = [cgutils.alloca_once(b, I8.as_pointer()) for _ in range(2)]
        call(b, symbol_of(name), I32, *returned, *args)

    build.__name__ = name
    return operation(*[types.int64] * count, out=types.void)(build)


class Vector(types.Type):
    """Sixteen lanes, as an array of registers."""

    def __init__(self, name: str, part: ir.Type) -> None:
        super().__init__(name)
        self.ir = ir.ArrayType(part, len(PARTS))


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, kind.ir)


floats, ints, octets = Vector("f32x16", FLOATS), Vector("i32x16", INTS), Vector("i8x64", BYTES)


def operation(*args: types.Type, out: types.Type) -> Callable[[Callable[..., Any]], Any]:
    """An intrinsic over vectors, numbers and addresses. A vector arrives as the list of its registers."""

    def make(build: Callable[..., Any]) -> Any:
        def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
            given = [
                registers_of(b, value) if isinstance(kind, Vector) else value
                for kind, value in zip(signature.args, values, strict=True)
            ]
            result = build(b, *given)
            if out is types.void:
                return context.get_dummy_value()
            return vector_of(b, out, result) if isinstance(out, Vector) else result

        names = [f"a{index}" for index in range(len(args))]
        scope: dict[str, Any] = {"signature": out(*args), "generate": generate}
        # numba counts an intrinsic's parameters by looking at its signature.
        exec(f"def {build.__name__}({', '.join(['typing', *names])}): return signature, generate", scope)
        return intrinsic(scope[build.__name__])

    return make


def registers_of(b: Any, vector: Any) -> list[Any]:
    return [b.extract_value(vector, index) for index in PARTS]


def vector_of(b: Any, kind: Vector, parts: list[Any]) -> Any:
    vector = ir.Constant(kind.ir, ir.Undefined)
    for index, part in enumerate(parts):
        vector = b.insert_value(vector, part, index)
    return vector


def pointer(b: Any, at: Any, kind: ir.Type, more: int = 0, *, writes: bool = False) -> Any:
    """An address to load from or to store to; in the checking form it is looked up first."""
    at = b.add(at, ir.Constant(I64, more)) if more else at
    if CHECKED:
        at = call(
            b, "paceline_check", I64, at, ir.Constant(I64, bytes_of(kind)), ir.Constant(I64, int(writes))
        )
    return b.inttoptr(at, kind.as_pointer())


def bytes_of(kind: ir.Type) -> int:
    if isinstance(kind, ir.VectorType):
        return int(kind.count) * bytes_of(kind.element)
    if isinstance(kind, ir.IntType):
        return int(kind.width) // 8
    return 2 if isinstance(kind, ir.HalfType) else 4


def load_at(b: Any, at: Any, kind: ir.Type, more: int = 0) -> Any:
    value = b.load(pointer(b, at, kind, more))
    value.align = 1
    return value


def store_at(b: Any, value: Any, at: Any, more: int = 0) -> None:
    b.store(value, pointer(b, at, value.type, more, writes=True)).align = 1


def constant(kind: ir.Type, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def call(b: Any, name: str, result: ir.Type, *args: Any) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), args)


def broadcast(b: Any, value: Any, count: int = WIDTH) -> Any:
    empty = ir.Constant(ir.VectorType(value.type, count), ir.Undefined)
    first = b.insert_element(empty, value, ir.Constant(I32, 0))
    return b.shuffle_vector(first, empty, constant(ir.VectorType(I32, count), 0))


def pick_lanes(b: Any, vector: Any, lanes: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
    return b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def widened(b: Any, halves: Any) -> Any:
    """Halves, given as 16-bit integers, one or a vector of them, as float32."""
    count = halves.type.count if isinstance(halves.type, ir.VectorType) else 0

    def kind(one: ir.Type) -> ir.Type:
        return ir.VectorType(one, count) if count else one

    def number(one: ir.Type, value: float) -> ir.Constant:
        return ir.Constant(kind(one), [value] * count if count else value)

    if ISA.name != "plain":
        return b.fpext(b.bitcast(halves, kind(F16)), kind(F32))
    # Where there is no instruction, LLVM would call a function of a library that is not there. The bits of a half,
    # moved to their place, are a float32 that is 2**112 times too small; infinities and NaN are set apart.
    wide = b.zext(halves, kind(I32))
    size = b.shl(b.and_(wide, number(I32, 0x7FFF)), number(I32, 13))
    finite = b.bitcast(b.fmul(b.bitcast(size, kind(F32)), number(F32, 2.0**112)), kind(I32))
    other = b.or_(size, number(I32, 0x7F800000))
    found = b.select(b.icmp_unsigned("<", size, number(I32, 0x7C00 << 13)), finite, other)
    return b.bitcast(b.or_(found, b.shl(b.and_(wide, number(I32, 0x8000)), number(I32, 16))), kind(F32))


def fused(b: Any, x: Any, y: Any, z: Any) -> Any:
    return call(b, f"llvm.fma.v{WIDTH}f32", FLOATS, x, y, z)


def each_register(name: str) -> Callable[..., list[Any]]:
    """A function of LLVM, register by register."""
    return lambda b, *vectors: [call(b, name, FLOATS, *parts) for parts in zip(*vectors, strict=True)]
