"""Trace files: text on disk in, a Workload out.

Owns the three supported formats, how one is recognised from what the file says (never from its name) and the
messages about files that are not what they should be. Draws nothing at random. Requests come back sorted by
arrival (equal arrivals in the order of the file) and with the first arrival at time 0.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TypeVar

import numpy as np

from paceline.core.sampling import MAX_OBJECTIVE_MS
from paceline.errors import InputError
from paceline.lab.workload.workload import DEFAULT_TENANTS, OBJECTIVES, Workload

MAX_LENGTH = 2**31 - 1
_MAX_SECONDS = 9_000_000_000  # nanoseconds must fit 64 bits; this is the year 2255 as a Unix time
_MAX_ID = 2**63 - 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TIMESTAMP = re.compile(
    r"(?P<whole>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(?P<part>\d+))?(?P<zone>Z|[+-]\d\d:?\d\d)?",
    flags=re.ASCII,
)
_WHOLE = re.compile(r"[+-]?\d{1,20}(\.0*)?", flags=re.ASCII)
MOONCAKE_BLOCK = 512  # tokens behind each of a Mooncake trace's hash ids
T = TypeVar("T")


# ---------------------------------------------------------------- single values: text or JSON in, a number out
#
# A value that is not what its column holds raises `FieldError` with the reason only; the reader, which knows the file,
# the line and the column, makes the message. Times are whole nanoseconds, so that sorting and subtracting are exact.


class FieldError(ValueError):
    """Why a value is not what its column holds."""


def parse_length(value: object, *, at_least: int = 1) -> int:
    """A number of tokens: `374`, and `374.0` as data frames write it."""
    number = _whole(value)
    if number < at_least:
        raise FieldError(f"must be at least {at_least}")
    if number > MAX_LENGTH:
        raise FieldError(f"must be at most {MAX_LENGTH}")
    return number


def parse_output_length(value: object) -> int:
    """Like `parse_length`, but an output of 0 tokens counts as 1: the request was served all the same."""
    return max(1, parse_length(value, at_least=0))


def parse_seconds(value: object) -> int:
    """Seconds since any start, as nanoseconds."""
    return _nanoseconds(_finite(value), per_second=1)


def parse_milliseconds(value: object) -> int:
    """Milliseconds since any start, as nanoseconds."""
    return _nanoseconds(_finite(value), per_second=1_000)


def parse_timestamp(value: object) -> int:
    """A date and time such as `2023-11-16 18:15:46.6805900`, as nanoseconds; without a zone it is UTC."""
    match = _TIMESTAMP.fullmatch(str(value).strip())
    if match is None:
        raise FieldError("is not a timestamp like 2023-11-16 18:15:46.6805900")
    try:
        moment = datetime.fromisoformat(match["whole"] + (match["zone"] or "+00:00"))
    except ValueError as error:
        raise FieldError(f"is not a valid timestamp ({error})") from None
    seconds = (moment - _EPOCH) // timedelta(seconds=1)
    if not 0 <= seconds <= _MAX_SECONDS:
        raise FieldError("must lie between the years 1970 and 2255")
    return seconds * 1_000_000_000 + int((match["part"] or "")[:9].ljust(9, "0"))


def parse_name(value: object) -> str:
    """The name of a client."""
    name = str(value).strip()
    if not name:
        raise FieldError("is empty")
    return name


def parse_block_ids(value: object) -> tuple[int, ...]:
    """A list of whole numbers that name the blocks of a prompt."""
    if not isinstance(value, list):
        raise FieldError("is not a list of block ids")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= _MAX_ID:
            raise FieldError(f"holds {shown(item)}, which is not a whole number of at least 0 in 64 bits")
    return tuple(value)


def shown(value: object, *, limit: int = 60) -> str:
    """A value as a message shows it: quoted, on one line, not endless."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _whole(value: object) -> int:
    if isinstance(value, str):
        text = value.strip()
        if not text:
            raise FieldError("is empty")
        if _WHOLE.fullmatch(text):
            return int(text.partition(".")[0])
    elif isinstance(value, int) and not isinstance(value, bool):
        return value
    elif isinstance(value, float) and value.is_integer():
        return int(value)
    raise FieldError("is not a whole number")


