"""A tensor as it lies in a file: name, shape, type and bytes, and how a model's tensors are asked for.

Names are those of Hugging Face's Llama layout whatever the file calls them, so that the decoder knows one set of
names (see `tensor_names`).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from paceline.models.files.config_fields import CheckpointError
from paceline.models.files.encoder import VISION, encoder_tensors
from paceline.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredTensor:
    """One tensor. `raw` is a read-only view of the file (no copy); `decode` turns it into float32.

    `raw` has one dimension. Rows lie whole, one behind the other, quantised ones too. Where a file keeps rows in
    another order it is a read-only copy, made when the tensor is asked for.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str  # F32, F16, BF16, or a GGUF type such as Q4_1
    raw: NDArray[np.uint8]
    decode: Callable[[StoredTensor], NDArray[np.float32]]

    def to_float32(self) -> NDArray[np.float32]:
        """The values, in the tensor's shape; a new array, or a view where the file holds float32."""
        return self.decode(self)


def check_finite(values: NDArray[np.float32], name: str, whose: str = "model") -> None:
    """Refuse values with NaN or infinity among them: a model that has any answers no request.

    A sum tells, at the speed of memory; only one that is not finite is looked at again.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        is_finite = bool(np.isfinite(values.sum()))
    if not is_finite and not np.isfinite(values).all():
        raise CheckpointError(
            f"the tensor {name} holds values that are not finite (NaN or infinity): the {whose}'s files are damaged; "
            f"download or convert the {whose} again"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a file's header says of one tensor; offsets count from the start of the file."""

    dtype: str
    shape: tuple[int, ...]  # rows first
    begin: int
    end: int


class TensorSource(Protocol):
    """Where a model's tensors come from."""

    spec: ModelSpec

    def names(self) -> frozenset[str]: ...

    def tensor(self, name: str) -> StoredTensor: ...


def tensor_names(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor the model of `spec` needs, with its shape ([out, in] for matrices)."""
    if spec.encoder is not None:
        yield from encoder_tensors(spec)
        return
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield "model.embed_tokens.weight", (spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        for part, width in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{prefix}self_attn.{part}_proj.weight", (width, hidden)
            if spec.qkv_bias:
                yield f"{prefix}self_attn.{part}_proj.bias", (width,)
        yield prefix + "self_attn.o_proj.weight", (hidden, queries)
        if spec.output_bias:
            yield prefix + "self_attn.o_proj.bias", (hidden,)
        if spec.qk_norm:
            yield prefix + "self_attn.q_norm.weight", (spec.head_dim,)
            yield prefix + "self_attn.k_norm.weight", (spec.head_dim,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        if spec.sandwich_norms:
            yield prefix + "pre_feedforward_layernorm.weight", (hidden,)
            yield prefix + "post_feedforward_layernorm.weight", (hidden,)
        if spec.experts is not None and spec.has_experts(layer):
            yield prefix + "mlp.gate.weight", (spec.experts.num_experts, hidden)
            for expert in range(spec.experts.num_experts):
                yield from _feed_forward(
                    f"{prefix}mlp.experts.{expert}.", hidden, spec.experts.intermediate_size
                )
        else:
            yield from _feed_forward(prefix + "mlp.", hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not spec.tied_embeddings:
        yield "lm_head.weight", (spec.vocab_size, hidden)
    if spec.vision is not None:
        for name, shape in encoder_tensors(spec.vision):
            yield VISION + name, shape


def num_parameters(spec: ModelSpec) -> int:
    """How many values the model's tensors hold."""
    return sum(math.prod(shape) for _, shape in tensor_names(spec))


def _feed_forward(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield prefix + "gate_proj.weight", (inner, hidden)
    yield prefix + "up_proj.weight", (inner, hidden)
    yield prefix + "down_proj.weight", (hidden, inner)


# Stored bytes turned into float32: plain floats here, the blocks of GGUF's quantised types by the gguf package.
#
# Bytes that are no sensible numbers become infinite or not-a-number without a word; the engine notices when a row
# of its results is not finite.


Floats = NDArray[np.float32]

Q8_VALUES = 32  # in a block of Q8_0, behind a scale of two bytes
BLOCKS_AT_ONCE = 2**15  # few enough to stay in the processor's cache


def decode_float(tensor: StoredTensor) -> Floats:
    """Values of a float tensor as float32; a view where the file holds float32 at an even address."""
    raw = tensor.raw
    if tensor.dtype == "F32":
        values = raw.view("<f4")
        if not values.flags.aligned:
            values = values.copy()
    elif tensor.dtype == "BF16":
        # The upper half of a float32.
        values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        assert tensor.dtype in ("F16", "F64"), tensor.dtype
        with np.errstate(over="ignore", invalid="ignore"):
            values = raw.view("<f2" if tensor.dtype == "F16" else "<f8").astype(np.float32)
    return values.reshape(tensor.shape)


def decode_blocks(tensor: StoredTensor) -> Floats:
    """Values of a tensor whose rows are quantised in blocks."""
    with np.errstate(over="ignore", invalid="ignore"):
        if tensor.dtype == "Q8_0":
            return _q8(tensor)
        import gguf  # not needed to open a model, only here

        rows = tensor.raw.reshape(int(np.prod(tensor.shape[:-1])), -1)
        values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[tensor.dtype])
    return cast(Floats, values.astype(np.float32, copy=False).reshape(tensor.shape))


def _q8(tensor: StoredTensor) -> Floats:
    """The type of most embeddings, and so of a small model's largest tensor: worth its own, faster road."""
    blocks = tensor.raw.reshape(-1, 2 + Q8_VALUES)
    scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    values = np.empty((blocks.shape[0], Q8_VALUES), np.float32)
    for start in range(0, blocks.shape[0], BLOCKS_AT_ONCE):
        part = slice(start, start + BLOCKS_AT_ONCE)
        np.multiply(blocks[part, 2:].view(np.int8), scales[part], out=values[part])
    return values.reshape(tensor.shape)


# A file seen as bytes without reading it: pages come in when they are looked at. Read-only.


class _MappedFile(mmap.mmap):
    """Tells a file's pages from memory whose contents are nowhere else."""


def map_file(path: Path) -> NDArray[np.uint8]:
    """The file's bytes. The mapping lives as long as any view of it."""
    try:
        if not path.is_file():  # opening a pipe would wait for its writer
            raise CheckpointError(f"{path}: cannot be read: it is not a file")
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size == 0:
                raise CheckpointError(f"{path}: is empty; download it again")
            return np.frombuffer(_MappedFile(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error


def drop_pages(values: NDArray[np.uint8]) -> None:
    """Pages of a mapped file with nothing but these values leave memory; they are read again when they are looked at.

    Other arrays stay as they are.
    """
    base: Any = values
    while isinstance(base, np.ndarray):
        base = base.base
    mapped = getattr(base, "obj", None)
    if not isinstance(mapped, _MappedFile):
        return
    begin = values.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (begin + values.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size > 0:
        with suppress(OSError, AttributeError):  # a system without the call
            mapped.madvise(mmap.MADV_DONTNEED, first, size)
