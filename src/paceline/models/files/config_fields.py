"""Named values of a model's description (a config.json, or the fields of a GGUF file), taken out with checks.

A value that is missing, of the wrong type or out of range is one sentence that names the file and the field.
Bounds are wide enough for any real model and narrow enough that no field can make us allocate without end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from paceline.errors import InputError

# Mistakes in a model on disk, as messages for users.


NAMED = 4  # entries of a list that are named, the rest are counted


class CheckpointError(InputError):
    """A model's files are missing, broken, or of a kind that cannot be run."""


def some_of(items: Sequence[str]) -> str:
    """The first few of a list and how many more there are."""
    named = ", ".join(items[:NAMED])
    rest = len(items) - NAMED
    return f"{named} and {rest} more" if rest > 0 else named


def shown(value: object) -> str:
    """A value from a file, short enough for a message."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**30:
        return "a number of more than 30 digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


MAX_JSON_BYTES = 100_000_000
MAX_SIZE = 2**31 - 1
NEGATIVE = -1e-9  # above it is zero or more


class Fields:
    """The values of one description. A null counts as absent, as it does for the writers of these files."""

    def __init__(
        self, values: Mapping[str, object], where: str, defaults: Mapping[str, object] | None = None
    ) -> None:
        self._values = values
        self._defaults = defaults or {}
        self.where = where

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def get(self, name: str) -> object:
        """The value, its default, or None. A null that is written down hides the default."""
        return self._values[name] if name in self._values else self._defaults.get(name)

    def integer(
        self, name: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_SIZE
    ) -> int:
        value = self._present(name, default)
        whole = isinstance(value, float) and value.is_integer()
        if isinstance(value, bool) or not (isinstance(value, int) or whole):
            self.refuse(name, f"must be a whole number, not {shown(value)}")
        assert isinstance(value, int | float)
        if not minimum <= value <= maximum:
            self.refuse(name, f"must be from {minimum} to {maximum}, not {shown(value)}")
        return int(value)

    def optional_integer(self, name: str, *, minimum: int = 1, maximum: int = MAX_SIZE) -> int | None:
        if self.get(name) is None:
            return None
        return self.integer(name, minimum=minimum, maximum=maximum)

    def number(self, name: str, default: float | None = None, *, above: float = -math.inf) -> float:
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(name, f"must be a number, not {shown(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number <= above:
            bound = "" if above == -math.inf else f" above {above:g}"
            self.refuse(name, f"must be a finite number{bound}, not {shown(value)}")
        return number

    def optional_number(self, name: str, *, above: float = -math.inf) -> float | None:
        return None if self.get(name) is None else self.number(name, above=above)

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self._present(name, default)
        if not isinstance(value, bool):
            self.refuse(name, f"must be true or false, not {shown(value)}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._present(name, default)
        if not isinstance(value, str):
            self.refuse(name, f"must be a text, not {shown(value)}")
        return value

    def sequence(self, name: str) -> Sequence[object]:
        """The list of that name; empty where there is none."""
        value = self.get(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            self.refuse(name, f"must be a list, not {shown(value)}")
        return value

    def group(self, name: str, defaults: Mapping[str, object] | None = None) -> Fields | None:
        """The values below a name, or None where there are none."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.refuse(name, f"must be a group of fields, not {shown(value)}")
        return Fields(value, f"{self.where}: {name}", defaults)

    def names(self) -> frozenset[str]:
        return frozenset(self._values)

    def refuse(self, name: str, why: str) -> NoReturn:
        raise CheckpointError(f"{self.where}: {name} {why}")

    def _present(self, name: str, default: object) -> object:
        value = self._values.get(name)
        if value is None:
            value = self._defaults.get(name)
        if value is None:
            value = default
        if value is None:
            self.refuse(name, "is missing")
        return value


def read_json(path: Path, maximum: int = MAX_JSON_BYTES) -> dict[str, object]:
    """The object in a JSON file."""
    try:
        if path.stat().st_size > maximum:
            raise CheckpointError(f"{path}: is larger than {maximum} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    return parse_json(data, str(path))


def parse_json(data: bytes, where: str) -> dict[str, object]:
    """The object in JSON text; a key that comes twice is an error, for it could be read two ways."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except _DuplicateKey as error:
        raise CheckpointError(f"{where}: the key {shown(error.args[0])} occurs twice") from error
    except RecursionError as error:
        raise CheckpointError(f"{where}: is nested too deeply") from error
    except ValueError as error:
        raise CheckpointError(f"{where}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: must hold a JSON object, not {shown(value)}")
    return value


class _DuplicateKey(Exception):
    """The key is its argument."""


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise _DuplicateKey(key)
        found[key] = value
    return found
