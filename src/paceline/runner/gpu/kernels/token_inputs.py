"""What the first layer reads: the embedding of each token, or the vector of a picture where the token stands for one.

One path for steps with pictures and without, so that graphs contain both. A vector is taken as the encoder made it;
only embeddings are scaled. The product with the scale is rounded once, as `Tensor.mul_` does it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

NO_VECTOR = -1  # in the place of a slot: the token is text
_LANES = 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PicturePages:
    """Buffers that steps read."""

    vectors: Tensor  # [slots, values], of the table's type: what the first layer reads, then what others add
    slots: Tensor  # int32 [tokens]: where the vector of each token of a step lies in them, or NO_VECTOR
    # int32 [axes, tokens]: by how much more than its position each turns; None: by that alone.
    added: Tensor | None = None


def allocate_picture_pages(
    num_vectors: int,
    values: int,
    max_tokens: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cuda",
    axes: int = 0,
) -> PicturePages:
    return PicturePages(
        vectors=torch.zeros(num_vectors, values, dtype=dtype, device=device),
        slots=torch.full((max_tokens,), NO_VECTOR, dtype=torch.int32, device=device),
        added=torch.zeros(axes, max_tokens, dtype=torch.int32, device=device) if axes else None,
    )


def token_inputs(
    out: Tensor, table: Tensor, ids: Tensor, *, scale: float = 1.0, pages: PicturePages | None = None
) -> None:
    """`out` [tokens, width] of `table` [vocabulary, width]; without pages all tokens are text."""
    count, width = out.shape
    assert out.stride(1) == table.stride(1) == 1 and table.shape[1] == width and len(ids) == count
    vectors, slots = (table, ids) if pages is None else (pages.vectors, pages.slots)
    assert vectors.stride(1) == 1 and vectors.shape[1] >= width and vectors.dtype == table.dtype
    _input_kernel[(count, triton.cdiv(width, _LANES))](
        out,
        table,
        ids,
        vectors,
        slots,
        out.stride(0),
        table.stride(0),
        vectors.stride(0),
        WIDTH=width,
        SCALE=scale,
        HAS_VECTORS=pages is not None,
        LANES=_LANES,
        num_warps=4,
    )


def add_vectors(residual: Tensor, pages: PicturePages, layer: int) -> None:
    """What layer `layer` adds to `residual` [tokens, width] where tokens stand for pictures."""
    count, width = residual.shape
    vectors = pages.vectors[:, (layer + 1) * width : (layer + 2) * width]
    assert residual.stride(1) == 1 and vectors.shape[1] == width
    _add_kernel[(count, triton.cdiv(width, _LANES))](
        residual,
        vectors,
        pages.slots,
        residual.stride(0),
        vectors.stride(0),
        WIDTH=width,
        LANES=_LANES,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["stride", "vector_stride"])
def _add_kernel(residual, vectors, slots, stride, vector_stride, WIDTH: tl.constexpr, LANES: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    mask = lane < WIDTH
    at = residual + token * stride + lane
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(vectors + slot * vector_stride + lane, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, x.to(residual.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["out_stride", "table_stride", "vector_stride"])
def _input_kernel(
    out,
    table,
    ids,
    vectors,
    slots,
    out_stride,
    table_stride,
    vector_stride,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_VECTORS: tl.constexpr,
    LANES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    mask = lane < WIDTH
    # The id of a token that stands for a picture is one of the vocabulary too.
    x = tl.load(table + tl.load(ids + token).to(tl.int64) * table_stride + lane, mask=mask, other=0.0)
    if SCALE != 1.0:
        x = (x.to(tl.float32) * SCALE).to(x.dtype)
    if HAS_VECTORS:
        slot = tl.load(slots + token).to(tl.int64)
        seen = tl.load(vectors + slot * vector_stride + lane, mask=mask & (slot >= 0), other=0.0)
        x = tl.where(slot >= 0, seen, x)
    tl.store(out + token * out_stride + lane, x, mask=mask)
