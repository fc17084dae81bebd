"""Keys and the file they come from: its entries and their fields, reading it, and changing it under a lock.

Every mistake names the place it was made in, the entry and the field.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from pathlib import Path
from typing import Any

from paceline.core.service_class import CLASSES, DEFAULT_CLASS
from paceline.errors import InputError
from paceline.server.access.caller import (
    BOUNDS,
    FREE,
    LARGEST_PRICE,
    LARGEST_WEIGHT,
    LEAST_WEIGHT,
    Caller,
    Prices,
)
from paceline.server.billing.pricing import BLOCK_DECIMALS, TOKEN_DECIMALS, decimal_of, scaled
from paceline.server.errors import Refusal
from paceline.server.http.request_headers import RawHeaders, presented_key

# Authentication: keys by the hash of their text, compared in constant time over all of them.
#
# Owns the comparison and what a key allows. Files are read in `keys_file`; `http.asgi` decides which routes need a
# key. Without any key, every client is the default tenant.


# Without keys only this machine reaches the server, and every process on it may do everything.
DEFAULT_CALLER = Caller(is_admin=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key(Caller):
    """One key: its hash, and the caller whose requests bring it."""

    sha256: bytes
    enabled: bool = True


class Keyring:
    """The keys that are let in. Replaced as a whole when the file is read again."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def callers(self) -> Sequence[Caller]:
        """The callers of all enabled keys."""
        return [key for key in self._keys if key.enabled]

    @property
    def weights(self) -> dict[str, float]:
        """The share of each tenant: what a policy that shares fairly between tenants goes by."""
        return {key.tenant: key.weight for key in self._keys}

    def caller_of(self, tenant: str) -> Caller | None:
        """The caller of a tenant; None without an enabled key."""
        known = self.callers if self._keys else (DEFAULT_CALLER,)
        return next((caller for caller in known if caller.tenant == tenant), None)

    def admit(self, headers: RawHeaders) -> Caller:
        """The caller of a request; raises `Refusal` for an unknown key."""
        if not self._keys:
            return DEFAULT_CALLER
        presented = presented_key(headers)
        digest = hashlib.sha256(presented or b"").digest()
        found: Key | None = None
        for key in self._keys:  # all of them, always: time tells nothing
            if hmac.compare_digest(digest, key.sha256):
                found = key
        if presented is None or found is None:
            raise Refusal("invalid_api_key")
        if not found.enabled:
            raise Refusal("key_disabled")
        return found


_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HEX = re.compile(r"[0-9a-fA-F]{64}")
FIELDS = (
    "name",
    "sha256",
    "enabled",
    "admin",
    "class",
    "weight",
    "cache_share",
    *BOUNDS,
    "prices",
    "adapters",
)
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
    limits: dict[str, Any] = {name: _whole(entry, name, *bounds, where) for name, bounds in BOUNDS.items()}
    return Key(
        tenant=name,
        sha256=bytes.fromhex(digest),
        enabled=flags["enabled"],
        is_admin=flags["admin"],
        service_class=service_class,
        weight=weight,
        cache_share=_number(entry, "cache_share", 1.0, 1.0, where),
        prices=_prices(entry.get("prices"), where),
        adapters=_adapters(entry.get("adapters"), where),
        **limits,
    )


def _check_known(entry: Mapping[Any, Any], known: tuple[str, ...], where: str) -> None:
    unknown = [name for name in entry if name not in known]
    if unknown:
        raise BadKeysFile(f"{where}: there is no field {str(unknown[0])!r:.80}; there are {', '.join(known)}")


def _adapters(given: Any, where: str) -> frozenset[str] | None:
    if given is None:
        return None
    if not isinstance(given, list) or not all(isinstance(name, str) and name for name in given):
        raise BadKeysFile(f"{where}: adapters must be a list of names; leave it out to allow all")
    return frozenset(given)


def _prices(given: Any, where: str) -> Prices:
    if given is None:
        return FREE
    where = f"{where}: prices"
    if not isinstance(given, dict):
        raise BadKeysFile(f"{where} must be an object with {', '.join(PRICES)}")
    _check_known(given, PRICES, where)
    # Without a price for cached tokens, all of the prompt has one price.
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


