"""Adapters without numbers: what an engine without tensors reads, and where it keeps them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from paceline.engine.adapters import Work
from paceline.errors import InvalidAdapter
from paceline.models.files.adapter_files import Adapter, LowRank

NOTHING = np.zeros((1, 1), np.float32)


class Memory:
    """What a runner would hold."""

    def __init__(self) -> None:
        self.held: dict[int, str] = {}
        self.copying: set[int] = set()  # of what is held, on its way

    def put(self, number: int, adapter: Adapter) -> None:
        self.held[number] = adapter.identity

    def is_there(self, number: int) -> bool:
        return number not in self.copying

    def drop(self, number: int) -> None:
        del self.held[number]


def read(folder: Path) -> Adapter:
    """An adapter whose identity is the number its folder is called by."""
    if not folder.name.isdigit():
        raise InvalidAdapter(f"{folder} is no adapter")
    return Adapter(identity=f"{int(folder.name):064x}", rank=4, parts={(0, "q"): LowRank(NOTHING, NOTHING)})


class HeldReads:
    """Folders are read when the test says so."""

    def __init__(self) -> None:
        self.waiting: dict[int, Work] = {}
        self._done: list[tuple[int, Work]] = []

    def start(self, number: int, work: Work) -> None:
        self.waiting[number] = work

    def finish(self) -> None:
        self._done += self.waiting.items()
        self.waiting = {}

    def done(self) -> list[tuple[int, Work]]:
        found, self._done = self._done, []
        return found
