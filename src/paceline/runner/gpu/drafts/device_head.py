"""What guesses on the device: it follows every step, and guesses at the beginning of those with drafts: a draft head,
or a smaller model.

Following a step writes keys of the step's tokens into further layers of the same blocks; with a head each row gets the
state that goes with its next token. Tokens of drafts are followed like others: the keys of those that were wrong lie
behind the row's length and are overwritten. A guess is a pass over one token of each slot, as often as a row may have
drafts. Everything is computed into fixed buffers, so that it is part of a step's graph.
Decision: docs/decisions/0040-drafts-on-the-gpu.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.plan import RowCopies, RowJoins
from paceline.models.decoder import Parts
from paceline.models.files.head_folder import EMBEDDING, LAYER, HeadFiles
from paceline.models.files.open import Checkpoint
from paceline.models.spec import FurtherLayer, ModelSpec
from paceline.runner.drafts import NO_STATE
from paceline.runner.gpu.device_attention import DeviceAttention, LaunchShape
from paceline.runner.gpu.forward import DeviceDecoder, rotation_tables
from paceline.runner.gpu.kernels.decode_attention import (
    RowQueries,
    allocate_partials,
    allocate_plan,
    decode_attention,
    decode_tuning,
    plan_decode,
)
from paceline.runner.gpu.kernels.draft_layout import Proposals
from paceline.runner.gpu.kernels.gated_product import Activation, gated_activation
from paceline.runner.gpu.kernels.head_drafts import (
    DrawColumns,
    InputWeights,
    RowStates,
    allocate_guesses,
    draw_guesses,
    head_inputs,
    keep_states,
    merge_guesses,
    next_inputs,
    span_rows,
    states_of_rows,
)
from paceline.runner.gpu.kernels.prefill_attention import Spans
from paceline.runner.gpu.kernels.residual_norm import residual_norm
from paceline.runner.gpu.kernels.rope_kv_write import TokenPlaces, rope_kv_write
from paceline.runner.gpu.kernels.skinny_product import (
    MAX_PARTS,
    MAX_ROWS,
    ProductTuning,
    skinny_product,
    small_tuning,
)
from paceline.runner.gpu.kernels.step_rows import StepTokens, allocate_step_tokens, decode_inputs
from paceline.runner.gpu.kv_pools import KVPools, on_device
from paceline.runner.gpu.row_memory import RowMemory


def queries_of(width: int) -> int:
    """Queries of a row that attention is launched for, where it has this many drafts: a power of two."""
    return 1 << width.bit_length()


@dataclass(frozen=True, slots=True)
class HeadSite:
    """What a head works beside."""

    decoder: DeviceDecoder
    pools: KVPools
    memory: RowMemory
    max_tokens: int  # of a step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FollowedStep:
    """A step that the model has computed."""

    shape: LaunchShape
    tokens: StepTokens
    visible: Tensor  # int32 [rows]: tokens that each row's attention saw
    slot_rows: Tensor  # of decoding rows
    spans: Spans | None = None  # behind their tokens
    queries: RowQueries | None = None  # where decoding rows have drafts
    draft_rows: Tensor | None = None  # int32 [tokens]: whose they are then


class DeviceGuesser(ABC):
    """Guesses and their draws; what is computed for a guess, and kept for it, is a subclass's."""

    def __init__(self, site: HeadSite, most: int, to_target: Tensor) -> None:
        """`most`: guesses of a row. `to_target`: the model's number of each token that is guessed."""
        self._memory = memory = site.memory
        self._table = table = memory.tables[0]
        self._device = table.device
        self.most, self._to_target = most, to_target.to(table.device, torch.int32)
        self._tokens = allocate_step_tokens(memory.max_slots, 1, self._device)
        self._visible = torch.zeros(memory.num_rows + 1, dtype=torch.int32, device=self._device)
        self._guesses = allocate_guesses(memory.max_slots, most, self._device)
        self._draws = DrawColumns(
            rows=memory.columns,
            table=table,
            may_draft=memory.column("may_draft"),
            temperature=memory.wide("temperature", torch.float64),
            seed=memory.wide("seed", torch.int64),
            limits=memory.column("draft_limits"),
        )

    def join(self, joins: RowJoins) -> None:
        """Before the row memory is sent: rows get owners."""
        return None

    def fork(self, copies: RowCopies) -> None:
        """After it was sent: branches go on where their parents are."""
        return None

    @abstractmethod
    def follow(self, step: FollowedStep, hidden: Tensor) -> Tensor:
        """Keep what later guesses read of the tokens of a step; `hidden` states are the model's. Returns what `keep`
        gets."""
        ...

    def keep(
        self, tokens: StepTokens, behind: Tensor, slot_rows: Tensor, first: Tensor, count: Tensor
    ) -> None:
        """The rows got `count` int32 [slots] tokens: as many of theirs in the step, from `first` on, were right."""
        return None

    def guess(self, into: Proposals, slot_rows: Tensor, most: int, *, overlapped: bool) -> None:
        """Guesses of the next tokens of `slot_rows` [slots], `most` of a row; they replace those in `into` that are
        trusted less."""
        tokens, slots = self._tokens, len(slot_rows)
        decode_inputs(tokens, self._visible, self._memory.columns, slot_rows, [self._table])
        for depth in range(min(self.most, most)):
            logits = self._pass(depth, slot_rows, overlapped)
            draw_guesses(
                self._guesses,
                tokens,
                self._visible,
                logits,
                self._to_target,
                slot_rows,
                self._draws,
                depth=depth,
            )
        merge_guesses(into, self._guesses, slots, self._draws.limits)

    @abstractmethod
    def _pass(self, depth: int, slot_rows: Tensor, overlapped: bool) -> Tensor:
        """Logits [slots, draft vocabulary] of the token behind each of `_tokens`."""
        ...

    def warm_up(self, sizes: Iterable[int]) -> None:
        """Launch the products of following as steps of these many tokens do."""
        return None


