"""The row table: the counters of running requests as numpy columns.

A running request owns a row. One step of plain decode is a handful of operations over whole columns, whatever
the number of rows. A freed row is handed out again only when every step submitted before has completed, and its
generation is raised, so that a late result is dropped instead of reaching the row's next owner. The counters of a row
are always in this order (invariant S9):

    computed <= scheduled          what results have confirmed; what plans have asked for
    computed <= num_tokens         prompt and delivered output
    num_known <= num_tokens <= max_len

    position   0         8         12   14                     20
               |---------|----------|----|----------------------|
               prompt ................... output ............... max_len
                         ^computed  ^scheduled
                                         ^num_known (prefilling)

    prefilling: scheduled < num_known     a plan schedules a span of known tokens
    decoding:   scheduled >= num_known    each plan schedules one token; with steps in flight `scheduled` runs ahead of
                                          num_tokens, and results bring computed and num_tokens after it

With drafts a plan schedules a token and the drafts behind it; its result brings `scheduled` back to what is possible:

    plan:    scheduled = min(scheduled + width + 1, max_len - 1)
    result:  computed += tokens that were right;  scheduled = min(computed + what is under way, max_len - 1)

Decisions: docs/decisions/0001-rows-as-columns.md, docs/decisions/0036-drafts.md.
"""

from __future__ import annotations

import heapq
from collections import deque
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from paceline.core.request import NO_ROW, Request

# Row counters are 64 bit: they are used as indices, and numpy is fastest with its own index type.
Count = NDArray[np.int64]
Flag = NDArray[np.bool_]
# What is counted of each row. `take` gives the first four their values, the others are read off the request that joins.
_FROM_REQUEST = {
    "request_id": "id",
    "num_prompt": "num_prompt",
    "num_known": "num_tokens",
    "num_tokens": "num_tokens",
    "computed": "joined_at",
    "scheduled": "joined_at",
    "max_len": "max_total",
    "priority": "priority",
    "preemptions": "preemptions",
    "peak_computed": "peak_computed",
    "displaced_at": "displaced_at",
}
COUNTS = ("order", "tenant", "pad", "pad_left", *_FROM_REQUEST)
_counts_of = attrgetter(*_FROM_REQUEST.values())
FLAGS = ("live", "decoding", "padding", "done", "sharing", "reserved")


