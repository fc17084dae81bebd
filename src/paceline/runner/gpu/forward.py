"""The decoder on the device: the same parts as on the CPU, computed by our kernels and by cuBLAS into fixed buffers.

Nothing is allocated and nothing is read back, so that a step can be captured in a graph. How few rows there are
decides which products are used; what is computed does not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from paceline.models.adapters import DOWN, GATE_UP, OUTPUT, QKV
from paceline.models.decoder import Parts
from paceline.models.layers import DenseLinear
from paceline.models.rope import inverse_frequencies
from paceline.models.spec import ModelSpec
from paceline.runner.gpu.adapters import LayerAdapters, StepAdapters
from paceline.runner.gpu.device_attention import DeviceAttention, StepPlans
from paceline.runner.gpu.device_layers import (
    DeviceExperts,
    DeviceLayer,
    DeviceLinear,
    GroupedLinear,
    ScaledLinear,
    device_layer,
)
from paceline.runner.gpu.kernels.expert_product import (
    ExpertBuffers,
    allocate_expert_buffers,
    expert_product,
)
from paceline.runner.gpu.kernels.gated_product import (
    SHARED_BYTES,
    Activation,
    can_be_gated,
    gated_activation,
    gated_product,
    gated_rows,
    is_worth_gating,
)
from paceline.runner.gpu.kernels.residual_norm import residual_norm
from paceline.runner.gpu.kernels.rope_kv_write import TokenPlaces, TokenTurns
from paceline.runner.gpu.kernels.row_product import RowNorm, row_product
from paceline.runner.gpu.kernels.scaled_product import (
    MAX_SPLIT_ROWS,
    is_split,
    scaled_gated_tuning,
    scaled_matrix_product,
    scaled_product,
    scaled_tuning,
)
from paceline.runner.gpu.kernels.scaled_rows import ScaledRows, quantize_rows
from paceline.runner.gpu.kernels.skinny_product import (
    MAX_GATED_ROWS,
    MAX_PARTS,
    MAX_ROWS,
    ProductTuning,
    gated_tuning,
    narrow_tuning,
    skinny_product,
    small_tuning,
    wide_tuning,
)
from paceline.runner.gpu.kernels.step_rows import StepTokens
from paceline.runner.gpu.kernels.token_inputs import PicturePages, add_vectors, token_inputs

_SMALL = 1 << 21  # entries of a matrix that are read in less time than a launch takes
_WIDE = 4096  # hidden entries


def rotation_tables(spec: ModelSpec, positions: int, device: torch.device) -> list[Tensor]:
    """Cosines of a position's pairs and then their sines, for each kind of rotation."""
    found = []
    for rope in spec.ropes:
        angles = torch.outer(torch.arange(positions).float(), inverse_frequencies(rope))
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor
        found.append(table.to(device).contiguous())
    return found


def _turned_axes(spec: ModelSpec, device: torch.device) -> Tensor | None:
    """Of each pair of a head by which of several numbers it turns; None: there is one, the position."""
    if not spec.has_turns:
        return None
    (rope,) = spec.ropes
    return torch.tensor(rope.axes, dtype=torch.int32, device=device)


