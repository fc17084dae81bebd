# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Keys and values of eight bits (e4m3: three for the fraction, up to 448, no infinity) inside kernels.

Products with them are made in float16: it holds each of their numbers exactly, and one instruction turns two of them
into it, where bfloat16 takes four, two of them slow. Queries of bfloat16 become float16 too, which keeps all bits of
those between 6e-5 and 65,504. Queries of float32 stay as they are.

It must not know where keys and values lie.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
