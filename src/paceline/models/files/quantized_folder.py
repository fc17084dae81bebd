"""Quantised weights in a Hugging Face folder: what `quantization_config` says, and each matrix as one tensor.

Read are fp8 of the kind DeepSeek and Qwen publish (`weight_scale_inv`, blocks of 128 x 128) or with a scale per tensor,
compressed-tensors (float-quantized, int-quantized, pack-quantized), GPTQ and AWQ. A matrix that a file keeps as several
tensors appears as one, `<name>.weight`, in the form of records.py; the rest of the model sees no difference. Scales of
inputs are not used: inputs get a scale per token when they are multiplied.

Everything is checked before it is used: which kind it is and how groups divide when a model is opened, scales when a
matrix is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.models.files.config_fields import CheckpointError, Fields
from paceline.models.files.records import FP8, INT4, INT8, Bytes, Floats, Record, as_tensor, pack_nibbles
from paceline.models.files.stored import Entry, StoredTensor

CONFIG_NAME = "quantization_config"
SUPPORTED = "supported are fp8, compressed-tensors (float-, int- and pack-quantized), GPTQ and AWQ of 4 bits, and GGUF"
# Beside a matrix, and not needed to multiply with it.
_UNUSED = re.compile(
    r".*\.(input_scale|output_scale|input_zero_point|bias_scale|[kvq]_scale|k_zero_point|v_zero_point|weight_shape)"
)
# The scale of a layer's keys or values, as different writers call it.
KV_SCALE = re.compile(
    r"(?:.*\.)?layers\.(\d+)\.self_attn\.(?:(?:attn\.|[kv]_proj\.)?([kv])_scale|([kv])_proj\.output_scale)"
)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each nibble of a word holds
_PER_WORD = 8  # numbers of four bits in one of 32
_BLOCK = 128
_STORED = {FP8: "F8_E4M3", INT8: "I8"}  # the type of a matrix that is kept plainly


class Files(Protocol):
    """Tensors by the names in the files."""

    @property
    def entries(self) -> Mapping[str, Entry]: ...

    def tensor(self, name: str) -> StoredTensor: ...

    def numbers(self, name: str) -> NDArray[np.generic]: ...

    def integers(self, name: str) -> NDArray[np.int64]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a folder's matrices are kept."""

    kind: str  # of a record
    form: str  # plain, packed, gptq or awq: which tensors a matrix consists of
    group: int = 0  # inputs that share a scale; 0: all of a row, or a block
    symmetric: bool = True
    zero_is_less_one: bool = False  # GPTQ stores zero points minus one
    where: str = ""


