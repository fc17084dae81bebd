"""The one value of this package: requests as columns, and what they look like in numbers.

Owns what a workload is (when each request arrives, how long it is, whose it is, which prompt blocks it may
share with others), the ways to cut one, and its statistics. Knows no file format and no distribution, and holds no
tokens: a caller that needs token ids makes them from the lengths and the block ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InputError

Floats = NDArray[np.float64]
DEFAULT_TENANTS = ("default",)
OBJECTIVES = ("deadline_ms", "ttft_slo_ms", "itl_slo_ms")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Images:
    """Pictures of requests: those of request i are `first[i]` to `first[i + 1]`, in the order of its prompt."""

    first: NDArray[np.int64]  # one more than there are requests
    tokens: NDArray[np.int32]  # of each picture, >= 1; they are part of its prompt
    content: NDArray[np.int64]  # what it shows: equal numbers are the same picture

    def counts(self) -> NDArray[np.int64]:
        counts: NDArray[np.int64] = self.first[1:] - self.first[:-1]
        return counts

    def of(self, request: int) -> list[tuple[int, int]]:
        """Tokens and content of each picture of a request."""
        span = slice(int(self.first[request]), int(self.first[request + 1]))
        return list(zip(self.tokens[span].tolist(), self.content[span].tolist(), strict=True))

    def sums(self) -> NDArray[np.int64]:
        """Tokens of all pictures of each request."""
        up_to = np.concatenate([[0], np.cumsum(self.tokens, dtype=np.int64)])
        sums: NDArray[np.int64] = up_to[self.first[1:]] - up_to[self.first[:-1]]
        return sums

    def take(self, index: NDArray[np.intp]) -> Images:
        counts = self.counts()[index]
        first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        # Each picture's place among all: where its request's begin, and how far behind that it stands.
        places = np.repeat(self.first[:-1][index] - first[:-1], counts) + np.arange(first[-1])
        return Images(first=first, tokens=self.tokens[places], content=self.content[places])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """Requests in order of arrival. Two workloads are equal only when they are the same object."""

    name: str
    arrival_s: Floats  # seconds from the start, ascending
    prompt_len: NDArray[np.int32]  # tokens, >= 1
    output_len: NDArray[np.int32]  # tokens, >= 1
    tenant: NDArray[np.int32]  # index into tenants
    tenants: tuple[str, ...] = DEFAULT_TENANTS
    prefix_ids: tuple[tuple[int, ...], ...] | None = None  # of a prompt's blocks (the last may be partial)
    prefix_block: int = 0  # tokens per id; 0 when prefix_ids is None
    objectives: NDArray[np.int32] | None = None  # of each request: deadline, TTFT and ITL in ms, 0 for none
    priority: NDArray[np.int32] | None = None  # of each request, where the source says; None: all alike
    images: Images | None = None  # None: there are only texts

    @classmethod
    def of_one_tenant(
        cls, name: str, arrival_s: Floats, prompt_len: NDArray[np.int32], output_len: NDArray[np.int32]
    ) -> Workload:
        return cls(
            name=name,
            arrival_s=arrival_s,
            prompt_len=prompt_len,
            output_len=output_len,
            tenant=np.zeros(len(arrival_s), np.int32),
        )

    def __post_init__(self) -> None:
        _check(self)
        for column in (self.arrival_s, self.prompt_len, self.output_len, self.tenant):
            column.setflags(write=False)

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def text_len(self) -> NDArray[np.int64]:
        """Tokens of each prompt that do not stand for pictures."""
        return self.prompt_len - (0 if self.images is None else self.images.sums())

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
        return self.take(np.arange(min(num_requests, len(self))))

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
        return replace(self.take(kept), output_len=shortened), touched

    def take(self, index: NDArray[np.intp], arrival_s: Floats | None = None) -> Workload:
        """The requests with these numbers, at these times or at their own."""
        prefix_ids = self.prefix_ids
        return replace(
            self,
            arrival_s=self.arrival_s[index] if arrival_s is None else arrival_s,
            prompt_len=self.prompt_len[index],
            output_len=self.output_len[index],
            tenant=self.tenant[index],
            prefix_ids=None if prefix_ids is None else tuple(prefix_ids[i] for i in index.tolist()),
            objectives=None if self.objectives is None else self.objectives[index],
            priority=None if self.priority is None else self.priority[index],
            images=None if self.images is None else self.images.take(index),
        )


def _check(workload: Workload) -> None:
    """Broken columns are a bug of the code that built them, not the user's: readers report theirs before."""
    count = len(workload.arrival_s)
    assert workload.arrival_s.dtype == np.float64
    for column in (workload.prompt_len, workload.output_len, workload.tenant):
        assert column.dtype == np.int32 and column.shape == (count,)
    assert workload.objectives is None or workload.objectives.shape == (count, len(OBJECTIVES))
    assert workload.priority is None or workload.priority.shape == (count,)
    assert workload.tenants
    assert (workload.prefix_ids is None) == (workload.prefix_block == 0)
    assert workload.prefix_ids is None or len(workload.prefix_ids) == count
    if workload.images is not None:
        images = workload.images
        assert images.first.shape == (count + 1,) and images.first[0] == 0
        assert (np.diff(images.first) >= 0).all() and images.first[-1] == len(images.tokens)
        assert len(images.content) == len(images.tokens) and images.tokens.min(initial=1) >= 1
        assert workload.text_len.min(initial=1) >= 1, "a prompt has text beside its pictures"
    if count:
        assert np.isfinite(workload.arrival_s).all() and workload.arrival_s[0] >= 0
        assert (np.diff(workload.arrival_s) >= 0).all(), "arrivals must ascend"
        assert workload.prompt_len.min() >= 1 and workload.output_len.min() >= 1
        assert workload.tenant.min() >= 0 and workload.tenant.max() < len(workload.tenants)


