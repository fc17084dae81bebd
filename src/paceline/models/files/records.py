"""Quantised matrices of safetensors files in one form, whatever the file's own: each row is a record of its bytes.

A record is the row's numbers, then a scale (float32) for each group of inputs, then for INT4 an offset each:

    FP8   e4m3, one byte each      value = number * scale
    INT8  signed, one byte each    value = number * scale
    INT4  0 to 15, two in a byte   value = number * scale + offset; the first of two in the lower half

One group may be the whole row. Rows lie whole, so that a matrix can be cut and put in order like any other
(layout.py). Knows no file and no names.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from paceline.models.files.stored import StoredTensor

FP8, INT8, INT4 = "FP8", "INT8", "INT4"
KINDS = (FP8, INT8, INT4)
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A matrix [rows, inner]: numbers as they are kept, and what they are multiplied with."""

    kind: str
    q: Bytes  # [rows, inner], or [rows, inner / 2] for INT4
    scale: Floats  # [rows, groups]
    offset: Floats | None = None  # [rows, groups], for INT4

    @property
    def inner(self) -> int:
        width: int = self.q.shape[1]
        return width * 2 if self.kind == INT4 else width

    def values(self) -> Floats:
        rows, groups = self.scale.shape
        grouped = self.numbers().reshape(rows, groups, -1)
        result: Floats = grouped * self.scale[:, :, None]
        if self.offset is not None:
            result += self.offset[:, :, None]
        return result.reshape(rows, self.inner)

    def numbers(self) -> Floats:
        """Without scales, [rows, inner]."""
        if self.kind == FP8:
            return fp8_table()[self.q]
        if self.kind == INT8:
            return self.q.view(np.int8).astype(np.float32)
        return self.nibbles().astype(np.float32)

    def nibbles(self) -> Bytes:
        """Of INT4: one in a byte, [rows, inner]."""
        return np.stack([self.q & 15, self.q >> 4], axis=-1).reshape(len(self.q), -1)


def as_tensor(name: str, record: Record) -> StoredTensor:
    rows = len(record.q)
    parts = [record.q, np.ascontiguousarray(record.scale, "<f4").view(np.uint8)]
    if record.kind == INT4:
        assert record.offset is not None
        parts.append(np.ascontiguousarray(record.offset, "<f4").view(np.uint8))
    raw = np.concatenate([part.reshape(rows, -1) for part in parts], axis=1).reshape(-1)
    raw.flags.writeable = False
    return StoredTensor(name=name, shape=(rows, record.inner), dtype=record.kind, raw=raw, decode=decode)


def record_of(tensor: StoredTensor) -> Record:
    rows, inner = tensor.shape
    size = inner // 2 if tensor.dtype == INT4 else inner
    records = tensor.raw.reshape(rows, -1)
    floats: Floats = np.ascontiguousarray(records[:, size:]).view("<f4").astype(np.float32, copy=False)
    q = np.ascontiguousarray(records[:, :size])
    if tensor.dtype != INT4:
        return Record(tensor.dtype, q, floats)
    groups = floats.shape[1] // 2
    return Record(INT4, q, floats[:, :groups], floats[:, groups:])


GGUF_FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")  # of GGUF files: what can be a record of four bits


def record_of_gguf(tensor: StoredTensor) -> Record:
    """Groups of 32; the first sixteen numbers of a group are the lower halves of its bytes."""
    rows = tensor.shape[0]
    if (
        tensor.dtype == "Q4_K"
    ):  # two halves, eight scales and eight minima of six bits, then groups two by two
        blocks = tensor.raw.reshape(rows, -1, 144)
        d, low = (_float16(blocks[:, :, at : at + 2]) for at in (0, 2))
        first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
        scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=-1)
        minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=-1)
        scale, offset = (d * scales).reshape(rows, -1), (-low * minima).reshape(rows, -1)
        pairs = blocks[:, :, 16:].reshape(rows, -1, 4, 32)
        numbers = np.stack([pairs & 15, pairs >> 4], axis=3)
    else:
        head = 2 if tensor.dtype == "Q4_0" else 4
        blocks = tensor.raw.reshape(rows, -1, head + 16)
        scale = _float16(blocks[:, :, :2])[..., 0]
        offset = -8 * scale if head == 2 else _float16(blocks[:, :, 2:4])[..., 0]
        numbers = np.concatenate([blocks[:, :, head:] & 15, blocks[:, :, head:] >> 4], axis=-1)
    return Record(INT4, pack_nibbles(numbers.reshape(tensor.shape)), scale, offset)


def _float16(raw: Bytes) -> Floats:
    values: Floats = np.ascontiguousarray(raw).view(np.float16).astype(np.float32)
    return values


def decode(tensor: StoredTensor) -> Floats:
    return record_of(tensor).values()


def pack_nibbles(numbers: Bytes) -> Bytes:
    """Numbers of 0 to 15, [rows, inner], two in a byte."""
    return (numbers[:, 0::2] | numbers[:, 1::2] << 4).astype(np.uint8)


@cache
def fp8_table() -> Floats:
    """The number of each byte of e4m3: a sign, four bits of exponent, three of a fraction; no infinity."""
    byte = np.arange(256)
    exponent, fraction = byte >> 3 & 15, byte & 7
    value = np.where(exponent > 0, (8 + fraction) * 2.0 ** (exponent - 10.0), fraction * 2.0**-9)
    value[(byte & 127) == 127] = np.nan
    return np.where(byte < 128, value, -value).astype(np.float32)
