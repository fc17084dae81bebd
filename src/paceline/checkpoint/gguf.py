"""Files of the GGUF format: fields, a table of tensors, then their bytes.

Opening parses and checks the header and touches no weight. Knows the container only; what the fields and names
mean for a model is in `gguf_model`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.decode import decode_blocks, decode_float
from paceline.checkpoint.errors import CheckpointError, shown
from paceline.checkpoint.ggml_types import FLOATS, NOT_WEIGHTS, TYPES, GgmlType
from paceline.checkpoint.gguf_reader import GgufReader
from paceline.checkpoint.mapped import map_file
from paceline.checkpoint.stored import StoredTensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**20
# The least a field (name length, type, one byte) and a tensor (name length, dimensions, type, offset) take.
FIELD_BYTES = 13
TENSOR_BYTES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One line of the tensor table. The shape is the usual one, rows first; offsets count from the file's start."""

    shape: tuple[int, ...]
    type: GgmlType
    begin: int
    end: int


class GgufFile:
    """One open file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = map_file(path)
        reader = GgufReader(self._bytes.data, str(path))
        num_tensors, num_fields = _read_head(reader, bytes(self._bytes[:8]), str(path))
        self.fields: Mapping[str, object] = _read_fields(reader, num_fields)
        self.tensors: Mapping[str, GgufTensor] = _read_table(
            reader, num_tensors, _alignment(self.fields, str(path)), self._bytes.size
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def types(self) -> Iterator[tuple[str, str, int]]:
        """Name, type and bytes of every tensor."""
        for name, tensor in self.tensors.items():
            yield name, tensor.type.name, tensor.end - tensor.begin

    def tensor(self, name: str) -> StoredTensor:
        entry = self.tensors[name]
        dtype = entry.type.name
        if dtype in NOT_WEIGHTS:
            raise CheckpointError(f"{self.path}: {name} is of type {dtype}, which weights cannot have")
        decode = decode_float if dtype in FLOATS else decode_blocks
        raw = self._bytes[entry.begin : entry.end]
        return StoredTensor(name=name, shape=entry.shape, dtype=dtype, raw=raw, decode=decode)


def _read_head(reader: GgufReader, start: bytes, where: str) -> tuple[int, int]:
    if start[:4] != MAGIC:
        raise CheckpointError(f"{where}: is not a GGUF file (it begins with {shown(start[:4])})")
    reader.at = len(MAGIC)
    version = reader.type_number()
    if version not in VERSIONS:
        if version & 0xFFFF == 0:
            raise CheckpointError(f"{where}: is a big-endian GGUF file, which is not supported")
        raise CheckpointError(
            f"{where}: is GGUF version {version}; supported are {VERSIONS[0]} and {VERSIONS[1]}"
        )
    num_tensors, num_fields = reader.lengths(2)
    if num_tensors * TENSOR_BYTES + num_fields * FIELD_BYTES > reader.left:
        raise reader.broken(
            f"claims {num_tensors} tensors and {num_fields} fields, more than it has bytes for"
        )
    return num_tensors, num_fields


def _read_fields(reader: GgufReader, count: int) -> dict[str, object]:
    fields: dict[str, object] = {}
    for _ in range(count):
        name = reader.string()
        if name in fields:
            raise reader.broken(f"the field {shown(name)} occurs twice")
        fields[name] = reader.value(reader.type_number())
    return fields


def _alignment(fields: Mapping[str, object], where: str) -> int:
    value = fields.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or not 8 <= value <= MAX_ALIGNMENT or value % 8:
        raise CheckpointError(f"{where}: general.alignment must be a multiple of 8, not {shown(value)}")
    return value


def _read_table(reader: GgufReader, count: int, alignment: int, size: int) -> dict[str, GgufTensor]:
    entries: dict[str, tuple[tuple[int, ...], GgmlType, int]] = {}
    for _ in range(count):
        name = reader.string()
        if name in entries:
            raise reader.broken(f"the tensor {shown(name)} occurs twice")
        entries[name] = _read_entry(reader, name)
    start = -(-reader.at // alignment) * alignment
    tensors = {}
    for name, (shape, kind, offset) in entries.items():
        end = start + offset + math.prod(shape) // kind.block * kind.block_bytes
        if offset % alignment:
            raise reader.broken(
                f"{shown(name)} lies at offset {offset}, which is not a multiple of {alignment}"
            )
        if end > size:
            raise reader.broken(f"{shown(name)} at offset {offset} reaches beyond the end of the file")
        tensors[name] = GgufTensor(shape=shape, type=kind, begin=start + offset, end=end)
    _check_overlap(reader, tensors)
    return tensors


def _read_entry(reader: GgufReader, name: str) -> tuple[tuple[int, ...], GgmlType, int]:
    num_dimensions = reader.type_number()
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise reader.broken(f"{shown(name)} claims {num_dimensions} dimensions")
    dimensions = reader.lengths(num_dimensions)
    number, offset = reader.type_number(), reader.length()
    kind = TYPES.get(number)
    if kind is None:
        raise CheckpointError(
            f"{reader.where}: {shown(name)} has type number {number}, which is not known; "
            f"known are {', '.join(known.name for known in TYPES.values())}"
        )
    if 0 in dimensions or dimensions[0] % kind.block:
        raise reader.broken(f"{shown(name)} of type {kind.name} has the impossible shape {list(dimensions)}")
    return tuple(reversed(dimensions)), kind, offset


def _check_overlap(reader: GgufReader, tensors: Mapping[str, GgufTensor]) -> None:
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
        if tensor.begin < at:
            raise reader.broken(f"{shown(name)} overlaps the tensor before it")
        at = tensor.end
