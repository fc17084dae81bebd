"""The keys file: one entry per key, as JSON lines, a JSON list or a YAML list.

    {"name": "team-a", "sha256": "<hex of the key's SHA-256>", "max_concurrency": 16}

The file holds hashes, never keys, and only its owner may read it. Mistakes name the file, the entry and the field.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import InputError
from paceline.server.auth import Key, Keyring

KEY_VARIABLE = "PACELINE_API_KEY"
MAX_FILE_BYTES = 4 * 2**20
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HEX = re.compile(r"[0-9a-fA-F]{64}")
_FIELDS = ("name", "sha256", "weight", "class", "max_concurrency", "lowest_priority_number", "enabled")


class BadKeysFile(InputError):
    """The keys cannot be read."""

    exit_code = 78


def read_keys(path: str | None, environment: Mapping[str, str] = os.environ) -> Keyring:
    """The keys of the file and of the environment."""
    keys = [] if path is None else _read_file(Path(path))
    given = environment.get(KEY_VARIABLE, "")
    if given:
        keys.append(Key(name="default", sha256=hashlib.sha256(given.encode()).digest()))
    for field in ("name", "sha256"):
        seen = [getattr(key, field) for key in keys]
        if len(set(seen)) != len(seen):
            raise BadKeysFile(f"--api-keys-file {path}: two keys have the same {field}")
    if path is not None and not keys:
        raise BadKeysFile(f"--api-keys-file {path} holds no key; add one or leave the flag out")
    return Keyring(keys)


def _read_file(path: Path) -> list[Key]:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
            raise BadKeysFile(f"--api-keys-file {path} is not a file of a sensible size")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise BadKeysFile(f"--api-keys-file {path} can be read by others; run: chmod 600 {path}")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadKeysFile(f"--api-keys-file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadKeysFile(f"--api-keys-file {path} is not UTF-8 text") from error
    return [_key(entry, f"--api-keys-file {path}, entry {index}") for index, entry in _entries(text, path)]


def _entries(text: str, path: Path) -> list[tuple[int, Any]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    try:
        if lines and lines[0].lstrip().startswith("{"):
            found: Any = [json.loads(line) for line in lines]
        else:
            import yaml

            found = yaml.safe_load(text) or []
    except ValueError as error:
        raise BadKeysFile(f"--api-keys-file {path} has a line that is not JSON") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "yaml":
            raise
        raise BadKeysFile(f"--api-keys-file {path} is neither JSON lines nor YAML") from error
    if isinstance(found, dict) and set(found) == {"keys"}:
        found = found["keys"]
    if not isinstance(found, list):
        raise BadKeysFile(f"--api-keys-file {path} must hold a list of keys")
    return list(enumerate(found, 1))


def _key(entry: Any, where: str) -> Key:
    if not isinstance(entry, dict):
        raise BadKeysFile(f"{where} is not an object with name and sha256")
    unknown = [str(name) for name in entry if name not in _FIELDS]
    if unknown:
        raise BadKeysFile(f"{where}: there is no field {unknown[0]!r}; there are {', '.join(_FIELDS)}")
    name, digest = entry.get("name"), entry.get("sha256")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadKeysFile(f"{where}: name must be 1 to 64 letters, digits, dots, dashes or underscores")
    if not isinstance(digest, str) or not _HEX.fullmatch(digest):
        raise BadKeysFile(f"{where}: sha256 must be 64 hexadecimal digits, the hash of the key")
    return Key(
        name=name,
        sha256=bytes.fromhex(digest),
        weight=_number(entry, "weight", 1.0, where),
        service_class=str(entry.get("class", "standard"))[:64],
        max_concurrency=_whole(entry, "max_concurrency", 1, where),
        lowest_priority_number=_whole(entry, "lowest_priority_number", None, where),
        enabled=entry.get("enabled", True) is True,
    )


def _number(entry: Mapping[str, Any], name: str, default: float, where: str) -> float:
    value = entry.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise BadKeysFile(f"{where}: {name} must be a number above 0")
    return float(value)


def _whole(entry: Mapping[str, Any], name: str, low: int | None, where: str) -> int | None:
    value = entry.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or (low is not None and value < low):
        raise BadKeysFile(f"{where}: {name} must be a whole number" + (f" from {low}" if low else ""))
    return value
