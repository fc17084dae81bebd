"""The one value of this package: requests as columns.

Owns what a workload is (when each request arrives, how long it is, whose it is, which prompt blocks it may
share with others) and the two ways to cut one. Knows no file format and no distribution, and holds no
tokens: a caller that needs token ids makes them from the lengths and the block ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InputError

DEFAULT_TENANTS = ("default",)
WISHES = ("deadline_ms", "ttft_slo_ms", "itl_slo_ms")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """Requests in order of arrival. Two workloads are equal only when they are the same object."""

    name: str
    arrival_s: NDArray[np.float64]  # seconds from the start, ascending
    prompt_len: NDArray[np.int32]  # tokens, >= 1
    output_len: NDArray[np.int32]  # tokens, >= 1
    tenant: NDArray[np.int32]  # index into tenants
    tenants: tuple[str, ...]  # ("default",) when there is one
    prefix_ids: tuple[tuple[int, ...], ...] | None  # ids of a prompt's blocks (the last may be partial)
    prefix_block: int  # tokens per id; 0 when prefix_ids is None
    wishes: NDArray[np.int32] | None = None  # of each request: deadline, TTFT and ITL in ms, 0 for none
    priority: NDArray[np.int32] | None = None  # of each request, where the source says; None: all alike

    def __post_init__(self) -> None:
        _check(self)
        for column in (self.arrival_s, self.prompt_len, self.output_len, self.tenant):
            column.setflags(write=False)

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def duration_s(self) -> float:
        """From the start (time 0) to the last arrival."""
        return float(self.arrival_s[-1]) if len(self) else 0.0

    @property
    def rate(self) -> float:
        """Mean requests per second between the first and the last arrival.

        0 when there are fewer than two requests, infinite when all of several arrive at once.
        """
        if len(self) < 2:
            return 0.0
        span_s = float(self.arrival_s[-1] - self.arrival_s[0])
        return (len(self) - 1) / span_s if span_s > 0 else math.inf

    def head(self, num_requests: int) -> Workload:
        """The first `num_requests` requests (all of them when there are fewer)."""
        assert num_requests >= 0, num_requests
        return self._take(np.arange(min(num_requests, len(self))))

    def clipped(self, max_total_len: int) -> tuple[Workload, int]:
        """Fit the requests into a context of `max_total_len` tokens, as a server would.

        A request whose prompt leaves no room for a single token is dropped: a server refuses it. One whose
        prompt fits but whose prompt and output together do not keeps its prompt and gets a shorter output:
        a server ends it at the context's end. Returns the new workload and how many requests were touched,
        the dropped ones included (the difference in length says how many those are).
        """
        room = max_total_len - self.prompt_len.astype(np.int64)
        kept = np.flatnonzero(room >= 1)
        if not len(kept):
            shortest = int(self.prompt_len.min()) if len(self) else 0
            raise InputError(
                f"{self.name}: no request fits into {max_total_len} tokens (the shortest prompt has "
                f"{shortest}, and one token must follow it); allow longer sequences or take another workload"
            )
        touched = int(np.count_nonzero(self.output_len > room))
        shortened = np.minimum(self.output_len[kept], room[kept]).astype(np.int32)
        return replace(self._take(kept), output_len=shortened), touched

    def _take(self, index: NDArray[np.intp]) -> Workload:
        prefix_ids = self.prefix_ids
        return replace(
            self,
            arrival_s=self.arrival_s[index],
            prompt_len=self.prompt_len[index],
            output_len=self.output_len[index],
            tenant=self.tenant[index],
            prefix_ids=None if prefix_ids is None else tuple(prefix_ids[i] for i in index.tolist()),
            wishes=None if self.wishes is None else self.wishes[index],
            priority=None if self.priority is None else self.priority[index],
        )


def _check(workload: Workload) -> None:
    """Broken columns are a bug of the code that built them, not the user's: readers report theirs before."""
    count = len(workload.arrival_s)
    assert workload.arrival_s.dtype == np.float64
    for column in (workload.prompt_len, workload.output_len, workload.tenant):
        assert column.dtype == np.int32 and column.shape == (count,)
    assert workload.wishes is None or workload.wishes.shape == (count, len(WISHES))
    assert workload.priority is None or workload.priority.shape == (count,)
    assert workload.tenants
    assert (workload.prefix_ids is None) == (workload.prefix_block == 0)
    assert workload.prefix_ids is None or len(workload.prefix_ids) == count
    if count:
        assert np.isfinite(workload.arrival_s).all() and workload.arrival_s[0] >= 0
        assert (np.diff(workload.arrival_s) >= 0).all(), "arrivals must ascend"
        assert workload.prompt_len.min() >= 1 and workload.output_len.min() >= 1
        assert workload.tenant.min() >= 0 and workload.tenant.max() < len(workload.tenants)