class DeviceHead(DeviceGuesser):
    """With a state of each row, which comes from the model."""

    def __init__(self, files: HeadFiles, site: HeadSite, width: int) -> None:
        """`width`: most drafts of a row."""
        spec, memory = files.spec, site.memory
        super().__init__(site, min(width, spec.num_heads or width), torch.from_numpy(files.to_target))
        self._decoder, self._hidden_size = site.decoder, spec.hidden_size
        self._weights = {
            name: torch.from_numpy(np.array(values)).to(self._device, site.decoder.dtype)
            for name, values in files.tensors.items()
        }
        self._token_rows = self._room(site.max_tokens, dtype=torch.int32)
        self._kept = RowStates(
            state=self._room(memory.num_rows + 1, spec.hidden_size), position=memory.column("state_position")
        )
        self._logits = self._room(memory.max_slots, spec.draft_vocab_size)

    def _room(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(sizes, dtype=dtype or self._decoder.dtype, device=self._device)

    def join(self, joins: RowJoins) -> None:
        # What goes with the next token of these rows is not known.
        self._memory.put("state_position", joins.row.astype(np.int64), np.full(len(joins.row), NO_STATE))

    def fork(self, copies: RowCopies) -> None:
        if not len(copies.source):
            return
        sources, targets = (on_device(rows.tolist(), self._table) for rows in (copies.source, copies.target))
        for column in (self._kept.state, self._kept.position):
            column[targets] = column[sources]

    def follow(self, step: FollowedStep, hidden: Tensor) -> Tensor:
        tokens, slot_rows, spans = step.tokens, step.slot_rows, step.spans
        behind = self._follow(tokens, self._rows_of(step), hidden, step.shape.overlapped)
        if step.draft_rows is not None:
            return behind
        if len(slot_rows):
            keep_states(self._kept, behind, tokens, slot_rows)
        if spans is not None:
            keep_states(self._kept, behind, tokens, spans.row, spans.first, spans.count)
        return behind

    def _rows_of(self, step: FollowedStep) -> Tensor:
        """Whose the tokens of a step are; what is left over is stored nowhere."""
        if step.draft_rows is not None:
            return step.draft_rows
        if step.spans is None and step.shape.num_tokens == len(step.slot_rows):
            return step.slot_rows
        token_rows = self._token_rows[: step.shape.num_tokens].fill_(self._memory.dummy_row)
        token_rows[: len(step.slot_rows)] = step.slot_rows
        if step.spans is not None:
            span_rows(token_rows, step.spans, step.shape.longest_span)
        return token_rows

    def _follow(self, tokens: StepTokens, token_rows: Tensor, hidden: Tensor, overlapped: bool) -> Tensor:
        """Returns the states that come from `tokens`; `token_rows` int32 [tokens]: whose they are."""
        return hidden

    def keep(
        self, tokens: StepTokens, behind: Tensor, slot_rows: Tensor, first: Tensor, count: Tensor
    ) -> None:
        keep_states(self._kept, behind, tokens, slot_rows, first, count)


class DeviceEagle(DeviceHead):
    """Three hidden states fused, the token's embedding beside them, one layer, a reduced vocabulary."""

    def __init__(self, files: HeadFiles, site: HeadSite, width: int, longest: int) -> None:
        """`longest`: tokens of the longest sequence."""
        super().__init__(files, site, width)
        layer, weights, decoder = files.spec.layer, self._weights, site.decoder
        assert layer is not None
        # Its keys are a further layer of the first group: layers that see everything are in it, where there are any.
        self._layer, self._kv, self._window = layer, site.pools.further[0], decoder.spec.group_windows[0] or 0
        self._inputs = InputWeights(
            embedding=weights.get(EMBEDDING, decoder.embedding),
            token_norm=weights[f"{LAYER}input_layernorm.weight"],
            state_norm=weights[f"{LAYER}hidden_norm.weight"],
            epsilon=layer.norm_eps,
        )
        parts = (weights.pop(f"{LAYER}self_attn.{part}_proj.weight") for part in ("q", "k", "v"))
        self._qkv = torch.cat(list(parts))
        gate_up = (weights.pop(f"{LAYER}mlp.{part}_proj.weight") for part in ("gate", "up"))
        self._gate_up = torch.cat(list(gate_up))
        self._activation: Activation = "silu" if layer.activation == "silu" else "gelu_tanh"
        self._rotation = rotation_tables(layer, longest + 1, self._device)[0]
        self._make_buffers(layer, site.memory.max_slots, site.max_tokens)

    def _make_buffers(self, layer: ModelSpec, slots: int, max_tokens: int) -> None:
        hidden, dim = self._hidden_size, layer.head_dim
        self._x, self._fused = self._room(max_tokens, 2 * hidden), self._room(max_tokens, hidden)
        self._keys = self._room(max_tokens, 2 * layer.num_kv_heads * dim)
        self._product = self._room(slots, len(self._qkv))
        self._query = self._room(slots, layer.num_heads, dim)
        self._out = self._room(slots, layer.num_heads, dim)
        self._log_sum = self._room(slots, layer.num_heads, dtype=torch.float32)
        self._state, self._normed = self._room(slots, hidden), self._room(slots, hidden)
        self._wide = self._room(slots, 2 * layer.intermediate_size)
        self._narrow = self._room(slots, layer.intermediate_size)
        self._parts = self._room(MAX_PARTS * min(slots, MAX_ROWS) * hidden, dtype=torch.float32)
        self._multiprocessors = 1
        if self._device.type == "cuda":
            self._multiprocessors = torch.cuda.get_device_properties(self._device).multi_processor_count
        chunks = max(self._chunks(1), self._chunks(slots))
        self._plan = replace(allocate_plan(slots, chunks, device=self._device), window=self._window)
        self._partials = allocate_partials(
            self._plan, heads=layer.num_heads, kv_heads=layer.num_kv_heads, head_dim=dim
        )

    def _chunks(self, slots: int) -> int:
        return decode_tuning(slots).target_chunks(self._multiprocessors, self._layer.num_kv_heads)

    def _follow(self, tokens: StepTokens, token_rows: Tensor, hidden: Tensor, overlapped: bool) -> Tensor:
        count = len(token_rows)
        behind, x, product = self._fused[:count], self._x[:count], self._keys[:count]
        self._times(self._decoder.tapped[:count], self._weights["fc.weight"], behind, overlapped)
        head_inputs(x, tokens, token_rows, self._inputs, self._kept, behind=behind)
        # There is one layer: keys and values need nothing that attention gives, and no queries.
        queries = len(self._qkv) - product.shape[1]
        self._times(x, self._qkv[queries:], product, overlapped)
        self._turn(self._query[:1, :0].expand(count, -1, -1), product, tokens, overlapped)
        return behind

    def _turn(self, query: Tensor, product: Tensor, tokens: StepTokens, overlapped: bool) -> None:
        count, kv = len(product), self._kv
        places = TokenPlaces(positions=tokens.positions[:count], slots=tokens.slots[0][:count])
        rope_kv_write(query, kv.keys, kv.values, product, places, self._rotation, overlapped=overlapped)

    def _pass(self, depth: int, slot_rows: Tensor, overlapped: bool) -> Tensor:
        count, tokens, weights, epsilon = len(slot_rows), self._tokens, self._weights, self._layer.norm_eps
        tuning = replace(decode_tuning(count), overlapped=overlapped)
        chunks = self._chunks(count)
        plan = replace(
            self._plan, num_slots=count, target_chunks=chunks, items=self._plan.items[: count + chunks]
        )
        plan_decode(plan, slot_rows, self._visible)
        x, state, normed = self._x[:count], self._state[:count], self._normed[:count]
        if depth:
            next_inputs(x, tokens, self._inputs, state)
        else:
            head_inputs(x, tokens, slot_rows, self._inputs, self._kept, states=state)
        product = self._times(x, self._qkv, self._product[:count], overlapped)
        query, out = self._query[:count], self._out[:count]
        self._turn(query, product, tokens, overlapped)
        decode_attention(
            out,
            self._log_sum[:count],
            query,
            self._kv,
            plan,
            self._partials,
            scale=self._layer.softmax_scale,
            tuning=tuning,
        )
        output, down = weights[f"{LAYER}self_attn.o_proj.weight"], weights[f"{LAYER}mlp.down_proj.weight"]
        update = self._update(out.view(count, -1), output, state, overlapped)
        norm = weights[f"{LAYER}post_attention_layernorm.weight"]
        residual_norm(normed, state, update, norm, epsilon=epsilon, overlapped=overlapped)
        update = self._update(self._fed(normed, overlapped), down, state, overlapped)
        residual_norm(normed, state, update, weights["norm.weight"], epsilon=epsilon, overlapped=overlapped)
        return self._times(normed, weights["lm_head.weight"], self._logits[:count], overlapped)

    # -- products: few rows through our own kernel, which need not wait for the one before it to end ---------------

    def _tuning(self, x: Tensor, columns: int, *, splits: bool = False) -> ProductTuning | None:
        if len(x) > MAX_ROWS or x.dtype == torch.float32:
            return None
        return small_tuning(columns, x.shape[1], splits=splits)

    def _times(self, x: Tensor, weight: Tensor, out: Tensor, overlapped: bool) -> Tensor:
        tuning = self._tuning(x, len(weight))
        if tuning is None:
            return torch.mm(x, weight.T, out=out)
        skinny_product(out, x, weight, tuning=tuning, overlapped=overlapped)
        return out

    def _update(self, x: Tensor, weight: Tensor, state: Tensor, overlapped: bool) -> Tensor | None:
        """A product that is added to `state`: in parts that the next norm adds, or at once."""
        tuning = self._tuning(x, len(weight), splits=True)
        if tuning is None:
            torch.addmm(state, x, weight.T, out=state)
            return None
        parts = self._parts[: tuning.parts * state.numel()].view(tuning.parts, *state.shape)
        into = parts if tuning.parts > 1 else parts[0]  # in float32 too
        skinny_product(into, x, weight, tuning=tuning, overlapped=overlapped)
        return parts

    def _fed(self, normed: Tensor, overlapped: bool) -> Tensor:
        count = len(normed)
        narrow = self._narrow[:count]
        tuning = self._tuning(normed, narrow.shape[1]) if self._activation == "silu" else None
        if tuning is None:
            wide = torch.mm(normed, self._gate_up.T, out=self._wide[:count])
            gated_activation(narrow, wide, activation=self._activation, overlapped=overlapped)
        else:
            skinny_product(narrow, normed, self._gate_up, tuning=tuning, gated=True, overlapped=overlapped)
        return narrow

    def warm_up(self, sizes: Iterable[int]) -> None:
        queries = len(self._qkv) - self._keys.shape[1]
        for size in sizes:
            torch.mm(self._decoder.tapped[:size], self._weights["fc.weight"].T, out=self._fused[:size])
            torch.mm(self._x[:size], self._qkv[queries:].T, out=self._keys[:size])


class DeviceMedusa(DeviceHead):
    """A residual block and an output matrix for each token ahead, all from the last hidden state; no keys."""

    def __init__(self, files: HeadFiles, site: HeadSite, width: int) -> None:
        super().__init__(files, site, width)
        self._state, self._inner = (self._room(site.memory.max_slots, self._hidden_size) for _ in range(2))

    def _pass(self, depth: int, slot_rows: Tensor, overlapped: bool) -> Tensor:
        count, weights, prefix = len(slot_rows), self._weights, f"medusa_head.{depth}."
        state, inner = self._state[:count], self._inner[:count]
        if not depth:
            states_of_rows(state, self._tokens, slot_rows, self._kept)
        bias, first = weights[f"{prefix}0.linear.bias"], weights[f"{prefix}0.linear.weight"]
        torch.addmm(bias, state, first.T, out=inner)
        F.silu(inner, inplace=True).add_(state)
        return torch.mm(inner, weights[f"{prefix}1.weight"].T, out=self._logits[:count])


# A smaller model of the same vocabulary guesses with the decoder and the attention of the model. Its layers keep their
# keys in further layers of the same blocks, by the tables of the first group. It computes the tokens of every step once
# more, which is how it follows; a guess is a decode step of it. Nothing is kept by row.


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
