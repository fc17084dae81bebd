"""Attention over paged keys and values on the CPU.

Rows of a step are put into buckets of like size; a bucket gathers the blocks of its rows once per layer and does two
batched matrix products. What a token gets does not depend on its bucket, bit for bit: sums over the context run in
pieces of `PIECE` tokens counted from the row's beginning, what lies beyond a row's context has weight zero, and no
product is so small that a library sums it in another order (`LEAST_ROWS`, `LEAST_CONTEXT`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from paceline.models.layers import LEAST_ROWS
from paceline.runner.device_rows import NOWHERE, DeviceRows, FlatBatch
from paceline.runner.kv_tensors import KVTensors
from paceline.runner.workers import Workers

Index = NDArray[np.int64]
PIECE = 128
LEAST_CONTEXT = 16
MAX_WASTE = 1.5  # of a bucket: padded size over real size
# Pairs of a query and a place it attends to: below the first, handing over costs more than it saves; from the second
# on, all threads together are faster.
SMALL, LARGE = 1024, 65_536


@dataclass(slots=True)
class Bucket:
    """Rows of one bucket in one layer group."""

    blocks: Tensor  # [rows * blocks per row]
    hidden: Tensor  # [1, rows, queries, 1, context]: True where a query must not look


@dataclass(slots=True)
class Members:
    """Rows that are computed together, each padded to `queries` tokens."""

    tokens: Tensor  # [rows * queries]: which token of the step; padding repeats a row's last one
    num_rows: int
    queries: int
    buckets: list[Bucket]  # per layer group
    first: Tensor  # which of `tokens` are real,
    real: Tensor  # and where their results go
    are_all: bool  # every token of the step once, in order: nothing has to be picked or put back


class StepAttention:
    """What `Decoder.forward` calls for each layer; made once per step."""

    def __init__(
        self, kv: KVTensors, rows: DeviceRows, batch: FlatBatch, *, scale: float, workers: Workers
    ) -> None:
        self._kv = kv
        self._scale = scale
        self._workers = workers
        kept = [slots != NOWHERE for slots in batch.slots]
        self._kept = [None if mask.all() else torch.from_numpy(mask.nonzero()[0]) for mask in kept]
        self._slots = [torch.from_numpy(slots[mask]) for slots, mask in zip(batch.slots, kept, strict=True)]
        split = _split(batch, workers.count)
        self._members = [_members(kv, rows, batch, which) for which in split]
        work = batch.count * (batch.start + batch.count)
        self._is_shared = max((int(work[which].sum()) for which in split), default=0) <= LARGE
        self._all_stored = len(batch.row_of) == int(batch.count.sum())

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.store(layer, keys, values)
        group = self._kv.layer_groups[layer]
        if len(self._members) == 1 and self._members[0].are_all:
            members = self._members[0]
            return self._attend(layer, members, members.buckets[group], queries).flatten(1)
        out = torch.zeros_like(queries) if not self._all_stored else torch.empty_like(queries)

        def attend(members: Members) -> None:
            seen = self._attend(layer, members, members.buckets[group], queries)
            out[members.real] = seen[members.first]

        self._workers.run(attend, self._members, beside=self._is_shared)
        return out.flatten(1)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep keys and values at the tokens' slots."""
        group = self._kv.layer_groups[layer]
        kept = self._kept[group]
        if kept is not None:
            self._kv.write(layer, self._slots[group], keys[kept], values[kept])
        else:
            self._kv.write(layer, self._slots[group], keys, values)

    def _attend(self, layer: int, members: Members, bucket: Bucket, queries: Tensor) -> Tensor:
        """Results of a bucket's tokens, [rows * queries, heads, head_dim]."""
        pools = self._kv.layers[layer]
        kv_heads, _, block_size, head_dim = pools.keys.shape
        num_rows, width = members.num_rows, members.queries
        shared = queries.shape[1] // kv_heads  # query heads that read one kv head
        q = queries if members.are_all else queries[members.tokens]
        q = q.reshape(num_rows, width, kv_heads, shared, head_dim)
        q = (q * self._scale).permute(2, 0, 1, 3, 4).reshape(kv_heads * num_rows, width * shared, head_dim)
        num_queries = q.shape[1]
        if num_queries < LEAST_ROWS:
            q = F.pad(q, (0, 0, 0, LEAST_ROWS - num_queries))
        context = bucket.blocks.shape[0] // num_rows * block_size
        shape = (kv_heads * num_rows, context, head_dim)
        k, v = (part.view(shape) for part in pools.gather(bucket.blocks))
        weights = torch.bmm(q, k.transpose(1, 2))
        spread = weights[:, :num_queries].view(kv_heads, num_rows, width, shared, context)
        spread.masked_fill_(bucket.hidden, float("-inf"))
        weights.sub_(weights.amax(dim=-1, keepdim=True)).exp_()
        out = _weighted_mean(weights, v)[:, :num_queries]
        out = out.view(kv_heads, num_rows, width, shared, head_dim).permute(1, 2, 0, 3, 4)
        return out.reshape(num_rows * width, kv_heads * shared, head_dim)


