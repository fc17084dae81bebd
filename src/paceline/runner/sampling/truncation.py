"""Which tokens stay in the draw: min-p, top-k and top-p, each as a lowest logit that is kept.

The order is vLLM's: min-p, then top-k of what is left, then top-p of the mass that is left. Each keeps tokens
by value, so tokens with equal logits stay or go together and no order among them matters. Masses are float64
sums over exp((logit - top) / temperature), from the largest down.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

SELECT_AT_MOST = 1024  # up to so many largest values are selected; for more, sorting everything is cheaper
HEAD = 10.0  # tokens less than e^-10 times as likely as the best are rarely reached by top-p


def floors(logits: F32, temperature: F64, top_k: I64, top_p: F64, min_p: F64) -> F32:
    """The lowest logit kept in each row: minus infinity where nothing is cut. Every row's top is finite."""
    floor = np.full(len(logits), -np.inf, dtype=np.float32)
    cut_k = (top_k > 0) & (top_k < logits.shape[1])
    cut_p, cut_min = top_p < 1, min_p > 0
    if not (cut_k | cut_p | cut_min).any():
        return floor
    top = logits.max(axis=1).astype(np.float64)
    some = np.flatnonzero(cut_min)
    floor[some] = _smallest_from(top[some] + temperature[some] * np.log(min_p[some]))
    some = np.flatnonzero(cut_k)
    if len(some):
        floor[some] = _top_k_floors(
            logits[some], floor[some], top[some], temperature[some], top_k[some], top_p[some]
        )
    for i in np.flatnonzero(cut_p & ~cut_k).tolist():
        floor[i] = _top_p_floor(logits[i], floor[i], top[i], temperature[i], top_p[i])
    return floor


def _smallest_from(bound: F64) -> F32:
    """The smallest float32 that is not below each bound."""
    near = bound.astype(np.float32)
    return np.where(near < bound, np.nextafter(near, np.float32(np.inf)), near)


def _top_k_floors(logits: F32, floor: F32, top: F64, temperature: F64, top_k: I64, top_p: F64) -> F32:
    """Floors of rows that all use top-k, some of them with top-p on top of it."""
    largest = _largest(logits, int(top_k.max()))
    floor = np.maximum(floor, np.take_along_axis(largest, top_k[:, None] - 1, axis=1)[:, 0])
    if not (top_p < 1).any():
        return floor
    weights = np.exp((largest - top[:, None]) / temperature[:, None])
    sums = np.cumsum(weights, axis=1)
    rank = np.arange(largest.shape[1])
    # Only the row's own k places count: how many more were selected depends on its neighbours.
    places = ((largest >= floor[:, None]) & (rank < top_k[:, None])).sum(axis=1)
    # Tokens that equal the k-th but have no place among the k are kept, so their mass counts.
    equals = (logits >= floor[:, None]).sum(axis=1) - places
    total = np.take_along_axis(sums, places[:, None] - 1, axis=1)[:, 0]
    total += equals * np.exp((floor - top) / temperature)
    reached = (sums >= (top_p * total)[:, None]) | (rank >= places[:, None] - 1)
    last = reached.argmax(axis=1)
    nucleus = np.take_along_axis(largest, last[:, None], axis=1)[:, 0]
    return np.where(top_p < 1, nucleus, floor)


def _largest(logits: F32, count: int) -> F32:
    """The largest values of each row, in descending order."""
    if count <= SELECT_AT_MOST:
        values: F32 = torch.from_numpy(logits).topk(count, dim=1).values.numpy()
        return values
    return np.sort(logits, axis=1)[:, ::-1][:, :count]


def _top_p_floor(
    logits: F32, floor: np.float32, top: np.float64, temperature: np.float64, top_p: np.float64
) -> np.float32:
    """The floor of one row that uses top-p without top-k."""
    weights = np.exp((logits - top) / temperature)
    if floor > -np.inf:
        weights[logits < floor] = 0.0
    needed = top_p * weights.sum()
    for lowest in (np.maximum(floor, top - HEAD * temperature), floor):
        head = np.sort(logits[logits >= lowest])[::-1]
        sums = np.cumsum(np.exp((head - top) / temperature))
        if sums[-1] >= needed:
            return np.float32(head[np.searchsorted(sums, needed)])
    return floor  # the two sums differ in their last bits, and top_p is all but 1
