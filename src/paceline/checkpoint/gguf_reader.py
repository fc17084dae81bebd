"""Values out of the header of a GGUF file, one behind the other, none taken before it is known to be there.

Owns the wire format: numbers, strings and arrays in little endian. Every length is checked against what is left
of the file before anything is allocated for it.
"""

from __future__ import annotations

import struct

from paceline.checkpoint.errors import CheckpointError

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

    def length(self) -> int:
        return int(self._take(_LENGTH)[0])

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
