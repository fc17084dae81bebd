"""Single values of a trace file: text or JSON in, a checked number out.

Owns what counts as a length, a time or a block id. A value that is not one raises `FieldError` with the
reason only; the reader, which knows the file, the line and the column, makes the message of it. Times are
whole nanoseconds, so that sorting and subtracting are exact.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation

MAX_LENGTH = 2**31 - 1
_MAX_SECONDS = 9_000_000_000  # nanoseconds must fit 64 bits; this is the year 2255 as a Unix time
_MAX_ID = 2**63 - 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TIMESTAMP = re.compile(
    r"(?P<whole>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(?P<part>\d+))?(?P<zone>Z|[+-]\d\d:?\d\d)?",
    flags=re.ASCII,
)
_WHOLE = re.compile(r"[+-]?\d{1,20}(\.0*)?", flags=re.ASCII)


class FieldError(ValueError):
    """Why a value is not what its column holds."""


def parse_length(value: object, *, at_least: int) -> int:
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