def _finite(value: object) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise FieldError("is not a number")
    text = str(value).strip()
    if not text:
        raise FieldError("is empty")
    try:
        # Exact, where a double would round a Unix time to a quarter of a microsecond.
        number = Decimal(text)
    except InvalidOperation:
        raise FieldError("is not a number") from None
    if "_" in text:  # Python would read 1_000 as a thousand
        raise FieldError("is not a number")
    if not number.is_finite():
        raise FieldError("is not a finite number")
    return number


def _nanoseconds(number: Decimal, *, per_second: int) -> int:
    if number < 0:
        raise FieldError("must not be negative")
    if number > _MAX_SECONDS * per_second:
        raise FieldError(f"must be at most {_MAX_SECONDS * per_second}")
    return round(number * (1_000_000_000 // per_second))


# ---------------------------------------------------------------- formats


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """Which columns (or keys) hold what."""

    title: str
    arrival: str
    prompt: str
    output: str
    parse_arrival: Callable[[object], int]  # to nanoseconds
    client: str | None = None  # optional in the file
    block_ids: str | None = None  # optional in the file, but then in every row

    @property
    def required(self) -> tuple[str, ...]:
        return (self.arrival, self.prompt, self.output)

    def __str__(self) -> str:
        optional = self.client or self.block_ids
        return f"{self.title} ({', '.join(self.required)}{f', optionally {optional}' if optional else ''})"


AZURE = TraceFormat(
    title="Azure CSV",
    arrival="TIMESTAMP",
    prompt="ContextTokens",
    output="GeneratedTokens",
    parse_arrival=parse_timestamp,
)
MULTI_TENANT = TraceFormat(
    title="multi-tenant CSV",
    arrival="arrival_s",
    prompt="prompt_len",
    output="output_len",
    parse_arrival=parse_seconds,
    client="client",
)
MOONCAKE = TraceFormat(
    title="Mooncake JSON lines",
    arrival="timestamp",
    prompt="input_length",
    output="output_length",
    parse_arrival=parse_milliseconds,
    block_ids="hash_ids",
)
CSV_FORMATS = (AZURE, MULTI_TENANT)
SUPPORTED = "; ".join(str(each) for each in (*CSV_FORMATS, MOONCAKE))


def read_trace(path: Path) -> Workload:
    """The requests of a trace file in any of the supported formats.

    An output length of 0 becomes 1; everything else that is wrong is an InputError that names the place.
    """
    text = read_text(path)
    start = text.lstrip()[:1]
    if not start:
        raise InputError(f"{path}: the file is empty; supported are {SUPPORTED}")
    if start == "[":
        raise InputError(f"{path}: holds a JSON array; write one JSON object a line instead ({MOONCAKE})")
    requests = _read_json_lines(path, text) if start == "{" else _read_csv(path, text)
    if not requests.arrival_ns:
        raise InputError(f"{path}: has a header but no requests")
    return requests.build(path.stem)


@dataclass(slots=True)
class _Requests:
    """Columns while they are being read, in the order of the file."""

    arrival_ns: list[int] = field(default_factory=list)
    prompt_len: list[int] = field(default_factory=list)
    output_len: list[int] = field(default_factory=list)
    client: list[str] = field(default_factory=list)  # empty when the file names none
    block_ids: list[tuple[int, ...]] = field(default_factory=list)  # likewise
    objectives: list[tuple[int, ...]] = field(default_factory=list)  # likewise

    def add(self, place: _SourcePlace, layout: TraceFormat, record: Mapping[str, object]) -> None:
        """What every format has of a request."""
        arrival, prompt, output = (record[name] for name in layout.required)
        self.arrival_ns.append(place.parse(layout.arrival, arrival, layout.parse_arrival))
        self.prompt_len.append(place.parse(layout.prompt, prompt, parse_length))
        self.output_len.append(place.parse(layout.output, output, parse_output_length))

    def build(self, name: str) -> Workload:
        arrival_ns = np.array(self.arrival_ns, dtype=np.int64)
        order = np.argsort(arrival_ns, kind="stable")
        tenants = tuple(sorted(set(self.client), key=_natural)) or DEFAULT_TENANTS
        number = {client: index for index, client in enumerate(tenants)}
        tenant = [number[client] for client in self.client] or [0] * len(order)
        return Workload(
            name=name,
            arrival_s=(arrival_ns[order] - arrival_ns.min()) / 1e9,
            prompt_len=np.array(self.prompt_len, dtype=np.int32)[order],
            output_len=np.array(self.output_len, dtype=np.int32)[order],
            tenant=np.array(tenant, dtype=np.int32)[order],
            tenants=tenants,
            prefix_ids=tuple(self.block_ids[i] for i in order.tolist()) if self.block_ids else None,
            prefix_block=MOONCAKE_BLOCK if self.block_ids else 0,
            objectives=np.array(self.objectives, dtype=np.int32)[order] if self.objectives else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _SourcePlace:
    """A line of a file, for messages."""

    path: Path
    line: int

    def error(self, message: str) -> InputError:
        return InputError(f"{self.path}:{self.line}: {message}")

    def parse(self, column: str, value: object, parser: Callable[[object], T]) -> T:
        try:
            return parser(value)
        except FieldError as error:
            raise self.error(f"column '{column}': {shown(value)} {error}") from None


def _objective(value: object) -> int:
    """Milliseconds; an empty cell wants nothing."""
    objective = parse_length(value, at_least=0) if str(value).strip() else 0
    if objective > MAX_OBJECTIVE_MS:
        raise FieldError(f"is more than the {MAX_OBJECTIVE_MS} ms of a day")
    return objective


# ---------------------------------------------------------------- CSV


def _read_csv(path: Path, text: str) -> _Requests:
    rows = _csv_rows(path, text)
    _, header = next(rows)
    names = [name.strip() for name in header]
    layout = _recognise(path, names)
    columns = _locate(path, names, layout)
    objectives = [(name, names.index(name) if name in names else None) for name in OBJECTIVES]
    requests = _Requests()
    for place, row in rows:
        if len(row) < len(names) or any(cell.strip() for cell in row[len(names) :]):
            raise place.error(
                f"has {len(row)} fields where the header has {len(names)}: {shown(','.join(row))}"
            )
        requests.add(place, layout, {name: row[column] for name, column in columns.items()})
        if layout.client in columns:
            requests.client.append(place.parse(layout.client, row[columns[layout.client]], parse_name))
        if any(column is not None for _, column in objectives):
            wanted = [
                0 if column is None else place.parse(name, row[column], _objective)
                for name, column in objectives
            ]
            requests.objectives.append(tuple(wanted))
    return requests


def _csv_rows(path: Path, text: str) -> Iterator[tuple[_SourcePlace, list[str]]]:
    """Rows that are not blank, with their places."""
    reader = csv.reader(io.StringIO(text, newline=""))
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise InputError(f"{path}:{reader.line_num}: cannot be read as CSV ({error})") from None
        if row is None:
            return
        if any(cell.strip() for cell in row):
            yield _SourcePlace(path=path, line=reader.line_num), row


def _recognise(path: Path, names: list[str]) -> TraceFormat:
    """The CSV format with the most of its columns here; an InputError when none is complete."""
    folded = {name.casefold() for name in names}

    def missing(layout: TraceFormat) -> list[str]:
        return [name for name in layout.required if name.casefold() not in folded]

    nearest = min(CSV_FORMATS, key=lambda layout: len(missing(layout)))
    lacking = missing(nearest)
    found = shown(", ".join(names), limit=200)
    if len(lacking) == len(nearest.required):
        raise InputError(
            f"{path}: no known trace format: found the columns {found}; supported are {SUPPORTED}"
        )
    if lacking:
        raise InputError(
            f"{path}: looks like {nearest.title} but lacks the column{'s' if len(lacking) > 1 else ''} "
            f"{', '.join(lacking)}; found {found}; supported are {SUPPORTED}"
        )
    return nearest


def _locate(path: Path, names: list[str], layout: TraceFormat) -> dict[str, int]:
    """Where each column of the format stands; the optional one only if it is there."""
    folded = [name.casefold() for name in names]
    columns: dict[str, int] = {}
    for name in (*layout.required, *([layout.client] if layout.client else [])):
        if folded.count(name.casefold()) > 1:
            raise InputError(f"{path}: has the column '{name}' more than once; keep one")
        if name.casefold() in folded:
            columns[name] = folded.index(name.casefold())
    return columns


# ---------------------------------------------------------------- JSON lines


def _read_json_lines(path: Path, text: str) -> _Requests:
    requests = _Requests()
    for line, content in enumerate(text.split("\n"), start=1):
        if content.strip():
            _read_object(_SourcePlace(path=path, line=line), content, requests)
    return requests


def _read_object(place: _SourcePlace, content: str, requests: _Requests) -> None:
    record = _load_object(place, content)
    lacking = [name for name in MOONCAKE.required if name not in record]
    if lacking:
        raise place.error(
            f"lacks {', '.join(lacking)}; found {shown(', '.join(record), limit=200)}; "
            f"supported are {SUPPORTED}"
        )
    requests.add(place, MOONCAKE, record)
    column = MOONCAKE.block_ids
    assert column is not None
    has_ids = column in record
    if len(requests.arrival_ns) > 1 and has_ids != bool(requests.block_ids):
        raise place.error(
            f"{'has' if has_ids else 'lacks'} {column}, unlike the lines before; give it on all or none"
        )
    if has_ids:
        block_ids = place.parse(column, record[column], parse_block_ids)
        prompt_len = requests.prompt_len[-1]
        needed = -(-prompt_len // MOONCAKE_BLOCK)
        if len(block_ids) != needed:
            raise place.error(
                f"column '{column}': {len(block_ids)} block ids for a prompt of {prompt_len} tokens; "
                f"blocks of {MOONCAKE_BLOCK} make {needed}"
            )
        requests.block_ids.append(block_ids)


def _load_object(place: _SourcePlace, content: str) -> dict[str, object]:
    try:
        record = json.loads(content)
    except json.JSONDecodeError as error:
        raise place.error(f"is not valid JSON ({error.msg} at character {error.colno})") from None
    except (ValueError, RecursionError) as error:  # numbers or nesting beyond any use
        raise place.error(f"cannot be read as JSON ({error})") from None
    if not isinstance(record, dict):
        raise place.error(f"is not a JSON object: {shown(record)}")
    return record


# ---------------------------------------------------------------- the file itself


def read_text(path: Path) -> str:
    if path.is_dir():
        raise InputError(
            f"{path}: is a directory; name one file in it, or give servegen:FOLDER for ServeGen clients"
        )
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: is not a text file (byte 0x{content[error.start]:02x} at position {error.start} is not "
            "UTF-8); unpack or convert it first"
        ) from None
    if "\0" in text:
        raise InputError(f"{path}: is not a text file (it holds zero bytes); unpack or convert it first")
    return text


def _natural(name: str) -> tuple[int, int, str]:
    """Order for names of clients: numbers by value, then everything else by spelling."""
    return (0, int(name), name) if name.isascii() and name.isdecimal() else (1, 0, name)
