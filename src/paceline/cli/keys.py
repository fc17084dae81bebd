"""`paceline keys add | ls | revoke`: makes keys and takes them back, in the file that a server reads.

Owns what is asked and printed. A new key is printed once and kept nowhere; the file is `server.keys_store`'s.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.keys_options import (
    ADD_HELP,
    ADD_PANELS,
    FILE_VARIABLE,
    HELP,
    LIST_HELP,
    LIST_PANELS,
    REVOKE_HELP,
    REVOKE_PANELS,
    KeyOptions,
)
from paceline.cli.options import add_command, command_group
from paceline.cli.terminal import note
from paceline.errors import InputError
from paceline.server.tenant import LIMITS

if TYPE_CHECKING:
    from paceline.server.auth import Key

PREFIX = "pl-"
KEY_BYTES = 32
PRICE = "price_"
HEADS = ("name", "class", "weight", "requests/min", "tokens/min", "at once", "priority from", "state")


def add_keys(app: typer.Typer) -> None:
    keys = command_group("keys", HELP)
    add_command(keys, "add", add, ADD_PANELS, ADD_HELP)
    add_command(keys, "ls", ls, LIST_PANELS, LIST_HELP)
    add_command(keys, "revoke", revoke, REVOKE_PANELS, REVOKE_HELP)
    app.add_typer(keys)


def add(given: Mapping[str, Any]) -> None:
    from paceline.server.keys_entry import check_name
    from paceline.server.keys_store import add_key

    path, name = _file(given), check_name(_name(given), "paceline keys add")
    options = KeyOptions(**{spec.name: given[spec.name] for spec in fields(KeyOptions)})
    rights = _rights(options)
    key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    add_key(path, {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), **rights})
    if given["json"]:
        typer.echo(json.dumps({"name": name, "key": key, "file": str(path), **rights}))
        return
    typer.echo(key)
    note(f"This is the key of {name}, shown once; {path} has only its hash.")
    _say_reload()


def ls(given: Mapping[str, Any]) -> None:
    from paceline.server.keys_store import stored_keys

    path = _file(given)
    keys = stored_keys(path)
    if given["json"]:
        typer.echo(json.dumps({"file": str(path), "keys": [_described(key) for key in keys]}))
        return
    if not keys:
        typer.echo(f"{path} has no keys; paceline keys add makes one.")
        return
    rows = [HEADS, *(_row(key) for key in keys)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    for row in rows:
        typer.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def revoke(given: Mapping[str, Any]) -> None:
    from paceline.server.keys_store import revoke_key

    path, name = _file(given), _name(given)
    was_enabled = revoke_key(path, name)
    if given["json"]:
        typer.echo(json.dumps({"name": name, "file": str(path), "enabled": False, "changed": was_enabled}))
        return
    typer.echo(f"Revoked {name}." if was_enabled else f"{name} was revoked before.")
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
    found |= {name: values[name] for name in LIMITS if name in values}
    prices = {name.removeprefix(PRICE): value for name, value in values.items() if name.startswith(PRICE)}
    return {**found, "prices": prices} if prices else found


def _described(key: Key) -> dict[str, Any]:
    found = {"name": key.name, "enabled": key.enabled, "admin": key.is_admin}
    found |= {"class": key.service_class, "weight": key.weight}
    prices = {name: float(price) for name, price in asdict(key.prices).items()}
    return {**found, **{name: getattr(key, name) for name in LIMITS}, "prices": prices}


def _row(key: Key) -> tuple[str, ...]:
    limits = (getattr(key, name) for name in LIMITS)
    shown = ("-" if limit is None else f"{limit:,}" for limit in limits)
    return (key.name, key.service_class, f"{key.weight:g}", *shown, _state(key))


def _state(key: Key) -> str:
    return "revoked" if not key.enabled else "admin" if key.is_admin else ""
