"""Sums of the hidden states of runs of tokens in float32: what vectors of texts are made of.

A run may go on a sum that earlier chunks of its prompt began. A run of one token is that token's state in float32. The
order of a sum depends on its run alone: the same bits in any batch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_LANES, _TOKENS = 128, 16


def span_sums(sums: Tensor, states: Tensor, runs: Tensor) -> None:
    """`sums` float32 [rows, width] of `states` [tokens, width]. `runs` int32 [4, number]: the row of `sums`, the first
    token, how many, and whether the row's sum goes on; runs of no tokens are skipped."""
    width = states.shape[1]
    assert sums.is_contiguous() and states.stride(1) == 1 and runs.is_contiguous() and sums.shape[1] == width
    number = runs.shape[1]
    _sum_kernel[(number, triton.cdiv(width, _LANES))](
        sums,
        states,
        runs,
        number,
        STRIDE=states.stride(0),
        WIDTH=width,
        LANES=_LANES,
        TOKENS=_TOKENS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["number"])
def _sum_kernel(
    sums,
    states,
    runs,
    number,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    run = runs + tl.program_id(0)
    count = tl.load(run + 2 * number)
    if count <= 0:
        return
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    mask = lane < WIDTH
    into = sums + tl.load(run).to(tl.int64) * WIDTH + lane
    goes_on = tl.load(run + 3 * number) != 0
    total = tl.load(into, mask=mask & goes_on, other=0.0)
    line = tl.arange(0, TOKENS)
    begin = states + tl.load(run + number).to(tl.int64) * STRIDE + lane[None, :]
    for at in range(0, count, TOKENS):
        token = at + line
        here = (token < count)[:, None] & mask[None, :]
        x = tl.load(begin + token.to(tl.int64)[:, None] * STRIDE, mask=here, other=0.0)
        total += tl.sum(x.to(tl.float32), 0)
    tl.store(into, total, mask=mask)
