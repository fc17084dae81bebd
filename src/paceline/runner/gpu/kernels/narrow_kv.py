"""Keys and values of eight bits (e4m3: three for the fraction, up to 448, no infinity) inside kernels.

Products with them are made in float16: it holds each of their numbers exactly, and one instruction turns two of them
into it, where bfloat16 takes four, two of them slow. Queries of bfloat16 become float16 too, which keeps all bits of
those between 6e-5 and 65,504. Queries of float32 stay as they are.

It must not know where keys and values lie.
"""

from __future__ import annotations

import triton
import triton.language as tl

_IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def as_factor(query, KIND: tl.constexpr):
    """Queries in the type of their products with keys of `KIND`: as they are, unless that is eight bits."""
    if tl.float8e4nv == KIND and query.dtype == tl.bfloat16:
        query = tl.clamp(query.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        query = query.to(tl.float16)
    return query


@triton.jit
def as_stored(x, KIND: tl.constexpr):
    """Numbers of float32 as a slot holds them: beyond the range of eight bits stands its end, and NaN stays NaN."""
    if tl.float8e4nv == KIND:
        x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(KIND)


@triton.jit
def split_pairs(words):
    """Two numbers that were loaded as one word of 16 bits, each in float16: the first ones, and the second ones.

    A product wants the values of neighbouring tokens in one register, where a block has neighbouring entries of one
    token: loaded singly, bytes go there one by one; words of 16 bits are transposed on the way.
    """
    if _IS_COMPILED:
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b32 both; .reg .b16 wanted, rest;
            prmt.b32 both, $2, 0, 0x4420;
            mov.b32 {wanted, rest}, both;
            cvt.rn.f16x2.e4m3x2 $0, wanted;
            prmt.b32 both, $2, 0, 0x4431;
            mov.b32 {wanted, rest}, both;
            cvt.rn.f16x2.e4m3x2 $1, wanted;
            }""",
            "=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:  # the interpreter knows no assembly
        first = (words & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        second = (words >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return first, second
