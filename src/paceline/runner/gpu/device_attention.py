"""Attention of one step on the device: plans made once, then each layer's queries over the blocks of their rows.

Decoding rows and spans of known tokens go through a kernel each. Buffers are made once for the largest step; a step
uses the beginning of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.models.spec import ModelSpec
from paceline.runner.gpu.graphs import MAX_SPANS
from paceline.runner.gpu.kernels import PagedKV
from paceline.runner.gpu.kernels.decode_attention import (
    DecodePlan,
    DecodeTuning,
    Partials,
    RowQueries,
    allocate_partials,
    allocate_plan,
    decode_attention,
    decode_tuning,
    plan_decode,
)
from paceline.runner.gpu.kernels.prefill_attention import (
    PrefillPlan,
    PrefillTuning,
    Spans,
    allocate_prefill_plan,
    plan_prefill,
    prefill_attention,
)
from paceline.runner.gpu.kernels.rope_kv_write import HeadNorm, TokenPlaces, rope_kv_write
from paceline.runner.gpu.kernels.shared_attention import (
    SharedGroups,
    SharedPlan,
    SharedTuning,
    allocate_shared_plan,
    merge_shared,
    plan_shared,
    shared_attention,
)

FEW_ROWS = 64  # up to here a kernel is shorter than its launch, and the next one may start early


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchShape:
    """What of a step its kernels are launched for."""

    num_tokens: int
    num_slots: int = 0  # decoding rows; their tokens come first
    num_spans: int = 0
    num_tiles: int = 0  # of the spans together
    longest_span: int = 0
    overlapped: bool = False  # kernels may start before the one before them has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """Beginnings that slots of a batch share."""

    tokens: Tensor  # int32 [rows]: how much of each row is computed with its group, 0: nothing
    groups: SharedGroups


class DeviceAttention:
    """Buffers and plans; `begin` for every step, then `attend` for every layer."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[PagedKV],
        rotations: list[Tensor],
        *,
        max_tokens: int,
        max_slots: int,
        max_spans: int,
        dtype: torch.dtype,
        most_queries: int = 1,  # of a decoding row
    ) -> None:
        device = rotations[0].device
        self._spec, self._layers, self._rotations = spec, layers, rotations
        self._windows = [window or 0 for window in spec.group_windows]
        self._heads, self._kv_heads, self._dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._query = torch.zeros(max_tokens, self._heads, self._dim, dtype=dtype, device=device)
        self._out = torch.zeros_like(self._query)
        self._log_sum = torch.zeros(max_tokens, self._heads, device=device)
        self._multiprocessors = 1
        if device.type == "cuda":
            self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        chunks = max(self._target(decode_tuning(slots)) for slots in (1, max_slots))
        self._plans = [allocate_plan(max_slots, chunks, device=device) for _ in self._windows]
        self._partials: Partials = allocate_partials(
            max(self._plans, key=lambda plan: plan.max_partials),
            heads=self._heads,
            kv_heads=self._kv_heads,
            head_dim=self._dim,
            width=most_queries,
        )
        self._shared_tuning = SharedTuning()
        self._shared: SharedPlan = allocate_shared_plan(
            max_slots,
            self._shared_tuning.target_chunks(self._multiprocessors, self._kv_heads),
            tile_slots=self._shared_tuning.tile_slots(self._heads // self._kv_heads),
            heads=self._heads,
            head_dim=self._dim,
            device=device,
        )
        self._prefill_tuning = PrefillTuning()
        tile = self._prefill_tuning.tile_tokens(self._heads // self._kv_heads)
        self._tiles: PrefillPlan = allocate_prefill_plan(max_tokens, max_spans, tile, device=device)

    def shape_of(self, num_tokens: int, num_slots: int) -> LaunchShape:
        """Of a step with prompts that is replayed, whatever its spans."""
        most = min(MAX_SPANS, num_tokens)
        return LaunchShape(
            num_tokens=num_tokens,
            num_slots=num_slots,
            num_spans=most,
            num_tiles=num_tokens // self.tile_tokens + most,
            longest_span=num_tokens,
        )

    @property
    def tile_tokens(self) -> int:
        return self._tiles.tile_tokens

    def begin(
        self,
        shape: LaunchShape,
        slot_rows: Tensor,
        visible: Tensor,
        spans: Spans | None,
        prefixes: SharedPrefixes | None = None,
        queries: RowQueries | None = None,
    ) -> StepPlans:
        """Make the work lists of a step. `visible`: how many tokens each row's attention sees. `queries`: decoding rows
        have several tokens."""
        tuning = replace(decode_tuning(shape.num_slots), overlapped=shape.overlapped)
        plans = []
        slots, chunks = shape.num_slots, self._target(tuning)
        if slots:
            for window, largest in zip(self._windows, self._plans, strict=True):
                items = largest.items[: slots + chunks]
                plan = replace(
                    largest,
                    num_slots=slots,
                    target_chunks=chunks,
                    items=items,
                    queries=queries,
                    window=window,
                )
                shared = None if prefixes is None else prefixes.tokens
                plan_decode(plan, slot_rows[:slots], visible, shared=shared)
                plans.append(plan)
        tiles = None
        if spans is not None:
            tiles = replace(self._tiles, tiles=self._tiles.tiles[: shape.num_tiles])
            plan_prefill(tiles, spans)
        together = None
        if prefixes is not None:
            assert self._windows == [0], "a row that sees a window has no beginning to share"
            together = self._shared.limited(slots)
            plan_shared(together, prefixes.groups)
        return StepPlans(shape, tuning, plans, tiles, together)

    def attend(
        self, step: StepPlans, layer: int, product: Tensor, places: TokenPlaces, norm: HeadNorm | None
    ) -> Tensor:
        """From the product of a layer's q, k and v matrices [tokens, ...] to [tokens, heads * head_dim]."""
        shape, spec, kv = step.shape, self._spec, self._layers[layer]
        group = spec.layer_groups[layer]
        tokens, slots = shape.num_tokens, shape.num_slots
        query, out, log_sum = self._query[:tokens], self._out[:tokens], self._log_sum[:tokens]
        rotation = self._rotations[spec.layer_ropes[layer]]
        rope_kv_write(
            query, kv.keys, kv.values, product, places, rotation, norm=norm, overlapped=shape.overlapped
        )
        scale = spec.softmax_scale
        if slots:
            decoding = slots if step.plans[group].queries is None else tokens
            decode_attention(
                out[:decoding],
                log_sum[:decoding],
                query[:decoding],
                kv,
                step.plans[group],
                self._partials,
                scale=scale,
                tuning=step.tuning,
            )
            if step.shared is not None:
                shared_attention(query[:slots], kv, step.shared, scale=scale, tuning=self._shared_tuning)
                merge_shared(out[:slots], log_sum[:slots], step.shared)
        if step.tiles is not None:
            prefill_attention(
                out,
                log_sum,
                query,
                kv,
                step.tiles,
                scale=scale,
                window=self._windows[group],
                tuning=self._prefill_tuning,
            )
        return out.view(tokens, -1)

    def _target(self, tuning: DecodeTuning) -> int:
        return tuning.target_chunks(self._multiprocessors, self._kv_heads)


@dataclass(frozen=True, slots=True)
class StepPlans:
    """The work lists of one step."""

    shape: LaunchShape
    tuning: DecodeTuning
    plans: list[DecodePlan]
    tiles: PrefillPlan | None
    shared: SharedPlan | None

    @property
    def has_drafts(self) -> bool:
        return bool(self.plans) and self.plans[0].queries is not None
