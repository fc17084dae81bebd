"""Adapters on the device: their matrices in one pool, which token has which, and what they add to a layer's products.

An adapter has a place: a stretch of the pool with room for every matrix of a model at the largest rank. Its number is
what plans name; a place is taken again once its adapter was let go of, which the engine does when no step under way can
touch it. What is written then is copied beside the steps; one with a row of the adapter waits for it. Tokens are
grouped by place once a step, by the plan that experts use; those without an adapter have a place too, in which there is
never anything.
"""

from __future__ import annotations

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
from paceline.models.files.adapter_files import Adapter, LowRank
from paceline.models.spec import ModelSpec
from paceline.runner.gpu.device_queue import DeviceQueue, Mark
from paceline.runner.gpu.host_rows import DeviceBatch
from paceline.runner.gpu.kernels.adapter_product import (
    LEAST_ROWS,
    NOTHING,
    PANEL,
    UNIT,
    AdaptedProduct,
    AdaptedTokens,
    AdapterPool,
    AdapterTuning,
    adapter_tuning,
    allocate_adapted,
    expand,
    expand_gated,
    low_entries,
    plan_adapters,
    shrink,
)
from paceline.runner.gpu.kernels.expert_product import max_tiles
from paceline.runner.gpu.kernels.gated_product import Activation
from paceline.runner.gpu.kernels.prefill_attention import Spans
from paceline.runner.gpu.kernels.step_rows import span_values
from paceline.runner.gpu.row_memory import NO_PLACE, RowMemory

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
        parts = spec.num_layers * sum(len(product) for product in products_of(spec).values())
        bases = parts * max_tiles(max_tokens, 1 + self.places, LEAST_ROWS)
        return self.pool_bytes(spec, dtype) + 4 * (low + bases + 4 * max_tokens)


@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """One matrix of a layer that may have an adapter."""

    name: str
    inputs: int
    outputs: int


