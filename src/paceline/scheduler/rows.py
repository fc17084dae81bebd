"""The row table: the counters of running requests as numpy columns.

A running request owns a row. One step of plain decode is a handful of operations over whole columns, whatever
the number of rows. A freed row is handed out again only when every step submitted before has completed, and its
generation is raised, so that a late result finds nobody.
"""

from __future__ import annotations

import heapq
from collections import deque

import numpy as np
from numpy.typing import NDArray

from paceline.core.request import NO_ROW, Request

# Row counters are 64 bit: they are used as indices, and numpy is fastest with its own index type.
Count = NDArray[np.int64]


class Rows:
    """Columns of all rows. `upper` counts what has been scheduled, `computed` what is known to be done."""

    def __init__(self, num_rows: int, max_len: int) -> None:
        self.num_rows = num_rows
        self.high = 0  # rows at and above this one were never used
        self.live = np.zeros(num_rows, np.bool_)
        self.generation: NDArray[np.int32] = np.zeros(num_rows, np.int32)
        self.request_id = np.zeros(num_rows, np.int64)
        self.num_prompt: Count = np.zeros(num_rows, np.int64)
        self.known: Count = np.zeros(num_rows, np.int64)  # tokens the row joined with
        self.num_tokens: Count = np.zeros(num_rows, np.int64)  # known and delivered so far
        self.computed: Count = np.zeros(num_rows, np.int64)
        self.upper: Count = np.zeros(num_rows, np.int64)
        self.limit: Count = np.zeros(num_rows, np.int64)
        self.pad_left: Count = np.zeros(num_rows, np.int64)
        self.pad: Count = np.zeros(num_rows, np.int64)
        self.decoding = np.zeros(num_rows, np.bool_)  # takes part in plain decode
        self.padding = np.zeros(num_rows, np.bool_)  # has its last token; decodes only to fill the batch
        self.done = np.zeros(num_rows, np.bool_)  # has ended, waits for its batch to leave
        self.needs_host = np.zeros(num_rows, np.bool_)
        self.sharing = np.zeros(num_rows, np.bool_)  # may write into a block that others read
        self.reserved = np.zeros(num_rows, np.bool_)  # never preempted
        self.order = np.zeros(num_rows, np.int64)
        self.arrival_s = np.zeros(num_rows, np.float64)
        self.priority: NDArray[np.int32] = np.zeros(num_rows, np.int32)
        self.tenant: NDArray[np.int32] = np.zeros(num_rows, np.int32)
        self.preemptions: NDArray[np.int32] = np.zeros(num_rows, np.int32)
        self.outputs: NDArray[np.int32] = np.zeros(
            (num_rows, max_len), np.int32
        )  # tokens delivered since the row joined
        self.requests: list[Request | None] = [None] * num_rows
        self.num_live = 0
        self.num_reserved = 0
        self.num_needs_host = 0
        self._free = list(range(num_rows))
        self._fenced: deque[tuple[int, int]] = deque()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, request: Request, order: int, tenant: int) -> int:
        """Give a request the lowest free row; every column is written anew."""
        row = heapq.heappop(self._free)
        self.high = max(self.high, row + 1)
        self.live[row] = True
        self.generation[row] += 1
        self.request_id[row] = request.id
        self.num_prompt[row] = request.num_prompt
        self.known[row] = self.num_tokens[row] = request.num_tokens
        self.computed[row] = self.upper[row] = 0
        self.limit[row] = request.max_total
        self.pad[row] = self.pad_left[row] = 0
        self.decoding[row] = self.padding[row] = self.done[row] = self.sharing[row] = False
        self.needs_host[row] = request.needs_host
        self.reserved[row] = False
        self.order[row] = order
        self.arrival_s[row] = request.arrival_s
        self.priority[row] = request.priority
        self.tenant[row] = tenant
        self.preemptions[row] = request.preemptions
        self.requests[row] = request
        self.num_live += 1
        self.num_needs_host += request.needs_host
        request.row = row
        return row

    def leave(self, request: Request, fence: int, completed: int) -> None:
        """The request leaves its row, taking its tokens along; the row rests until step `fence` has completed."""
        row = request.row
        count = int(self.num_tokens[row] - self.known[row])
        if count:
            request.tokens = np.concatenate([request.tokens, self.outputs[row, :count]])
        self.live[row] = self.decoding[row] = False
        self.generation[row] += 1
        self.requests[row] = None
        self.num_live -= 1
        self.num_needs_host -= request.needs_host
        self.num_reserved -= bool(self.reserved[row])
        self.reserved[row] = False
        request.row = NO_ROW
        if fence > completed:
            self._fenced.append((fence, row))
        else:
            heapq.heappush(self._free, row)

    def reserve(self, row: int) -> None:
        """The row is never preempted from now on."""
        self.reserved[row] = True
        self.num_reserved += 1

    def complete(self, seq: int) -> None:
        """Step `seq` and all before it have completed: rows that waited for them are free."""
        while self._fenced and self._fenced[0][0] <= seq:
            heapq.heappush(self._free, self._fenced.popleft()[1])

    def free_rows(self) -> list[int]:
        return list(self._free)

    def fenced_rows(self) -> list[int]:
        return [row for _, row in self._fenced]
