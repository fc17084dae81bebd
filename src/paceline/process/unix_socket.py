"""Where a program listens for others of its machine, as a path."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

from paceline.errors import PacelineError


def bind_unix(path: str, flag: str, cannot: type[PacelineError]) -> socket.socket:
    """A bound unix socket. What an earlier process left behind is removed; anything else in its place is not. Raises
    `cannot`, in words of the flag that gave the path."""
    place = Path(path)
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(place.stat().st_mode):
            raise cannot(f"{flag} {path} exists and is not a socket; name another path")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(path) == 0:
                raise cannot(f"{flag} {path} is in use by another server; name another path")
        place.unlink()
    bound = socket.socket(socket.AF_UNIX)
    try:
        bound.bind(path)
        os.chmod(path, 0o600)
    except OSError as error:
        bound.close()
        raise cannot(f"cannot listen on {flag} {path}: {error.strerror}") from error
    return bound
