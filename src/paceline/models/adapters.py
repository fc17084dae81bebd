"""Adapters in the decoder's products: x A^T B^T for the tokens of rows that have one.

Tokens of a step are grouped by adapter; the parts of a fused product share one product with A, stacked, and each adds
its own product with B to its columns. Tokens are multiplied four by four, because a library's product of a whole group
has other last bits for another number of rows: so a token's numbers are the same in any batch (docs/decisions/0009).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.adapter import NO_ADAPTER
from paceline.models.files.adapter_files import Adapter
from paceline.models.layers import LEAST_ROWS
from paceline.models.spec import ModelSpec

QKV, OUTPUT, GATE_UP, DOWN = "qkv", "output", "gate_up", "down"


class _Columns(NamedTuple):
    """What one part of a product adds to its columns."""

    ranks: slice  # of the stacked A
    columns: slice  # of the product
    b: Tensor  # [columns, ranks]


class _Matrices(NamedTuple):
    """An adapter's share of one product."""

    a: Tensor  # of all its parts, stacked [ranks, inputs]
    parts: list[_Columns]


Table = dict[tuple[int, str], _Matrices]  # by layer and product


class AdapterTables:
    """The adapters in memory, by number."""

    def __init__(self, spec: ModelSpec) -> None:
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        inner, hidden = spec.intermediate_size, spec.hidden_size
        self._num_layers = spec.num_layers
        self._widths = {
            QKV: {"q": queries, "k": keys, "v": keys},
            OUTPUT: {"o": hidden},
            GATE_UP: {"gate": inner, "up": inner},
            DOWN: {"down": hidden},
        }
        self._tables: dict[int, Table] = {}

    def put(self, number: int, adapter: Adapter) -> None:
        table: Table = {}
        for layer in range(self._num_layers):
            for product, widths in self._widths.items():
                matrices = _matrices(adapter, layer, widths)
                if matrices is not None:
                    table[layer, product] = matrices
        self._tables[number] = table

    def drop(self, number: int) -> None:
        del self._tables[number]

    def of_tokens(self, numbers: NDArray[np.int64]) -> StepAdapters:
        """The adapters of a step's tokens, one of which has one. A number that is not in memory is an error: no token
        is ever computed without the adapter that its row has."""
        groups = []
        for number in np.unique(numbers[numbers != NO_ADAPTER]).tolist():
            tokens = np.flatnonzero(numbers == number)
            index = None if len(tokens) == len(numbers) else torch.from_numpy(tokens)
            groups.append((index, self._tables[number]))
        return StepAdapters(groups)


class StepAdapters:
    """Adds to the products of one step."""

    def __init__(self, groups: list[tuple[Tensor | None, Table]]) -> None:
        self._groups = groups  # tokens (None: all of them) and their adapter

    def add(self, layer: int, product: str, x: Tensor, out: Tensor) -> None:
        """Add to `out`, the product of `x` with a layer's own matrix, in place."""
        for tokens, table in self._groups:
            matrices = table.get((layer, product))
            if matrices is None:
                continue
            rows = x if tokens is None else x[tokens]
            low = _product(rows, matrices.a)
            for part in matrices.parts:
                more = _product(low[:, part.ranks], part.b)
                if tokens is None:
                    out[:, part.columns] += more
                else:
                    out[tokens, part.columns] += more


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T, four rows at a time; the last row fills up what is missing."""
    num_rows = len(x)
    missing = -num_rows % LEAST_ROWS
    if missing:
        x = torch.cat([x, x[-1:].expand(missing, -1)])
    fours = x.reshape(-1, LEAST_ROWS, x.shape[1])
    out = torch.bmm(fours, weight.T.expand(len(fours), -1, -1))
    return out.view(len(x), -1)[:num_rows]


def _matrices(adapter: Adapter, layer: int, widths: dict[str, int]) -> _Matrices | None:
    stacked, parts = [], []
    rank = column = 0
    for part, width in widths.items():
        pair = adapter.parts.get((layer, part))
        if pair is not None:
            own = len(pair.a)
            stacked.append(torch.from_numpy(pair.a))
            columns = slice(column, column + width)
            parts.append(_Columns(slice(rank, rank + own), columns, torch.from_numpy(pair.b)))
            rank += own
        column += width
    return _Matrices(torch.cat(stacked), parts) if parts else None
