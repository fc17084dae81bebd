"""Joins two attention results over disjoint keys into one, by their log-sum-exp: a shared prefix and the rest.

It must not know where the two came from. Either side may be empty (minus infinity).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def merge_attention(out: Tensor, log_sum: Tensor, other: Tensor, other_log_sum: Tensor) -> None:
    """`out` [tokens, heads, head_dim] and `log_sum` [tokens, heads] become the result over both, in place."""
    assert out.is_contiguous() and other.is_contiguous() and log_sum.is_contiguous()
    tokens, heads, head_dim = out.shape
    rows = 8
    _merge_kernel[(triton.cdiv(tokens * heads, rows),)](
        out, log_sum, other, other_log_sum, tokens * heads, HEAD_DIM=head_dim, ROWS=rows, num_warps=4
    )


@triton.jit(do_not_specialize=["num_rows"])
def _merge_kernel(out, log_sum, other, other_log_sum, num_rows, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    at = row[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    log_a = tl.load(log_sum + row, mask=mask, other=0.0)
    log_b = tl.load(other_log_sum + row, mask=mask, other=0.0)
    peak = tl.maximum(log_a, log_b)
    peak = tl.where(peak == float("-inf"), 0.0, peak)  # both are empty
    weight_a = tl.exp(log_a - peak)
    weight_b = tl.exp(log_b - peak)
    mass = weight_a + weight_b
    a = tl.load(out + at, mask=mask[:, None], other=0.0).to(tl.float32)
    b = tl.load(other + at, mask=mask[:, None], other=0.0).to(tl.float32)
    share = tl.where(mass == 0.0, 1.0, mass)
    result = (a * weight_a[:, None] + b * weight_b[:, None]) / share[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=mask[:, None])
    tl.store(log_sum + row, peak + tl.log(mass), mask=mask)


def reference_merge(
    out: Tensor, log_sum: Tensor, other: Tensor, other_log_sum: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition in float64."""
    logs = torch.stack([log_sum.double(), other_log_sum.double()])
    total = logs.logsumexp(0)
    weights = torch.where(total == float("-inf"), 0.0, (logs - total).exp()).nan_to_num(0.0)
    return out.double() * weights[0][..., None] + other.double() * weights[1][..., None], total
