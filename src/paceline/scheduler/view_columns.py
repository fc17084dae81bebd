"""The columns a policy sees, each declared once: where its value comes from while a request waits and while it runs.

`RequestView` names and explains the columns. The queue stores the values of waiting requests by this table, a view of
running requests is read from the row table by it, and the forecast adds a request to a view by it. A new column is a
field of `RequestView` and a line here. Decision: docs/decisions/0017-policies.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.request import Request
from paceline.policy import RequestView
from paceline.scheduler.rows import Rows


class ColumnSource(NamedTuple):
    """Where the value of a column is found."""

    waiting: str  # attribute of a waiting Request; "" for the two that the scheduler adds
    running: str  # column of the row table; "" for what follows from having a row
    is_time: bool = False  # seconds, else a whole number


VIEW_COLUMNS = {
    "order": ColumnSource("", "order"),
    "tenant": ColumnSource("", "tenant"),
    "row": ColumnSource("row", ""),
    "priority": ColumnSource("priority", "priority"),
    "num_prompt": ColumnSource("num_prompt", "num_prompt"),
    "num_tokens": ColumnSource("num_tokens", "num_tokens"),
    "max_total": ColumnSource("max_total", "max_len"),
    "preemptions": ColumnSource("preemptions", "preemptions"),
    "num_computed": ColumnSource("num_computed", "computed"),
    "peak_computed": ColumnSource("peak_computed", "peak_computed"),
    "started": ColumnSource("started", ""),
    "arrival_s": ColumnSource("arrival_s", "arrival_s", is_time=True),
    "deadline_s": ColumnSource("due_s", "deadline_s", is_time=True),
    "first_due_s": ColumnSource("first_due_s", "first_due_s", is_time=True),
}
COUNTS = tuple(name for name, source in VIEW_COLUMNS.items() if not source.is_time)
TIMES = tuple(name for name, source in VIEW_COLUMNS.items() if source.is_time)
# One call reads all attributes of a request: every request that comes or goes is written to the queue's columns.
_counts = attrgetter(*(VIEW_COLUMNS[name].waiting for name in COUNTS if VIEW_COLUMNS[name].waiting))
times_of = attrgetter(*(VIEW_COLUMNS[name].waiting for name in TIMES))
_RUNNING = tuple((name, source.running) for name, source in VIEW_COLUMNS.items() if source.running)


def counts_of(request: Request, order: int, tenant: int) -> tuple[int, ...]:
    """The whole numbers of a waiting request, in the order of `COUNTS`."""
    return order, tenant, *_counts(request)


def row_view(rows: Rows, at: NDArray[np.int64], now_s: float) -> RequestView:
    """The requests on the rows `at`."""
    columns = {name: getattr(rows, column)[at] for name, column in _RUNNING}
    columns["peak_computed"] = np.maximum(columns["peak_computed"], columns["num_computed"])
    return RequestView(now_s=now_s, row=at, started=np.ones(len(at), np.int64), **columns)


def view_of_requests(requests: Sequence[Mapping[str, float]], now_s: float) -> RequestView:
    """A view from the values of single requests by name."""
    columns: dict[str, Any] = {
        name: np.array([values[name] for values in requests], np.float64 if source.is_time else np.int64)
        for name, source in VIEW_COLUMNS.items()
    }
    return RequestView(now_s=now_s, **columns)


def waiting_values(request: Request, order: int, tenant: int) -> dict[str, float]:
    """What a policy sees of a request that waits, by name."""
    values: dict[str, float] = dict(zip(COUNTS, counts_of(request, order, tenant), strict=True))
    return values | dict(zip(TIMES, times_of(request), strict=True))


def part_of(view: RequestView, at: slice) -> RequestView:
    """Some of the requests of a view."""
    return RequestView(now_s=view.now_s, **{name: getattr(view, name)[at] for name in VIEW_COLUMNS})


def with_one_more(view: RequestView, values: Mapping[str, float]) -> RequestView:
    """A view and one more request behind its own."""
    columns = {name: np.append(getattr(view, name), values[name]) for name in VIEW_COLUMNS}
    return RequestView(now_s=view.now_s, **columns)
