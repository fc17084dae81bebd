"""How evenly tenants were served: what each got up to each moment, and how far two of them grew apart.

Only while both have requests waiting: who asks for nothing is owed nothing. Service is counted as the fair policy does,
an output token as two of a prompt. Seen at moments on a grid, at a cost that grows with requests and moments, not with
their product.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from paceline.report.record import OUTCOMES, Floats, RunRecord

OUTPUT_COST = 2.0
GRID_S, MOST_MOMENTS = 0.25, 4000
MOST_TENANTS = 64  # with the most requests: pairs of tenants are compared
_REFUSED = OUTCOMES.index("refused")

Mask = NDArray[np.bool_]


def moments(until_s: float) -> Floats:
    """A quarter of a second apart, or farther in a long run."""
    return np.linspace(0.0, until_s, min(max(int(until_s / GRID_S), 1), MOST_MOMENTS), endpoint=False)


def service(record: RunRecord, tenant: int, times: Floats) -> Floats:
    """What a tenant was served up to each moment: a prompt when it is admitted, output evenly as it comes."""
    mine = (record.tenant == tenant) & np.isfinite(record.admitted_s)
    found = _steps(record.admitted_s[mine], record.prompt_len[mine].astype(np.float64), times)
    done = mine & np.isfinite(record.first_token_s) & np.isfinite(record.finished_s)
    first_s, end_s = record.first_token_s[done], record.finished_s[done]
    outputs = OUTPUT_COST * record.output_len[done]
    span_s = np.maximum(end_s - first_s, 1e-9)
    rate = outputs / span_s
    return found + _ramps(first_s, rate, times) - _ramps(first_s + span_s, rate, times)


def is_waiting(record: RunRecord, tenant: int, times: Floats) -> Mask:
    """At which moments a tenant has a request that has come and is not admitted yet."""
    mine = (record.tenant == tenant) & (record.outcome != _REFUSED)
    mine &= np.isfinite(record.admitted_s) | (record.outcome == OUTCOMES.index("unfinished"))
    come = np.searchsorted(np.sort(record.arrival_s[mine]), times, side="right")
    admitted = np.sort(np.nan_to_num(record.admitted_s[mine], nan=np.inf))
    found: Mask = come > np.searchsorted(admitted, times, side="right")
    return found


def largest_gap(record: RunRecord, until_s: float | None = None) -> float | None:
    """The most that the service of two tenants grew apart while both had requests waiting. None: never two at once."""
    times = moments(record.duration_s if until_s is None else until_s)
    counts = np.bincount(record.tenant) if record.num_requests else np.zeros(0, np.int64)
    tenants = [int(tenant) for tenant in np.argsort(-counts, kind="stable")[:MOST_TENANTS] if counts[tenant]]
    waiting = {tenant: is_waiting(record, tenant, times) for tenant in tenants}
    given = {tenant: service(record, tenant, times) for tenant in tenants}
    gap: float | None = None
    for one, other in combinations(tenants, 2):
        both = waiting[one] & waiting[other]
        if not both.any():
            continue
        apart = given[one] - given[other]
        edges = np.flatnonzero(np.diff(np.concatenate(([0], both.astype(np.int8), [0]))))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            gap = max(gap or 0.0, float(np.ptp(apart[start:end])))
    return gap


def _steps(at_s: Floats, height: Floats, times: Floats) -> Floats:
    """The sum of steps up at their moments."""
    order = np.argsort(at_s, kind="stable")
    total = np.concatenate(([0.0], np.cumsum(height[order])))
    found: Floats = total[np.searchsorted(at_s[order], times, side="right")]
    return found


def _ramps(from_s: Floats, rate: Floats, times: Floats) -> Floats:
    """The sum of slopes that begin at their moments and never end."""
    return _steps(from_s, rate, times) * times - _steps(from_s, rate * from_s, times)
