"""A redis in memory for tests, and one that stalls and lies."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

NEEDED = ("redis", "fakeredis")


def fake_server() -> Any:
    """What several clients share; the test is skipped where there is none, unless that is forbidden."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        if os.environ.get("PACELINE_REQUIRE_FAKEREDIS") == "1":
            pytest.fail(f"{' and '.join(missing)} not installed: pip install redis==8.1.0 fakeredis==2.40.0")
        pytest.skip(f"{' and '.join(missing)} not installed")
    return import_module("fakeredis").FakeServer()


class Client:
    """A client of such a server. What is set below happens to every value it reads from then on."""

    def __init__(self, server: Any) -> None:
        self.real = import_module("fakeredis").FakeRedis(server=server)
        self.lie: Callable[[bytes, bytes | None], Any] = lambda name, value: value
        self.may_go = threading.Event()  # while it is not set, reads do not return
        self.may_go.set()
        self.num_reads = 0

    def getex(self, name: bytes, **more: Any) -> Any:
        self.num_reads += 1
        self.may_go.wait(60.0)
        return self.lie(name, self.real.getex(name, **more))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)
