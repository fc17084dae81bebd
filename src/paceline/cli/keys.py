"""`paceline keys add | ls | revoke`: makes keys and takes them back, in the file that a server reads.

Owns what is asked and printed. A new key is printed once and kept nowhere; `server.access.keys_file` writes the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.command import Command, CommandGroup
from paceline.cli.terminal import columns, note
from paceline.config.options import CheckedOptions, from_values, option
from paceline.config.server import split_list
from paceline.core.service_class import CLASSES, DEFAULT_CLASS
from paceline.errors import InputError
from paceline.server.access.caller import (
    BOUNDS,
    CONCURRENCY,
    LARGEST_PRICE,
    LARGEST_WEIGHT,
    LEAST_WEIGHT,
    LIMITS,
    PRIORITY,
    REQUESTS,
    TOKENS,
)

if TYPE_CHECKING:
    from paceline.server.access.keys_file import Key


# The command lines of `paceline keys`: their options and help pages.


FILE_VARIABLE = "PACELINE_API_KEYS_FILE"
HELP = "Create, list and revoke the API keys of a server."
ADD_HELP = f"""
Create a key and print it once.

The file gets only its hash, and is created if it does not exist.

  paceline keys add team-a --file keys.jsonl
  paceline keys add night --file keys.jsonl --class batch --max-concurrency 8

A revoked name can be added again. {FILE_VARIABLE} can name the file as well. A running server reads the file again on
SIGHUP.
"""
LIST_HELP = "List the keys of a file with their class and limits."
REVOKE_HELP = """
Revoke a key.