class Rows:
    """Columns of all rows."""

    def __init__(self, num_rows: int, max_len: int) -> None:
        self.num_rows = num_rows
        self.high = 0  # rows at and above this one were never used
        self.generation: NDArray[np.int32] = np.zeros(num_rows, np.int32)
        self.arrival_s = np.zeros(num_rows, np.float64)
        self.deadline_s: NDArray[np.float64] = np.full(num_rows, np.inf)
        self.first_due_s: NDArray[np.float64] = np.full(num_rows, np.inf)  # when its first token is wanted
        self.itl_s: NDArray[np.float64] = np.full(num_rows, np.inf)  # most it wants between two tokens
        self.num_itl = 0  # rows that want something between tokens
        # One array behind the columns of a kind, so that a join writes all of them at once.
        self._counts: Count = np.zeros((len(COUNTS), num_rows), np.int64)
        self.request_id: Count
        self.num_prompt: Count
        self.num_known: Count  # tokens the row joined with
        self.num_tokens: Count  # known and delivered so far
        self.computed: Count
        self.scheduled: Count
        self.max_len: Count
        self.pad: Count
        self.pad_left: Count
        self.order: Count
        self.priority: Count
        self.tenant: Count
        self.preemptions: Count
        self.peak_computed: Count  # tokens computed before it joined
        self.displaced_at: Count  # it gives its place to another only once it is further than this
        for name, count in zip(COUNTS, self._counts, strict=True):
            setattr(self, name, count)
        self._flags: Flag = np.zeros((len(FLAGS), num_rows), np.bool_)
        self.live: Flag
        self.decoding: Flag  # takes part in plain decode
        self.padding: Flag  # has its last token; decodes only to fill the batch
        self.done: Flag  # has ended, waits for its batch to leave
        self.sharing: Flag  # may write into a block that others read
        self.reserved: Flag  # never preempted
        for name, flag in zip(FLAGS, self._flags, strict=True):
            setattr(self, name, flag)
        # Tokens delivered since the row joined.
        self.outputs: NDArray[np.int32] = np.zeros((num_rows, max_len), np.int32)
        self.requests: list[Request | None] = [None] * num_rows
        self.num_live = 0
        self.num_reserved = 0
        self.any_sharing = False  # False: no flag of `sharing` is set
        self._free = list(range(num_rows))
        self._fenced: deque[tuple[int, int]] = deque()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, request: Request, order: int, tenant: int, num_computed: int) -> int:
        """Give a request the lowest free row; every column is written anew."""
        row = heapq.heappop(self._free)
        if row >= self.high:
            self.high = row + 1
        self.generation[row] = self.generation.item(row) + 1
        self.arrival_s[row] = request.arrival_s
        self.deadline_s[row] = request.due_s
        self.first_due_s[row] = request.first_due_s
        if request.itl_s != np.inf:
            self.itl_s[row] = request.itl_s
            self.num_itl += 1
        request.joined_at = num_computed
        self._counts[:, row] = (order, tenant, 0, 0, *_counts_of(request))
        self._flags[:, row] = False
        self.live[row] = True
        self.requests[row] = request
        self.num_live += 1
        request.row = row
        return row

    def collect(self, request: Request) -> bool:
        """Tokens delivered since the request joined go into it and are known from now on; False when there are none."""
        row = request.row
        known, num_tokens = self.num_known.item(row), self.num_tokens.item(row)
        if known == num_tokens:
            return False
        request.tokens = np.concatenate((request.tokens, self.outputs[row, : num_tokens - known]))
        self.num_known[row] = num_tokens
        return True

    def leave(self, request: Request, fence: int, completed: int) -> None:
        """The request leaves its row, taking its tokens along; the row rests until step `fence` has completed."""
        row = request.row
        self.collect(request)
        peak_computed, computed = self.peak_computed.item(row), self.computed.item(row)
        request.peak_computed = peak_computed if peak_computed > computed else computed
        self.live[row] = self.decoding[row] = False
        self.generation[row] = self.generation.item(row) + 1
        self.requests[row] = None
        self.num_live -= 1
        if self.num_itl and self.itl_s.item(row) != np.inf:
            self.itl_s[row] = np.inf
            self.num_itl -= 1
        if self.num_reserved and self.reserved[row]:
            self.reserved[row] = False
            self.num_reserved -= 1
        request.row = NO_ROW
        if fence > completed:
            self._fenced.append((fence, row))
        else:
            heapq.heappush(self._free, row)

    def reserve(self, row: int) -> None:
        """The row is never preempted from now on."""
        self.reserved[row] = True
        self.num_reserved += 1

    def share(self, rows: list[int]) -> None:
        """The rows may write into a block that others read, until a check finds that they do not."""
        self.sharing[rows] = True
        self.any_sharing = True

    def promote(self, rows: list[tuple[int, int]]) -> None:
        """Rows, each with its generation, whose last known token has been scheduled: they decode from now on."""
        for row, generation in rows:
            if self.generation[row] == generation and self.live[row]:
                self.decoding[row] = True
        rows.clear()

    def end_of_length(self, ended: Flag, stays: bool) -> None:
        """Rows that have been given their last token: they leave plain decode, or stay as padding."""
        if stays:
            self.padding[: len(ended)] |= ended
        else:
            self.decoding[: len(ended)] &= ~ended

    def complete(self, seq: int) -> None:
        """Step `seq` and all before it have completed: rows that waited for them are free."""
        while self._fenced and self._fenced[0][0] <= seq:
            heapq.heappush(self._free, self._fenced.popleft()[1])

    def columns(self) -> tuple[bytes, bytes]:
        """A copy of all counts and of all flags, as `COUNTS` and `FLAGS` name them. For checks."""
        return self._counts.tobytes(), self._flags.tobytes()

    def free_rows(self) -> list[int]:
        return list(self._free)

    def fenced_rows(self) -> list[int]:
        return [row for _, row in self._fenced]
