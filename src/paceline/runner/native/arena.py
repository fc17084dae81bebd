"""A model's weights as panels, in one piece of memory.

Quantised tensors of a file stay quantised: Q4_0, Q4_1, Q4_K and INT4 as 4 bits, all others as 8; dense ones keep their
type, or are quantised here if the user wants it.
Repacking moves whole words and runs in threads; what has been read of the file is let go of behind it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.models.files.open import MADE_UP
from paceline.models.files.records import INT4, INT8, Record, record_of, record_of_gguf
from paceline.models.files.stored import StoredTensor, TensorSource, check_finite, drop_pages
from paceline.models.spec import ModelSpec
from paceline.runner.native.layout import BF16, COLUMNS, F16, F32, GROUP, Q4, Q8, Q8_FINE, panel_bytes

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Halves = NDArray[np.float16]

ALIGNED = 64
ROUTER = "mlp.gate.weight"
_DENSE = {"F32": F32, "F16": F16, "BF16": BF16, MADE_UP: F32}
_FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K", INT4)
AS_STORED = (*_FOUR_BITS, "Q8_0", INT8)  # other quantised types are rounded anew, to 8 bits
# What 4 bits would harm most; files have more bits for them too.
_EIGHT_AT_LEAST = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A matrix [outputs, inputs] as panels: its kind, and where they begin."""

    kind: int
    at: int
    inputs: int
    outputs: int  # a multiple of 16

    @property
    def size(self) -> int:
        """Bytes."""
        return self.outputs // COLUMNS * panel_bytes(self.kind, self.inputs)


class Arena:
    """Owns the memory of all panels and of the small tensors beside them."""

    def __init__(self, size: int) -> None:
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError, AttributeError):  # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.memory: Bytes = np.frombuffer(memory, np.uint8)
        self.address = self.memory.ctypes.data
        self.size = size
        self.kept: list[NDArray[np.generic]] = []

    def keep(self, values: NDArray[np.generic]) -> int:
        """The address of a small tensor, which lives as long as the arena."""
        values = np.ascontiguousarray(values)
        self.kept.append(values)
        return values.ctypes.data


def kind_of(tensor: StoredTensor, quantization: str = "auto") -> int:
    """What kind of panels a stored matrix becomes."""
    if tensor.name.endswith(ROUTER):  # small, and decides much
        return F32
    is_dense = tensor.dtype == "F64" or tensor.dtype in _DENSE
    if is_dense and quantization in ("int4", "int8"):
        return Q4 if quantization == "int4" and not tensor.name.endswith(_EIGHT_AT_LEAST) else Q8
    if is_dense or quantization == "none":
        return _DENSE.get(tensor.dtype, F32)
    return Q4 if tensor.dtype in _FOUR_BITS else Q8


def kinds_of(
    tensors: Iterable[StoredTensor], quantization: str, *, fine_inputs: bool = True
) -> dict[str, int]:
    """The kinds of a model's panels, by name. Where none has 4 bits, rounding the inputs to 8 would cost most of what 8
    bits of the weights keep: inputs have 16 then, unless speed is wanted more (`fine_inputs` false)."""
    kinds = {tensor.name: kind_of(tensor, quantization) for tensor in tensors}
    if Q4 in kinds.values() or not fine_inputs:
        return kinds
    return {name: Q8_FINE if kind == Q8 else kind for name, kind in kinds.items()}