# What a workload looks like in numbers: the statistics the generators are fitted by, so that a trace and a synthetic
# workload are always measured the same way.

QUANTILE_LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSummary:
    num_requests: int
    rate: float  # requests per second
    prompt_mean: float
    prompt_quantiles: tuple[float, ...]  # at QUANTILE_LEVELS
    output_mean: float
    output_quantiles: tuple[float, ...]
    rank_correlation: float  # of prompt and output length (Spearman)
    gap_variation: float  # coefficient of variation of the gaps between arrivals; 1 for a Poisson process
    dispersion_10s: float  # variance over mean of the arrivals in windows of 10 s; 1 for a Poisson process
    block_reuse: float | None  # share of prompt blocks an unbounded cache would hold; None without block ids
    tenant_shares: tuple[float, ...]  # of the requests, in the order of `tenants`


def describe(workload: Workload) -> WorkloadSummary:
    count = len(workload)
    assert count, "an empty workload has no statistics"
    tenants = np.bincount(workload.tenant, minlength=len(workload.tenants)) / count
    return WorkloadSummary(
        num_requests=count,
        rate=workload.rate,
        prompt_mean=float(workload.prompt_len.mean()),
        prompt_quantiles=_quantiles(workload.prompt_len),
        output_mean=float(workload.output_len.mean()),
        output_quantiles=_quantiles(workload.output_len),
        rank_correlation=rank_correlation(workload.prompt_len, workload.output_len),
        gap_variation=gap_variation(workload),
        dispersion_10s=dispersion(workload, window_s=10.0),
        block_reuse=block_reuse(workload),
        tenant_shares=tuple(tenants.tolist()),
    )


def gap_variation(workload: Workload) -> float:
    """Standard deviation over mean of the gaps between arrivals; nan when there is no gap to speak of."""
    gaps = np.diff(workload.arrival_s)
    return float(gaps.std() / gaps.mean()) if gaps.size and gaps.mean() > 0 else math.nan


def dispersion(workload: Workload, *, window_s: float) -> float:
    """Variance over mean of the arrivals per window (whole windows only); nan with fewer than two windows."""
    num_windows = int(workload.duration_s // window_s)
    if num_windows < 2:
        return math.nan
    window = (workload.arrival_s // window_s).astype(np.int64)
    counts = np.bincount(window[window < num_windows], minlength=num_windows)
    return float(counts.var() / counts.mean())


def block_reuse(workload: Workload) -> float | None:
    """Share of all prompt blocks whose id an earlier request already had."""
    if workload.prefix_ids is None:
        return None
    seen: set[int] = set()
    total = reused = 0
    for ids in workload.prefix_ids:
        total += len(ids)
        reused += sum(block_id in seen for block_id in ids)
        seen.update(ids)
    return reused / total if total else 0.0


def rank_correlation(first: NDArray[np.int32], second: NDArray[np.int32]) -> float:
    """Spearman's rank correlation, equal values sharing their mean rank; nan when a column is constant."""
    ranks = _mean_ranks(first), _mean_ranks(second)
    if ranks[0].std() == 0 or ranks[1].std() == 0:
        return math.nan
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _mean_ranks(values: NDArray[np.int32]) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2.0)[inverse]


def _quantiles(values: NDArray[np.int32]) -> tuple[float, ...]:
    return tuple(np.quantile(values, QUANTILE_LEVELS).tolist())
