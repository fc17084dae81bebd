"""Files of the GGUF format: fields, a table of tensors, then their bytes.

Opening parses and checks the header and touches no weight. Knows the container only; what the fields and names
mean for a model is in `open`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.models.files.config_fields import CheckpointError, shown
from paceline.models.files.stored import Entry, StoredTensor, decode_blocks, decode_float, map_file

# Values out of the header of a GGUF file, one behind the other, none taken before it is known to be there.
#
# Owns the wire format: numbers, strings and arrays in little endian. Every length is checked against what is left
# of the file before anything is allocated for it.


# A header is a vocabulary and a few settings; real ones stay below 50 MB and a million entries.
MAX_HEADER_BYTES = 256 * 2**20
MAX_ELEMENTS = 2**22
MAX_DEPTH = 4

STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")
_TYPE = struct.Struct("<I")
_ARRAY_HEAD = struct.Struct("<IQ")


class GgufReader:
    """A place in the header that moves on with each value."""

    def __init__(self, data: memoryview, where: str) -> None:
        self._data = data[:MAX_HEADER_BYTES]
        self.where = where
        self.at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self.at

    def type_number(self) -> int:
        return int(self._take(_TYPE)[0])

    def lengths(self, count: int) -> tuple[int, ...]:
        return tuple(self._take(struct.Struct(f"<{count}Q")))

    def string(self) -> str:
        (size,) = self._take(_LENGTH)
        self._need(size, "a string")
        end = self.at + size
        try:
            text = str(self._data[self.at : end], "utf-8")
        except UnicodeDecodeError as error:
            raise self.broken(f"a string at byte {self.at} is not UTF-8") from error
        self.at = end
        return text

    def value(self, kind: int) -> object:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array(1)
        code = NUMBERS.get(kind)
        if code is None:
            raise self.broken(f"a value has the unknown type {kind}")
        (number,) = self._take(struct.Struct(f"<{code}"))
        return bool(number) if kind == BOOL else number

    def broken(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {what}; the file is broken, download it again")

    def _array(self, depth: int) -> list[object]:
        kind, count = self._take(_ARRAY_HEAD)
        if depth > MAX_DEPTH:
            raise self.broken(f"arrays are nested more than {MAX_DEPTH} deep")
        if count > MAX_ELEMENTS:
            raise self.broken(f"an array claims {count} elements")
        if kind == STRING:
            self._need(count * _LENGTH.size, "an array of strings")
            return self._strings(count)
        if kind == ARRAY:
            self._need(count * _ARRAY_HEAD.size, "an array of arrays")
            return [self._array(depth + 1) for _ in range(count)]
        code = NUMBERS.get(kind)
        if code is None:
            raise self.broken(f"an array has elements of the unknown type {kind}")
        numbers = self._take(struct.Struct(f"<{count}{code}"))
        return [bool(number) for number in numbers] if kind == BOOL else list(numbers)

    def _strings(self, count: int) -> list[object]:
        """As `string`, `count` times, without the calls: vocabularies have hundreds of thousands."""
        data, at, end = self._data, self.at, len(self._data)
        unpack, head = _LENGTH.unpack_from, _LENGTH.size
        found: list[object] = []
        try:
            for _ in range(count):
                (size,) = unpack(data, at)
                at += head
                if size > end - at:
                    raise self.broken(
                        f"a string at byte {at} claims {size} bytes, beyond the end of the header"
                    )
                found.append(str(data[at : at + size], "utf-8"))
                at += size
        except struct.error as error:
            raise self.broken("ends within an array of strings") from error
        except UnicodeDecodeError as error:
            raise self.broken(f"a string at byte {at} is not UTF-8") from error
        self.at = at
        return found

    def _take(self, layout: struct.Struct) -> tuple[int, ...]:
        self._need(layout.size, "its header")
        values = layout.unpack_from(self._data, self.at)
        self.at += layout.size
        return values

    def _need(self, size: int, what: str) -> None:
        if size > self.left:
            raise self.broken(f"ends within {what} ({size} bytes wanted at {self.at}, {self.left} there)")


# The types a tensor in a GGUF file can have: values per block and bytes per block, by number and name.
#
# Types that need a table or a kernel we lack are listed too, so that a file that uses one is refused by name.


@dataclass(frozen=True, slots=True)
class GgmlType:
    name: str
    block: int  # values that are stored together
    block_bytes: int


TYPES = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    9: GgmlType("Q8_1", 32, 40),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    28: GgmlType("F64", 1, 8),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
    41: GgmlType("Q1_0", 128, 18),
}
FLOATS = ("F32", "F16", "BF16", "F64")
NOT_WEIGHTS = ("I8", "I16", "I32", "I64", "Q8_1", "Q8_K", "Q1_0")


MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**20
# The least a field (name length, type, one byte) and a tensor (name length, dimensions, type, offset) take.
FIELD_BYTES = 13
TENSOR_BYTES = 24


class GgufFile:
    """One open file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = map_file(path)
        reader = GgufReader(self._bytes.data, str(path))
        num_tensors, num_fields = _read_head(reader, bytes(self._bytes[:8]), str(path))
        self.fields: Mapping[str, object] = _read_fields(reader, num_fields)
        self.entries: Mapping[str, Entry] = _read_table(
            reader, num_tensors, _alignment(self.fields, str(path)), self._bytes.size
        )

    def tensor(self, name: str) -> StoredTensor:
        entry = self.entries[name]
        dtype = entry.dtype
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


def _read_table(reader: GgufReader, count: int, alignment: int, size: int) -> dict[str, Entry]:
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
        tensors[name] = Entry(shape=shape, dtype=kind.name, begin=start + offset, end=end)
    _check_overlap(reader, tensors)
    return tensors


def _read_entry(reader: GgufReader, name: str) -> tuple[tuple[int, ...], GgmlType, int]:
    num_dimensions = reader.type_number()
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise reader.broken(f"{shown(name)} claims {num_dimensions} dimensions")
    dimensions = reader.lengths(num_dimensions)
    number, (offset,) = reader.type_number(), reader.lengths(1)
    kind = TYPES.get(number)
    if kind is None:
        raise CheckpointError(
            f"{reader.where}: {shown(name)} has type number {number}, which is not known; "
            f"known are {', '.join(known.name for known in TYPES.values())}"
        )
    if 0 in dimensions or dimensions[0] % kind.block:
        raise reader.broken(f"{shown(name)} of type {kind.name} has the impossible shape {list(dimensions)}")
    return tuple(reversed(dimensions)), kind, offset


def _check_overlap(reader: GgufReader, tensors: Mapping[str, Entry]) -> None:
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
        if tensor.begin < at:
            raise reader.broken(f"{shown(name)} overlaps the tensor before it")
        at = tensor.end