Its line stays in the file, so that past usage keeps its name. A running server accepts the key until it gets SIGHUP.
"""
_LIMITS: dict[str, dict[str, Any]] = {
    name: {"low": low, "high": high, "default_text": "no limit"} for name, (low, high) in BOUNDS.items()
}
_PRICE: dict[str, Any] = {"low": 0.0, "high": LARGEST_PRICE, "default_text": "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions:
    """Which file, and how the answer looks."""

    file: str | None = option(None, "keys file; default: PACELINE_API_KEYS_FILE", metavar="FILE")
    json: bool = option(False, "print one JSON object")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyNameOptions:
    """Which key."""

    name: str | None = option(
        None, "name of the key: letters, digits, dots, dashes, underscores", argument=True, metavar="NAME"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyOptions(CheckedOptions):
    """What a new key may do and what it pays."""

    admin: bool = option(False, "allow the admin routes: dial, policy, usage of all keys")
    service_class: str = option(
        DEFAULT_CLASS, "service class of its requests", choices=CLASSES, flag="--class"
    )
    weight: float = option(
        1.0, "share of this key under the fair policy", low=LEAST_WEIGHT, high=LARGEST_WEIGHT
    )
    requests_per_minute: int | None = option(None, "most requests per minute", **_LIMITS[REQUESTS])
    tokens_per_minute: int | None = option(
        None, "most prompt and output tokens per minute", **_LIMITS[TOKENS]
    )
    max_concurrency: int | None = option(None, "most requests at once", **_LIMITS[CONCURRENCY])
    lowest_priority_number: int | None = option(
        None, "smallest priority it may ask for; smaller runs first", **_LIMITS[PRIORITY]
    )
    cache_share: float | None = option(
        None,
        "share of the KV cache; what it leaves there beyond is evicted first",
        low=0.0,
        high=1.0,
        default_text="1",
    )
    adapters: str | None = option(
        None, "adapters it may name, with commas between", metavar="NAME,...", default_text="all"
    )
    price_prompt: float | None = option(None, "price of a million prompt tokens", **_PRICE)
    price_cached_prompt: float | None = option(
        None, "price of a million cached prompt tokens", **_PRICE | {"default_text": "--price-prompt"}
    )
    price_output: float | None = option(None, "price of a million output tokens", **_PRICE)
    price_kv_block_second: float | None = option(None, "price of a KV block per second", **_PRICE)


PREFIX = "pl-"
KEY_BYTES = 32
PRICE = "price_"
HEADS = ("name", "class", "weight", "requests/min", "tokens/min", "at once", "priority from", "state")


def add(given: Mapping[str, Any]) -> None:
    from paceline.server.access.keys_file import add_key, check_name

    path, name = _file(given), check_name(_name(given), "paceline keys add")
    options = from_values(KeyOptions, given)
    rights = _rights(options)
    key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    add_key(path, {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), **rights})
    if given["json"]:
        print(json.dumps({"name": name, "key": key, "file": str(path), **rights}))
        return
    print(key)
    note(f"This is the key of {name}, shown once; {path} has only its hash.")
    _say_reload()


def ls(given: Mapping[str, Any]) -> None:
    from paceline.server.access.keys_file import stored_keys

    path = _file(given)
    keys = stored_keys(path)
    if given["json"]:
        print(json.dumps({"file": str(path), "keys": [_described(key) for key in keys]}))
        return
    if not keys:
        print(f"{path} has no keys; paceline keys add makes one.")
        return
    print(*columns([HEADS, *map(_row, keys)], len(HEADS)), sep="\n")


def revoke(given: Mapping[str, Any]) -> None:
    from paceline.server.access.keys_file import revoke_key

    path, name = _file(given), _name(given)
    was_enabled = revoke_key(path, name)
    if given["json"]:
        print(json.dumps({"name": name, "file": str(path), "enabled": False, "changed": was_enabled}))
        return
    print(f"Revoked {name}." if was_enabled else f"{name} was revoked before.")
    _say_reload()


def _say_reload() -> None:
    note("A running server reads the file again on: kill -HUP PID, with the process id of `paceline serve`.")


def _file(given: Mapping[str, Any]) -> Path:
    path = given["file"] or os.environ.get(FILE_VARIABLE, "")
    if not path:
        raise InputError(f"which file? Give --file, or set {FILE_VARIABLE}")
    return Path(path).expanduser()


def _name(given: Mapping[str, Any]) -> str:
    if not given["name"]:
        raise InputError("which key? Give its name")
    return str(given["name"])


def _rights(options: KeyOptions) -> dict[str, Any]:
    """The fields of an entry, as far as they say more than nothing."""
    values = {name: value for name, value in asdict(options).items() if value is not None}
    found: dict[str, Any] = {"class": values["service_class"], "weight": values["weight"]}
    if options.admin:
        found["admin"] = True
    if options.cache_share is not None:
        found["cache_share"] = options.cache_share
    if options.adapters is not None:
        found["adapters"] = list(split_list(options.adapters))
    found |= {name: values[name] for name in LIMITS if name in values}
    prices = {name.removeprefix(PRICE): value for name, value in values.items() if name.startswith(PRICE)}
    return {**found, "prices": prices} if prices else found


def _described(key: Key) -> dict[str, Any]:
    found = {"name": key.tenant, "enabled": key.enabled, "admin": key.is_admin}
    found |= {"class": key.service_class, "weight": key.weight}
    prices = {name: float(price) for name, price in asdict(key.prices).items()}
    adapters = None if key.adapters is None else sorted(key.adapters)
    found |= {"cache_share": key.cache_share, "adapters": adapters}
    return {**found, **{name: getattr(key, name) for name in LIMITS}, "prices": prices}


def _row(key: Key) -> tuple[str, ...]:
    limits = (getattr(key, name) for name in LIMITS)
    shown = ("-" if limit is None else f"{limit:,}" for limit in limits)
    return (key.tenant, key.service_class, f"{key.weight:g}", *shown, _state(key))


def _state(key: Key) -> str:
    return "revoked" if not key.enabled else "admin" if key.is_admin else ""


KEYS = CommandGroup(
    name="keys",
    help=HELP,
    headings={
        "Commands": (
            Command(name="add", help=ADD_HELP, run=add, takes=(KeyNameOptions, KeyOptions, FileOptions)),
            Command(name="ls", help=LIST_HELP, run=ls, takes=(FileOptions,)),
            Command(name="revoke", help=REVOKE_HELP, run=revoke, takes=(KeyNameOptions, FileOptions)),
        )
    },
)