def products_of(spec: ModelSpec) -> dict[str, tuple[AdaptedMatrix, ...]]:
    """The parts of each product of a layer, in the order of their columns."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = {
        QKV: (
            AdaptedMatrix("q", hidden, queries),
            AdaptedMatrix("k", hidden, keys),
            AdaptedMatrix("v", hidden, keys),
        ),
        OUTPUT: (AdaptedMatrix("o", queries, hidden),),
    }
    if all(spec.has_experts(layer) for layer in range(spec.num_layers)):
        return attention
    return attention | {
        GATE_UP: (AdaptedMatrix("gate", hidden, inner), AdaptedMatrix("up", hidden, inner)),
        DOWN: (AdaptedMatrix("down", inner, hidden),),
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdapterImage(Adapter):
    """An adapter as its place holds it."""

    entries: Tensor  # in memory that the device can read
    table: Tensor  # int32 [layers, parts], in such memory too: where each part begins, in UNITs
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
        firsts = {name: self._parts.index(parts[0].name) for name, parts in self._products.items()}
        self._place_entries = room.entries(spec)
        table = torch.full(
            (1 + room.places, spec.num_layers, len(self._parts)), NOTHING, dtype=torch.int32, device=device
        )
        memory_of_pool = room.memory
        if memory_of_pool is None:
            memory_of_pool = torch.zeros(room.pool_bytes(spec, dtype), dtype=torch.uint8, device=device)
        pool = AdapterPool(
            entries=memory_of_pool.view(dtype),
            table=table,
            panels=torch.zeros(1 + room.places, dtype=torch.int32, device=device),
            most_panels=room.panels,
        )
        self._pool = pool
        self._tokens = allocate_adapted(pool, max_tokens)
        self._of_tokens = torch.full((max_tokens,), NO_PLACE, dtype=torch.int32, device=device)
        self._places: dict[int, int] = {}  # by number
        self._copies = DeviceQueue(device)
        self._coming: dict[int, Mark] = {}  # numbers that no row had yet: when their copies are complete
        self._free = list(range(room.places, NO_PLACE, -1))
        self._layers = [
            {
                name: AdaptedProduct(
                    layer=layer,
                    first=firsts[name],
                    inner=parts[0].inputs,
                    widths=tuple(part.outputs for part in parts),
                )
                for name, parts in self._products.items()
            }
            for layer in range(spec.num_layers)
        ]
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
        first = (place - 1) * self._place_entries
        table = self._pool.table[place]
        with self._copies.entered():
            self._pool.entries[first : first + len(image.entries)].copy_(image.entries, non_blocking=True)
            table.copy_(image.table, non_blocking=True)
            table.add_((table != NOTHING) * (first // UNIT))
            self._pool.panels[place].fill_(image.panels)
        self._places[number] = place
        self._coming[number] = self._copies.mark()

    def is_there(self, number: int) -> bool:
        """Whether a row that has it would wait for nothing."""
        return number not in self._coming or self._coming[number].is_reached()

    def drop(self, number: int) -> None:
        self._free.append(self._places.pop(number))
        self._coming.pop(number, None)

    def prepare(self, adapter: Adapter) -> AdapterImage:
        """What takes long of `put`; in any thread."""
        panels = -(-adapter.rank // PANEL)
        ranks, layers = panels * PANEL, self._pool.table.shape[1]
        table = torch.full((layers, len(self._parts)), NOTHING, dtype=torch.int32)
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
            table=table.pin_memory() if self._queue.is_gpu else table,
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
                if self._coming.pop(number, None) is not None:
                    self._queue.follow(self._copies)
        self._memory.put("adapter", at, places)
        self._has_one[at] = places != NO_PLACE

    def are_in(self, batch: DeviceBatch) -> bool:
        """Whether a row of the batch has one."""
        return bool(self._has_one[batch.decode].any() or self._has_one[batch.spans].any())

    # -- a step ----------------------------------------------------------------------------------------------

    def of_rows(self, rows: Tensor) -> StepAdapters:
        """The adapters of a step in which each of `rows` has a token, in this order."""
        self._take(rows)
        return self._planned(len(rows))

    def of_spans(self, count: int, slot_rows: Tensor, spans: Spans | None, longest: int) -> StepAdapters:
        """The adapters of a step of `count` tokens: of rows that decode, then of spans; the rest belongs to none."""
        self._of_tokens[:count].fill_(NO_PLACE)
        if len(slot_rows):
            self._take(slot_rows)
        if spans is not None:
            span_values(self._of_tokens, self._memory.column("adapter"), spans, longest)
        return self._planned(count)

    def of_none(self, count: int) -> StepAdapters:
        """Those of a step that shows how long it takes or what it loads."""
        self._of_tokens[:count].fill_(NO_PLACE)
        return self._planned(count)

    def _take(self, rows: Tensor) -> None:
        torch.index_select(self._memory.column("adapter"), 0, rows, out=self._of_tokens[: len(rows)])

    def _planned(self, count: int) -> StepAdapters:
        tuning = adapter_tuning(count, self._dtype)
        plan_adapters(self._tokens, self._of_tokens[:count], tuning=tuning)
        # Short kernels, whatever was launched before them: see overlap.py.
        return StepAdapters(self._layers, self._tokens, tuning, overlapped=self._queue.is_gpu)


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The adapters of a step's tokens."""

    layers: list[dict[str, AdaptedProduct]]
    tokens: AdaptedTokens
    tuning: AdapterTuning
    overlapped: bool

    def of_layer(self, layer: int) -> LayerAdapters:
        return LayerAdapters(self, self.layers[layer])


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """What the adapters of a step add to the products of a layer, by their names: `read` the inputs of a product before
    it is computed, and `add_to` the product in place, or go on to what its activation leaves."""

    step: StepAdapters
    products: dict[str, AdaptedProduct]

    def read(self, name: str, x: Tensor) -> None:
        step = self.step
        shrink(x, step.tokens, self.products[name], tuning=step.tuning, overlapped=step.overlapped)

    def add_to(self, name: str, out: Tensor) -> None:
        step = self.step
        expand(out, step.tokens, self.products[name], tuning=step.tuning, overlapped=step.overlapped)

    def gate(self, out: Tensor, wide: Tensor, activation: Activation) -> None:
        step = self.step
        expand_gated(
            out,
            wide,
            step.tokens,
            self.products[GATE_UP],
            activation=activation,
            tuning=step.tuning,
            overlapped=step.overlapped,
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