class DeviceDecoder:
    """Hidden states of a step's tokens, and logits of the tokens that are sampled."""

    def __init__(
        self,
        spec: ModelSpec,
        parts: Parts,
        *,
        max_tokens: int,
        max_logits: int,
        max_kept: int,  # rows of logits of which a copy can be kept
        device: torch.device,
        taps: tuple[int, ...] = (),  # hidden states that are kept: those before the layers of these numbers
        pictures: PicturePages | None = None,  # whose vectors stand in the place of embeddings
    ) -> None:
        self.spec, self._pictures = spec, pictures
        self._axes = _turned_axes(spec, device)
        self._embedding = cast(DenseLinear, parts.embedding).weight
        self._head = cast(DenseLinear, parts.head)
        self.dtype = self._embedding.dtype
        self._embed_scale = torch.tensor(spec.embed_scale, dtype=self.dtype).item()
        self._norm = parts.norm.weight.to(device)
        self._layers = [device_layer(layer, spec, device, self.dtype) for layer in parts.layers]
        mixtures = [layer.experts for layer in self._layers if layer.experts is not None]
        self._expert_buffers: ExpertBuffers | None = None
        if mixtures:
            first = mixtures[0]
            self._expert_buffers = allocate_expert_buffers(
                max_tokens, first.per_token, first.weights, device, self.dtype
            )
        self._activation: Activation = "silu" if spec.activation == "silu" else "gelu_tanh"
        self._multiprocessors = 0 if self.dtype == torch.float32 else _multiprocessors(device)
        grouped = [
            linear for layer in self._layers for linear in layer.linears if isinstance(linear, GroupedLinear)
        ]
        sizes = [math.prod(linear.weight.shape) for linear in grouped]
        self._is_plain = not (
            sizes
            or spec.qkv_bias
            or spec.output_bias
            or spec.sandwich_norms
            or spec.experts
            or spec.activation != "silu"
        )
        self._reads_head_at_once = self._is_plain or bool(sizes)
        scaled = _scaled_dtype(self._layers)
        # Eight bits of a large model are read faster by matrix instructions than norms are saved.
        self._joins_norms = self._is_plain and (scaled is None or spec.hidden_size < _WIDE)

        def room(rows: int, columns: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.zeros(rows, columns, dtype=dtype, device=device)

        width, inner = spec.hidden_size, spec.intermediate_size
        heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        self._residual, self._normed, self._update = (room(max_tokens, width) for _ in range(3))
        self._product = room(max_tokens, heads)
        self._wide, self._narrow = room(max_tokens, 2 * inner), room(max_tokens, inner)
        few = MAX_ROWS if scaled is None else MAX_SPLIT_ROWS
        most_rows = max([few, *(linear.most_rows for linear in grouped)])
        self._parts = torch.zeros(MAX_PARTS * most_rows * width, device=device)
        self._chosen = room(max_logits, width)
        self._logits = room(max_logits, spec.vocab_size)
        self._raw_logits = room(max_kept, spec.vocab_size)
        self._has_drafts = False  # the step that is computed
        self._taps = taps
        # Of the tokens of the last step, one tap beside the other.
        self.tapped = room(max_tokens if taps else 0, len(taps) * width)
        if scaled is not None:  # inputs of a product, of eight bits; the next product has others
            widest = max(width, inner, spec.num_heads * spec.head_dim)
            self._eight_bits = room(1, max_tokens * widest, scaled)[0]
            self._row_scales = torch.zeros(max_tokens, device=device)
        if sizes:
            self._dense = room(1, max(sizes))[0]

    def warm_up(self, sizes: Iterable[int], adapters_of: Callable[[int], StepAdapters] | None = None) -> None:
        """Launch the products of one layer as steps of these many tokens do, and what only some other sizes do.
        `adapters_of`: those of a step of some tokens, where there may be any.

        cuBLAS has a kernel for every few sizes, and loading one waits for the device.
        """
        layer = self._layers[0]
        gate_up = layer.gate_up
        may_be_gated = isinstance(gate_up, DenseLinear) and gate_up.bias is None and self._multiprocessors
        if may_be_gated and can_be_gated(self._narrow.shape[1], self.spec.hidden_size):
            assert isinstance(gate_up, DenseLinear)
            gated_product(self._narrow[:1], self._normed[:1], gate_up.weight, activation=self._activation)
        width = self.spec.num_heads * self.spec.head_dim
        for size in sizes:
            residual, norm = self._residual[:size], layer.norm_before_attention
            self._queries(self._add(residual, None, norm, layer.qkv, False), layer.qkv, False)
            attended = self._product.view(-1)[: size * width].view(size, width)
            self._narrowed(attended, layer.output, layer.norm_after_attention, False)
            self._fed(self._add(residual, None, norm, gate_up, False), layer, False)
            if adapters_of is not None:
                adapters = adapters_of(size).of_layer(0)
                self._fed(self._add(residual, None, norm, None, False), layer, False, adapters)

    # -- a step ----------------------------------------------------------------------------------------------

    def forward(
        self,
        tokens: StepTokens,
        attention: DeviceAttention,
        step: StepPlans,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """Hidden states [tokens, hidden] behind the last norm. `adapters`: of the tokens, where any has one."""
        count, overlapped = step.shape.num_tokens, step.shape.overlapped
        self._has_drafts = step.has_drafts
        residual = self._residual[:count]
        ids = tokens.ids[:count]
        token_inputs(residual, self._embedding, ids, scale=self._embed_scale, pages=self._pictures)
        turned = None
        if tokens.turns is not None:
            assert self._axes is not None
            turned = TokenTurns(turns=tokens.turns[:, :count], axes=self._axes)
        places = [
            TokenPlaces(positions=tokens.positions[:count], turned=turned, slots=slots[:count])
            for slots in tokens.slots
        ]
        if count == 1 and self._joins_norms and adapters is None and not self.spec.num_deep:
            return self._forward_one(attention, step, places)
        # Kernels of adapters are beside.
        norms_overlap = overlapped or (adapters is not None and adapters.overlapped)
        update: Tensor | None = None
        for index, layer in enumerate(self._layers):
            of_layer = None if adapters is None else adapters.of_layer(index)
            following = (layer.qkv, layer.gate_up) if adapters is None else (None, None)  # they take 16 bits
            x = self._add(residual, update, layer.norm_before_attention, following[0], norms_overlap)
            if index in self._taps:
                self._tap(index, residual)
            product = self._queries(x, layer.qkv, overlapped, of_layer)
            place = places[self.spec.layer_groups[index]]
            attended = attention.attend(step, index, product, place, layer.head_norm)
            norm = layer.norm_after_attention
            update = self._narrowed(attended, layer.output, norm, overlapped, of_layer, OUTPUT)
            x = self._add(residual, update, layer.norm_before_feed_forward, following[1], norms_overlap)
            update = self._fed(x, layer, overlapped, of_layer)
            if index < self.spec.num_deep and self._pictures is not None:
                add_vectors(residual, self._pictures, index)
        self._add(residual, update, self._norm, self._head, norms_overlap)
        if len(self._layers) in self._taps:
            self._tap(len(self._layers), residual)
        return self._normed[:count]

    @property
    def embedding(self) -> Tensor:
        """The table that tokens are looked up in."""
        return self._embedding

    @property
    def hidden(self) -> Tensor:
        """Where `forward` leaves hidden states."""
        return self._normed

    def logits(self, hidden: Tensor, which: Tensor | None) -> Tensor:
        """Of all tokens, or of those numbered in `which`."""
        if which is not None:
            chosen = self._chosen[: len(which)]
            torch.index_select(hidden, 0, which, out=chosen)
            hidden = chosen
        out = self._logits[: len(hidden)]
        if len(hidden) == 1 and self._reads_head_at_once:
            row_product(out[0], hidden[0], self._head.weight)
            return out
        return self._times(hidden, self._head, self._logits)

    def last_logits(self, count: int) -> Tensor:
        """Where `logits` has written those of the last `count` tokens."""
        return self._logits[:count]

    def keep_logits(self, count: int) -> Tensor:
        """A copy of these, for steps whose draw changes them although log-probabilities are asked for."""
        return self._raw_logits[:count].copy_(self._logits[:count])

    def _tap(self, layer: int, residual: Tensor) -> None:
        width = residual.shape[1]
        for place, tap in enumerate(self._taps):
            if tap == layer:
                self.tapped[: len(residual), place * width : (place + 1) * width] = residual

    # -- parts of a layer ------------------------------------------------------------------------------------

    def _add(
        self,
        residual: Tensor,
        update: Tensor | None,
        weight: Tensor,
        following: DeviceLinear | None,
        overlapped: bool,
    ) -> Tensor | ScaledRows:
        """The norm behind an addition, as the product that follows takes it (None: experts)."""
        is_scaled = isinstance(following, ScaledLinear)
        out = self._rows_of(*residual.shape) if is_scaled else self._normed[: len(residual)]
        residual_norm(out, residual, update, weight, epsilon=self.spec.norm_eps, overlapped=overlapped)
        return out

    def _rows_of(self, rows: int, width: int) -> ScaledRows:
        """Room for the inputs of the next product of eight bits."""
        return ScaledRows(self._eight_bits[: rows * width].view(rows, width), self._row_scales[:rows])

    def _quantized(self, x: Tensor | ScaledRows, overlapped: bool) -> ScaledRows:
        if isinstance(x, ScaledRows):
            return x
        rows = self._rows_of(*x.shape)
        quantize_rows(rows, x, overlapped=overlapped)
        return rows

    def _scaled_times(self, x: ScaledRows, linear: ScaledLinear, into: Tensor, overlapped: bool) -> Tensor:
        out = into[: len(x)]
        if len(x) <= MAX_ROWS:
            tuning = scaled_tuning(len(x), *linear.weight.q.shape)
            scaled_product(out, x, linear.weight, tuning=tuning, overlapped=overlapped)
        else:
            scaled_matrix_product(out, x, linear.weight)
        return out if linear.bias is None else out.add_(linear.bias)

    def _times(self, x: Tensor, linear: DenseLinear, into: Tensor) -> Tensor:
        out = into[: len(x)]
        if linear.bias is not None:
            return torch.addmm(linear.bias, x, linear.weight.T, out=out)
        return torch.mm(x, linear.weight.T, out=out)

    def _small_tuning(self, weight: Tensor, *, splits: bool = False) -> ProductTuning | None:
        """In a step with drafts: a row has several tokens there, so that steps of a few of them are the rule."""
        if not self._has_drafts or weight.numel() > _SMALL:
            return None
        return small_tuning(*weight.shape, splits=splits)

    def _has_few_rows(self, x: Tensor, most: int = MAX_ROWS) -> bool:
        return len(x) <= most and self.dtype != torch.float32

    def _queries(
        self,
        x: Tensor | ScaledRows,
        linear: DeviceLinear,
        overlapped: bool,
        adapters: LayerAdapters | None = None,
    ) -> Tensor:
        if adapters is None:
            return self._whole(x, linear, self._product, overlapped)
        adapters.read(QKV, cast(Tensor, x))
        product = self._whole(x, linear, self._product, overlapped, waits_last=True)
        adapters.add_to(QKV, product)
        return product

    def _whole(
        self,
        x: Tensor | ScaledRows,
        linear: DeviceLinear,
        into: Tensor,
        overlapped: bool,
        *,
        waits_last: bool = False,
    ) -> Tensor:
        """A product as it is. `waits_last`: `x` is older than the kernel in front."""
        if isinstance(linear, ScaledLinear):
            return self._scaled_times(self._quantized(x, overlapped), linear, into, overlapped)
        assert isinstance(x, Tensor)
        tuning: ProductTuning | None = None
        if isinstance(linear, GroupedLinear):
            if len(x) <= linear.most_rows:
                out, cut = into[: len(x)], linear.tuning(len(x), linear.weight.shape[0])
                linear.product(out, x, tuning=cut, overlapped=overlapped)
                return out if linear.bias is None else out.add_(linear.bias)
            linear = self._unpacked(linear)
        if self._has_few_rows(x) and linear.bias is None:
            tuning = wide_tuning(len(x), *linear.weight.shape) or self._small_tuning(linear.weight)
        if tuning is None:
            return self._times(x, linear, into)
        out = into[: len(x)]
        skinny_product(out, x, linear.weight, tuning=tuning, overlapped=overlapped, waits_last=waits_last)
        return out

    def _narrowed(
        self,
        x: Tensor | ScaledRows,
        linear: DeviceLinear,
        norm: Tensor | None,
        overlapped: bool,
        adapters: LayerAdapters | None = None,
        name: str = "",  # that adapters know it by
    ) -> Tensor | None:
        """A product back to the model's width, for the next norm to add to the residual."""
        is_bare = linear.bias is None and norm is None
        if adapters is None:
            update = self._narrow_product(x, linear, is_bare, overlapped)
        else:
            adapters.read(name, cast(Tensor, x))
            update = self._narrow_product(x, linear, is_bare, overlapped, waits_last=True)
            into = self._residual[: len(x)] if update is None else update
            adapters.add_to(name, into if into.dim() == 2 else into[0])
        if update is not None and norm is not None:
            residual_norm(update, update, None, norm, epsilon=self.spec.norm_eps, overlapped=overlapped)
        return update

    def _narrow_product(
        self,
        x: Tensor | ScaledRows,
        linear: DeviceLinear,
        is_bare: bool,
        overlapped: bool,
        *,
        waits_last: bool = False,
    ) -> Tensor | None:
        """Few rows are left in parts for the next norm to sum. Where nothing stands between product and residual
        (`is_bare`), the product adds itself and nothing is left to add: the norm then moves half as much."""
        if isinstance(linear, ScaledLinear):
            x = self._quantized(x, overlapped)
            if is_bare and is_split(len(x), linear.weight.q.shape[0]):
                tuning = scaled_tuning(len(x), *linear.weight.q.shape, narrow=True)
                parts = self._parts_for(tuning, x, linear.weight.q.shape[0])
                scaled_product(parts, x, linear.weight, tuning=tuning, overlapped=overlapped)
                return parts
            return self._scaled_times(x, linear, self._update, overlapped)
        assert isinstance(x, Tensor)
        if isinstance(linear, GroupedLinear):
            if is_bare and len(x) <= linear.most_rows:
                tuning = linear.tuning(len(x), linear.weight.shape[0], narrow=True)
                parts = self._parts_for(tuning, x, linear.weight.shape[0])
                linear.product(parts, x, tuning=tuning, overlapped=overlapped)
                return parts
            linear = self._unpacked(linear)
        if is_bare and self._has_few_rows(x):
            cut = narrow_tuning(*linear.weight.shape) or self._small_tuning(linear.weight, splits=True)
            if cut is not None:
                parts = self._parts_for(cut, x, linear.weight.shape[0])
                skinny_product(
                    parts, x, linear.weight, tuning=cut, overlapped=overlapped, waits_last=waits_last
                )
                return parts
        if is_bare:
            residual = self._residual[: len(x)]
            torch.addmm(residual, x, linear.weight.T, out=residual)
            return None
        return self._times(x, linear, self._update)

    def _parts_for(self, tuning: ProductTuning, x: Tensor | ScaledRows, columns: int) -> Tensor:
        """float32 [parts, rows, columns]; a single part, which is complete, as [rows, columns] in the model's type."""
        if tuning.parts == 1:
            return self._update[: len(x)]
        shape = (tuning.parts, len(x), columns)
        return self._parts[: math.prod(shape)].view(shape)

    def _fed(
        self,
        x: Tensor | ScaledRows,
        layer: DeviceLayer,
        overlapped: bool,
        adapters: LayerAdapters | None = None,
    ) -> Tensor | None:
        norm = layer.norm_after_feed_forward
        if layer.experts is not None:
            assert isinstance(x, Tensor)
            return self._chosen_experts(x, layer.experts)
        assert layer.gate_up is not None and layer.down is not None
        inner: Tensor | ScaledRows
        if adapters is not None:  # between the product and its gate
            adapters.read(GATE_UP, cast(Tensor, x))
            wide = self._whole(x, layer.gate_up, self._wide, overlapped, waits_last=True)
            inner = self._narrow[: len(x)]
            adapters.gate(inner, wide, self._activation)
        elif isinstance(layer.gate_up, ScaledLinear):
            inner = self._scaled_gate(self._quantized(x, overlapped), layer.gate_up, layer.down, overlapped)
        else:
            assert isinstance(x, Tensor)
            inner = self._gate(x, layer.gate_up, overlapped)
        return self._narrowed(inner, layer.down, norm, overlapped, adapters, DOWN)

    def _scaled_gate(
        self, x: ScaledRows, gate_up: ScaledLinear, down: DeviceLinear, overlapped: bool
    ) -> Tensor | ScaledRows:
        narrow = self._narrow[: len(x)]
        if gate_up.bias is None and len(x) <= MAX_ROWS and self._activation == "silu":
            tuning = scaled_gated_tuning(len(x), narrow.shape[1], x.q.shape[1])
            scaled_product(narrow, x, gate_up.weight, tuning=tuning, gated=True, overlapped=overlapped)
            return narrow
        wide = self._scaled_times(x, gate_up, self._wide, overlapped)
        if isinstance(down, ScaledLinear):
            rows = self._rows_of(*narrow.shape)
            gated_rows(rows, wide, activation=self._activation, overlapped=overlapped)
            return rows
        gated_activation(narrow, wide, activation=self._activation, overlapped=overlapped)
        return narrow

    def _unpacked(self, linear: GroupedLinear) -> DenseLinear:
        """In memory that the next such matrix uses too."""
        dense = self._dense[: math.prod(linear.weight.shape)].view(linear.weight.shape)
        linear.unpack(dense)
        return DenseLinear(dense, linear.bias)

    def _gate(self, normed: Tensor, gate_up: DenseLinear | GroupedLinear, overlapped: bool) -> Tensor:
        narrow = self._narrow[: len(normed)]
        shape = (len(normed), narrow.shape[1], normed.shape[1])
        if isinstance(gate_up, GroupedLinear):
            if gate_up.bias is None and len(normed) <= gate_up.most_rows and self._activation == "silu":
                cut = gate_up.tuning(*shape[:2], gated=True)
                gate_up.product(narrow, normed, tuning=cut, gated=True, overlapped=overlapped)
                return narrow
            gate_up = self._unpacked(gate_up)
        tuning: ProductTuning | None = None
        if gate_up.bias is None and self._has_few_rows(normed, MAX_GATED_ROWS) and self._activation == "silu":
            tuning = gated_tuning(*shape)
            if tuning is None and len(normed) <= MAX_ROWS:
                tuning = self._small_tuning(gate_up.weight[: shape[1]])
        if tuning is not None:
            skinny_product(narrow, normed, gate_up.weight, tuning=tuning, gated=True, overlapped=overlapped)
        elif (
            gate_up.bias is None and self._multiprocessors and is_worth_gating(*shape, self._multiprocessors)
        ):
            gated_product(narrow, normed, gate_up.weight, activation=self._activation)
        else:
            wide = self._times(normed, gate_up, self._wide)
            gated_activation(narrow, wide, activation=self._activation, overlapped=overlapped)
        return narrow

    def _chosen_experts(self, normed: Tensor, experts: DeviceExperts) -> Tensor:
        scores = torch.softmax(_router_logits(normed, experts.router), dim=-1)
        weight, chosen = scores.topk(experts.per_token, dim=-1)
        if experts.normalize:
            weight = weight / weight.sum(dim=-1, keepdim=True)
        update = self._update[: len(normed)]
        assert self._expert_buffers is not None
        expert_product(update, normed, chosen, weight, experts.weights, self._expert_buffers)
        return update

    # -- one row -----------------------------------------------------------------------------------------------

    def _forward_one(self, attention: DeviceAttention, step: StepPlans, places: list[TokenPlaces]) -> Tensor:
        """A single token: each product takes in the norm before it or the gate after it."""
        overlapped, epsilon = step.shape.overlapped, self.spec.norm_eps
        residual, other, update = self._residual[0], self._normed[0], self._update[0]
        update.zero_()
        for index, layer in enumerate(self._layers):
            assert layer.gate_up is not None and layer.down is not None
            norm = RowNorm(
                residual=residual, new_residual=other, weight=layer.norm_before_attention, epsilon=epsilon
            )
            _row(self._product[0], update, layer.qkv, norm=norm, overlapped=overlapped)
            if index in self._taps:
                self._tap(index, self._normed[:1])  # where the new residual is
            place = places[self.spec.layer_groups[index]]
            attended = attention.attend(step, index, self._product[:1], place, layer.head_norm)
            _row(update, attended[0], layer.output, overlapped=overlapped)
            norm = RowNorm(
                residual=other, new_residual=residual, weight=layer.norm_before_feed_forward, epsilon=epsilon
            )
            _row(self._narrow[0], update, layer.gate_up, norm=norm, gated=True, overlapped=overlapped)
            _row(update, self._narrow[0], layer.down, overlapped=overlapped)
        self._add(self._residual[:1], self._update[:1], self._norm, self._head, overlapped)
        if len(self._layers) in self._taps:
            self._tap(len(self._layers), self._residual[:1])
        return self._normed[:1]


def _row(
    out: Tensor,
    x: Tensor,
    linear: DeviceLinear,
    *,
    norm: RowNorm | None = None,
    gated: bool = False,
    overlapped: bool,
) -> None:
    assert not isinstance(linear, GroupedLinear)
    row_product(out, x, linear.weight, norm=norm, gated=gated, overlapped=overlapped)


def _scaled_dtype(layers: Sequence[DeviceLayer]) -> torch.dtype | None:
    """The type of weights of eight bits; None where a model has none."""
    linears = [linear for layer in layers for linear in layer.linears]
    found = {linear.weight.q.dtype for linear in linears if isinstance(linear, ScaledLinear)}
    assert len(found) <= 1, found
    return found.pop() if found else None


def _multiprocessors(device: torch.device) -> int:
    """How many programs of a gated product run at once; 0 where one of them has too little memory."""
    if device.type != "cuda":
        return 0
    properties = torch.cuda.get_device_properties(device)
    if getattr(properties, "shared_memory_per_block_optin", 0) < SHARED_BYTES:  # torch's types do not know it
        return 0
    return int(properties.multi_processor_count)


def _router_logits(x: Tensor, router: Tensor) -> Tensor:
    """In float32: rounded to a narrower type, the shares of a token's experts would be off by a percent or more."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, router.T, out_dtype=torch.float32)
    return torch.mm(x, router.T)