def build_arena(
    source: TensorSource,
    names: list[str],
    on_matrix: Callable[[int, int], None] | None = None,
    quantization: str = "auto",
    *,
    fine_inputs: bool = True,
) -> tuple[Arena, dict[str, Matrix]]:
    """The named matrices as panels. `fine_inputs`: see `kinds_of`."""
    tensors = [source.tensor(name) for name in names]
    kinds = kinds_of(tensors, quantization, fine_inputs=fine_inputs)
    places, at = [], 0
    for tensor in tensors:
        outputs = -(-tensor.shape[0] // COLUMNS) * COLUMNS
        places.append(at)
        at += outputs // COLUMNS * panel_bytes(kinds[tensor.name], tensor.shape[1])
        at = -(-at // ALIGNED) * ALIGNED + ALIGNED  # matrices do not touch each other
    arena = Arena(at)
    found: dict[str, Matrix] = {}

    def fill(item: tuple[StoredTensor, int]) -> tuple[str, Matrix]:
        tensor, place = item
        kind, outputs, inputs = kinds[tensor.name], -(-tensor.shape[0] // COLUMNS) * COLUMNS, tensor.shape[1]
        size = outputs // COLUMNS * panel_bytes(kind, inputs)
        pack(tensor, kind, arena.memory[place : place + size])
        drop_pages(tensor.raw)
        return tensor.name, Matrix(kind, arena.address + place, inputs, outputs)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        for name, matrix in threads.map(fill, zip(tensors, places, strict=True)):
            found[name] = matrix
            if on_matrix is not None:
                on_matrix(len(found), len(names))
    return arena, found


# -- one matrix ----------------------------------------------------------------------------------------------


def pack(tensor: StoredTensor, kind: int, to: Bytes) -> None:
    """A stored matrix into the panels at `to`. Raises CheckpointError for numbers that are not finite."""
    if kind == Q4:
        quads, scale, offset = _four_bits(tensor)
        _put_groups(to, quads, scale, offset, tensor.name)
    elif kind in (Q8, Q8_FINE):
        quads, scale = _eight_bits(tensor)
        _put_groups(to, quads, scale, np.zeros_like(scale), tensor.name)
    else:
        _put_dense(tensor, kind, to)


def _four_bits(tensor: StoredTensor) -> tuple[NDArray[np.uint32], Halves, Halves]:
    """Words [outputs, groups, 4] of nibbles, inputs i and 16 + i in a byte; scales and offsets [outputs, groups]."""
    rows = tensor.shape[0]
    if tensor.dtype == "Q4_K":
        return _four_bits_of_record(record_of_gguf(tensor), tensor.name)
    if tensor.dtype == INT4:
        return _four_bits_of_record(record_of(tensor), tensor.name)
    if tensor.dtype not in _FOUR_BITS:
        return _four_bits_of_floats(tensor)
    head = 2 if tensor.dtype == "Q4_0" else 4
    blocks = tensor.raw.reshape(rows, -1, head + 16)
    scale = _halves(blocks[:, :, :2])
    with np.errstate(over="ignore"):
        offset = scale * np.float16(-8) if head == 2 else _halves(blocks[:, :, 2:4])
    return np.ascontiguousarray(blocks[:, :, head:]).view(np.uint32), scale, offset


def _four_bits_of_floats(tensor: StoredTensor) -> tuple[NDArray[np.uint32], Halves, Halves]:
    """Sixteen steps from the smallest to the largest number of each group."""
    grouped = _groups(tensor)
    low, high = grouped.min(axis=-1), grouped.max(axis=-1)
    with np.errstate(over="ignore"):
        scale, offset = ((high - low) / 15).astype(np.float16), low.astype(np.float16)
    wide, start = scale.astype(np.float32)[:, :, None], offset.astype(np.float32)[:, :, None]
    q = np.divide(grouped - start, wide, out=np.zeros_like(grouped), where=wide > 0)
    nibbles = np.rint(q).clip(0, 15).astype(np.uint8)
    return np.ascontiguousarray(nibbles[..., :16] | nibbles[..., 16:] << 4).view(np.uint32), scale, offset


def _four_bits_of_record(record: Record, name: str) -> tuple[NDArray[np.uint32], Halves, Halves]:
    """Groups of 32 to a whole row become groups of 32 with the same scale."""
    nibbles = record.nibbles().reshape(len(record.q), -1, GROUP)
    assert record.offset is not None, name
    with np.errstate(over="ignore"):
        scale, offset = (
            _spread(values, record.inner).astype(np.float16) for values in (record.scale, record.offset)
        )
    return np.ascontiguousarray(nibbles[..., :16] | nibbles[..., 16:] << 4).view(np.uint32), scale, offset


def _spread(values: Floats, inner: int) -> Floats:
    """Numbers [outputs, groups] for groups of 32."""
    return np.repeat(values, inner // GROUP // values.shape[1], axis=1)


def _eight_bits(tensor: StoredTensor) -> tuple[NDArray[np.uint32], Halves]:
    """Words [outputs, groups, 8] of signed bytes, and scales. What is no Q8_0 is rounded anew."""
    rows = tensor.shape[0]
    if tensor.dtype == "Q8_0":
        blocks = tensor.raw.reshape(rows, -1, 34)
        return np.ascontiguousarray(blocks[:, :, 2:]).view(np.uint32), _halves(blocks[:, :, :2])
    record = record_of(tensor) if tensor.dtype == INT8 else None
    if record is not None and (record.q.view(np.int8) > -128).all():  # the kernels know no -128
        with np.errstate(over="ignore"):
            scale = _spread(record.scale, record.inner).astype(np.float16)
        return record.q.reshape(rows, -1, GROUP).view(np.uint32), scale
    grouped = _groups(tensor)
    with np.errstate(over="ignore"):
        scale = (np.abs(grouped).max(axis=-1) / 127).astype(np.float16)
    wide = scale.astype(np.float32)[:, :, None]
    q = np.rint(np.divide(grouped, wide, out=np.zeros_like(grouped), where=wide > 0)).clip(-127, 127)
    return np.ascontiguousarray(q.astype(np.int8)).view(np.uint32), scale


def _groups(tensor: StoredTensor) -> Floats:
    """Numbers [outputs, groups, 32]."""
    values = tensor.to_float32()
    check_finite(values, tensor.name)
    return values.reshape(tensor.shape[0], -1, GROUP)


def _put_groups(to: Bytes, words: NDArray[np.uint32], scale: Halves, offset: Halves, name: str) -> None:
    check_finite(scale.astype(np.float32), name)
    check_finite(offset.astype(np.float32), name)
    rows, groups, quads = words.shape
    panels = -(-rows // COLUMNS)
    size = quads * 64
    place = to.reshape(panels, groups, size + 64)
    numbers = place[:, :, :size].view(np.uint32).reshape(panels, groups, quads, COLUMNS)
    halves = place[:, :, size:].view(np.float16)
    whole = rows // COLUMNS
    numbers[:whole] = words[: whole * COLUMNS].reshape(whole, COLUMNS, groups, quads).transpose(0, 2, 3, 1)
    for start, values in ((0, scale), (COLUMNS, offset)):
        part = values[: whole * COLUMNS].reshape(whole, COLUMNS, groups).transpose(0, 2, 1)
        halves[:whole, :, start : start + COLUMNS] = part
    rest = rows - whole * COLUMNS
    if rest:  # the last panel's other columns stay zeros
        numbers[whole, :, :, :rest] = words[-rest:].transpose(1, 2, 0)
        halves[whole, :, :rest] = scale[-rest:].T
        halves[whole, :, COLUMNS : COLUMNS + rest] = offset[-rest:].T


def _put_dense(tensor: StoredTensor, kind: int, to: Bytes) -> None:
    """Floats [outputs, inputs] into [input][16 columns]. bfloat16 travels as the integers it is."""
    rows, inputs = tensor.shape
    floats = tensor.to_float32()
    check_finite(floats, tensor.name)
    values: NDArray[np.generic] = floats
    if kind != F32:
        values = tensor.raw.view(np.uint16).reshape(rows, inputs)
    place = to.view(values.dtype).reshape(-1, inputs, COLUMNS)
    whole = rows // COLUMNS
    place[:whole] = values[: whole * COLUMNS].reshape(whole, COLUMNS, inputs).transpose(0, 2, 1)
    rest = rows - whole * COLUMNS
    if rest:
        place[whole, :, :rest] = values[-rest:].T


def _halves(raw: Bytes) -> Halves:
    values: Halves = np.ascontiguousarray(raw).view(np.float16)[..., 0]
    return values


def matrix_names(spec: ModelSpec) -> list[str]:
    """Every matrix of a decoder, largest first."""
    names = [] if spec.tied_embeddings else ["lm_head.weight"]
    names.append("model.embed_tokens.weight")
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        names += [f"{prefix}self_attn.{part}_proj.weight" for part in "qkvo"]
        feeds = [prefix + "mlp."]
        if spec.experts is not None and spec.has_experts(layer):
            names.append(prefix + ROUTER)
            feeds = [f"{prefix}mlp.experts.{expert}." for expert in range(spec.experts.num_experts)]
        names += [f"{feed}{part}_proj.weight" for feed in feeds for part in ("gate", "up", "down")]
    return names
