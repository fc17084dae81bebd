"""Adapters in memory as the kernels read them, and which tokens of a step have which (see `kernels.adapters`).

Numbers that fit 16 bits without a change are kept in 16: an adapter saved in 16 bits takes half the memory, and a step
reads half as much.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.core.adapter import NO_ADAPTER
from paceline.models.files.adapter_files import Adapter
from paceline.models.spec import ModelSpec
from paceline.runner.native.checks import Range, aligned
from paceline.runner.native.layout import BF16, COLUMNS, F16, F32, MATRICES, NUM_PARTS, PARTS, ROW_BLOCK

Column = NDArray[np.int64]
Floats = NDArray[np.float32]
_ABREAST = 4  # ranks that the product with A takes together


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """One adapter."""

    places: Column  # [layer, part, field], see `layout.MATRICES`
    ranks: int  # most of a part
    kept: list[NDArray[np.uint8]]  # what the places point to


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedAdapter(Adapter):
    """An adapter whose matrices are in the table; it has no others."""

    table: _Table


class NativeAdapters:
    """The adapters in memory, by number."""

    def __init__(self, spec: ModelSpec) -> None:
        self._num_layers = spec.num_layers
        self._tables: dict[int, _Table] = {}

    def put(self, number: int, adapter: Adapter) -> None:
        packed = adapter if isinstance(adapter, PackedAdapter) else self.prepare(adapter)
        self._tables[number] = packed.table

    def prepare(self, adapter: Adapter) -> PackedAdapter:
        """What takes long of `put`; in any thread."""
        places = np.zeros((self._num_layers, NUM_PARTS, len(MATRICES)), np.int64)
        kept: list[NDArray[np.uint8]] = []
        most = 0
        for (layer, part), pair in adapter.parts.items():
            ranks = -(-len(pair.a) // _ABREAST) * _ABREAST
            a, b = np.zeros((ranks, pair.a.shape[1]), np.float32), np.zeros((ranks, len(pair.b)), np.float32)
            a[: len(pair.a)], b[: len(pair.a)] = pair.a, pair.b.T
            a_kind, a_bytes = _smallest(a)
            b_kind, b_bytes = _smallest(b.reshape(ranks, -1, COLUMNS).transpose(1, 0, 2))
            kept += [a_bytes, b_bytes]
            most = max(most, ranks)
            row = places[layer, PARTS.index(part)]
            row[MATRICES["a_kind"]], row[MATRICES["a"]] = a_kind, a_bytes.ctypes.data
            row[MATRICES["b_kind"]], row[MATRICES["b"]] = b_kind, b_bytes.ctypes.data
            row[MATRICES["ranks"]] = ranks
        return PackedAdapter(
            identity=adapter.identity, rank=adapter.rank, parts={}, table=_Table(places, most, kept)
        )

    def drop(self, number: int) -> None:
        del self._tables[number]

    def of_tokens(self, numbers: Column) -> StepAdapters:
        """The adapters of a step's tokens, one of which has one. A number that is not in memory is an error: no token
        is ever computed without the adapter that its row has."""
        tokens = np.argsort(numbers, kind="stable")
        tokens = tokens[np.searchsorted(numbers[tokens], NO_ADAPTER, side="right") :]
        chosen, first, count = np.unique(numbers[tokens], return_index=True, return_counts=True)
        tables = [self._tables[number] for number in chosen.tolist()]
        addresses = np.array([table.places.ctypes.data for table in tables])
        of_token = np.zeros(len(numbers), np.int64)
        of_token[tokens] = np.repeat(addresses, count)
        pieces = -(-count // ROW_BLOCK)
        group = np.repeat(np.arange(len(tables)), pieces)
        start = (np.arange(len(group)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * ROW_BLOCK
        blocks = [addresses[group], first[group] + start, np.minimum(count[group] - start, ROW_BLOCK)]
        ranks = max(table.ranks for table in tables)
        return StepAdapters(of_token, np.ascontiguousarray(tokens), np.stack(blocks, axis=1), ranks, tables)


@dataclass(frozen=True, slots=True, eq=False)
class StepAdapters:
    """The adapters of one step."""

    of_token: Column  # the address of its table; 0: it has none
    tokens: Column  # that have one, sorted by adapter
    blocks: Column  # [block, (table, first, count)] of `tokens`
    ranks: int  # most of a part
    tables: list[_Table]

    def ranges(self) -> list[Range]:
        """All memory of them."""
        found = [Range.of("an adapter's table", table.places) for table in self.tables]
        return found + [Range.of("an adapter", each) for table in self.tables for each in table.kept]


def _smallest(values: Floats) -> tuple[int, NDArray[np.uint8]]:
    """The kind and the bytes of numbers, in 16 bits where these hold each of them."""
    flat = np.ascontiguousarray(values).reshape(-1)
    words = flat.view(np.uint32)
    if not (words & 0xFFFF).any():
        return BF16, _kept((words >> 16).astype(np.uint16))
    with np.errstate(over="ignore"):
        halves = flat.astype(np.float16)
    if np.array_equal(halves.astype(np.float32), flat):
        return F16, _kept(halves)
    return F32, _kept(flat)


def _kept(values: NDArray[np.generic]) -> NDArray[np.uint8]:
    """A copy that begins on a line of the cache."""
    memory = aligned(values.nbytes)
    memory[:] = values.view(np.uint8)
    return memory
