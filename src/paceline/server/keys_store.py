"""Changes a keys file: one writer at a time, and a reader finds the old file or the new one, never half of one.

Keeps every line it does not change, comments too, and so changes JSON lines only. What is written has been read the
way a server reads it. The new file has the mode and the owner that the server needs to read it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.server.auth import Key
from paceline.server.keys_entry import BadKeysFile, read_entry
from paceline.server.keys_file import is_json_lines, parse_keys, read_text

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
    """Let nobody in with that key any more; its line stays. False when that was so before."""
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
    """Be the only writer. The lock is a file of its own, because the keys file itself is replaced."""
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
