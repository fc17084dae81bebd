"""What a workload looks like in numbers: lengths, rate, burstiness, sharing, tenants.

Owns the definitions of the statistics the generators are fitted by, so that a trace and a synthetic workload
are always measured the same way. Knows nothing of where a workload came from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.lab.workload.workload import Workload

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


def _mean_ranks(values: NDArray[np.int32]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2.0)[inverse]


def _quantiles(values: NDArray[np.int32]) -> tuple[float, ...]:
    return tuple(np.quantile(values, QUANTILE_LEVELS).tolist())
