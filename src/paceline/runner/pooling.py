"""Vectors of pooled rows: what the hidden states of a prompt come to, chunk by chunk.

A row that pools computes its prompt like any other; its states are looked at as they come, and behind its last token it
has its vector. Sums are of float64 and belong to the row: one that joins again begins again. Knows rows and numbers.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core.parameters import CHOICE, CLASSIFY, CLS, MEAN, PoolingParams
from paceline.core.plan import RowVector
from paceline.runner.device_rows import DeviceRows, FlatBatch

Index = NDArray[np.int64]
Bool = NDArray[np.bool_]
Floats = NDArray[np.float32]


class States(Protocol):
    """What a step has computed, for as long as the next has not begun."""

    def logits(self, tokens: Index) -> Floats: ...

    def states(self, batch: FlatBatch, index: int, *, only_last: bool) -> Floats:
        """Hidden states [tokens, width] of row `index` of the last batch that became known in it: of a decoder those
        of its tokens there, or of the last of them; of an encoder all of its sequence, once that is whole."""
        ...

    def classify(self, states: Floats, *, raw: bool) -> Floats:
        """Scores of the labels, from the states of all tokens; `raw`: without softmax or sigmoid."""
        ...


class Pooler:
    """The pooled rows of a runner. It is false where there are none, which is what most steps find."""

    def __init__(self, compute: States) -> None:
        self._compute = compute
        self._wanted: dict[int, PoolingParams] = {}
        self._sums: dict[int, NDArray[np.float64]] = {}

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def join(self, row: int, wanted: PoolingParams | None) -> None:
        """A row starts; whatever its former owner left is forgotten."""
        self.leave(row)
        if wanted is not None:
            self._wanted[row] = wanted

    def leave(self, row: int) -> None:
        self._wanted.pop(row, None)
        self._sums.pop(row, None)

    def clear(self) -> None:
        self._wanted.clear()
        self._sums.clear()

    def without_pooled(self, rows: Index, is_due: Bool) -> Bool:
        """Rows that get a token: those that pool never do."""
        return is_due & ~np.isin(rows, list(self._wanted))

    def take(self, rows: DeviceRows, batch: FlatBatch, finite: Bool) -> tuple[RowVector, ...]:
        """Look at the states of a step; the vectors of the rows that are through. What is not finite is noted."""
        found = []
        for index, row in enumerate(batch.rows.tolist()):
            wanted = self._wanted.get(row)
            if wanted is None or not finite[index] or batch.masked[index]:
                continue
            is_whole = batch.start.item(index) + batch.count.item(index) >= rows.num_tokens.item(row)
            vector = self._vector(batch, index, row, wanted, rows.num_tokens.item(row), is_whole=is_whole)
            if vector is None:
                continue
            if np.isfinite(vector).all():
                found.append(RowVector(row, vector))
            else:
                finite[index] = False
            rows.ended[row] = True
        return tuple(found)

    def _vector(
        self, batch: FlatBatch, index: int, row: int, wanted: PoolingParams, length: int, *, is_whole: bool
    ) -> Floats | None:
        compute, kind = self._compute, wanted.kind
        if kind == MEAN:
            states = compute.states(batch, index, only_last=False)
            total = states.sum(axis=0, dtype=np.float64) + self._sums.get(row, 0.0)
            self._sums[row] = total
            return finished(total / length, wanted) if is_whole else None
        if not is_whole:
            return None
        if kind == CHOICE:
            last = int(batch.last[index])
            logits = compute.logits(np.array([last]))[0, list(wanted.token_ids)]
            return logits.astype(np.float32) if wanted.raw else softmax(logits)
        states = compute.states(batch, index, only_last=kind not in (CLS, CLASSIFY))
        if kind == CLASSIFY:
            return compute.classify(states, raw=wanted.raw)
        return finished(states[0 if kind == CLS else -1], wanted)


def finished(vector: NDArray[np.floating], wanted: PoolingParams) -> Floats:
    """Cut to its dimensions, then of length 1 where that is wanted."""
    values = vector[: wanted.dimensions].astype(np.float64)
    if wanted.normalize:
        values /= max(float(np.linalg.norm(values)), 1e-12)
    return values.astype(np.float32)


def softmax(logits: Floats) -> Floats:
    weights = np.exp((logits - logits.max()).astype(np.float64))
    shares: Floats = (weights / weights.sum()).astype(np.float32)
    return shares
