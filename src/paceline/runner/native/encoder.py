"""An encoder computed by the native kernels: texts in, hidden states out, one compiled call.

Owns its weights and the memory of a call. A text's keys and values are those of one layer only; nothing is kept between
calls. Knows token ids and numbers; never a request. What reads pictures has the same weights and calls, and lines that
stay between them (`picture_encoder`).
"""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.counters import CPUWork
from paceline.core.standing import Pulse
from paceline.models.files.stored import StoredTensor, TensorSource, check_finite, decode_float
from paceline.models.spec import ModelSpec
from paceline.runner.machine_load import MANY_TOKENS, FreeCores
from paceline.runner.native.arena import Arena, Matrix, build_arena, kinds_of
from paceline.runner.native.checks import Range, aligned
from paceline.runner.native.code import Code
from paceline.runner.native.layout import (
    COLUMNS,
    GROUP,
    INPUT_SCALES,
    KINDS,
    LAYER,
    LINE,
    MOST_QUERY_TOKENS,
    Q8,
    QUAD,
    QUANTISED,
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


def objection(source: TensorSource, quantization: str = "auto", prefix: str = "") -> str:
    """Why an encoder cannot run on the native kernels, in words; empty when it can. `prefix`: of its tensors."""
    spec = encoder_of(source, prefix)
    names = source.names()
    wanted = [name for _, name in _matrix_names(spec, prefix) if name in names]
    kinds = kinds_of(map(source.tensor, wanted), quantization, fine_inputs=False)
    quantised = {kind for kind in kinds.values() if kind in QUANTISED}
    if quantised and set(kinds.values()) != {Q8}:
        return f"its matrices are {', '.join(sorted({KINDS[kind] for kind in kinds.values()}))}"
    step = GROUP if quantised else COLUMNS
    if spec.hidden_size % step:
        return f"its hidden size of {spec.hidden_size} is not a multiple of {step}"
    if spec.activation not in ACTIVATIONS:
        return f"there is no native {spec.activation} activation"
    return _patch_objection(spec)


def _patch_objection(spec: ModelSpec) -> str:
    """The same of what stands before and behind the layers of an encoder of pictures."""
    assert spec.encoder is not None
    patches = spec.encoder.patches
    if patches is None:
        return ""
    if 3 * patches.size**2 % QUAD:
        return f"its patches of {patches.size} x {patches.size} pixels are not a multiple of {QUAD} numbers"
    square = spec.hidden_size * patches.merge**2
    if patches.has_inner and square % GROUP:
        return f"its squares of {square} numbers are not a multiple of {GROUP}"
    return ""


def encoder_of(source: TensorSource, prefix: str) -> ModelSpec:
    """The model itself, or the encoder of its pictures."""
    spec = source.spec.vision if prefix else source.spec
    assert spec is not None and spec.encoder is not None
    return spec


def _matrix_names(spec: ModelSpec, prefix: str) -> list[tuple[int, str]]:
    """Those of all layers, whether the model has them or not, each with its layer."""
    return [
        (layer, f"{prefix}encoder.layer.{layer}.{part}.weight")
        for layer in range(spec.num_layers)
        for part in _MATRICES.values()
    ]


class _Filled:
    """A source whose heads and inner layers are filled up with zeros to sizes that the kernels take."""

    def __init__(self, source: TensorSource, spec: ModelSpec, step: int) -> None:
        self._source, self._given = source, spec
        self._heads, self._inner = (
            -(-spec.head_dim // step) * step,
            -(-spec.intermediate_size // GROUP) * GROUP,
        )
        self.spec = replace(
            spec, head_dim=self._heads, intermediate_size=self._inner, attention_scale=spec.softmax_scale
        )

    def names(self) -> frozenset[str]:
        return self._source.names()

    def tensor(self, name: str) -> StoredTensor:
        tensor, given = self._source.tensor(name), self._given
        part = _PARTS.search(name)
        if part is None:
            return tensor
        if part["heads"]:
            return _filled(tensor, 0, given.num_heads, given.head_dim, self._heads)
        if part["mixed"]:
            return _filled(tensor, 1, given.num_heads, given.head_dim, self._heads)
        return _filled(tensor, 0 if part["inner"] else 1, 1, given.intermediate_size, self._inner)


_PARTS = re.compile(
    r"encoder\.layer\.\d+\.((?P<heads>attention\.self\..*)|(?P<mixed>attention\.output\.dense\.weight)"
    r"|(?P<inner>intermediate\.(dense|up)\..*)|(?P<outer>output\.dense\.weight))"
)
_WORDS = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}


def _filled(tensor: StoredTensor, axis: int, parts: int, given: int, size: int) -> StoredTensor:
    """A matrix or a bias with zeros behind each of the equal parts of an axis. Zeros of all types are zeros."""
    if given == size:
        return tensor
    kind = _WORDS.get(tensor.dtype)
    values: NDArray[np.generic] = tensor.to_float32()
    if kind is not None:
        values = tensor.raw.view(kind).reshape(tensor.shape)
    before, behind = tensor.shape[:axis], tensor.shape[axis + 1 :]
    values = values.reshape(*before, parts, given, *behind)
    room = [(0, size - given) if at == axis + 1 else (0, 0) for at in range(values.ndim)]
    whole = np.ascontiguousarray(np.pad(values, room))
    shape, raw = (*before, parts * size, *behind), whole.view(np.uint8).reshape(-1)
    if kind is not None:
        return replace(tensor, shape=shape, raw=raw)
    return replace(tensor, shape=shape, dtype="F32", raw=raw, decode=decode_float)


class EncoderKernels:
    """Weights of an encoder, the memory of a call, and the threads that make it. `prefix`: of its tensors."""

    def __init__(
        self,
        source: TensorSource,
        code: Code,
        threads: int,
        free: FreeCores | None = None,
        *,
        prefix: str = "",
        quantization: str = "auto",
        pulse: Pulse | None = None,
        on_matrix: Callable[[int, int], None] | None = None,
    ) -> None:
        spec = encoder_of(source, prefix)
        assert spec.encoder is not None
        self._options = spec.encoder
        names = source.names()
        wanted = [name for _, name in _matrix_names(spec, prefix) if name in names]
        kinds = kinds_of(map(source.tensor, wanted), quantization, fine_inputs=False)
        self.is_quantised = Q8 in kinds.values()
        filled = _Filled(source, spec, GROUP if self.is_quantised else COLUMNS)
        self.spec = filled.spec
        self._width = filled.spec.num_heads * filled.spec.head_dim
        self._arena, matrices = build_arena(filled, wanted, on_matrix, quantization, fine_inputs=False)
        self._weights = Weights(filled, self._arena, prefix)
        self._ranges = [Range(name, matrix.at, matrix.size) for name, matrix in matrices.items()]
        self._parameters = Parameters()
        self._threads = self._used = threads
        self._free = free
        self._room = 0  # tokens that there is room for
        self._layers = self._layer_table(prefix, matrices)
        self._parameters.set(
            is_encoder=1,
            is_rms=int(spec.encoder.is_rms),
            hidden=spec.hidden_size,
            heads=spec.num_heads,
            kv_heads=spec.num_heads,
            head_dim=self.spec.head_dim,
            rotary_dim=spec.ropes[0].rotary_dim if spec.ropes else 0,
            inner=self.spec.intermediate_size,
            activation=ACTIVATIONS[spec.activation],
            input_bytes=int(self.is_quantised),
        )
        self._parameters.set_floats(norm_eps=spec.norm_eps, softmax_scale=spec.softmax_scale)
        self._constants()
        self._ranges += [Range.of("a small tensor", values) for values in self._arena.kept]
        self._make_rows(TILE)
        self._code, self._pulse = code, pulse if pulse is not None else Pulse()
        self._call_s = 0.0
        self._laps: dict[str, int] = {}  # of teams that have ended
        self._start()

    def _start(self) -> None:
        self._team: Team | None = Team(self._code, self._parameters, self._threads)
        self._beats = PhaseBeats(self._pulse, partial(self._parameters.get, "phase"))
        weakref.finalize(self, self._beats.close).atexit = False

    def _constants(self) -> None:
        """What a kind of encoder has beside it."""
        raise NotImplementedError

    # -- weights -------------------------------------------------------------------------------------------

    def _layer_table(self, prefix: str, matrices: dict[str, Matrix]) -> Index:
        spec, options, weights = self.spec, self._options, self._weights
        layers = np.zeros((spec.num_layers, len(LAYER)), np.int64)
        for number in range(spec.num_layers):
            stem = f"encoder.layer.{number}."
            row: dict[str, int] = {"subs": 1}
            for field, part in _MATRICES.items():
                matrix = matrices.get(f"{prefix}{stem}{part}.weight")
                if matrix is not None:
                    row |= {field: matrix.at, f"{field}_kind": matrix.kind}
            row["qkv_bias"] = weights.vector(*(f"{stem}{_MATRICES[part]}.bias" for part in "qkv"))
            row["output_bias"] = weights.vector(f"{stem}attention.output.dense.bias")
            row["gate_bias"] = weights.vector(f"{stem}intermediate.dense.bias")
            row["up_bias"] = weights.vector(f"{stem}intermediate.up.bias")
            row["down_bias"] = weights.vector(f"{stem}output.dense.bias")
            # A norm behind a part is what stands before the next one.
            before = f"encoder.layer.{number - 1}.output.LayerNorm" if number else ""
            inner = stem + "attention.output.LayerNorm"
            if options.norm_first:
                before, inner = stem + "attention.LayerNorm", stem + "intermediate.LayerNorm"
            for field, name in (("attention", before), ("feed_forward", inner)):
                row[f"norm_before_{field}"] = weights.vector(name + ".weight")
                row[f"norm_bias_before_{field}"] = weights.vector(name + ".bias")
            row["reach"] = options.reaches[number] if options.reaches else 0
            for field, value in row.items():
                layers[number, LAYER[field]] = value
        return layers

    # -- memory of a call ----------------------------------------------------------------------------------

    def _make_rows(self, count: int) -> None:
        """Room for so many tokens."""
        if count <= self._room:
            return
        self._room = count = -(-count // ROW_BLOCK) * ROW_BLOCK
        spec, p = self.spec, self._parameters
        hidden, inner = spec.hidden_size, spec.intermediate_size
        for name, width in (("delta", hidden), ("queries", self._width), ("normed", hidden)):
            p.point(name, aligned(count * width * 4))
        for name, width in (("attended", self._width), ("gated", inner)):
            p.point(name, aligned(4 if self.is_quantised else count * width * 4))
        if self.is_quantised:
            for name, width in (("normed", hidden), ("attended", self._width), ("gated", inner)):
                p.point(f"{name}_q", aligned(count * width))
                p.point(f"{name}_scales", aligned(count * width // GROUP * INPUT_SCALES))
        self._finite = np.ones(count, np.int64)
        p.point("finite", self._finite)
        p.point("unpacked", aligned(LINE))  # of four bits only
        p.set(unpacked_step=0)

    def _make_scratch(self, longest: int) -> None:
        """Room of each thread, where the longest sequence has so many tokens, or one before it had more."""
        dim, p = self.spec.head_dim, self._parameters
        scores = max(-(-longest // SUB_BLOCK) * SUB_BLOCK * 4 + 64, p.get("scores_step"))
        # Two products of 32 columns, one row behind the other, of a block of rows.
        size = max(256 * ROW_BLOCK, ROW_BLOCK * dim * 4, MOST_QUERY_TOKENS * (16 + 4 * dim + scores))
        size = max(-(-size // LINE) * LINE, p.get("scratch_step"))
        if size > p.get("scratch_step"):
            p.point("scratch", aligned(self._threads * size))
        p.set(scratch_step=size, scores_step=scores)

    # -- a call --------------------------------------------------------------------------------------------

    def work(self) -> CPUWork:
        return CPUWork(
            self._used, {phase: spent * 1e-9 for phase, spent in self._all_laps().items()}, self._call_s
        )

    def _all_laps(self) -> dict[str, int]:
        now = {} if self._team is None else self._team.laps()
        return {phase: now.get(phase, 0) + self._laps.get(phase, 0) for phase in now or self._laps}

    def close(self) -> None:
        """End the threads; the next call starts others."""
        if self._team is None:
            return
        self._laps = self._all_laps()
        self._beats.close()
        self._team.close()
        self._team = None

    def _run(self) -> None:
        if self._free is not None:
            self._used = min(self._free.refresh(MANY_TOKENS), self._threads)
            self._parameters.set(sleeps=int(self._free.is_shared))
        if self._team is None:
            self._start()
        assert self._team is not None
        started_s = time.perf_counter()
        with self._beats:
            others = None if self._team.checks is None else [*self._ranges, *self._others()]
            self._team.run(self._used, True, others)
        self._call_s += time.perf_counter() - started_s

    def _others(self) -> list[Range]:
        """What a call touches beside the weights, the parameters and what they point to."""
        raise NotImplementedError


class NativeEncoder(EncoderKernels):
    """`models.encoder.Encoder` of texts on the native kernels, in float32 or with weights and inputs as bytes."""

    def __init__(self, source: TensorSource, code: Code, threads: int, *more: Any, **options: Any) -> None:
        self._subs = 0  # that there is room for
        super().__init__(source, code, threads, *more, **options)

    def _constants(self) -> None:
        spec, options, weights = self.spec, self._options, self._weights
        last = f"encoder.layer.{spec.num_layers - 1}.output.LayerNorm"
        last = "final_norm" if options.norm_first else last
        self._parameters.set(
            num_layers=spec.num_layers,
            embedding=weights.rows("embeddings.word_embeddings.weight"),
            place_vectors=weights.places(options.position_offset),
            first_norm=weights.vector("embeddings.LayerNorm.weight"),
            first_norm_bias=weights.vector("embeddings.LayerNorm.bias"),
            last_norm=weights.vector(last + ".weight"),
            last_norm_bias=weights.vector(last + ".bias"),
            second_vector=weights.second,
        )
        turns = [tuple(map(self._arena.keep, rope_tables(rope, spec.max_positions))) for rope in spec.ropes]
        for number in range(spec.num_layers if turns else 0):
            cos, sin = turns[spec.layer_ropes[number]]
            self._layers[number, LAYER["cos"]], self._layers[number, LAYER["sin"]] = cos, sin
        self._parameters.point("layers", self._layers)

    def _make_rows(self, count: int) -> None:
        if count <= self._room:
            return
        super()._make_rows(count)
        p = self._parameters
        p.point("residual", aligned(self._room * self.spec.hidden_size * 4))
        if not self._options.norm_first:  # behind the parts: what is normed is the residual
            p.point("normed", p.kept["residual"])
        self._make_scratch(self.spec.max_positions)

    def _make_subs(self, subs: int) -> None:
        """Room for so many sub-blocks of keys and values."""
        if subs <= self._subs:
            return
        self._subs = subs
        size = self.spec.num_heads * kv_head_bytes(self.spec.head_dim, in_bytes=False)
        self._kv = aligned(subs * size)
        self._table = np.arange(subs + -(-self.spec.max_positions // SUB_BLOCK))
        layers = self._layers
        layers[:, LAYER["kv"]], layers[:, LAYER["block_bytes"]] = self._kv.ctypes.data, size
        # A text's sub-blocks lie one behind the other: its row of the table begins at the first of them.
        layers[:, LAYER["table"]], layers[:, LAYER["table_width"]] = self._table.ctypes.data, 1

    def forward(
        self, texts: Sequence[Index], beat: Callable[[], None], seconds: Sequence[int] = ()
    ) -> list[Floats]:
        """See `models.encoder.Encoder.forward`. Beats come from a thread beside the call."""
        sizes = np.array([len(text) for text in texts])
        subs = -(-sizes // SUB_BLOCK)
        total, starts, first_subs = int(sizes.sum()), np.cumsum(sizes) - sizes, np.cumsum(subs) - subs
        self._make_rows(total)
        self._make_subs(int(subs.sum()))
        places = np.arange(total) - np.repeat(starts, sizes)
        columns = {
            "tokens": np.concatenate(texts).astype(np.int64, copy=False),
            "positions": places,
            "ends": np.repeat(sizes, sizes),
            "tiles": query_tiles(sizes, starts, first_subs),
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
        self._run()
        width = self.spec.hidden_size
        found = p.kept["normed"].view(np.float32)[: total * width].reshape(total, width).copy()
        return np.split(found, starts[1:])

    def _others(self) -> list[Range]:
        return [
            Range.of("keys and values", self._kv, writable=True),
            Range.of("block table", self._table),
            Range.of("slots", self._slots),
        ]


class Weights:
    """Small tensors of a source, kept by an arena: their addresses, 0 for what the model does not have."""

    def __init__(self, source: TensorSource, arena: Arena, prefix: str = "") -> None:
        self._source, self._arena, self._prefix = source, arena, prefix
        self._names = source.names()
        self.second = 0  # what a token of the second text of a pair has more

    def has(self, name: str) -> bool:
        return self._prefix + name in self._names

    def read(self, name: str) -> Floats:
        values = self._source.tensor(self._prefix + name).to_float32()
        check_finite(values, self._prefix + name)
        return values

    def vector(self, *names: str) -> int:
        """Some vectors, one behind the other."""
        if not all(map(self.has, names)):
            return 0
        return self._arena.keep(np.concatenate([self.read(name) for name in names]))

    def rows(self, name: str) -> int:
        return self._arena.keep(self.read(name))

    def places(self, offset: int) -> int:
        """Vectors of the places of a text's tokens, which are nearly all of the first type."""
        name = "embeddings.position_embeddings.weight"
        if not self.has(name):
            return 0
        types = self.read("embeddings.token_type_embeddings.weight")
        if len(types) > 1:
            self.second = self._arena.keep(types[1] - types[0])
        return self._arena.keep(self.read(name)[offset:] + types[0])


def query_tiles(sizes: Index, starts: Index, first_subs: Index) -> Index:
    """Tokens of one sequence that attention takes together: [tile, (first token, count, first sub-block)]."""
    pieces = -(-sizes // MOST_QUERY_TOKENS)
    text = np.repeat(np.arange(len(sizes)), pieces)
    first = (np.arange(len(text)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * MOST_QUERY_TOKENS
    count = np.minimum(sizes[text] - first, MOST_QUERY_TOKENS)
    return np.stack([starts[text] + first, count, first_subs[text]], axis=1)
