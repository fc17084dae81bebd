"""The measures of a run, each defined once.

Rates are per second of the whole run. Shares of slots and KV are weighted by time: a step counts for as long
as it took, and idle time is in `busy_share` alone. A measure that a run cannot have (no finished request, no
steps seen, no price) is None, never NaN and never a made-up zero. Nothing here is printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from paceline.lab.report.run_record import FINISHED, OUTCOMES, Floats, RunRecord

# How evenly tenants were served: what each got up to each moment, and how far two of them grew apart.
#
# Only while both have requests waiting: a tenant without them is owed nothing. Service is counted as the fair policy
# does, an output token as two of a prompt. Seen at moments on a grid, at a cost that grows with requests and
# moments, not with their product.


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


FLOOR_S = 0.2  # a shorter time to the first token is judged as if it were this long


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a request must meet to count as good; a bound left out always holds."""

    ttft_s: float | None = None
    itl_s: float | None = None  # on the request's mean gap after its first token, not on its worst one
    e2e_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Of `count` values. Percentiles are interpolated linearly between the two nearest values."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    tail_ratio: float | None  # p99 / p50


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All measures of one run."""

    label: str
    requests: Mapping[str, int]  # by outcome, every outcome named
    duration_s: float

    requests_per_s: float | None  # finished
    output_tokens_per_s: float | None  # delivered, whatever became of the request
    total_tokens_per_s: float | None  # output, and prompts of requests that got a first token, cached or not
    useful_tokens: int  # prompt tokens computed (once each, cached ones not) + output tokens delivered
    goodput_per_s: float | None  # requests that finished and met the SLO
    cost_per_million_tokens: float | None  # price of all replicas for the run, over useful tokens

    padded_tokens: int | None
    padded_share: float | None  # padded / (useful + padded)
    slot_occupancy: float | None  # live rows / max_num_seqs
    kv_occupancy: float | None  # slots allocated / slots there are
    kv_waste: float | None  # slots allocated that hold no computed token / slots allocated
    busy_share: float | None  # sum of step durations / (duration x replicas)
    preemptions: int
    preemptions_per_request: float | None
    preemptions_per_s: float | None
    preempted_by: Mapping[str, int]  # for what and how, reason:kind; empty where it is not known
    recomputed_tokens: int | None  # computed again after preemptions
    kv_block_seconds: float | None  # blocks held by requests; a shared one counts for each
    prefix_hit_share: float | None  # cached / prompt tokens, of requests that were admitted
    prompt_device_s: float | None  # of step durations, the part of prompt tokens
    # Tokens by which the service of two tenants grew apart while both waited; output tokens count twice.
    fairness_gap: float | None

    queue_delay_s: Distribution  # arrival to admission
    queue_delay_by_class_s: Mapping[str, Distribution]  # empty where all are alike
    ttft_s: Distribution  # arrival to first token
    itl_s: Distribution  # between two token deliveries
    e2e_s: Distribution  # arrival to last token, finished requests

    slo: Slo | None
    device_hour_price: float | None
    # |forecast - observed| / max(observed, 200 ms); None: no forecasts were made.
    ttft_forecast_error: Distribution | None = None

    @property
    def preempted_by_kind(self) -> dict[str, int]:
        """How many were preempted in each way there is, whatever for; empty where it is not known."""
        counts = dict.fromkeys(("recompute", "swap"), 0) if self.preempted_by else {}
        for rule, count in self.preempted_by.items():
            kind = rule.rpartition(":")[2]
            counts[kind] = counts.get(kind, 0) + count
        return counts


def summarize(
    record: RunRecord, *, slo: Slo | None = None, device_hour_price: float | None = None
) -> Summary:
    finished = record.outcome == FINISHED
    started = np.isfinite(record.first_token_s)
    output_tokens = _total(record.output_len)
    computed_prompt = _total(np.maximum(record.prompt_len - record.cached_tokens, 0)[started])
    useful = computed_prompt + output_tokens
    padded = _total(record.step_padded) if record.num_steps else None
    preemptions = _total(record.preemptions)
    duration_s = record.duration_s
    device_s = record.replica_s or duration_s * record.num_replicas
    durations = record.step_end_s - record.step_start_s
    return Summary(
        label=record.label,
        requests={name: int((record.outcome == code).sum()) for code, name in enumerate(OUTCOMES)},
        duration_s=duration_s,
        requests_per_s=_ratio(int(finished.sum()), duration_s),
        output_tokens_per_s=_ratio(output_tokens, duration_s),
        total_tokens_per_s=_ratio(_total(record.prompt_len[started]) + output_tokens, duration_s),
        useful_tokens=useful,
        goodput_per_s=None if slo is None else _ratio(int(_met(record, slo).sum()), duration_s),
        cost_per_million_tokens=(
            None if device_hour_price is None else _ratio(device_hour_price * device_s / 3600.0, useful / 1e6)
        ),
        padded_tokens=padded,
        padded_share=None if padded is None else _ratio(padded, useful + padded),
        slot_occupancy=_weighted(record.step_rows, durations, record.max_num_seqs),
        kv_occupancy=_weighted(record.step_kv_used, durations, record.kv_total_slots),
        kv_waste=_kv_waste(record, durations),
        busy_share=_ratio(float(durations.sum()), device_s) if record.num_steps else None,
        preemptions=preemptions,
        preemptions_per_request=_ratio(preemptions, record.num_requests),
        preemptions_per_s=_ratio(preemptions, duration_s),
        preempted_by=dict(sorted(record.preempted_by.items())),
        recomputed_tokens=_total(record.recomputed_tokens) if record.recomputed_tokens.size else None,
        kv_block_seconds=float(record.kv_block_us.sum()) / 1e6 if record.kv_block_us.size else None,
        prefix_hit_share=_prefix_hit_share(record),
        prompt_device_s=_prompt_device_s(record, durations),
        fairness_gap=largest_gap(record),
        queue_delay_s=distribution(record.admitted_s - record.arrival_s),
        queue_delay_by_class_s={
            name: distribution((record.admitted_s - record.arrival_s)[record.service_class == number])
            for number, name in enumerate(record.classes)
        },
        ttft_s=distribution(record.first_token_s - record.arrival_s),
        itl_s=distribution(record.itl_s.astype(np.float64)),
        e2e_s=distribution((record.finished_s - record.arrival_s)[finished]),
        slo=slo,
        device_hour_price=device_hour_price,
        ttft_forecast_error=_forecast_error(record),
    )


def _forecast_error(record: RunRecord) -> Distribution | None:
    if not record.predicted_ttft_s.size:
        return None
    seen_s = record.first_token_s - record.arrival_s
    return distribution(np.abs(record.predicted_ttft_s - seen_s) / np.maximum(seen_s, FLOOR_S))


def distribution(values: Floats) -> Distribution:
    """Of the values that exist: NaN is left out."""
    there = values[np.isfinite(values)]
    if not there.size:
        return Distribution(count=0, mean=None, p50=None, p90=None, p99=None, tail_ratio=None)
    p50, p90, p99 = (float(value) for value in np.quantile(there, (0.5, 0.9, 0.99)))
    return Distribution(
        count=there.size,
        mean=float(there.mean()),
        p50=p50,
        p90=p90,
        p99=p99,
        tail_ratio=_ratio(p99, p50),
    )


def _met(record: RunRecord, slo: Slo) -> Mask:
    """Which requests finished within every bound. A request of one token has no gap and meets any ITL."""
    met: Mask = record.outcome == FINISHED
    gaps = np.maximum(record.output_len - 1, 1)
    mean_itl_s = np.where(record.output_len > 1, (record.finished_s - record.first_token_s) / gaps, 0.0)
    for bound, values in (
        (slo.ttft_s, record.first_token_s - record.arrival_s),
        (slo.itl_s, mean_itl_s),
        (slo.e2e_s, record.finished_s - record.arrival_s),
    ):
        if bound is not None:
            met &= values <= bound  # a comparison with NaN is false: what did not happen was not in time
    return met


def _kv_waste(record: RunRecord, durations: Floats) -> float | None:
    """A ratio of two integrals over time, so that a step with nothing allocated weighs nothing."""
    allocated = float(record.step_kv_used @ durations)
    empty = float((record.step_kv_used - record.step_kv_filled) @ durations)
    return _ratio(empty, allocated)


def _prefix_hit_share(record: RunRecord) -> float | None:
    admitted = np.isfinite(record.admitted_s)
    return _ratio(_total(record.cached_tokens[admitted]), _total(record.prompt_len[admitted]))


def _prompt_device_s(record: RunRecord, durations: Floats) -> float | None:
    """The tokens of a step share its duration equally."""
    if not record.num_steps:
        return None
    tokens = record.step_prefill + record.step_decode
    return float((record.step_prefill / np.maximum(tokens, 1)) @ durations)


def _weighted(values: NDArray[np.int32], durations: Floats, whole: int) -> float | None:
    return _ratio(float(values @ durations), float(durations.sum()) * whole)


def _total(values: NDArray[np.int32]) -> int:
    return int(values.sum(dtype=np.int64))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
