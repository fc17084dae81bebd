"""Files of the safetensors format: an 8-byte length, a JSON header, then the tensors' bytes side by side.

Everything the header claims is checked before a byte of a tensor is touched: the format's promise is that a file
can be opened without trusting it. Owns nothing about models: names are whatever the file says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.models.files.config_fields import CheckpointError, parse_json, shown, some_of
from paceline.models.files.stored import Entry, StoredTensor, decode_float, map_file

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 16
METADATA = "__metadata__"

# Bytes of one value, of every type the format has. Only the ones in WEIGHT_TYPES can be a model's weights.
TYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
WEIGHT_TYPES = ("F32", "F16", "BF16", "F64")
INTEGER_TYPES = {"I32": "<i4", "I64": "<i8"}
# Of what quantised matrices consist of; e4m3 as bytes.
QUANTIZED_TYPES = {"I8": "<i1", "F8_E4M3": "<u1", **INTEGER_TYPES}
WRITTEN_TYPES = {"float32": "F32", "float16": "F16", "int64": "I64", "bool": "BOOL"}


class SafetensorsFile:
    """One open file. Opening reads the header only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = map_file(path)
        self.entries: Mapping[str, Entry] = _read_header(self._bytes, str(path))

    def tensor(self, name: str) -> StoredTensor:
        entry = self.entries[name]
        if entry.dtype not in WEIGHT_TYPES:
            raise CheckpointError(
                f"{self.path}: {name} is of type {entry.dtype}; weights must be one of {', '.join(WEIGHT_TYPES)}"
            )
        raw = self._bytes[entry.begin : entry.end]
        return StoredTensor(name=name, shape=entry.shape, dtype=entry.dtype, raw=raw, decode=decode_float)

    def numbers(self, name: str) -> NDArray[np.generic]:
        """A tensor as it is stored: whole numbers as such, e4m3 as bytes, other floats as float32."""
        entry = self.entries[name]
        if entry.dtype not in QUANTIZED_TYPES:
            return self.tensor(name).to_float32()
        raw = np.array(self._bytes[entry.begin : entry.end])  # a file may begin it at an odd address
        return raw.view(QUANTIZED_TYPES[entry.dtype]).reshape(entry.shape)

    def integers(self, name: str) -> NDArray[np.int64]:
        """A tensor that is no weight: numbers of tokens, say."""
        entry = self.entries[name]
        if entry.dtype not in INTEGER_TYPES:
            raise CheckpointError(f"{self.path}: {name} is of type {entry.dtype}, not of whole numbers")
        raw = np.array(self._bytes[entry.begin : entry.end])  # a file may begin it at an odd address
        return raw.view(INTEGER_TYPES[entry.dtype]).astype(np.int64).reshape(entry.shape)


def _read_header(data: NDArray[np.uint8], where: str) -> dict[str, Entry]:
    if data.size < LENGTH_BYTES:
        raise CheckpointError(f"{where}: is {data.size} bytes long, too short to be a safetensors file")
    length = int.from_bytes(data[:LENGTH_BYTES].tobytes(), "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{where}: claims a header of {length} bytes; this is not a safetensors file")
    start = LENGTH_BYTES + length
    if start > data.size:
        raise CheckpointError(
            f"{where}: claims a header of {length} bytes but is only {data.size} bytes long; download it again"
        )
    header = parse_json(data[LENGTH_BYTES:start].tobytes(), f"{where}: header")
    header.pop(METADATA, None)
    entries = {name: _entry(name, value, start, where) for name, value in header.items()}
    _check_order(entries, start, data.size, where)
    return entries


def _entry(name: str, value: object, start: int, where: str) -> Entry:
    place = f"{where}: {shown(name)}"
    if not isinstance(value, dict):
        raise CheckpointError(f"{place}: the header must hold an object for it, not {shown(value)}")
    dtype = value.get("dtype")
    if not isinstance(dtype, str) or dtype not in TYPE_BYTES:
        raise CheckpointError(
            f"{place}: the type {shown(dtype)} is not known; known are {', '.join(TYPE_BYTES)}"
        )
    shape = _whole_numbers(value.get("shape"), "shape", place)
    offsets = _whole_numbers(value.get("data_offsets"), "data_offsets", place)
    if len(shape) > MAX_DIMENSIONS or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"{place}: has a shape or offsets that cannot be: {shown(shape)}, {shown(offsets)}"
        )
    begin, end = offsets
    if math.prod(shape) * TYPE_BYTES[dtype] != end - begin:
        raise CheckpointError(
            f"{place}: holds {shown(end - begin)} bytes, which is not what {dtype} of shape {shown(shape)} takes"
        )
    return Entry(dtype=dtype, shape=shape, begin=start + begin, end=start + end)


def _whole_numbers(value: object, what: str, place: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise CheckpointError(f"{place}: {what} must be a list of whole numbers, not {shown(value)}")
    return tuple(value)


def _check_order(entries: Mapping[str, Entry], start: int, size: int, where: str) -> None:
    """The tensors must fill the rest of the file exactly: no overlap, no hole, nothing left over."""
    at = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.end > size:
            raise CheckpointError(
                f"{where}: {shown(name)} ends at byte {entry.end} but the file has {size}; download it again"
            )
        if entry.begin != at:
            kind = "overlaps what lies before it" if entry.begin < at else "leaves a hole before it"
            raise CheckpointError(f"{where}: {shown(name)} {kind}; the file is broken, download it again")
        at = entry.end
    if at != size:
        raise CheckpointError(f"{where}: has {size - at} bytes behind its last tensor; download it again")


class SafetensorsFiles:
    """Several files that together hold a model. `weight_map` says which file each tensor is taken from."""

    def __init__(self, weight_map: Mapping[str, Path], where: str) -> None:
        files = {path: SafetensorsFile(path) for path in dict.fromkeys(weight_map.values())}
        absent = [name for name, path in weight_map.items() if name not in files[path].entries]
        if absent:
            raise CheckpointError(
                f"{where}: {len(absent)} tensors are not in the file named for them: {some_of(absent)}"
            )
        self._owners = {name: files[path] for name, path in weight_map.items()}
        self.entries: Mapping[str, Entry] = {name: file.entries[name] for name, file in self._owners.items()}

    def tensor(self, name: str) -> StoredTensor:
        return self._owners[name].tensor(name)

    def numbers(self, name: str) -> NDArray[np.generic]:
        return self._owners[name].numbers(name)

    def integers(self, name: str) -> NDArray[np.int64]:
        return self._owners[name].integers(name)


def write_safetensors(path: Path, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Write arrays as one file, which replaces the one there when it is complete."""
    header: dict[str, object] = {METADATA: dict(metadata)}
    at = 0
    for name, array in arrays.items():
        place = [at, at + array.nbytes]
        header[name] = {"dtype": WRITTEN_TYPES[array.dtype.name], "shape": array.shape, "data_offsets": place}
        at = place[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)  # the first tensor at an even address
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).tobytes())
    part.replace(path)
