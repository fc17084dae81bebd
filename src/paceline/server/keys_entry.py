"""One entry of the keys file: which fields it has and which values they take.

Every mistake names the place it was made in, the entry and the field. Reading files is `keys_file`'s business.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from paceline.errors import InputError
from paceline.server.auth import Key
from paceline.server.tenant import (
    BOUNDS,
    CLASSES,
    DEFAULT_CLASS,
    FREE,
    LARGEST_PRICE,
    LARGEST_WEIGHT,
    Prices,
)

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HEX = re.compile(r"[0-9a-fA-F]{64}")
FIELDS = ("name", "sha256", "enabled", "class", "weight", *BOUNDS, "prices")
PRICES = tuple(spec.name for spec in fields(Prices))


class BadKeysFile(InputError):
    """The keys cannot be read."""

    exit_code = 78


def check_name(name: Any, where: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadKeysFile(f"{where}: name must be 1 to 64 letters, digits, dots, dashes or underscores")
    return name


def read_entry(entry: Any, where: str) -> Key:
    """The key that an entry describes. `where` is the place, for mistakes."""
    if not isinstance(entry, dict):
        raise BadKeysFile(f"{where} is not an object with name and sha256")
    name = check_name(entry.get("name"), where)
    where = f"{where} ({name})"
    _check_known(entry, FIELDS, where)
    digest = entry.get("sha256")
    if not isinstance(digest, str) or not _HEX.fullmatch(digest):
        raise BadKeysFile(f"{where}: sha256 must be 64 hexadecimal digits, the hash of the key")
    enabled = entry.get("enabled", True)
    if not isinstance(enabled, bool):
        raise BadKeysFile(f"{where}: enabled must be true or false")
    service_class = entry.get("class", DEFAULT_CLASS)
    if service_class not in CLASSES:
        raise BadKeysFile(f"{where}: class must be one of {', '.join(CLASSES)}")
    weight = _number(entry, "weight", 1.0, LARGEST_WEIGHT, where)
    if weight == 0:
        raise BadKeysFile(f"{where}: weight must be a number above 0")
    return Key(
        name=name,
        sha256=bytes.fromhex(digest),
        enabled=enabled,
        service_class=service_class,
        weight=weight,
        prices=_prices(entry.get("prices"), where),
        **{name: _whole(entry, name, *bounds, where) for name, bounds in BOUNDS.items()},
    )


def _check_known(entry: Mapping[Any, Any], known: tuple[str, ...], where: str) -> None:
    unknown = [name for name in entry if name not in known]
    if unknown:
        raise BadKeysFile(f"{where}: there is no field {str(unknown[0])!r:.80}; there are {', '.join(known)}")


def _prices(given: Any, where: str) -> Prices:
    if given is None:
        return FREE
    where = f"{where}: prices"
    if not isinstance(given, dict):
        raise BadKeysFile(f"{where} must be an object with {', '.join(PRICES)}")
    _check_known(given, PRICES, where)
    prompt = _number(given, "prompt", 0.0, LARGEST_PRICE, where)
    # Whoever says nothing of cached tokens has one price for all of the prompt.
    defaults = {"prompt": prompt, "cached_prompt": prompt}
    return Prices(
        **{name: _number(given, name, defaults.get(name, 0.0), LARGEST_PRICE, where) for name in PRICES}
    )


def _number(entry: Mapping[str, Any], name: str, default: float, high: float, where: str) -> float:
    value = entry.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= high:
        raise BadKeysFile(f"{where}: {name} must be a number from 0 to {high:,.0f}")
    return float(value)


def _whole(entry: Mapping[str, Any], name: str, low: int, high: int, where: str) -> int | None:
    value = entry.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadKeysFile(f"{where}: {name} must be a whole number from {low:,} to {high:,}")
    return value
