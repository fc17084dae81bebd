"""A plan as bytes, in a fixed layout, for processes that compute the same steps.

    header   magic, version, checksum, layout, number of the plan, columns that are there, numbers that are there,
             length of the text: 40 bytes
    numbers  eight bytes each: those that are not what a plan has by default
    counts   four bytes each: entries of each column that is there
    columns  int32, int64 or float32, one behind the other
    text     what has no columns, as JSON: sampling and pictures of rows that join, contents of blocks that move

Which fields there are is read from `StepPlan` itself, so that a new one is carried or refused when this module is
loaded, and both sides must have the same. Bytes are believed only with their checksum and within their bounds; nothing
of them is ever run.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from enum import Enum
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from paceline.core.fast import make_tuple
from paceline.core.parameters import KVKeep, Pin, PoolingParams
from paceline.core.plan import F32, I32, I64, EncodeJoin, StepPlan
from paceline.core.request import BlockKey
from paceline.core.sampling import PARAMETERS, RequestOutputKind, SamplingParams
from paceline.core.structure import Structure

MAGIC, VERSION = b"PLSP", 1
_HEAD = struct.Struct("<4sHHI")  # magic, version, nothing, and the checksum of all behind it
# Layout, number of the plan, columns and numbers that are there, length of the text.
_BODY = struct.Struct("<IqQII")
_START = _HEAD.size + _BODY.size
_LENGTHS, _TOKENS = "token_lengths", "tokens"  # columns that stand for a tuple of them
_TYPES: tuple[tuple[object, str], ...] = ((I32, "<i4"), (I64, "<i8"), (F32, "<f4"))
_WORD = np.dtype("<i4")


class BadPlan(ValueError):
    """Bytes that are no plan, or one of another version."""


class _Column(NamedTuple):
    bit: int
    name: str
    type: np.dtype[Any]


class _Number(NamedTuple):
    bit: int
    name: str
    kind: type
    default: Any


class _Part(NamedTuple):
    """A field of a plan that is a value of its own, or, at `at` -1, the plan."""

    at: int
    name: str
    kind: Any
    absent: Any  # what it is where nothing of it is in the bytes
    columns: tuple[_Column, ...]
    numbers: tuple[_Number, ...]
    texts: tuple[str, ...]
    has_tokens: bool  # of its columns, the last two are the lengths and the tokens of a tuple


class _Shape(NamedTuple):
    """What is there of a plan, worked out from the bits that say so."""

    numbers: struct.Struct
    number_fields: tuple[tuple[int, str, type], ...]  # place in the plan, name, type
    counts: struct.Struct
    columns: tuple[tuple[int, str, np.dtype[Any]], ...]


def encode(plan: StepPlan) -> bytes:
    """The bytes of a plan."""
    columns: list[NDArray[Any]] = []
    numbers: list[bytes] = []
    text: dict[str, Any] = {}
    there = given = 0
    for part in _PARTS:
        value: Any = plan if part.at < 0 else plan[part.at]
        if value is part.absent:
            continue
        if part.numbers:
            found = _NUMBERS_OF[part.at](value)
            if found != _DEFAULTS_OF[part.at]:
                given |= _add_numbers(part, found, numbers)
        for name in part.texts:
            entries = getattr(value, name)
            if entries:
                text[f"{part.name}.{name}"] = _TO_TEXT[name](entries)
        for bit, name, dtype in part.columns:
            column = _token_column(value, name) if part.has_tokens else getattr(value, name)
            if len(column):
                there |= bit
                columns.append(column if column.dtype is dtype else column.astype(dtype))
    rest = json.dumps(text, separators=(",", ":")).encode() if text else b""
    counts = struct.pack(f"<{len(columns)}I", *map(len, columns))
    start = _BODY.pack(_LAYOUT, plan.seq, there, given, len(rest))
    body = b"".join([start, *numbers, counts, *[column.tobytes() for column in columns], rest])
    return _HEAD.pack(MAGIC, VERSION, 0, zlib.crc32(body)) + body


def _add_numbers(part: _Part, found: tuple[Any, ...], to: list[bytes]) -> int:
    """Those that are not the default; returns their bits."""
    given = 0
    for (bit, _, kind, default), number in zip(part.numbers, found, strict=True):
        if number != default:
            given |= bit
            to.append(_FLOAT.pack(number) if kind is float else _INT.pack(number))
    return given


def decode(data: memoryview) -> StepPlan:
    """The plan of these bytes. Raises BadPlan for any that `encode` did not make."""
    if len(data) < _START:
        raise BadPlan(f"{len(data)} bytes are too few for a plan")
    magic, version, nothing, checksum = _HEAD.unpack_from(data)
    layout, seq, there, given, num_text = _BODY.unpack_from(data, _HEAD.size)
    if (magic, version, nothing, layout) != (MAGIC, VERSION, 0, _LAYOUT):
        raise BadPlan("the bytes are no plan of this version")
    if zlib.crc32(data[_HEAD.size :]) != checksum:
        raise BadPlan("the bytes of a plan are damaged")
    if there >= _NO_COLUMN or given >= _NO_NUMBER:
        raise BadPlan("a plan has parts that this version does not know")
    shape = _shape(there, given)
    first_word = _START + shape.numbers.size + shape.counts.size
    if first_word + num_text > len(data):
        raise BadPlan("a plan has other parts than it says")
    try:
        return _decode(data, seq, shape, first_word, len(data) - num_text)
    except BadPlan:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise BadPlan(f"a plan cannot be read: {error}") from error


def _decode(data: memoryview, seq: int, shape: _Shape, first_word: int, text_at: int) -> StepPlan:
    found: list[Any] = list(_ABSENT)
    found[0] = seq
    values: dict[int, dict[str, Any]] = {}
    numbers = shape.numbers.unpack_from(data, _START)
    for (at, name, kind), number in zip(shape.number_fields, numbers, strict=True):
        if kind is bool and number != 1:
            raise BadPlan("a flag is neither set nor not")
        values.setdefault(at, {})[name] = kind(number)
    counts = shape.counts.unpack_from(data, _START + shape.numbers.size)
    words = np.frombuffer(data, _WORD, (text_at - first_word) // 4, first_word)
    end = 0
    for (at, name, dtype), count in zip(shape.columns, counts, strict=True):
        begin, end = end, end + (count if dtype is _WORD else count * dtype.itemsize // 4)
        if not count or end > len(words):
            raise BadPlan("a plan has other columns than it says")
        column = words[begin:end]
        values.setdefault(at, {})[name] = column if dtype is _WORD else column.copy().view(dtype)
    if first_word + 4 * end != text_at:
        raise BadPlan("a plan has other columns than it says")
    if text_at < len(data):
        _decode_text(bytes(data[text_at:]), values)
    for at, mine in values.items():
        if at < 0:
            for name, value in mine.items():
                found[_PLACES[name]] = value
        else:
            part = _PART_AT[at]
            if part.has_tokens and (_LENGTHS in mine or _TOKENS in mine):
                mine[_TOKENS] = _token_tuple(mine.pop(_LENGTHS, _NONE), mine.get(_TOKENS, _NONE))
            found[at] = part.kind(**mine)
    plan: StepPlan = make_tuple(StepPlan, found)
    return plan


@lru_cache(4096)  # steps of a kind have the same parts
def _shape(there: int, given: int) -> _Shape:
    numbers = [(part.at, number) for part in _PARTS for number in part.numbers if number.bit & given]
    columns = [(part.at, column) for part in _PARTS for column in part.columns if column.bit & there]
    codes = "".join("d" if number.kind is float else "q" for _, number in numbers)
    return _Shape(
        struct.Struct("<" + codes),
        tuple((at, number.name, number.kind) for at, number in numbers),
        struct.Struct(f"<{len(columns)}I"),
        tuple((at, column.name, column.type) for at, column in columns),
    )


def _decode_text(data: bytes, values: dict[int, dict[str, Any]]) -> None:
    text = json.loads(data)
    if not isinstance(text, dict) or not text or not _TEXTS.keys() >= text.keys():
        raise BadPlan("a plan has a text with other names")
    for name, entries in text.items():
        at, field = _TEXTS[name]
        values.setdefault(at, {})[field] = _FROM_TEXT[field](entries)


def _token_column(value: Any, name: str) -> NDArray[Any]:
    """A column of what has tokens: of the tuple of these, the lengths, then all of them."""
    if name == _LENGTHS:
        return np.fromiter(map(len, value.tokens), np.int32, len(value.tokens))
    if name == _TOKENS:
        return np.concatenate(value.tokens) if value.tokens else _NONE
    column: NDArray[Any] = getattr(value, name)
    return column


def _token_tuple(lengths: I32, tokens: I32) -> tuple[I32, ...]:
    if not len(lengths) or int(lengths.min()) < 0 or int(lengths.sum(dtype=np.int64)) != len(tokens):
        raise BadPlan("rows that join have other tokens than they say")
    ends = np.cumsum(lengths).tolist()
    return tuple(tokens[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True))


# -- what stands in the text -----------------------------------------------------------------------------------


def _sampling_texts(all_of_them: Iterable[SamplingParams]) -> list[dict[str, Any]]:
    return [_sampling_text(each) for each in all_of_them]


def _sampling_text(sampling: SamplingParams) -> dict[str, Any]:
    """The parameters that are not what they are by default."""
    changed = {}
    for name, parameter in PARAMETERS.items():
        value = getattr(sampling, name)
        if value != parameter.default:
            changed[name] = _plain(value)
    return changed


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return [[int(key), float(each)] for key, each in value.items()]
    if isinstance(value, (KVKeep, Pin, PoolingParams, Structure)):
        return asdict(value)
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value


def _samplings(texts: list[dict[str, Any]]) -> tuple[SamplingParams, ...]:
    return tuple(
        SamplingParams(
            **{
                name: _NESTED[name](value) if name in _NESTED and value is not None else value
                for name, value in each.items()
            }
        )
        for each in texts
    )


_NESTED: dict[str, Callable[[Any], Any]] = {
    "logit_bias": dict,
    "bad_words": lambda words: tuple(word if isinstance(word, str) else tuple(word) for word in words),
    "structured_outputs": lambda given: Structure(**given),
    "output_kind": RequestOutputKind,
    "kv_keep": lambda given: KVKeep(**given),
    "pin": lambda given: Pin(**given),
    "pooling": lambda given: PoolingParams(**given),
}


def _media(entries: Any) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    return tuple(tuple(_whole(item, 3) for item in row) for row in entries)  # type: ignore[misc]


def _whole(given: Any, count: int | None = None) -> tuple[int, ...]:
    numbers = tuple(given)
    if (count is not None and len(numbers) != count) or any(type(each) is not int for each in numbers):
        raise BadPlan("a plan has something where it should have whole numbers")
    return numbers


def _key_text(key: BlockKey) -> list[str]:
    return [getattr(key, spec.name).hex() for spec in fields(BlockKey)]


def _encode_joins(entries: Any) -> tuple[EncodeJoin, ...]:
    return tuple(make_tuple(EncodeJoin, (*_whole(each[:-1], 3), _whole(each[-1]))) for each in entries)


_TO_TEXT: dict[str, Callable[[Any], Any]] = {
    "sampling": _sampling_texts,
    "media": lambda rows: rows,
    "contents": lambda keys: [_key_text(key) for key in keys],
    "uses_left": lambda uses: [int(each) for each in uses],
    "joins": lambda joins: joins,
}
_FROM_TEXT: dict[str, Callable[[Any], Any]] = {
    "sampling": _samplings,
    "media": _media,
    "contents": lambda keys: tuple(BlockKey(*map(bytes.fromhex, key)) for key in keys),
    "uses_left": _whole,
    "joins": _encode_joins,
}


# -- which fields there are ------------------------------------------------------------------------------------


def _parts_of(plan: Any) -> list[_Part]:
    """Every field of a plan: where it stands in the bytes."""
    columns, numbers = _Bits(), _Bits()
    found = []
    hints = get_type_hints(plan)
    own = {name: hint for name, hint in hints.items() if name != "seq" and _is_plain(hint)}
    found.append(_part(-1, "", plan, object(), own, columns, numbers))
    for at, name in enumerate(plan._fields):
        if name != "seq" and name not in own:
            kind = hints[name]
            default = plan._field_defaults[name]
            found.append(_part(at, name, kind, default, get_type_hints(kind), columns, numbers))
    return found


class _Bits:
    """Gives out one after the other."""

    def __init__(self) -> None:
        self.next = 1

    def take(self) -> int:
        self.next <<= 1
        return self.next >> 1


def _is_plain(hint: object) -> bool:
    return hint in (int, float, bool) or any(hint == array for array, _ in _TYPES)


def _part(
    at: int, name: str, kind: Any, absent: Any, hints: Mapping[str, Any], columns: _Bits, numbers: _Bits
) -> _Part:
    sample = kind(seq=1) if at < 0 else kind()
    arrays, plain, texts, has_tokens = [], [], [], False
    for field, hint in hints.items():
        stored = next((code for array, code in _TYPES if hint == array), "")
        if stored:
            arrays.append(_Column(columns.take(), field, np.dtype(stored)))
        elif hint in (int, float, bool):
            plain.append(_Number(numbers.take(), field, hint, getattr(sample, field)))
        elif get_origin(hint) is tuple and get_args(hint) == (I32, ...) and field == _TOKENS:
            has_tokens = True
        elif field in _TO_TEXT:
            texts.append(field)
        else:
            raise TypeError(f"a plan's {name}.{field} has no place in the bytes of a plan")
    if has_tokens:
        for field in (_LENGTHS, _TOKENS):
            arrays.append(_Column(columns.take(), field, np.dtype("<i4")))
    return _Part(at, name, kind, absent, tuple(arrays), tuple(plain), tuple(texts), has_tokens)


_INT, _FLOAT = struct.Struct("<q"), struct.Struct("<d")
_NONE: I32 = np.zeros(0, np.int32)
_PARTS = _parts_of(StepPlan)
_PART_AT = {part.at: part for part in _PARTS}
_NUMBERS_OF = {part.at: attrgetter(*[each.name for each in part.numbers]) for part in _PARTS if part.numbers}
_DEFAULTS_OF = {part.at: tuple(each.default for each in part.numbers) for part in _PARTS}
_TEXTS = {f"{part.name}.{name}": (part.at, name) for part in _PARTS for name in part.texts}
_NO_COLUMN = 1 << sum(len(part.columns) for part in _PARTS)
_NO_NUMBER = 1 << sum(len(part.numbers) for part in _PARTS)
_PLACES = {name: at for at, name in enumerate(StepPlan._fields)}
_ABSENT = StepPlan(seq=0)
# Both sides have the same fields, in the same order.
_LAYOUT = zlib.crc32(repr([(part.name, part.columns, part.numbers, part.texts) for part in _PARTS]).encode())
assert _NO_COLUMN <= 1 << 64 and _NO_NUMBER <= 1 << 32, "the header has no room for more fields"
