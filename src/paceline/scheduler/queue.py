"""The waiting requests as columns, so that a policy can score them all at once.

Owns nothing but places in the queue; a request that waits has no row and no blocks. Bounded by requests and by
tokens. Order of arrival is kept in `order`: a preempted request comes back with the number it had.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.policy import RequestView
from paceline.core.request import NO_ROW, Request, RequestId

_COLUMNS: dict[str, type] = {
    "order": np.int64,
    "arrival_s": np.float64,
    "priority": np.int32,
    "tenant": np.int32,
    "num_tokens": np.int64,
    "max_total": np.int64,
    "preemptions": np.int32,
}


class WaitingQueue:
    """Waiting requests, in no particular order; `view` is what policies see."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._place: dict[RequestId, int] = {}
        self._columns: dict[str, NDArray[Any]] = {
            name: np.zeros(64, dtype) for name, dtype in _COLUMNS.items()
        }
        self._row = np.full(64, NO_ROW, np.int32)
        self._views = {name: _read_only(column) for name, column in self._columns.items()}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._place

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def get(self, index: int) -> Request:
        return self._requests[index]

    def push(self, request: Request, order: int, tenant: int) -> None:
        place = len(self._requests)
        if place == len(self._row):
            self._grow()
        self._requests.append(request)
        self._place[request.id] = place
        columns = self._columns
        columns["order"][place] = order
        columns["arrival_s"][place] = request.arrival_s
        columns["priority"][place] = request.priority
        columns["tenant"][place] = tenant
        columns["num_tokens"][place] = request.num_tokens
        columns["max_total"][place] = request.max_total
        columns["preemptions"][place] = request.preemptions
        self.num_tokens += request.num_tokens

    def remove(self, request: Request) -> None:
        """Take a request out; the last one moves into its place."""
        place = self._place.pop(request.id)
        last = self._requests.pop()
        if last is not request:
            self._requests[place] = last
            self._place[last.id] = place
            end = len(self._requests)
            for column in self._columns.values():
                column[place] = column[end]
        self.num_tokens -= request.num_tokens

    def set_priority(self, request: Request) -> None:
        self._columns["priority"][self._place[request.id]] = request.priority

    def view(self, now_s: float) -> RequestView:
        count = len(self._requests)
        columns = {name: column[:count] for name, column in self._views.items()}
        return RequestView(now_s=now_s, row=self._row[:count], **columns)

    def _grow(self) -> None:
        for name, column in self._columns.items():
            self._columns[name] = np.concatenate([column, np.zeros_like(column)])
            self._views[name] = _read_only(self._columns[name])
        self._row = np.full(2 * len(self._row), NO_ROW, np.int32)


def first(view: RequestView, scores: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Indices of the `count` lowest scores, in order; ties go to the earlier arrival."""
    if count < len(scores) // 4:
        highest = np.partition(scores, count)[count]
        chosen = np.flatnonzero(scores <= highest)
        return chosen[np.lexsort((view.order[chosen], scores[chosen]))][:count]
    return np.lexsort((view.order, scores))[:count]


def _read_only(column: NDArray[Any]) -> NDArray[Any]:
    view = column.view()
    view.flags.writeable = False
    return view
