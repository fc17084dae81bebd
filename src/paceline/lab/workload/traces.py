"""Trace files: text on disk in, a Workload out.

Owns the three supported formats, how one is recognised from what the file says (never from its name) and the
messages about files that are not what they should be. Draws nothing at random. Requests come back sorted by
arrival (equal arrivals in the order of the file) and with the first arrival at time 0.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from paceline.core.sampling import MAX_WISH_MS
from paceline.errors import InputError
from paceline.lab.workload.trace_fields import (
    FieldError,
    parse_block_ids,
    parse_length,
    parse_milliseconds,
    parse_name,
    parse_output_length,
    parse_seconds,
    parse_timestamp,
    shown,
)
from paceline.lab.workload.workload import DEFAULT_TENANTS, WISHES, Workload

MOONCAKE_BLOCK = 512  # tokens behind each of a Mooncake trace's hash ids
T = TypeVar("T")


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
    wishes: list[tuple[int, ...]] = field(default_factory=list)  # likewise

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
            wishes=np.array(self.wishes, dtype=np.int32)[order] if self.wishes else None,
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


def _prompt_length(value: object) -> int:
    return parse_length(value, at_least=1)


def _wish(value: object) -> int:
    """Milliseconds; an empty cell wants nothing."""
    wish = parse_length(value, at_least=0) if str(value).strip() else 0
    if wish > MAX_WISH_MS:
        raise FieldError(f"is more than the {MAX_WISH_MS} ms of a day")
    return wish


# ---------------------------------------------------------------- CSV


def _read_csv(path: Path, text: str) -> _Requests:
    rows = _csv_rows(path, text)
    _, header = next(rows)
    names = [name.strip() for name in header]
    layout = _recognise(path, names)
    columns = _locate(path, names, layout)
    wishes = [(name, names.index(name) if name in names else None) for name in WISHES]
    requests = _Requests()
    for place, row in rows:
        if len(row) < len(names) or any(cell.strip() for cell in row[len(names) :]):
            raise place.error(
                f"has {len(row)} fields where the header has {len(names)}: {shown(','.join(row))}"
            )
        arrival, prompt, output = (row[columns[name]] for name in layout.required)
        requests.arrival_ns.append(place.parse(layout.arrival, arrival, layout.parse_arrival))
        requests.prompt_len.append(place.parse(layout.prompt, prompt, _prompt_length))
        requests.output_len.append(place.parse(layout.output, output, parse_output_length))
        if layout.client in columns:
            requests.client.append(place.parse(layout.client, row[columns[layout.client]], parse_name))
        if any(column is not None for _, column in wishes):
            wanted = [
                0 if column is None else place.parse(name, row[column], _wish) for name, column in wishes
            ]
            requests.wishes.append(tuple(wanted))
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
    arrival, prompt, output = (record[name] for name in MOONCAKE.required)
    arrival_ns = place.parse(MOONCAKE.arrival, arrival, MOONCAKE.parse_arrival)
    prompt_len = place.parse(MOONCAKE.prompt, prompt, _prompt_length)
    output_len = place.parse(MOONCAKE.output, output, parse_output_length)
    column = MOONCAKE.block_ids
    assert column is not None
    has_ids = column in record
    if requests.arrival_ns and has_ids != bool(requests.block_ids):
        raise place.error(
            f"{'has' if has_ids else 'lacks'} {column}, unlike the lines before; give it on all or none"
        )
    if has_ids:
        block_ids = place.parse(column, record[column], parse_block_ids)
        needed = -(-prompt_len // MOONCAKE_BLOCK)
        if len(block_ids) != needed:
            raise place.error(
                f"column '{column}': {len(block_ids)} block ids for a prompt of {prompt_len} tokens; "
                f"blocks of {MOONCAKE_BLOCK} make {needed}"
            )
        requests.block_ids.append(block_ids)
    requests.arrival_ns.append(arrival_ns)
    requests.prompt_len.append(prompt_len)
    requests.output_len.append(output_len)


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
        raise InputError(f"{path}: is a directory; name one file in it")
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
