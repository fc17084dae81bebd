"""A store in memory that fails and stalls on command."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from paceline.core.store import BlockHead


class FakeStore:
    """Keeps blocks; what is set below happens to every call from then on."""

    def __init__(self, num_places: int = 64) -> None:
        self.num_places = num_places
        self.kept: dict[int, tuple[BlockHead, bytes]] = {}
        self.error: OSError | None = None  # instead of doing anything
        self.may_go = threading.Event()  # while it is not set, calls do not return
        self.may_go.set()
        self.is_called = threading.Event()

    def write(self, place: int, head: BlockHead, parts: Sequence[memoryview]) -> None:
        self.is_called.set()
        self.may_go.wait()
        if self.error is not None:
            raise self.error
        self.kept[place] = (head, b"".join(bytes(part) for part in parts))

    def read(self, place: int, head: BlockHead, into: Sequence[memoryview]) -> bool:
        self.is_called.set()
        self.may_go.wait()
        if self.error is not None:
            raise self.error
        known = self.kept.get(place)
        if known is None or known[0][:2] != head[:2]:
            return False
        start = 0
        for part in into:
            part[:] = known[1][start : start + part.nbytes]
            start += part.nbytes
        return True

    def entries(self) -> Iterator[tuple[int, BlockHead]]:
        for place, (head, _) in sorted(self.kept.items()):
            yield place, head
