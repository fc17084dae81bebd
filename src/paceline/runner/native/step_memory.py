"""The numpy arrays a step works in, and what a plan's batch becomes in them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.runner.device_rows import FlatBatch
from paceline.runner.native.adapters import StepAdapters
from paceline.runner.native.checks import Range, aligned
from paceline.runner.native.kv_pool import KVPool
from paceline.runner.native.layout import (
    COLUMNS,
    DRAW_SCRATCH,
    GROUP,
    INPUT_SCALES,
    LAYER,
    LINE,
    MOST_QUERY_TOKENS,
    NUM_PARTS,
    Q4_UNPACKED,
    ROW_BLOCK,
    SUB_BLOCK,
    TILE,
)
from paceline.runner.native.model import ACTIVATIONS, NativeModel, taken_turns
from paceline.runner.native.team import Parameters

Column = NDArray[np.int64]
Floats = NDArray[np.float32]


class StepMemory:
    """Buffers for steps of any size: they grow when a larger step comes, and are never made anew for a smaller one."""

    def __init__(self, model: NativeModel, pool: KVPool, max_length: int, threads: int) -> None:
        self.vectors: Floats | None = None  # of pictures
        self._model = model
        self._pool = pool
        self._threads = threads
        self._max_length = max_length
        self.parameters = Parameters()
        self._tokens = self._sampled = 0  # what there is room for
        self._ranks = 0  # of adapters
        self._adapters: StepAdapters | None = None  # of the step
        self.logits: Floats = np.zeros((0, 0), np.float32)
        self._constants()
        self.grow(TILE, TILE)

    def _constants(self) -> None:
        spec, model, p = self._model.spec, self._model, self.parameters
        p.set(
            num_layers=spec.num_layers,
            hidden=spec.hidden_size,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rotary_dim=spec.ropes[0].rotary_dim,
            inner=spec.intermediate_size,
            vocabulary=model.head.outputs,
            activation=ACTIVATIONS[spec.activation],
            input_bytes=model.input_bytes,
            embedding_kind=model.embedding.kind,
            embedding=model.embedding.at,
            head_kind=model.head.kind,
            head=model.head.at,
            last_norm=model.last_norm,
            kv_in_bytes=int(self._pool.in_bytes),
            deep=spec.num_deep,
        )
        if spec.experts is not None:
            p.set(
                num_experts=spec.experts.num_experts,
                per_token=spec.experts.per_token,
                normalize=int(spec.experts.normalize),
                expert_inner=spec.experts.intermediate_size,
            )
        p.set_floats(embed_scale=spec.embed_scale, norm_eps=spec.norm_eps, softmax_scale=spec.softmax_scale)
        # A copy: runners that share a model have separate caches.
        self._layers, pool = model.layers.copy(), self._pool
        layers = self._layers
        layers[:, LAYER["block_bytes"]] = pool.sub_bytes
        layers[:, LAYER["subs"]] = pool.subs
        layers[:, LAYER["kv"]] = [keys_values.ctypes.data for keys_values in pool.layers]
        p.point("layers", layers)
        self._turned: list[Floats] = []  # cos and sin of the step's tokens, where positions do not say them

    def grow(self, tokens: int, sampled: int) -> None:
        """Room for this many tokens and sampled rows."""
        if tokens > self._tokens:
            self._tokens = -(-tokens // TILE) * TILE
            self._make_rows(self._tokens)
        if sampled > self._sampled:
            self._sampled = -(-sampled // TILE) * TILE
            width = self._model.head.outputs
            self.logits = aligned(self._sampled * width * 4).view(np.float32).reshape(self._sampled, width)
            self.parameters.point("logits", self.logits)
            self.parameters.set(logits_step=width * 4)

    def _make_rows(self, count: int) -> None:
        spec, p = self._model.spec, self.parameters
        hidden, inner, queries = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
        for name, width in (("residual", hidden), ("delta", hidden), ("queries", queries)):
            p.point(name, aligned(count * width * 4))
        self._make_input("normed", count * hidden, has_floats=True)
        # What adapters are multiplied with is not quantised.
        self._make_input("attended", count * queries, has_floats=self._ranks > 0)
        self._make_input("gated", max(count * inner, self._make_experts(count)), has_floats=self._ranks > 0)
        if self._ranks:
            p.point("low", aligned(count * NUM_PARTS * self._ranks * 4))
            p.set(low_part=self._ranks * 4, low_step=NUM_PARTS * self._ranks * 4)
        self.finite = np.ones(count, np.int64)
        self._sampled_at = np.full(count, -1, np.int64)
        p.point("finite", self.finite)
        p.point("sampled", self._sampled_at)
        scores = -(-self._max_length // SUB_BLOCK) * SUB_BLOCK * 4 + 64
        size = max(
            192 * count,  # gate and up of 32 columns
            min(count, ROW_BLOCK) * spec.head_dim * 4,
            128 + 24 * spec.head_dim + TILE * scores,
            4 * hidden,
            DRAW_SCRATCH,
            4 * -(-(spec.experts.num_experts if spec.experts else 0) // COLUMNS) * COLUMNS,
        )
        size = -(-size // LINE) * LINE
        p.point("scratch", aligned(self._threads * size))
        unpacked = max(hidden, inner, queries) // GROUP * Q4_UNPACKED
        p.point("unpacked", aligned(self._threads * unpacked))
        p.set(scratch_step=size, unpacked_step=unpacked, scores_step=scores)

    def _make_input(self, name: str, size: int, *, has_floats: bool = False) -> None:
        """Inputs of a product: floats, or bytes and their scales, or both."""
        p, width = self.parameters, self._model.input_bytes
        p.point(name, aligned(size * 4 if has_floats or not width else 4))
        if width:
            p.point(f"{name}_q", aligned(size * width))
            p.point(f"{name}_scales", aligned(size // GROUP * INPUT_SCALES))

    def _make_experts(self, count: int) -> int:
        """What experts need beside it; returns how many numbers their inner layers have at most."""
        experts, p = self._model.spec.experts, self.parameters
        if experts is None:
            return 0
        hidden, chosen = self._model.spec.hidden_size, count * experts.per_token
        # Each expert's entries fill whole tiles.
        entries = -(-(chosen + min(experts.num_experts, chosen) * (TILE - 1)) // TILE) * TILE
        p.point("chosen", aligned(chosen * 16))
        p.point("firsts", aligned(8 * (experts.num_experts + 1)))
        p.point("sizes", aligned(8 * experts.num_experts))
        p.point("entries", aligned(8 * entries))
        p.point("places", aligned(8 * chosen))
        p.point("expert_parts", aligned(entries * hidden * 4))
        self._make_input("expert_x", entries * hidden)
        return entries * experts.intermediate_size

    def load(
        self,
        batch: FlatBatch,
        tables: list[Column],
        sampled: Column,
        adapters: StepAdapters | None = None,
        seen: Column | None = None,
        turns: Column | None = None,
    ) -> None:
        """Point the parameters at a batch; `sampled` are the tokens whose logits are wanted. `seen`: for each token the
        address of the vector that it stands for, or 0. `turns` [3, tokens]: by what tokens turn, where that is not
        their position."""
        count = len(batch.tokens)
        if adapters is not None and adapters.ranks > self._ranks:
            self._ranks, self._tokens = adapters.ranks, 0  # all buffers are made anew
        self.grow(count, 0)
        p = self.parameters
        self._point_at(adapters)
        p.set(seen=0)
        if seen is not None:
            p.point("seen", seen)
        tiles = query_tiles(batch, padding_row=len(tables[0]) - 1)
        # What a token sees ends behind it, at its place among what its row has not dropped.
        columns = {
            "tokens": batch.tokens,
            "positions": self._turn(batch.positions, turns),
            "ends": batch.places + 1,
            "tiles": tiles,
        }
        for name, values in columns.items():
            p.point(name, np.ascontiguousarray(values, np.int64))
        p.set(num_tokens=count, num_tiles=len(tiles))
        self.sample(count, sampled)
        self._slots = [np.ascontiguousarray(slots, np.int64) for slots in batch.slots]
        self._tables = tables
        layers, groups = self._layers, np.array(self._pool.layer_groups)
        starts = np.array([slots.ctypes.data for slots in self._slots])
        layers[:, LAYER["slots"]] = starts[groups]
        layers[:, LAYER["table"]] = np.array([table.ctypes.data for table in tables])[groups]
        layers[:, LAYER["table_width"]] = np.array([table.shape[1] for table in tables])[groups]

    def _turn(self, positions: Column, turns: Column | None) -> Column:
        """For each token its row in the tables of cos and sin: those of the model, or of this step alone."""
        layers, places = self._layers, [LAYER["cos"], LAYER["sin"]]
        if turns is None or (turns == turns[0]).all():
            if self._turned:
                self._turned, layers[:, places] = [], self._model.layers[:, places]
            return positions if turns is None else turns[0]
        spec = self._model.spec
        tables = [
            taken_turns(pair, rope, turns) for rope, pair in zip(spec.ropes, self._model.turns, strict=True)
        ]
        layers[:, places] = [[table.ctypes.data for table in tables[rope]] for rope in spec.layer_ropes]
        self._turned = [table for pair in tables for table in pair]
        return np.arange(turns.shape[1])

    def _point_at(self, adapters: StepAdapters | None) -> None:
        p, self._adapters = self.parameters, adapters
        if adapters is None:
            p.set(adapted=0)
            return
        p.point("adapted", adapters.of_token)
        p.point("adapted_tokens", adapters.tokens)
        p.point("adapted_blocks", adapters.blocks)
        p.set(num_adapted_blocks=len(adapters.blocks))

    def ranges(self) -> list[Range]:
        """What the layers point to."""
        found = [
            Range.of(f"keys and values of layer {layer}", pool, writable=True)
            for layer, pool in enumerate(self._pool.layers)
        ]
        found += [Range.of("slots", slots) for slots in self._slots]
        found += [Range.of("block table", table) for table in self._tables]
        found += [] if self._adapters is None else self._adapters.ranges()
        found += [Range.of("turns of the step", table) for table in self._turned]
        found += [] if self.vectors is None else [Range.of("vectors of pictures", self.vectors)]
        return found + self._model.ranges

    def residual(self, first: int, end: int) -> Floats:
        """Of tokens of the last step, what all layers have added up."""
        width = self._model.spec.hidden_size
        kept = self.parameters.kept["residual"].view(np.float32)
        return kept[first * width : end * width].reshape(end - first, width)

    def sample(self, count: int, sampled: Column) -> None:
        """Of the `count` tokens of a step, those whose logits are wanted."""
        self.grow(count, len(sampled))
        self._sampled_at[:count] = -1
        self._sampled_at[:count][sampled] = np.arange(len(sampled))
        self.parameters.set(num_sampled=len(sampled))


def query_tiles(batch: FlatBatch, padding_row: int) -> Column:
    """Tokens of one row that attention takes together: [tile, (first token, count, row)]."""
    counts = batch.count
    pads = len(batch.tokens) - int(counts.sum())
    if pads:
        counts = np.concatenate([counts, np.ones(pads, np.int64)])
    owners = np.concatenate([batch.rows, np.full(pads, padding_row)]) if pads else batch.rows
    if len(batch.rows) == len(batch.tokens):
        return np.stack([np.arange(len(counts)), counts, owners], axis=1)
    pieces = -(-counts // MOST_QUERY_TOKENS)
    row = np.repeat(np.arange(len(counts)), pieces)
    within = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = within * MOST_QUERY_TOKENS
    length = np.minimum(counts[row] - first, MOST_QUERY_TOKENS)
    starts = np.cumsum(counts) - counts
    return np.stack([starts[row] + first, length, owners[row]], axis=1)
