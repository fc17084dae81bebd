"""Files that commands are asked to write, checked before anything runs: nobody should wait for a run and then learn
that its folder does not exist."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.errors import InputError


def writable(flag: str, name: str | None) -> Path | None:
    """The path a flag names, if a file can be written there; None where the flag was not given."""
    if not name:
        return None
    path, folder = Path(name), Path(name).parent
    if name == "-":
        raise InputError(f"{flag} -: standard output has the table; give the name of a file")
    if path.is_dir():
        raise InputError(f"{flag} {name}: that is a folder; give the name of a file")
    if not folder.is_dir():
        raise InputError(f"{flag} {name}: the folder {folder} does not exist; make it first")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(f"{flag} {name}: there is no permission to write it")
    return path
