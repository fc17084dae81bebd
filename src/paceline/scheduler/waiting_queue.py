"""The waiting requests as columns, so that a policy can score them all at once.

Owns nothing but places in the queue; a request that waits has no row and no blocks on the device. Order of
arrival is kept in `order`: a preempted request comes back with the number it had.
Decision: docs/decisions/0002-one-queue.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, KeysView
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.request import Request, RequestId
from paceline.errors import ConfigError
from paceline.kv.wishes import Wishes
from paceline.policy import RequestView
from paceline.scheduler.view_columns import COUNTS, TIMES, counts_of, part_of, times_of

ORDER, PRIORITY, TENANT = (COUNTS.index(name) for name in ("order", "priority", "tenant"))
DEADLINE = TIMES.index("deadline_s")


class WaitingQueue:
    """Waiting requests, in no particular order; `view` is what policies see. `wishes` hears which come and leave."""

    def __init__(self, wishes: Wishes | None = None) -> None:
        self.wishes = wishes
        self._requests: list[Request] = []
        self._place: dict[RequestId, int] = {}
        # One line per request: requests come and go far more often than a policy looks at a whole column.
        self._counts: NDArray[np.int64] = np.zeros((64, len(COUNTS)), np.int64)
        self._times: NDArray[np.float64] = np.zeros((64, len(TIMES)), np.float64)
        # Those that wait for what others compute, and for nothing else.
        self._parked: NDArray[np.bool_] = np.zeros(64, np.bool_)
        self.num_parked = 0
        self.num_tokens = 0
        self.tenants: dict[int, int] = {}  # waiting requests by tenant; one without any is not listed
        self._last_tenant: int | None = None  # the last whose queue became empty
        # Columns of the last view by name, and that view, for as long as they hold.
        self._columns: dict[str, Any] | None = None
        self._view: RequestView | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._place

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def ids(self) -> KeysView[RequestId]:
        return self._place.keys()

    def get(self, index: int) -> Request:
        return self._requests[index]

    def push(self, request: Request, order: int, tenant: int) -> None:
        place = len(self._requests)
        if place == len(self._times):
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._times = np.concatenate([self._times, np.zeros_like(self._times)])
            self._parked = np.concatenate([self._parked, np.zeros_like(self._parked)])
        self._view = self._columns = None
        self._requests.append(request)
        self.tenants[tenant] = self.tenants.get(tenant, 0) + 1
        self._place[request.id] = place
        self._counts[place] = counts_of(request, order, tenant)
        self._times[place] = times_of(request)
        self.num_tokens += request.num_tokens
        if self.wishes is not None:
            self.wishes.comes(request.id, request.keys, request.num_tokens)

    def remove(self, request: Request) -> None:
        """Take a request out; the last one moves into its place."""
        if self.wishes is not None:
            self.wishes.leaves(request.id)
        if self.num_parked:
            self.unpark(request)
        self._view = self._columns = None
        place = self._place.pop(request.id)
        tenant = self._counts.item(place, TENANT)
        waiting = self.tenants[tenant] - 1
        if waiting:
            self.tenants[tenant] = waiting
        else:
            del self.tenants[tenant]
            self._last_tenant = tenant
        last = self._requests.pop()
        if last is not request:
            self._requests[place] = last
            self._place[last.id] = place
            end = len(self._requests)
            self._counts[place] = self._counts[end]
            self._times[place] = self._times[end]
            if self.num_parked:
                self._parked[place], self._parked[end] = self._parked[end], False
        self.num_tokens -= request.num_tokens

    def backlog(self, beside: Collection[int]) -> Collection[int]:
        """The tenants that wait besides some; if there are none, the last one that did."""
        last = () if self._last_tenant is None else (self._last_tenant,)
        return self.tenants.keys() - beside or set(last).difference(beside)

    def park(self, request: Request) -> None:
        """A request is not looked at in its turn until it is unparked."""
        self.num_parked += not self._parked[self._place[request.id]]
        self._parked[self._place[request.id]] = True

    def unpark(self, request: Request) -> None:
        self.num_parked -= bool(self._parked[self._place[request.id]])
        self._parked[self._place[request.id]] = False

    def unparked(self) -> NDArray[np.intp] | None:
        """Places of those that are not parked; None: of all."""
        return np.flatnonzero(~self._parked[: len(self._requests)]) if self.num_parked else None

    def set_order(self, request: Request, order: int) -> None:
        self._counts[self._place[request.id], ORDER] = order

    def set_priority(self, request: Request) -> None:
        self._counts[self._place[request.id], PRIORITY] = request.priority

    def set_deadline(self, request: Request) -> None:
        self._times[self._place[request.id], DEADLINE] = request.due_s

    def view(self, now_s: float) -> RequestView:
        if self._view is not None and self._view.now_s == now_s:
            return self._view
        if self._columns is None:
            count = len(self._requests)
            counts, times = self._counts[:count].T, self._times[:count].T
            counts.flags.writeable = times.flags.writeable = False
            self._columns = dict(zip((*COUNTS, *TIMES), (*counts, *times), strict=True))
        self._view = RequestView(now_s=now_s, **self._columns)
        return self._view

    def view_of(self, request: Request, now_s: float) -> RequestView:
        """One of them alone."""
        place = self._place[request.id]
        return part_of(self.view(now_s), slice(place, place + 1))


def first(
    view: RequestView, scores: NDArray[np.float64], count: int, at: NDArray[np.intp] | None = None
) -> NDArray[np.intp]:
    """Indices of the `count` lowest scores, in order, of all or of those `at` some places; ties go to the earlier
    arrival."""
    if np.shape(scores) != np.shape(view.order):
        raise ConfigError(
            f"the scheduling policy gave an order of shape {np.shape(scores)} for {len(view.order)} requests: one "
            "number for each is wanted"
        )
    if np.isnan(scores).any():
        raise ConfigError("the scheduling policy gave an order with NaN in it: numbers are wanted")
    chosen = at
    if at is None and count < len(scores) // 4:
        chosen = np.flatnonzero(scores <= np.partition(scores, count)[count])
    if chosen is None:
        return np.lexsort((view.order, scores))[:count]
    return chosen[np.lexsort((view.order[chosen], scores[chosen]))][:count]
