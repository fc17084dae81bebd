"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object],
    seconds: float = 60.0,
    *,
    every_s: float = 0.01,
    says: str = "it did not happen in time",
) -> None:
    """A condition that raises OSError is not met yet: a server may not listen, or a file not be there."""
    until_s = time.monotonic() + seconds
    while not _holds(condition):
        assert time.monotonic() < until_s, says
        time.sleep(every_s)


def _holds(condition: Callable[[], object]) -> bool:
    try:
        return bool(condition())
    except OSError:
        return False