class QuantizedFiles:
    """Files whose quantised matrices appear as one tensor each."""

    def __init__(self, files: Files, scheme: Scheme) -> None:
        self.source = files
        self._scheme = scheme
        self._matrices: dict[str, str] = {}  # `<name>.weight` to the tensor with its numbers
        ending = {"plain": ".weight", "packed": ".weight_packed"}.get(scheme.form, ".qweight")
        for name, entry in files.entries.items():
            if name.endswith(ending) and (scheme.form != "plain" or entry.dtype == _STORED[scheme.kind]):
                self._matrices[name.removesuffix(ending) + ".weight"] = name
        if not self._matrices:
            raise CheckpointError(f"{scheme.where}: the files hold no tensor {ending} of such a kind")
        self.entries: Mapping[str, Entry] = self._virtual()

    def tensor(self, name: str) -> StoredTensor:
        if name not in self._matrices:
            return self.source.tensor(name)
        return as_tensor(name, _READ[self._scheme.form](self, name.removesuffix(".weight")))

    def numbers(self, name: str) -> NDArray[np.generic]:
        return self.source.numbers(name)

    def integers(self, name: str) -> NDArray[np.int64]:
        return self.source.integers(name)

    def _virtual(self) -> dict[str, Entry]:
        """Entries as a reader should see them: parts of matrices are not tensors of their own."""
        parts = {matrix.removesuffix("weight") + part for matrix in self._matrices for part in _PARTS}
        found = {
            name: entry
            for name, entry in self.source.entries.items()
            if name not in parts and _UNUSED.fullmatch(name) is None
        }
        for matrix, source in self._matrices.items():
            shape, stem = self._shape(source), matrix.removesuffix(".weight")
            size = sum(
                entry.end - entry.begin
                for part in _PARTS
                if (entry := self.source.entries.get(f"{stem}.{part}")) is not None
            )
            found[matrix] = Entry(dtype=self._scheme.kind, shape=shape, begin=0, end=size)
            self._check_groups(stem, shape)
        return found

    def _shape(self, source: str) -> tuple[int, ...]:
        """[rows, inner] of a matrix."""
        shape = self.source.entries[source].shape
        if len(shape) != 2:
            raise CheckpointError(f"{self._scheme.where}: {source} has {len(shape)} dimensions, not 2")
        if self._scheme.form == "packed":
            return shape[0], shape[1] * _PER_WORD
        if self._scheme.form == "gptq":
            return shape[1], shape[0] * _PER_WORD
        return (shape[1] * _PER_WORD, shape[0]) if self._scheme.form == "awq" else shape

    def _check_groups(self, stem: str, shape: tuple[int, ...]) -> None:
        group = self._scheme.group
        if group and shape[1] % group:
            raise CheckpointError(
                f"{self._scheme.where}: groups of {group} do not divide the {shape[1]} inputs of {stem}.weight"
            )

    # -- parts of a matrix -----------------------------------------------------------------------------------

    def part(self, stem: str, name: str) -> NDArray[np.generic]:
        if not self.has(stem, name):
            raise CheckpointError(f"{self._scheme.where}: {stem}.{name} is missing; download the model again")
        return self.source.numbers(f"{stem}.{name}")

    def has(self, stem: str, name: str) -> bool:
        return f"{stem}.{name}" in self.source.entries

    def scales(self, stem: str, name: str) -> Floats:
        """Refuses zeros and what is not finite: a matrix would be nothing or spoil every answer."""
        values = self.part(stem, name).astype(np.float32)
        if not np.isfinite(values).all() or not values.all():
            raise CheckpointError(
                f"{self._scheme.where}: {stem}.{name} holds a scale that is zero or not finite; download the "
                "model again"
            )
        return values

    def plain(self, stem: str) -> Record:
        """Bytes with a scale per tensor, row, group or block of 128 x 128."""
        q = self.part(stem, "weight")
        rows, inner = q.shape
        is_inverse = self.has(stem, "weight_scale_inv")  # so it is called; values are multiplied with it
        scale = self.scales(stem, "weight_scale_inv" if is_inverse else "weight_scale")
        if scale.size == 1:
            spread = np.full((rows, 1), scale.reshape(-1)[0], np.float32)
        elif scale.shape in ((rows,), (rows, 1)):
            spread = scale.reshape(rows, 1)
        elif scale.ndim == 2 and len(scale) == rows and inner % scale.shape[1] == 0:
            spread = scale
        elif scale.shape == (-(-rows // _BLOCK), inner // _BLOCK) and inner % _BLOCK == 0:
            spread = np.repeat(scale, _BLOCK, axis=0)[:rows]
        else:
            raise CheckpointError(
                f"{self._scheme.where}: scales {list(scale.shape)} of {stem}.weight {[rows, inner]} are neither one, "
                f"one per row or group, nor one for {_BLOCK} x {_BLOCK} blocks"
            )
        return Record(self._scheme.kind, q.view(np.uint8), np.ascontiguousarray(spread))

    def packed(self, stem: str) -> Record:
        """compressed-tensors: eight numbers in a word along a row, each with 8 added."""
        q = _nibbles(self.part(stem, "weight_packed"), axis=1)
        scale = self.scales(stem, "weight_scale")
        rows, inner = q.shape
        groups = inner // self._scheme.group if self._scheme.group else 1
        self._expect(stem, scale, (rows, groups))
        if self.has(stem, "weight_g_idx"):
            self._check_order(stem, "weight_g_idx", inner)
        zero = np.full((rows, groups), 8.0, np.float32)
        if not self._scheme.symmetric:
            zero = _nibbles(self.part(stem, "weight_zero_point"), axis=0)[:rows].astype(np.float32)
            self._expect(stem, zero, (rows, groups))
        return Record(INT4, pack_nibbles(q), scale, -zero * scale)

    def gptq(self, stem: str) -> Record:
        """Eight inputs in a word; scales and zero points lie [groups, rows]."""
        q = _nibbles(self.part(stem, "qweight"), axis=0)
        scale = self.scales(stem, "scales")
        zero = _nibbles(self.part(stem, "qzeros"), axis=1).astype(np.float32)
        inner, rows = q.shape
        groups = inner // self._scheme.group if self._scheme.group else 1
        self._expect(stem, scale, (groups, rows))
        self._expect(stem, zero, (groups, rows))
        if self.has(stem, "g_idx"):
            self._check_order(stem, "g_idx", inner)
        if self._scheme.zero_is_less_one:
            zero = zero + 1
        return _turned(q, scale, zero)

    def awq(self, stem: str) -> Record:
        """Eight columns in a word, in an order of its own; zero points likewise."""
        q = _awq_columns(self.part(stem, "qweight"))
        scale = self.scales(stem, "scales")
        inner, rows = q.shape
        groups = inner // self._scheme.group if self._scheme.group else 1
        self._expect(stem, scale, (groups, rows))
        zero = np.full((groups, rows), 8.0, np.float32)
        if not self._scheme.symmetric:
            zero = _awq_columns(self.part(stem, "qzeros")).astype(np.float32)
            self._expect(stem, zero, (groups, rows))
        return _turned(q, scale, zero)

    def _expect(self, stem: str, values: NDArray[np.generic], shape: tuple[int, int]) -> None:
        if values.shape != shape:
            raise CheckpointError(
                f"{self._scheme.where}: scales or zero points of {stem} have the shape {list(values.shape)}, not "
                f"{list(shape)}"
            )

    def _check_order(self, stem: str, name: str, inner: int) -> None:
        group = self._scheme.group or inner
        if not np.array_equal(self.integers(f"{stem}.{name}"), np.arange(inner) // group):
            raise CheckpointError(
                f"{self._scheme.where}: {stem}.{name} puts inputs into groups out of order (desc_act, actorder), which "
                "is not supported; use a file made without it"
            )


# Which tensors a matrix can consist of.
_PARTS = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_zero_point",
    "weight_g_idx",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
)
_READ: dict[str, Callable[[QuantizedFiles, str], Record]] = {
    "plain": QuantizedFiles.plain,
    "packed": QuantizedFiles.packed,
    "gptq": QuantizedFiles.gptq,
    "awq": QuantizedFiles.awq,
}


def _turned(q: Bytes, scale: Floats, zero: Floats) -> Record:
    """Of numbers [inner, rows] and scales [groups, rows]."""
    scale = np.ascontiguousarray(scale.T)
    return Record(INT4, pack_nibbles(np.ascontiguousarray(q.T)), scale, -np.ascontiguousarray(zero.T) * scale)


def _nibbles(words: NDArray[np.generic], axis: int) -> Bytes:
    """Numbers of four bits, the lowest first, along one side of a matrix of 32-bit words."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    parts = words.view(np.uint32)[..., None] >> shifts & 15
    rows, columns = words.shape
    if axis == 1:
        return parts.astype(np.uint8).reshape(rows, columns * _PER_WORD)
    return parts.astype(np.uint8).transpose(0, 2, 1).reshape(rows * _PER_WORD, columns)


def _awq_columns(words: NDArray[np.generic]) -> Bytes:
    parts = _nibbles(words, axis=1).reshape(len(words), -1, _PER_WORD)
    ordered = np.empty_like(parts)
    ordered[:, :, list(_AWQ_ORDER)] = parts
    return ordered.reshape(len(words), -1)


def read_kv_scales(files: Files, where: str) -> dict[int, tuple[float, float]]:
    """By layer: what keys and values are divided by where they are kept in eight bits; of most files none."""
    found: dict[int, dict[str, float]] = {}
    for name in files.entries:
        match = KV_SCALE.fullmatch(name)
        if match is None:
            continue
        values = files.numbers(name).reshape(-1)
        scale = float(values[0]) if values.size == 1 else float("nan")
        if not (0 < scale < float("inf")):
            raise CheckpointError(
                f"{where}: {name} must be one number above zero that is finite; download the model again"
            )
        found.setdefault(int(match[1]), {})[match[2] or match[3]] = scale
    return {layer: (scales.get("k", 1.0), scales.get("v", 1.0)) for layer, scales in found.items()}


# -- what the config says ------------------------------------------------------------------------------------


def read_scheme(config: Mapping[str, object], where: str) -> Scheme | None:
    """How matrices are kept; None where nothing is quantised. Raises CheckpointError for kinds that are not read."""
    outer = Fields(config, where)
    fields = outer.group(CONFIG_NAME) or outer.group("compression_config")
    if fields is None and (text := outer.group("text_config")) is not None:
        fields = text.group(CONFIG_NAME)
    if fields is None:
        return None
    method = fields.text("quant_method", "none given")
    if method not in _METHODS:
        raise CheckpointError(f"{where}: {CONFIG_NAME}: the method {method!r} is not read; {SUPPORTED}")
    return _METHODS[method](fields, f"{where}: {CONFIG_NAME}")


def _fp8(fields: Fields, where: str) -> Scheme:
    if fields.has("fmt") and fields.text("fmt") != "e4m3":
        fields.refuse("fmt", "must be e4m3")
    size = fields.sequence("weight_block_size")
    if size and list(size) != [_BLOCK, _BLOCK]:
        fields.refuse("weight_block_size", f"must be {_BLOCK} x {_BLOCK}")
    return Scheme(kind=FP8, form="plain", group=_BLOCK if size else 0, where=where)


def _four_bits(fields: Fields, where: str, *, form: str) -> Scheme:
    if fields.integer("bits") != 4:
        fields.refuse("bits", "must be 4")
    group = fields.integer("group_size", -1, minimum=-1)
    _check_group(fields, "group_size", group)
    if form == "awq":
        if fields.text("version", "gemm").lower() != "gemm":
            fields.refuse("version", "must be gemm")
        symmetric = not fields.flag("zero_point", True)
        return Scheme(kind=INT4, form=form, group=max(group, 0), symmetric=symmetric, where=where)
    old = fields.text("checkpoint_format", "gptq") != "gptq_v2"
    return Scheme(kind=INT4, form=form, group=max(group, 0), zero_is_less_one=old, where=where)


def _compressed(fields: Fields, where: str) -> Scheme | None:
    groups = fields.group("config_groups")
    names = sorted(groups.names()) if groups is not None else []
    if not names and fields.has("kv_cache_scheme"):
        return None  # only keys and values have scales
    if groups is None or len(names) != 1:
        fields.refuse("config_groups", "must be one: files that mix kinds are not read")
    group = groups.group(names[0])
    weights = None if group is None else group.group("weights")
    if weights is None:
        fields.refuse("config_groups", "does not say how weights are kept")
    written = fields.text("format", group.text("format", "none given") if group is not None else "none given")
    bits, kind = weights.integer("num_bits"), weights.text("type", "int")
    symmetric = weights.flag("symmetric", True)
    size = weights.integer("group_size", -1, minimum=-1) if weights.has("group_size") else -1
    known = {
        ("float-quantized", 8, "float"): (FP8, "plain"),
        ("naive-quantized", 8, "float"): (FP8, "plain"),
        ("int-quantized", 8, "int"): (INT8, "plain"),
        ("naive-quantized", 8, "int"): (INT8, "plain"),
        ("pack-quantized", 4, "int"): (INT4, "packed"),
    }
    found = known.get((written, bits, kind))
    if found is None:
        raise CheckpointError(f"{where}: {written} of {bits}-bit {kind} weights is not read; {SUPPORTED}")
    if found[1] == "plain" and not symmetric:
        weights.refuse("symmetric", "must be true for eight bits")
    _check_group(weights, "group_size", size)
    return Scheme(kind=found[0], form=found[1], group=max(size, 0), symmetric=symmetric, where=where)


def _check_group(fields: Fields, name: str, size: int) -> None:
    if size != -1 and (size < 32 or size % 32):
        fields.refuse(name, f"must be -1 or a multiple of 32, not {size}")


_METHODS: dict[str, Callable[[Fields, str], Scheme | None]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "gptq": partial(_four_bits, form="gptq"),
    "awq": partial(_four_bits, form="awq"),
}
