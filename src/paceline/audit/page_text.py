"""JSON texts of whole pages, made in native code: the thread that makes them shares the interpreter with the engine.

With msgspec, which a server has anyway, a decision takes a quarter of a microsecond; the standard library takes two.
Both texts say the same, not byte for byte, so that only what is never compared with another text may be made here:
pages of the decision log, not lines of the run log.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from paceline.audit.codec import plain

_standard = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=plain, check_circular=False)


def standard_text(value: Any) -> str:
    """Named tuples and texts of an enumeration become lists and texts without a step in between."""
    try:
        return _standard.encode(value)
    except ValueError:  # a number that JSON lacks
        return _standard.encode(plain(value))


def _native_text() -> Callable[[Any], str]:
    try:
        import msgspec
    except ImportError:  # an engine runs without a server's libraries too
        return standard_text
    encoder = msgspec.json.Encoder(enc_hook=plain)
    return lambda value: encoder.encode(value).decode()


page_text = _native_text()
