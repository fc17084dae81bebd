"""One entry of the keys file: which fields it has and which values they take.

Every mistake names the place it was made in, the entry and the field. Reading files is `keys_file`'s business.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from decimal import Decimal
from typing import Any

from paceline.errors import InputError
from paceline.server.auth import Key
from paceline.server.billing.money import BLOCK_DECIMALS, TOKEN_DECIMALS, decimal_of, scaled
from paceline.server.tenant import (
    BOUNDS,
    CLASSES,
    DEFAULT_CLASS,
    FREE,
    LARGEST_PRICE,
    LARGEST_WEIGHT,
    LEAST_WEIGHT,
    Prices,
)

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HEX = re.compile(r"[0-9a-fA-F]{64}")
FIELDS = ("name", "sha256", "enabled", "admin", "class", "weight", *BOUNDS, "prices")
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
    flags = {name: entry.get(name, default) for name, default in (("enabled", True), ("admin", False))}
    for name_of_flag, value in flags.items():
        if not isinstance(value, bool):
            raise BadKeysFile(f"{where}: {name_of_flag} must be true or false")
    service_class = entry.get("class", DEFAULT_CLASS)
    if service_class not in CLASSES:
        raise BadKeysFile(f"{where}: class must be one of {', '.join(CLASSES)}")
    weight = _number(entry, "weight", 1.0, LARGEST_WEIGHT, where)
    if weight < LEAST_WEIGHT:
        raise BadKeysFile(f"{where}: weight must be a number from {LEAST_WEIGHT:g} to {LARGEST_WEIGHT:,.0f}")
    return Key(
        name=name,
        sha256=bytes.fromhex(digest),
        enabled=flags["enabled"],
        is_admin=flags["admin"],
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
    # Whoever says nothing of cached tokens has one price for all of the prompt.
    given = {"cached_prompt": given.get("prompt", 0), **given}
    return Prices(**{name: _price(given, name, where) for name in PRICES})


def _price(given: Mapping[str, Any], name: str, where: str) -> Decimal:
    _number(given, name, 0.0, LARGEST_PRICE, where)
    price = decimal_of(given.get(name, 0))
    decimals = BLOCK_DECIMALS if name == "kv_block_second" else TOKEN_DECIMALS
    try:
        scaled(price, decimals)
    except ValueError:
        raise BadKeysFile(f"{where}: {name} must be a number with at most {decimals} decimals") from None
    return price


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
