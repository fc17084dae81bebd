"""Single numbers by address, and what threads share: counters, the clock, semaphores."""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types

from paceline.runner.native.kernels.emit import (
    CHECKED,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    address,
    call,
    load_at,
    operation,
    pointer,
    store_at,
    widened,
)


@operation(address, out=types.float32)
def get_float(b, at):
    return load_at(b, at, F32)


@operation(address, types.int32, out=types.void)
def put_int32(b, at, value):
    store_at(b, value, at)


@operation(address, types.float32, out=types.void)
def put_float(b, at, value):
    store_at(b, value, at)


@operation(address, out=types.int64)
def get_int(b, at):
    return load_at(b, at, I64)


@operation(address, types.int64, out=types.void)
def put_int(b, at, value):
    store_at(b, value, at)


@operation(address, out=types.int32)
def get_byte(b, at):
    return b.sext(load_at(b, at, I8), I32)


@operation(address, out=types.float32)
def get_half(b, at):
    return widened(b, load_at(b, at, I16))


@operation(address, out=types.float32)
def get_brain(b, at):
    wide = b.zext(load_at(b, at, I16), I32)
    return b.bitcast(b.shl(wide, ir.Constant(I32, 16)), F32)


@operation(types.int64, out=types.float32)
def float_of_bits(b, bits):
    return b.bitcast(b.trunc(bits, I32), F32)


@operation(types.float32, out=types.int64)
def bits_of_float(b, x):
    return b.zext(b.bitcast(x, I32), I64)


@operation(types.int64, out=types.float64)
def double_of_bits(b, bits):
    return b.bitcast(bits, F64)


@operation(types.float64, out=types.int64)
def bits_of_double(b, x):
    return b.bitcast(x, I64)


@operation(address, out=types.int64)
def get_word(b, at):
    """32 bits without a sign."""
    return b.zext(load_at(b, at, I32), I64)


@operation(address, types.int64, out=types.void)
def put_word(b, at, value):
    store_at(b, b.trunc(value, I32), at)


@operation(types.int64, out=types.int64)
def upper_word(b, x):
    return b.lshr(x, ir.Constant(I64, 32))


@operation(types.float32, types.float32, types.float32, out=types.float32)
def fma_one(b, x, y, z):
    return call(b, "llvm.fma.f32", F32, x, y, z)


@operation(types.float32, out=types.float32)
def square_root(b, x):
    return call(b, "llvm.sqrt.f32", F32, x)


# -- threads -------------------------------------------------------------------------------------------------


@operation(address, types.int64, out=types.int64)
def fetch_add(b, at, count):
    return b.atomic_rmw("add", pointer(b, at, I64, writes=True), count, "seq_cst")


@operation(address, out=types.int64)
def peek(b, at):
    return b.load_atomic(pointer(b, at, I64), "acquire", 8)


@operation(address, types.int64, out=types.void)
def poke(b, at, value):
    b.store_atomic(value, pointer(b, at, I64, writes=True), "release", 8)


@operation(out=types.void)
def yield_processor(b):
    call(b, "sched_yield", I32)


@operation(out=types.void)
def pause(b):
    """In the checking form other threads go first at random; else this is nothing."""
    if CHECKED:
        call(b, "paceline_pause", ir.VoidType())


@operation(address, out=types.void)
def sleep_on(b, semaphore):
    call(b, "sem_wait", I32, b.inttoptr(semaphore, I8.as_pointer()))


@operation(address, out=types.void)
def wake(b, semaphore):
    call(b, "sem_post", I32, b.inttoptr(semaphore, I8.as_pointer()))


@operation(out=types.int64)
def nanoseconds(b):
    """The monotonic clock."""
    time = cgutils.alloca_once(b, ir.ArrayType(I64, 2))
    at = b.bitcast(time, I64.as_pointer())
    kind = ir.FunctionType(I32, [I32, I64.as_pointer()])
    b.call(cgutils.get_or_insert_function(b.module, kind, "clock_gettime"), [ir.Constant(I32, 1), at])
    seconds = b.mul(b.load(at), ir.Constant(I64, 10**9))
    return b.add(seconds, b.load(b.gep(at, [ir.Constant(I64, 1)])))
