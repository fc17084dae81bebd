"""Adapters on the device: their matrices in one pool, which token has which, and what they add to a layer's products.

An adapter has a place: a stretch of the pool with room for every matrix of a model at the largest rank. Its number is
what plans name; a place is taken again once its adapter was let go of, which the engine does when no step under way can
touch it, and what is written then is queued behind all steps before. Tokens are grouped by place once a step, by the
plan that experts use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.engine import ModelConfig
from paceline.core.adapter import NO_ADAPTER
from paceline.core.plan import RowJoins
from paceline.errors import InvalidAdapter
from paceline.models.adapters import DOWN, GATE_UP, OUTPUT, QKV
from paceline.models.files.adapter import Adapter, LowRank
from paceline.models.spec import ModelSpec
from paceline.runner.gpu.device_queue import DeviceQueue
from paceline.runner.gpu.host_rows import DeviceBatch
from paceline.runner.gpu.kernels.adapter_product import (
    NOTHING,
    PANEL,
    UNIT,
    AdaptedTokens,
    AdapterPool,
    adapter_product,
    adapter_tuning,
    low_entries,
)
from paceline.runner.gpu.kernels.expert_product import allocate_expert_plan, plan_experts
from paceline.runner.gpu.kernels.prefill_attention import Spans
from paceline.runner.gpu.kernels.step_rows import span_values
from paceline.runner.gpu.row_memory import NO_PLACE, RowMemory

# What the adapters of a step add in place: to a layer's product of some inputs, by its name.
AddAdapters = Callable[[int, str, Tensor, Tensor], None]
AddToLayer = Callable[[str, Tensor, Tensor], None]
AddToProduct = Callable[[Tensor, Tensor], None]


_PLACES = 16  # unless the user says how many


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRoom:
    """For how many adapters, of which ranks, there is room on the device."""

    places: int
    max_rank: int
    memory: Tensor | None = None  # bytes of the pool; None: its own

    @classmethod
    def of(cls, model: ModelConfig, max_loras: int) -> AdapterRoom | None:
        """`max_loras`: as the user gave it, or 0. None: requests name no adapters."""
        if not model.has_adapters:
            return None
        return cls(places=max_loras or _PLACES, max_rank=model.max_lora_rank)

    @property
    def panels(self) -> int:
        """Of 16 ranks each."""
        return -(-self.max_rank // PANEL)

    def entries(self, spec: ModelSpec) -> int:
        """Of a place: room for every part at the largest rank."""
        each = sum(part.inputs + part.outputs for product in products_of(spec).values() for part in product)
        return spec.num_layers * self.panels * PANEL * each

    def pool_bytes(self, spec: ModelSpec, dtype: torch.dtype) -> int:
        """Of all places."""
        return self.places * self.entries(spec) * dtype.itemsize

    def num_bytes(self, spec: ModelSpec, max_tokens: int, dtype: torch.dtype) -> int:
        """Of all places, and of what a step needs beside."""
        low = low_entries(max_tokens, self.panels * PANEL)
        return self.pool_bytes(spec, dtype) + 4 * (low + 4 * max_tokens)


@dataclass(frozen=True, slots=True)
class Part:
    """One matrix of a layer that may have an adapter."""

    name: str
    inputs: int
    outputs: int


def products_of(spec: ModelSpec) -> dict[str, tuple[Part, ...]]:
    """The parts of each product of a layer, in the order of their columns."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = {
        QKV: (Part("q", hidden, queries), Part("k", hidden, keys), Part("v", hidden, keys)),
        OUTPUT: (Part("o", queries, hidden),),
    }
    if all(spec.has_experts(layer) for layer in range(spec.num_layers)):
        return attention
    return attention | {
        GATE_UP: (Part("gate", hidden, inner), Part("up", hidden, inner)),
        DOWN: (Part("down", inner, hidden),),
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdapterImage(Adapter):
    """An adapter as its place holds it."""

    entries: Tensor  # in memory that the device can read
    table: NDArray[np.int64]  # [layers, parts]: where each part begins
    panels: int


class DeviceAdapters:
    """The adapters that a runner has on the device."""

    def __init__(
        self,
        room: AdapterRoom,
        spec: ModelSpec,
        memory: RowMemory,
        queue: DeviceQueue,
        max_tokens: int,
        dtype: torch.dtype,
    ) -> None:
        device = queue.device
        self._room, self._memory, self._queue, self._dtype = room, memory, queue, dtype
        self._products = products_of(spec)
        self._parts = [part.name for product in self._products.values() for part in product]
        self._first = {name: self._parts.index(parts[0].name) for name, parts in self._products.items()}
        self._widths = {name: [part.outputs for part in parts] for name, parts in self._products.items()}
        self._place_entries = room.entries(spec)
        table = torch.full(
            (room.places, spec.num_layers, len(self._parts)), NOTHING, dtype=torch.int32, device=device
        )
        memory_of_pool = room.memory
        if memory_of_pool is None:
            memory_of_pool = torch.zeros(room.pool_bytes(spec, dtype), dtype=torch.uint8, device=device)
        pool = AdapterPool(
            entries=memory_of_pool.view(dtype),
            table=table,
            panels=torch.zeros(room.places, dtype=torch.int32, device=device),
            most_panels=room.panels,
        )
        self._pool = pool
        self._step = AdaptedTokens(
            pool=pool,
            plan=allocate_expert_plan(max_tokens, room.places, device=device),
            low=torch.zeros(low_entries(max_tokens, room.panels * PANEL), device=device),
        )
        self._of_tokens = torch.full((max_tokens,), NO_PLACE, dtype=torch.int32, device=device)
        self._places: dict[int, int] = {}  # by number
        self._free = list(reversed(range(room.places)))
        self._has_one: NDArray[np.bool_] = np.zeros(memory.num_rows + 1, np.bool_)  # by row

    # -- which there are -------------------------------------------------------------------------------------

    def put(self, number: int, adapter: Adapter) -> None:
        """Copy an adapter's matrices to a free place; the scheduler has as many adapters in memory as there are."""
        if not self._free:  # rows of a padded batch may have any number of them
            raise InvalidAdapter(
                f"the GPU has room for {self._room.places} adapters: start with a larger --max-loras",
                param="lora_name",
            )
        image = adapter if isinstance(adapter, AdapterImage) else self.prepare(adapter)
        place = self._free.pop()
        first = place * self._place_entries
        table = np.where(image.table == NOTHING, NOTHING, image.table + first // UNIT)
        with self._queue.entered():
            self._pool.entries[first : first + len(image.entries)].copy_(image.entries, non_blocking=True)
            self._pool.table[place].copy_(torch.from_numpy(table.astype(np.int32)))
            self._pool.panels[place] = image.panels
        self._places[number] = place

    def drop(self, number: int) -> None:
        place = self._places.pop(number)
        with self._queue.entered():
            self._pool.table[place].fill_(NOTHING)
        self._free.append(place)

    def prepare(self, adapter: Adapter) -> AdapterImage:
        """What takes long of `put`; in any thread."""
        panels = -(-adapter.rank // PANEL)
        ranks, layers = panels * PANEL, self._pool.table.shape[1]
        table = np.full((layers, len(self._parts)), NOTHING, np.int64)
        size = sum(ranks * (pair.a.shape[1] + pair.b.shape[0]) for pair in adapter.parts.values())
        entries = torch.zeros(size, dtype=self._dtype, pin_memory=self._queue.is_gpu)
        first = 0
        for (layer, name), pair in sorted(adapter.parts.items()):
            table[layer, self._parts.index(name)] = first // UNIT
            first += _write(entries[first:], pair, ranks)
        return AdapterImage(
            identity=adapter.identity,
            rank=adapter.rank,
            parts={},
            entries=entries,
            table=table,
            panels=panels,
        )

    # -- rows ------------------------------------------------------------------------------------------------

    def join(self, joins: RowJoins) -> None:
        """A number that is not in memory is an error: no token is computed without the adapter that its row has."""
        at = joins.row.astype(np.int64)
        places = np.full(len(at), NO_PLACE, np.int32)
        for index, number in enumerate(joins.adapter.tolist()):
            if number != NO_ADAPTER:
                places[index] = self._places[number]
        self._memory.put("adapter", at, places)
        self._has_one[at] = places != NO_PLACE

    def are_in(self, batch: DeviceBatch) -> bool:
        """Whether a row of the batch has one."""
        return bool(self._has_one[batch.decode].any() or self._has_one[batch.spans].any())

    # -- a step ----------------------------------------------------------------------------------------------

    def of_rows(self, rows: Tensor) -> AddAdapters:
        """The adapters of a step in which each of `rows` has a token, in this order."""
        self._take(rows)
        return self._planned(len(rows))

    def of_spans(self, count: int, slot_rows: Tensor, spans: Spans | None, longest: int) -> AddAdapters:
        """The adapters of a step of `count` tokens: of rows that decode, then of spans; the rest belongs to none."""
        self._of_tokens[:count].fill_(NO_PLACE)
        if len(slot_rows):
            self._take(slot_rows)
        if spans is not None:
            span_values(self._of_tokens, self._memory.column("adapter"), spans, longest)
        return self._planned(count)

    def of_none(self, count: int) -> AddAdapters:
        """Those of a step that shows how long it takes or what it loads."""
        self._of_tokens[:count].fill_(NO_PLACE)
        return self._planned(count)

    def _take(self, rows: Tensor) -> None:
        torch.index_select(self._memory.column("adapter"), 0, rows, out=self._of_tokens[: len(rows)])

    def _planned(self, count: int) -> AddAdapters:
        tile_rows = adapter_tuning(count, self._dtype).rows
        plan_experts(self._step.plan, self._of_tokens[:count].view(-1, 1), tile_rows=tile_rows)
        return self._add

    def _add(self, layer: int, product: str, x: Tensor, out: Tensor) -> None:
        adapter_product(
            out,
            x,
            self._step,
            layer=layer,
            first=self._first[product],
            widths=self._widths[product],
            tuning=adapter_tuning(len(x), self._dtype),
            # Short kernels, whatever was launched before them: see overlap.py.
            overlapped=self._queue.is_gpu,
        )


def _write(into: Tensor, pair: LowRank, ranks: int) -> int:
    """Both matrices of a part, padded to `ranks` with zeros, which are there; returns how many entries they have."""
    (rank, inputs), outputs = pair.a.shape, len(pair.b)
    into[: rank * inputs].view(rank, inputs).copy_(torch.from_numpy(pair.a))
    panels = into[ranks * inputs : ranks * (inputs + outputs)].view(-1, outputs, PANEL)
    for panel, first in zip(panels, range(0, rank, PANEL), strict=False):
        own = torch.from_numpy(pair.b[:, first : first + PANEL])
        panel[:, : own.shape[1]].copy_(own)
    return int(ranks * (inputs + outputs))
