"""An encoder computed by the native kernels: texts in, hidden states out, one compiled call.

Owns its weights and the memory of a call. A text's keys and values are those of one layer only; nothing is kept between
calls. Knows token ids and numbers; never a request.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from paceline.core.counters import CPUWork
from paceline.core.standing import Pulse
from paceline.models.files.stored import TensorSource, check_finite
from paceline.models.spec import ModelSpec
from paceline.runner.machine_load import MANY_TOKENS, FreeCores
from paceline.runner.native.arena import Arena, Matrix, build_arena
from paceline.runner.native.checks import Range, aligned
from paceline.runner.native.code import Code
from paceline.runner.native.layout import (
    COLUMNS,
    GROUP,
    INPUT_SCALES,
    LAYER,
    LINE,
    MOST_QUERY_TOKENS,
    Q8,
    ROW_BLOCK,
    SUB_BLOCK,
    TILE,
    kv_head_bytes,
)
from paceline.runner.native.model import ACTIVATIONS, rope_tables
from paceline.runner.native.step import PhaseBeats
from paceline.runner.native.team import Parameters, Team

Index = NDArray[np.int64]
Floats = NDArray[np.float32]

MOST_TOKENS = 1024  # computed together: their numbers stay in a near cache
_MATRICES = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "output": "attention.output.dense",
    "gate": "intermediate.dense",
    "up": "intermediate.up",
    "down": "output.dense",
}


def objection(spec: ModelSpec, quantization: str = "auto") -> str:
    """Why an encoder cannot run on the native kernels, in words; empty when it can."""
    step = GROUP if quantization == "int8" else COLUMNS
    sizes = {"hidden size": (spec.hidden_size, step), "head size": (spec.head_dim, step)}
    sizes["intermediate size"] = (spec.intermediate_size, GROUP)
    for name, (size, multiple) in sizes.items():
        if size % multiple:
            return f"its {name} of {size} is not a multiple of {multiple}"
    return ""


class NativeEncoder:
    """`models.encoder.Encoder` on the native kernels, in float32 or with weights and inputs as bytes."""

    def __init__(
        self,
        source: TensorSource,
        code: Code,
        threads: int,
        free: FreeCores | None = None,
        *,
        quantization: str = "auto",
        pulse: Pulse | None = None,
        on_matrix: Callable[[int, int], None] | None = None,
    ) -> None:
        self.spec = spec = source.spec
        assert spec.encoder is not None
        self._options = spec.encoder
        stems = [(layer, f"encoder.layer.{layer}.") for layer in range(spec.num_layers)]
        names = source.names()
        wanted = [f"{stem}{part}.weight" for _, stem in stems for part in _MATRICES.values()]
        wanted = [name for name in wanted if name in names]
        self._arena, matrices = build_arena(source, wanted, on_matrix, quantization, fine_inputs=False)
        self._weights = _Weights(source, self._arena)
        self._ranges = [Range(name, matrix.at, matrix.size) for name, matrix in matrices.items()]
        self.is_quantised = any(matrix.kind == Q8 for matrix in matrices.values())
        self._parameters = Parameters()
        self._threads = self._used = threads
        self._free = free
        self._tokens = self._subs = 0  # what there is room for
        self._layers = self._layer_table(stems, matrices)
        self._constants()
        self._ranges += [Range.of("a small tensor", values) for values in self._arena.kept]
        self._grow(TILE, 1)
        self._team = Team(code, self._parameters, threads)
        phase = partial(self._parameters.get, "phase")
        self._beats = PhaseBeats(pulse if pulse is not None else Pulse(), phase)
        weakref.finalize(self, self._beats.close).atexit = False
        self._call_s = 0.0

    # -- weights -------------------------------------------------------------------------------------------

    def _layer_table(self, stems: list[tuple[int, str]], matrices: dict[str, Matrix]) -> Index:
        spec, options, weights = self.spec, self._options, self._weights
        turns = [tuple(map(self._arena.keep, rope_tables(rope, spec.max_positions))) for rope in spec.ropes]
        layers = np.zeros((spec.num_layers, len(LAYER)), np.int64)
        for number, stem in stems:
            row: dict[str, int] = {"subs": 1}
            for field, part in _MATRICES.items():
                matrix = matrices.get(f"{stem}{part}.weight")
                if matrix is not None:
                    row |= {field: matrix.at, f"{field}_kind": matrix.kind}
            row["qkv_bias"] = weights.vector(*(f"{stem}{_MATRICES[part]}.bias" for part in "qkv"))
            row["output_bias"] = weights.vector(f"{stem}attention.output.dense.bias")
            row["gate_bias"] = weights.vector(f"{stem}intermediate.dense.bias")
            row["down_bias"] = weights.vector(f"{stem}output.dense.bias")
            # A norm behind a part is what stands before the next one.
            before = f"encoder.layer.{number - 1}.output.LayerNorm" if number else ""
            inner = stem + "attention.output.LayerNorm"
            if options.norm_first:
                before, inner = stem + "attention.LayerNorm", stem + "intermediate.LayerNorm"
            for field, name in (("attention", before), ("feed_forward", inner)):
                row[f"norm_before_{field}"] = weights.vector(name + ".weight")
                row[f"norm_bias_before_{field}"] = weights.vector(name + ".bias")
            if turns:
                row["cos"], row["sin"] = turns[spec.layer_ropes[number]]
            row["reach"] = options.reaches[number] if options.reaches else 0
            for field, value in row.items():
                layers[number, LAYER[field]] = value
        return layers

    def _constants(self) -> None:
        spec, p, options, weights = self.spec, self._parameters, self._options, self._weights
        last = f"encoder.layer.{spec.num_layers - 1}.output.LayerNorm"
        last = "final_norm" if options.norm_first else last
        p.set(
            is_encoder=1,
            num_layers=spec.num_layers,
            hidden=spec.hidden_size,
            heads=spec.num_heads,
            kv_heads=spec.num_heads,
            head_dim=spec.head_dim,
            rotary_dim=spec.ropes[0].rotary_dim if spec.ropes else 0,
            inner=spec.intermediate_size,
            activation=ACTIVATIONS[spec.activation],
            input_bytes=int(self.is_quantised),
            embedding=weights.rows("embeddings.word_embeddings.weight"),
            place_vectors=weights.places(options.position_offset),
            first_norm=weights.vector("embeddings.LayerNorm.weight"),
            first_norm_bias=weights.vector("embeddings.LayerNorm.bias"),
            last_norm=weights.vector(last + ".weight"),
            last_norm_bias=weights.vector(last + ".bias"),
            second_vector=weights.second,
        )
        p.set_floats(norm_eps=spec.norm_eps, softmax_scale=spec.softmax_scale)
        p.point("layers", self._layers)

    # -- memory of a call ----------------------------------------------------------------------------------

    def _grow(self, tokens: int, subs: int) -> None:
        """Room for so many tokens and sub-blocks of keys and values."""
        if tokens > self._tokens:
            self._tokens = -(-tokens // ROW_BLOCK) * ROW_BLOCK
            self._make_rows(self._tokens)
        if subs > self._subs:
            self._subs = subs
            size = self.spec.num_heads * kv_head_bytes(self.spec.head_dim, in_bytes=False)
            self._kv = aligned(subs * size)
            self._table = np.arange(subs + -(-self.spec.max_positions // SUB_BLOCK))
            layers = self._layers
            layers[:, LAYER["kv"]], layers[:, LAYER["block_bytes"]] = self._kv.ctypes.data, size
            # A text's sub-blocks lie one behind the other: its row of the table begins at the first of them.
            layers[:, LAYER["table"]], layers[:, LAYER["table_width"]] = self._table.ctypes.data, 1

    def _make_rows(self, count: int) -> None:
        spec, p = self.spec, self._parameters
        hidden, inner = spec.hidden_size, spec.intermediate_size
        for name in ("residual", "delta", "queries"):
            p.point(name, aligned(count * hidden * 4))
        # Where norms stand behind the parts, what is normed is the residual.
        p.point("normed", aligned(count * hidden * 4) if self._options.norm_first else p.kept["residual"])
        for name, width in (("attended", hidden), ("gated", inner)):
            p.point(name, aligned(4 if self.is_quantised else count * width * 4))
        if self.is_quantised:
            for name, width in (("normed", hidden), ("attended", hidden), ("gated", inner)):
                p.point(f"{name}_q", aligned(count * width))
                p.point(f"{name}_scales", aligned(count * width // GROUP * INPUT_SCALES))
        self._finite = np.ones(count, np.int64)
        p.point("finite", self._finite)
        scores = -(-spec.max_positions // SUB_BLOCK) * SUB_BLOCK * 4 + 64
        rows = count if self._options.is_gated else min(count, ROW_BLOCK)
        size = max(192 * rows, ROW_BLOCK * spec.head_dim * 4, 128 + 24 * spec.head_dim + TILE * scores)
        size = -(-size // LINE) * LINE
        p.point("scratch", aligned(self._threads * size))
        p.point("unpacked", aligned(LINE))  # of four bits only
        p.set(scratch_step=size, unpacked_step=0, scores_step=scores)

    # -- a call --------------------------------------------------------------------------------------------

    def forward(
        self, texts: Sequence[Index], beat: Callable[[], None], seconds: Sequence[int] = ()
    ) -> list[Floats]:
        """See `models.encoder.Encoder.forward`. Beats come from a thread beside the call."""
        sizes = np.array([len(text) for text in texts])
        subs = -(-sizes // SUB_BLOCK)
        total, starts, first_subs = int(sizes.sum()), np.cumsum(sizes) - sizes, np.cumsum(subs) - subs
        self._grow(total, int(subs.sum()))
        places = np.arange(total) - np.repeat(starts, sizes)
        columns = {
            "tokens": np.concatenate(texts).astype(np.int64, copy=False),
            "positions": places,
            "ends": np.repeat(sizes, sizes),
            "tiles": _tiles(sizes, starts, first_subs),
        }
        assert columns["tokens"].min() >= 0 and columns["tokens"].max() < self.spec.vocab_size
        assert sizes.max() <= self.spec.max_positions
        p = self._parameters
        for name, values in columns.items():
            p.point(name, np.ascontiguousarray(values))
        p.set(num_tokens=total, num_tiles=len(columns["tiles"]), seconds=0)
        if self._weights.second and any(seconds):
            begins = np.array([second or size for second, size in zip(seconds, sizes.tolist(), strict=True)])
            p.point("seconds", (places >= np.repeat(begins, sizes)).astype(np.int64))
        self._slots = np.repeat(first_subs * SUB_BLOCK, sizes) + places
        self._layers[:, LAYER["slots"]] = self._slots.ctypes.data
        self._run(beat)
        width = self.spec.hidden_size
        found = p.kept["normed"].view(np.float32)[: total * width].reshape(total, width).copy()
        return np.split(found, starts[1:])

    def work(self) -> CPUWork:
        phases = {phase: spent * 1e-9 for phase, spent in self._team.laps().items()}
        return CPUWork(self._used, phases, self._call_s)

    def close(self) -> None:
        self._beats.close()
        self._team.close()

    def _run(self, beat: Callable[[], None]) -> None:
        if self._free is not None:
            self._used = min(self._free.refresh(MANY_TOKENS), self._threads)
            self._parameters.set(sleeps=int(self._free.is_shared))
        started_s = time.perf_counter()
        with self._beats:
            self._team.run(self._used, True, None if self._team.checks is None else self._others())
        self._call_s += time.perf_counter() - started_s

    def _others(self) -> list[Range]:
        """What a call touches beside the parameters and what they point to."""
        return [
            *self._ranges,
            Range.of("keys and values", self._kv, writable=True),
            Range.of("block table", self._table),
            Range.of("slots", self._slots),
        ]


class _Weights:
    """Small tensors of a source, kept by an arena: their addresses, 0 for what the model does not have."""

    def __init__(self, source: TensorSource, arena: Arena) -> None:
        self._source, self._arena, self._names = source, arena, source.names()
        self.second = 0  # what a token of the second text of a pair has more

    def read(self, name: str) -> Floats:
        values = self._source.tensor(name).to_float32()
        check_finite(values, name)
        return values

    def vector(self, *names: str) -> int:
        """Some vectors, one behind the other."""
        if not set(names) <= self._names:
            return 0
        return self._arena.keep(np.concatenate([self.read(name) for name in names]))

    def rows(self, name: str) -> int:
        return self._arena.keep(self.read(name))

    def places(self, offset: int) -> int:
        """Vectors of the places of a text's tokens, which are nearly all of the first type."""
        name = "embeddings.position_embeddings.weight"
        if name not in self._names:
            return 0
        types = self.read("embeddings.token_type_embeddings.weight")
        if len(types) > 1:
            self.second = self._arena.keep(types[1] - types[0])
        return self._arena.keep(self.read(name)[offset:] + types[0])


def _tiles(sizes: Index, starts: Index, first_subs: Index) -> Index:
    """Tokens of one text that attention takes together: [tile, (first token, count, first sub-block)]."""
    pieces = -(-sizes // MOST_QUERY_TOKENS)
    text = np.repeat(np.arange(len(sizes)), pieces)
    first = (np.arange(len(text)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * MOST_QUERY_TOKENS
    count = np.minimum(sizes[text] - first, MOST_QUERY_TOKENS)
    return np.stack([starts[text] + first, count, first_subs[text]], axis=1)