# The keys file: one entry per key, as JSON lines, a JSON list or a YAML list.
#
# {"name": "team-a", "sha256": "<hex of the key's SHA-256>", "requests_per_minute": 600}
#
# The file holds hashes, never keys, and only its owner may read it. What an entry may say is declared above.


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
            key = Key(tenant=name, sha256=hashlib.sha256(given.encode()).digest(), is_admin=is_admin)
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
    """The text of a keys file that only its owner can read."""
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
    """Whether the entries of a file are separate lines; also true of a file without entries."""
    lines = _lines(text)
    return not lines or lines[0].lstrip().startswith("{")


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def _check_distinct(keys: list[Key], place: str) -> None:
    for field, seen in (("name", [key.tenant for key in keys]), ("sha256", [key.sha256 for key in keys])):
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


# Changes a keys file: one writer at a time, and a reader finds the old file or the new one, never half of one.
#
# Keeps every line it does not change, comments too, and so changes JSON lines only. What is written has been read
# the way a server reads it. The new file has the mode and the owner that the server needs to read it.


PATIENCE_S = 10.0
RETRY_S = 0.05
OWNER_ONLY = 0o600


def stored_keys(path: Path) -> list[Key]:
    """The keys of a file, in its order."""
    return parse_keys(read_text(path, str(path)), str(path))


def add_key(path: Path, entry: Mapping[str, Any]) -> None:
    """Write one more entry; it takes the place of a revoked one of that name. Makes the file if there is none."""
    read_entry(dict(entry), "the new key")

    def change(lines: list[str]) -> None:
        index = _find(lines, entry["name"])
        if index is None:
            lines.append(json.dumps(dict(entry)))
        elif json.loads(lines[index]).get("enabled", True):
            raise BadKeysFile(
                f"{path} has a key {entry['name']} already; choose another name, or revoke that one first"
            )
        else:
            lines[index] = json.dumps(dict(entry))

    _change(path, change)


def revoke_key(path: Path, name: str) -> bool:
    """Revoke a key; its line stays. False if it was revoked before."""
    was_enabled = False

    def change(lines: list[str]) -> None:
        nonlocal was_enabled
        index = _find(lines, name)
        if index is None:
            raise BadKeysFile(f"{path} has no key {name!r:.80}; paceline keys ls shows what there is")
        entry = json.loads(lines[index])
        was_enabled = entry.get("enabled", True)
        lines[index] = json.dumps({**entry, "enabled": False})

    if not path.exists():
        raise BadKeysFile(f"{path} is not there; give the file that the server reads")
    _change(path, change)
    return was_enabled


def _find(lines: list[str], name: str) -> int | None:
    for index, line in enumerate(lines):
        is_entry = line.strip() and not line.lstrip().startswith("#")
        if is_entry and json.loads(line)["name"] == name:
            return index
    return None


def _change(path: Path, change: Callable[[list[str]], None]) -> None:
    path = path.resolve()  # a link stays a link
    try:
        with _locked(path):
            text = read_text(path, str(path)) if path.exists() else ""
            parse_keys(text, str(path))  # a file with a mistake is not touched
            if not is_json_lines(text):
                raise BadKeysFile(f"{path} is a JSON or YAML list; only JSON lines are changed by a command")
            lines = text.splitlines()
            change(lines)
            changed = "".join(line + "\n" for line in lines)
            parse_keys(changed, str(path))
            _replace(path, changed)
    except OSError as error:
        raise BadKeysFile(f"{path} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Be the only writer. The lock is a separate file, because the keys file itself is replaced."""
    lock = path.with_name(path.name + ".lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, OWNER_ONLY)
    try:
        _keep_owner(path, descriptor)
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    raise BadKeysFile(f"{path} is being changed by another; try again") from None
                time.sleep(RETRY_S)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)  # of a writer that was killed; there is no other while we have the lock
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, OWNER_ONLY)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            _keep_owner(path, file.fileno())
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name is on the disk too: a revoked key does not come back with the power
    finally:
        os.close(folder)


def _keep_owner(path: Path, descriptor: int) -> None:
    """A server that runs as another user must still be able to read what, say, root has changed."""
    if not path.exists():
        return
    owner = path.stat()
    if owner.st_uid != os.fstat(descriptor).st_uid:
        os.fchown(descriptor, owner.st_uid, owner.st_gid)