def _weighted_mean(weights: Tensor, values: Tensor) -> Tensor:
    """Sum of values by weight over sum of weights, in pieces of fixed length."""
    context = weights.shape[-1]
    padded = F.pad(weights, (0, -context % PIECE))
    total = padded[..., :PIECE].sum(dim=-1, keepdim=True)
    out = torch.bmm(weights[..., :PIECE], values[:, :PIECE])
    for start in range(PIECE, context, PIECE):
        end = start + PIECE
        total += padded[..., start:end].sum(dim=-1, keepdim=True)
        out += torch.bmm(weights[..., start:end], values[:, start:end])
    return out.div_(total)


def _split(batch: FlatBatch, num_workers: int) -> list[Index]:
    """Rows in buckets: like numbers of queries and like contexts together, so that little is padding."""
    ends = batch.start + batch.count
    buckets: list[Index] = []
    members: list[int] = []
    real = longest = 0
    for row in np.lexsort((ends, batch.count)).tolist():
        size = int(batch.count[row] * ends[row])
        padded = int(batch.count[row]) * max(longest, int(ends[row])) * (len(members) + 1)
        if members and padded > MAX_WASTE * (real + size) + SMALL:
            buckets += _shares(members, real, num_workers)
            members, real, longest = [], 0, 0
        members.append(row)
        real += size
        longest = max(longest, int(ends[row]))
    return buckets + _shares(members, real, num_workers) if members else buckets


def _shares(members: list[int], work: int, num_workers: int) -> list[Index]:
    """One bucket, or as many as can be done beside each other where the work is worth the handing over."""
    count = max(1, min(num_workers, len(members), work // SMALL))
    return [np.sort(members[share::count]) for share in range(count)]  # long and short ones in each


def _members(kv: KVTensors, rows: DeviceRows, batch: FlatBatch, which: Index) -> Members:
    count = batch.count[which]
    width = int(count.max())
    first_token = (np.cumsum(batch.count) - batch.count)[which]
    column = np.minimum(np.arange(width), count[:, None] - 1)
    tokens = first_token[:, None] + column
    is_real = np.arange(width) < count[:, None]
    places = batch.places[tokens]
    return Members(
        tokens=torch.from_numpy(tokens.ravel()),
        num_rows=len(which),
        queries=width,
        buckets=[
            _bucket(kv, rows.tables[group][batch.rows[which]], places, group, batch.masked[which])
            for group in range(len(kv.windows))
        ],
        first=torch.from_numpy(np.flatnonzero(is_real.ravel())),
        real=torch.from_numpy(tokens[is_real]),
        are_all=bool(is_real.all()) and np.array_equal(tokens.ravel(), np.arange(len(batch.tokens))),
    )


def _bucket(kv: KVTensors, tables: Index, positions: Index, group: int, masked: NDArray[np.bool_]) -> Bucket:
    """The blocks each row reads and what each of its queries must not see."""
    size, window = kv.block_size, kv.windows[group]
    low = np.zeros(len(tables), np.int64)
    if window is not None:  # whole pieces: a token's sums are cut at the same places whatever the step holds
        low = np.maximum(positions[:, 0] - window + 1, 0) // PIECE * PIECE
    length = positions[:, -1] + 1 - low
    num_blocks = -(-max(int(length.max()), LEAST_CONTEXT) // size)
    index = low[:, None] // size + np.arange(num_blocks)
    held = np.arange(num_blocks) * size < length[:, None]
    index = np.minimum(index, tables.shape[1] - 1)
    blocks = np.where(held & ~masked[:, None], tables[np.arange(len(tables))[:, None], index], 0)
    place = low[:, None, None] + np.arange(num_blocks * size)
    hidden = place > positions[:, :, None]
    if window is not None:
        hidden |= place <= positions[:, :, None] - window
    return Bucket(torch.from_numpy(blocks.ravel()), torch.from_numpy(hidden)[None, :, :, None, :])
