"""Which part of a model each rank holds.

Matrices that read the residual (queries, keys, values, gate, up, those of every expert) are cut by rows, those that
write it (output of attention, down) by columns: what a rank computes from its rows is what its columns are multiplied
with, and the sum over ranks is the whole. Embedding, norms and routers are whole on each. The output matrix is cut by
rows, and logits are gathered. Where there are fewer heads of keys and values than ranks, ranks share one.

Knows names and shapes, no devices. Stored bytes are cut as they are, quantised ones at the borders of their blocks, so
that a rank reads its slice of a file alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from paceline.errors import ConfigError
from paceline.models.files.stored import StoredTensor, TensorSource
from paceline.models.spec import ModelSpec

ROWS, COLUMNS = 0, 1
# Which dimension of a tensor is cut, by the end of its name; what is not here is whole.
CUT_BY = {
    "gate_proj.weight": ROWS,
    "up_proj.weight": ROWS,
    "o_proj.weight": COLUMNS,
    "down_proj.weight": COLUMNS,
}
_QUERIES, _KEYS, _VALUES = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
_OUTPUT, _EMBEDDING, _HEAD = "self_attn.o_proj", "model.embed_tokens.weight", "lm_head.weight"
_FLOATS = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}
MOST_RANKS = 64


def possible_sizes(spec: ModelSpec, source: TensorSource) -> tuple[int, ...]:
    """How many ranks a model can have."""
    return tuple(size for size in range(1, MOST_RANKS + 1) if not _objection(spec, source, size))


def check_size(spec: ModelSpec, source: TensorSource, size: int) -> None:
    """Raise ConfigError for a number of ranks that the model cannot have."""
    reason = _objection(spec, source, size)
    if reason:
        sizes = possible_sizes(spec, source)
        listed = ", ".join(map(str, sizes)) if len(sizes) > 1 else "1 alone"
        raise ConfigError(f"--tensor-parallel-size {size}: {reason}; this model can have {listed}")


def shard_spec(spec: ModelSpec, size: int) -> ModelSpec:
    """The model that one rank computes."""
    experts = spec.experts
    if experts is not None:
        experts = replace(experts, intermediate_size=experts.intermediate_size // size)
    return replace(
        spec,
        num_heads=spec.num_heads // size,
        num_kv_heads=max(1, spec.num_kv_heads // size),
        intermediate_size=spec.intermediate_size // size,
        experts=experts,
        # Its own part of the output matrix is a matrix of its own, even where it is cut from the embedding.
        tied_embeddings=spec.tied_embeddings and size == 1,
    )


@dataclass(frozen=True, slots=True)
class _Slice:
    """Part of a dimension, in rows or columns."""

    dimension: int
    first: int
    end: int


class ShardedSource:
    """The tensors of one rank, cut when they are asked for. A `TensorSource`."""

    def __init__(self, source: TensorSource, rank: int, size: int) -> None:
        assert 0 <= rank < size
        self._source = source
        self._whole = source.spec
        self._rank, self._size = rank, size
        self.spec = shard_spec(source.spec, size)

    def names(self) -> frozenset[str]:
        names = self._source.names()
        if self._rank:  # it is added once
            names = frozenset(name for name in names if not name.endswith(f"{_OUTPUT}.bias"))
        return names | {_HEAD} if self._whole.tied_embeddings else names

    def tensor(self, name: str) -> StoredTensor:
        stored = _EMBEDDING if name == _HEAD and self._whole.tied_embeddings else name
        whole = self._source.tensor(stored)
        if stored != name:
            whole = replace(whole, name=name)
        part = self._slice(name, whole)
        return whole if part is None or self._size == 1 else cut(whole, part.dimension, part.first, part.end)

    def _slice(self, name: str, whole: StoredTensor) -> _Slice | None:
        rank, size, dim = self._rank, self._size, self._whole.head_dim
        if name == _HEAD:
            part = -(-whole.shape[0] // size)
            return _Slice(ROWS, rank * part, min((rank + 1) * part, whole.shape[0]))
        if _QUERIES in name:
            return self._even(ROWS, whole)
        if _KEYS in name or _VALUES in name:
            heads = self.spec.num_kv_heads * dim
            first = rank * self._whole.num_kv_heads // size * dim
            return _Slice(ROWS, first, first + heads)
        dimension = next((found for end, found in CUT_BY.items() if name.endswith(end)), None)
        return None if dimension is None else self._even(dimension, whole)

    def _even(self, dimension: int, whole: StoredTensor) -> _Slice:
        part = whole.shape[dimension] // self._size
        return _Slice(dimension, self._rank * part, (self._rank + 1) * part)


def cut(whole: StoredTensor, dimension: int, first: int, end: int) -> StoredTensor:
    """Rows or columns of a stored matrix, or entries of a vector. Rows are a view of the file, columns a copy of theirs
    alone; what has no known layout is cut when it has been decoded."""
    shape = (*whole.shape[:dimension], end - first, *whole.shape[dimension + 1 :])
    rows = whole.shape[0]
    if dimension == ROWS and len(whole.raw) and len(whole.raw) % rows == 0:
        record = len(whole.raw) // rows
        return replace(whole, shape=shape, raw=whole.raw[first * record : end * record])
    block = _block(whole)
    if block is not None and dimension == COLUMNS:
        values, size = block
        assert first % values == 0 and end % values == 0, "a quantised block cannot be cut"
        columns = whole.raw.reshape(rows, -1)[:, first // values * size : end // values * size]
        raw = np.ascontiguousarray(columns).reshape(-1)
        raw.flags.writeable = False
        return replace(whole, shape=shape, raw=raw)

    def decode(_: StoredTensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        decoded = whole.to_float32()
        return np.ascontiguousarray(decoded[first:end] if dimension == ROWS else decoded[:, first:end])

    return StoredTensor(name=whole.name, shape=shape, dtype="F32", raw=np.zeros(0, np.uint8), decode=decode)


def _block(stored: StoredTensor) -> tuple[int, int] | None:
    """How many values of a row go together, and in how many bytes; None: that is not known."""
    if stored.dtype in _FLOATS:
        return 1, _FLOATS[stored.dtype]
    if not stored.dtype.startswith(("Q", "IQ")):
        return None
    import gguf  # not needed to open a model, only here

    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[stored.dtype]]
    return int(values), int(size)


def _objection(spec: ModelSpec, source: TensorSource, size: int) -> str:
    """Why a model cannot have so many ranks; empty: it can."""
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    if heads % size:
        return f"{heads} attention heads cannot be divided by it"
    if kv_heads % size and size % kv_heads:
        return f"{kv_heads} heads of keys and values cannot be divided by it, nor it by them"
    if spec.vocab_size <= (size - 1) * -(-spec.vocab_size // size):
        return f"a vocabulary of {spec.vocab_size} leaves a rank without any"
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        inner, matrix = spec.intermediate_size, f"{prefix}mlp.down_proj.weight"
        if spec.experts is not None and spec.has_experts(layer):
            inner = spec.experts.intermediate_size
            matrix = f"{prefix}mlp.experts.0.down_proj.weight"
        if inner % size:
            return f"a feed-forward width of {inner} cannot be divided by it"
        for name, width in ((f"{prefix}{_OUTPUT}.weight", heads * spec.head_dim), (matrix, inner)):
            values = _values_together(source, name) if size > 1 else 1
            if width // size % values:
                return (
                    f"{name} is stored in blocks of {values} columns, which {width // size} columns would cut"
                )
    return ""


def _values_together(source: TensorSource, name: str) -> int:
    block = _block(source.tensor(name))
    return 1 if block is None else block[0]
