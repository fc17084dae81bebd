"""A smaller model of the same vocabulary that guesses on the device, with the decoder and the attention of the model.

Its layers keep their keys in further layers of the same blocks, by the tables of the first group. It computes the
tokens of every step once more, which is how it follows; a guess is a decode step of it. Nothing is kept by row.
Decision: docs/decisions/0040-drafts-on-the-gpu.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.models.decoder import Parts
from paceline.models.files.head_folder import HeadFiles
from paceline.models.files.open import Checkpoint
from paceline.models.spec import FurtherLayer, ModelSpec
from paceline.runner.gpu.device_attention import DeviceAttention, LaunchShape
from paceline.runner.gpu.device_drafts import queries_of
from paceline.runner.gpu.device_head import (
    DeviceEagle,
    DeviceGuesser,
    DeviceMedusa,
    FollowedStep,
    HeadSite,
)
from paceline.runner.gpu.forward import DeviceDecoder, rotation_tables
from paceline.runner.gpu.kernels.step_rows import StepTokens


@dataclass(frozen=True, slots=True, eq=False)
class DraftParts:
    """A draft model on the device."""

    spec: ModelSpec
    parts: Parts


def further_layers(guesser: HeadFiles | Checkpoint | DraftParts | None) -> tuple[FurtherLayer, ...]:
    """Layers whose keys it keeps. Windows are left out: their keys lie in blocks that keep most."""
    if guesser is None:
        return ()
    if not isinstance(guesser, HeadFiles):
        spec = guesser.spec
        return (FurtherLayer(spec.num_kv_heads, spec.head_dim),) * spec.num_layers
    layer = guesser.spec.layer
    return () if layer is None else (FurtherLayer(layer.num_kv_heads, layer.head_dim),)


class DeviceDraftModel(DeviceGuesser):
    """Its layers over the tokens of a step, and over one token of each slot for a guess."""

    def __init__(self, model: DraftParts, site: HeadSite, width: int, longest: int) -> None:
        super().__init__(site, width, torch.arange(model.spec.vocab_size))
        spec, memory, device = _within(model.spec, site.decoder.spec), site.memory, self._device
        self._num_groups = len(spec.group_windows)
        self._decoder = DeviceDecoder(
            spec,
            model.parts,
            max_tokens=site.max_tokens,
            max_logits=memory.max_slots,
            max_kept=0,
            device=device,
        )
        self._attention = DeviceAttention(
            spec,
            site.pools.further,
            rotation_tables(spec, longest + 1, device),
            max_tokens=site.max_tokens,
            max_slots=memory.max_slots,
            max_spans=memory.num_rows,
            dtype=self._decoder.dtype,
            most_queries=queries_of(width),
        )

    def follow(self, step: FollowedStep, hidden: Tensor) -> Tensor:
        shape = step.shape
        if step.spans is not None:  # its tiles may have another size; as many as there can be
            tiles = shape.num_tokens // self._attention.tile_tokens + shape.num_spans
            shape = replace(shape, num_tiles=tiles)
        plans = self._attention.begin(shape, step.slot_rows, step.visible, step.spans, queries=step.queries)
        return self._decoder.forward(self._in_groups(step.tokens), self._attention, plans)

    def _pass(self, depth: int, slot_rows: Tensor, overlapped: bool) -> Tensor:
        count = len(slot_rows)
        shape = LaunchShape(num_tokens=count, num_slots=count, overlapped=overlapped)
        plans = self._attention.begin(shape, slot_rows, self._visible, None)
        hidden = self._decoder.forward(self._in_groups(self._tokens), self._attention, plans)
        return self._decoder.logits(hidden, None)

    def _in_groups(self, tokens: StepTokens) -> StepTokens:
        """Layers of all windows have their keys in the blocks of the first group."""
        return replace(tokens, slots=[tokens.slots[0]] * self._num_groups)

    def warm_up(self, sizes: Iterable[int]) -> None:
        self._decoder.warm_up(sizes)


def build_guesser(guesser: HeadFiles | DraftParts, site: HeadSite, width: int, longest: int) -> DeviceGuesser:
    """`width`: most drafts of a row, `longest`: tokens of the longest sequence."""
    if isinstance(guesser, DraftParts):
        return DeviceDraftModel(guesser, site, width, longest)
    if guesser.spec.kind == "medusa":
        return DeviceMedusa(guesser, site, width)
    return DeviceEagle(guesser, site, width, longest)


def _within(spec: ModelSpec, model: ModelSpec) -> ModelSpec:
    """A draft model whose layers see no more than the blocks of `model` keep."""
    most = model.group_windows[0]
    if most is None:
        return spec
    return replace(spec, windows=tuple(min(window or most, most) for window in spec.windows))
