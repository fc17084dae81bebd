"""The newest decisions of one engine, in memory: what is known about requests of a moment ago.

Holds whole batches as the scheduler handed them out, so that keeping them costs a step one append, and looks
through them only on request. Bounded by the number of decisions; the oldest go first. Knows no engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from paceline.core.events import Decision
from paceline.core.request import RequestId


class DecisionRing:
    """At most `most` decisions, and the newest batch whole however large it is. With 0 nothing is kept."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_dropped = 0
        self._batches: deque[Sequence[Decision]] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, batch: Sequence[Decision]) -> None:
        """Keep a batch, which its owner must not change any more."""
        if not batch or not self.most:
            return
        self._batches.append(batch)
        self._count += len(batch)
        while self._count > self.most and len(self._batches) > 1:
            dropped = len(self._batches.popleft())
            self._count -= dropped
            self.num_dropped += dropped

    def of(self, request_id: RequestId) -> list[Decision]:
        """What is still known about a request, oldest first."""
        return [decision for batch in self._batches for decision in batch if decision.request == request_id]
