"""The keys file: one entry per key, as JSON lines, a JSON list or a YAML list.

    {"name": "team-a", "sha256": "<hex of the key's SHA-256>", "requests_per_minute": 600}

The file holds hashes, never keys, and only its owner may read it. What an entry may say is in `keys_entry`.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.server.auth import Key, Keyring
from paceline.server.keys_entry import BadKeysFile, read_entry

__all__ = [
    "ADMIN_KEY_VARIABLE",
    "KEY_VARIABLE",
    "BadKeysFile",
    "is_json_lines",
    "parse_keys",
    "read_keys",
    "read_text",
]

KEY_VARIABLE, ADMIN_KEY_VARIABLE = "PACELINE_API_KEY", "PACELINE_ADMIN_KEY"
MAX_FILE_BYTES = 4 * 2**20


def read_keys(path: str | None, environment: Mapping[str, str] = os.environ) -> Keyring:
    """The keys of the file and of the environment."""
    place = f"--api-keys-file {path}"
    keys = [] if path is None else parse_keys(read_text(Path(path), place), place)
    for variable, name in ((KEY_VARIABLE, "default"), (ADMIN_KEY_VARIABLE, "admin")):
        given = environment.get(variable, "")
        if given:
            is_admin = variable == ADMIN_KEY_VARIABLE
            key = Key(name=name, sha256=hashlib.sha256(given.encode()).digest(), is_admin=is_admin)
            if any(each.sha256 == key.sha256 and each.is_admin >= is_admin for each in keys):
                continue  # the file has it, and with more to say about it
            keys.append(key)
            _check_distinct(keys, f"{place} and {variable}")
    if path is not None and not keys:
        raise BadKeysFile(f"{place} holds no key; add one or leave the flag out")
    return Keyring(keys)


def parse_keys(text: str, place: str) -> list[Key]:
    """The keys that a file's text describes; `place` names the file in mistakes."""
    keys = [read_entry(entry, f"{place}, entry {index}") for index, entry in _entries(text, place)]
    _check_distinct(keys, place)
    return keys


def read_text(path: Path, place: str) -> str:
    """The text of a keys file that nobody but its owner can read."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
            raise BadKeysFile(f"{place} is not a file of a sensible size")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise BadKeysFile(f"{place} can be read by others; run: chmod 600 {path}")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadKeysFile(f"{place} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadKeysFile(f"{place} is not UTF-8 text") from error


def is_json_lines(text: str) -> bool:
    """Whether the entries of a file are lines of their own; also true of a file without entries."""
    lines = _lines(text)
    return not lines or lines[0].lstrip().startswith("{")


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def _check_distinct(keys: list[Key], place: str) -> None:
    for field in ("name", "sha256"):
        seen = [getattr(key, field) for key in keys]
        if len(set(seen)) != len(seen):
            raise BadKeysFile(f"{place}: two keys have the same {field}")


def _entries(text: str, place: str) -> list[tuple[int, Any]]:
    lines = _lines(text)
    try:
        if lines and is_json_lines(text):
            found: Any = [json.loads(line) for line in lines]
        else:
            import yaml

            found = yaml.safe_load(text) or []
    except ValueError as error:
        raise BadKeysFile(f"{place} has a line that is not JSON") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "yaml":
            raise
        raise BadKeysFile(f"{place} is neither JSON lines nor YAML") from error
    if isinstance(found, dict) and set(found) == {"keys"}:
        found = found["keys"]
    if not isinstance(found, list):
        raise BadKeysFile(f"{place} must hold a list of keys")
    return list(enumerate(found, 1))
