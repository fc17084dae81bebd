"""Attention of whole sequences that lie one behind the other without padding: every token sees both directions.

Queries, keys and values are those of all tokens of a step, as a product leaves them. A tile is a run of queries of one
sequence and the keys that they may see; the list of tiles is made on the host, once for all layers that have the same
sequences. What a sequence is, is the caller's business: a text, a picture, a window of a picture's patches. `reach`
lets a token see as many neighbours to each side and no more.

One program takes one tile and one head. Keys that all queries see go through a loop without masks, the last ones and
all of a layer with a reach through one with them. A head whose size is no power of two is cut in two parts (72 and 80
entries are 64 and 16), so that little of a product is wasted; entries beyond its size are read as zeros. A tile's
result depends on its sequence alone: the same bits in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

TILE_WIDTH = 4  # first query, behind the last query, first key, behind the last key
LARGEST_HEAD = 256
Index = NDArray[np.integer]
_LOG2E = 1.4426950408889634
_LEAST = 16  # entries of a factor of a matrix instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedTuning:
    """How the kernel is launched."""

    query_rows: int = 128  # queries of a tile
    keys: int = 64  # that are looked at together
    num_warps: int = 4
    num_stages: int = 3


def ragged_tuning(head_dim: int) -> RaggedTuning:
    """Larger heads have more sums than four warps keep."""
    return RaggedTuning() if head_dim <= 64 else RaggedTuning(num_warps=8)


def ragged_tiles(
    starts: Index, counts: Index, query_rows: int, *, keys: tuple[Index, Index] | None = None
) -> NDArray[np.int32]:
    """Tiles [number, TILE_WIDTH] of the queries that begin at `starts`; those with most keys come first. `keys`: where
    those of each sequence begin and end; None: its queries are all there is of it."""
    begins, ends = (starts, starts + counts) if keys is None else keys
    number = -(-counts // query_rows)
    owner = np.repeat(np.arange(len(counts)), number)
    offset = (np.arange(len(owner)) - np.repeat(np.cumsum(number) - number, number)) * query_rows
    first, last = starts[owner] + offset, (starts + counts)[owner]
    tiles = np.stack([first, np.minimum(first + query_rows, last), begins[owner], ends[owner]], axis=1)
    order = np.argsort(-(ends - begins)[owner], kind="stable")
    found: NDArray[np.int32] = tiles[order].astype(np.int32)
    return found


def ragged_attention(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tiles: Tensor,
    *,
    scale: float,
    reach: int = 0,
    tuning: RaggedTuning | None = None,
) -> None:
    """All [tokens, heads, head_dim], with any distance between tokens; `tiles` int32 [number, TILE_WIDTH], made for the
    queries of `tuning`. A tile without queries is skipped, so that a graph may have more than a step uses. Tokens of no
    tile stay as they are."""
    heads, head_dim = query.shape[1:]
    tuning = tuning or ragged_tuning(head_dim)
    for part in (out, query, key, value):
        assert part.shape[1:] == (heads, head_dim) and part.stride()[1:] == (head_dim, 1)
    assert key.stride(0) == value.stride(0) and head_dim <= LARGEST_HEAD and tiles.is_contiguous()
    near, far = _head_parts(head_dim)
    _attend_kernel[(tiles.shape[0] * heads,)](
        out,
        query,
        key,
        value,
        tiles,
        scale * _LOG2E,
        reach,
        QUERY_STRIDE=query.stride(0),
        KEY_STRIDE=key.stride(0),
        OUT_STRIDE=out.stride(0),
        HEADS=heads,
        HEAD_DIM=head_dim,
        NEAR=near,
        FAR=far,
        ROWS=tuning.query_rows,
        KEYS=tuning.keys,
        WIDTH=TILE_WIDTH,
        HAS_REACH=reach > 0,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )


def _head_parts(head_dim: int) -> tuple[int, int]:
    """How a head is cut: two powers of two that hold it; the second may be 0."""
    near = 1 << (head_dim.bit_length() - 1)
    if near < _LEAST:
        return _LEAST, 0
    rest = head_dim - near
    far = max(_LEAST, triton.next_power_of_2(rest)) if rest else 0
    return (2 * near, 0) if far == near else (near, far)


@triton.jit(do_not_specialize=["reach"])
def _attend_kernel(
    out,
    query,
    key,
    value,
    tiles,
    scale_log2,
    reach,
    QUERY_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_REACH: tl.constexpr,
):
    fields = tiles + tl.program_id(0) // HEADS * WIDTH
    head_at = tl.program_id(0) % HEADS * HEAD_DIM
    first = tl.load(fields)
    end = tl.load(fields + 1)
    if first >= end:
        return
    begin = tl.load(fields + 2)
    stop = tl.load(fields + 3)
    if HAS_REACH:
        begin = tl.maximum(begin, first - reach)
        stop = tl.minimum(stop, end + reach)

    line = first + tl.arange(0, ROWS)
    is_query = (line < end)[:, None]
    query_at = query + line.to(tl.int64)[:, None] * QUERY_STRIDE + head_at
    near = tl.arange(0, NEAR)[None, :]
    in_near = near < HEAD_DIM
    q_near = tl.load(query_at + near, mask=is_query & in_near, other=0.0)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    acc_near = tl.zeros([ROWS, NEAR], tl.float32)
    q_far = q_near
    acc_far = acc_near
    if FAR > 0:
        far = NEAR + tl.arange(0, FAR)[None, :]
        in_far = far < HEAD_DIM
        q_far = tl.load(query_at + far, mask=is_query & in_far, other=0.0)
        acc_far = tl.zeros([ROWS, FAR], tl.float32)

    whole = begin if HAS_REACH else begin + (stop - begin) // KEYS * KEYS
    for start in range(begin, whole, KEYS):
        peak, mass, acc_near, acc_far = _look(
            q_near, q_far, key, value, start, stop, line, reach, peak, mass, acc_near, acc_far,
            scale_log2, head_at, KEY_STRIDE, HEAD_DIM, NEAR, FAR, KEYS, HAS_REACH, MASKED=False,
        )  # fmt: skip
    for start in range(whole, stop, KEYS):
        peak, mass, acc_near, acc_far = _look(
            q_near, q_far, key, value, start, stop, line, reach, peak, mass, acc_near, acc_far,
            scale_log2, head_at, KEY_STRIDE, HEAD_DIM, NEAR, FAR, KEYS, HAS_REACH, MASKED=True,
        )  # fmt: skip

    mass = tl.where(mass == 0.0, 1.0, mass)[:, None]  # lines that are no query may see nothing
    out_at = out + line.to(tl.int64)[:, None] * OUT_STRIDE + head_at
    tl.store(out_at + near, (acc_near / mass).to(out.dtype.element_ty), mask=is_query & in_near)
    if FAR > 0:
        tl.store(out_at + far, (acc_far / mass).to(out.dtype.element_ty), mask=is_query & in_far)


@triton.jit
def _look(
    q_near,
    q_far,
    key,
    value,
    start,
    stop,
    line,
    reach,
    peak,
    mass,
    acc_near,
    acc_far,
    scale_log2,
    head_at,
    KEY_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_REACH: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Sums behind `KEYS` more keys."""
    at = start + tl.arange(0, KEYS)
    rows = at.to(tl.int64)[:, None] * KEY_STRIDE + head_at
    near = tl.arange(0, NEAR)[None, :]
    k_near = _rows(key + rows + near, at, stop, near, HEAD_DIM, NEAR, MASKED)
    scores = tl.dot(q_near, tl.trans(k_near), input_precision="ieee")
    if FAR > 0:
        far = NEAR + tl.arange(0, FAR)[None, :]
        k_far = _rows(key + rows + far, at, stop, far, HEAD_DIM, NEAR + FAR, MASKED)
        scores = tl.dot(q_far, tl.trans(k_far), scores, input_precision="ieee")
    scores = scores * scale_log2
    if MASKED:
        sees = (at < stop)[None, :]
        if HAS_REACH:
            distance = at[None, :] - line[:, None]
            sees = sees & (distance <= reach) & (distance >= -reach)
        scores = tl.where(sees, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    if MASKED:
        # A query may have seen nothing yet: minus infinity less itself would be no number.
        new_peak = tl.maximum(new_peak, -1e30)
    shrink = tl.exp2(peak - new_peak)
    weights = tl.exp2(scores - new_peak[:, None])
    mass = mass * shrink + tl.sum(weights, 1)
    weights = weights.to(q_near.dtype)
    v_near = _rows(value + rows + near, at, stop, near, HEAD_DIM, NEAR, MASKED)
    acc_near = tl.dot(weights, v_near, acc_near * shrink[:, None], input_precision="ieee")
    if FAR > 0:
        v_far = _rows(value + rows + far, at, stop, far, HEAD_DIM, NEAR + FAR, MASKED)
        acc_far = tl.dot(weights, v_far, acc_far * shrink[:, None], input_precision="ieee")
    else:
        acc_far = acc_near
    return new_peak, mass, acc_near, acc_far


@triton.jit
def _rows(where, at, stop, entry, HEAD_DIM: tl.constexpr, HELD: tl.constexpr, MASKED: tl.constexpr):
    """Entries of keys or values; what is behind the sequence or the head is zero and never read."""
    if MASKED:
        if HELD > HEAD_DIM:
            found = tl.load(where, mask=(at < stop)[:, None] & (entry < HEAD_DIM), other=0.0)
        else:
            found = tl.load(where, mask=(at < stop)[:, None], other=0.0)
    else:
        if HELD > HEAD_DIM:
            found = tl.load(where, mask=entry < HEAD_DIM, other=0.0)
        else:
            found = tl.load(where)
    return found
