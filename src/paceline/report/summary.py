"""The measures of a run, each defined once.

Rates are per second of the whole run. Shares of slots and KV are weighted by time: a step counts for as long
as it took, and idle time is in `busy_share` alone. A measure that a run cannot have (no finished request, no
steps seen, no price) is None, never NaN and never a made-up zero. Nothing here is printed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.report.fairness import largest_gap
from paceline.report.record import FINISHED, OUTCOMES, Floats, RunRecord

Mask = NDArray[np.bool_]
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
    fairness_gap: (
        float | None
    )  # tokens that the service of two tenants grew apart while both waited; outputs twice

    queue_delay_s: Distribution  # arrival to admission
    queue_delay_by_class_s: Mapping[str, Distribution]  # empty where all are alike
    ttft_s: Distribution  # arrival to first token
    itl_s: Distribution  # between two token deliveries
    e2e_s: Distribution  # arrival to last token, finished requests

    slo: Slo | None
    device_hour_price: float | None
    ttft_forecast_error: Distribution | None = (
        None  # |said - seen| / max(seen, 200 ms); None: nobody was asked
    )


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
    device_s = duration_s * record.num_replicas
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


def _weighted(values: NDArray[np.int32], durations: Floats, whole: int) -> float | None:
    return _ratio(float(values @ durations), float(durations.sum()) * whole)


def _total(values: NDArray[np.int32]) -> int:
    return int(values.sum(dtype=np.int64))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
