"""Every measure against a case worked out by hand, and runs in which nothing happened."""

import math
import warnings
from typing import Any

import numpy as np
import pytest

from paceline.errors import InputError
from paceline.lab.report.run_record import OUTCOMES, RunRecord
from paceline.lab.report.summary import Slo, distribution, summarize

NAN = math.nan


def record(**changes: Any) -> RunRecord:
    """Four requests, ten seconds, three steps on one replica."""
    fields: dict[str, Any] = {
        "label": "hand",
        "config": {},
        "max_num_seqs": 4,
        "duration_s": 10.0,
        "kv_total_slots": 100,
        "arrival_s": [0.0, 1.0, 2.0, 3.0],
        "admitted_s": [0.0, 2.0, 5.0, NAN],
        "first_token_s": [1.0, 3.0, 6.0, NAN],
        "finished_s": [5.0, 4.0, NAN, NAN],
        "prompt_len": [10, 20, 30, 40],
        "output_len": [5, 1, 4, 0],
        "cached_tokens": [0, 8, 0, 0],
        "preemptions": [0, 0, 2, 0],
        "tenant": [0, 0, 1, 1],
        "outcome": [OUTCOMES.index(name) for name in ("finished", "finished", "aborted", "refused")],
        "itl_s": [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0],
        "step_replica": [0, 0, 0],
        "step_start_s": [0.0, 1.0, 4.0],
        "step_end_s": [1.0, 4.0, 5.0],
        "step_rows": [1, 2, 4],
        "step_decode": [0, 1, 3],
        "step_prefill": [10, 12, 30],
        "step_padded": [0, 6, 4],
        "step_waiting": [0, 0, 1],
        "step_kv_used": [20, 40, 100],
        "step_kv_filled": [10, 30, 80],
        "step_preempted": [0, 0, 2],
    }
    return RunRecord(**(fields | changes))


def empty(**changes: Any) -> RunRecord:
    times = ("arrival_s", "admitted_s", "first_token_s", "finished_s")
    counts = ("prompt_len", "output_len", "cached_tokens", "preemptions", "tenant", "outcome")
    fields: dict[str, Any] = {name: [] for name in (*times, *counts)}
    fields |= {"label": "empty", "config": {}, "max_num_seqs": 8, "duration_s": 0.0}
    return RunRecord(**(fields | changes))


def test_requests_and_rates() -> None:
    summary = summarize(record())
    assert summary.requests == {"finished": 2, "aborted": 1, "refused": 1, "failed": 0, "unfinished": 0}
    assert summary.requests_per_s == pytest.approx(0.2)
    assert summary.output_tokens_per_s == pytest.approx(1.0)
    # The fourth request never got a token, so its prompt was not served.
    assert summary.total_tokens_per_s == pytest.approx((10 + 20 + 30 + 10) / 10)


def test_useful_and_padded_tokens() -> None:
    summary = summarize(record())
    assert summary.useful_tokens == 10 + (20 - 8) + 30 + 10
    assert summary.padded_tokens == 10
    assert summary.padded_share == pytest.approx(10 / 72)


def test_shares_are_weighted_by_the_length_of_steps() -> None:
    summary = summarize(record())
    assert summary.slot_occupancy == pytest.approx((1 * 1 + 2 * 3 + 4 * 1) / 5 / 4)
    assert summary.kv_occupancy == pytest.approx((20 * 1 + 40 * 3 + 100 * 1) / 5 / 100)
    assert summary.kv_waste == pytest.approx(1 - (10 * 1 + 30 * 3 + 80 * 1) / (20 * 1 + 40 * 3 + 100 * 1))


def test_the_tokens_of_a_step_share_its_time() -> None:
    assert summarize(record()).prompt_device_s == pytest.approx(1 + 3 * 12 / 13 + 30 / 33)


def test_busy_share_counts_all_replicas() -> None:
    assert summarize(record()).busy_share == pytest.approx(0.5)
    assert summarize(record(num_replicas=2, step_replica=[0, 1, 0])).busy_share == pytest.approx(0.25)


def test_the_order_of_steps_does_not_matter() -> None:
    base = record()
    order = np.array([2, 0, 1])
    steps = [name for name in RunRecord.__dataclass_fields__ if name.startswith("step_")]
    shuffled = record(**{name: getattr(base, name)[order] for name in steps})
    assert summarize(shuffled) == summarize(base)


def test_preemptions() -> None:
    summary = summarize(record())
    assert (summary.preemptions, summary.preemptions_per_request, summary.preemptions_per_s) == (2, 0.5, 0.2)


def test_prefix_hits_are_of_admitted_requests() -> None:
    assert summarize(record()).prefix_hit_share == pytest.approx(8 / 60)


def test_latencies_start_at_arrival_and_leave_out_what_did_not_happen() -> None:
    summary = summarize(record())
    assert summary.queue_delay_s.count == 3  # 0, 1, 3
    assert summary.queue_delay_s.mean == pytest.approx(4 / 3)
    assert summary.ttft_s.count == 3  # 1, 2, 4
    assert summary.ttft_s.p50 == pytest.approx(2.0)
    assert summary.ttft_s.p90 == pytest.approx(2.0 + 0.8 * 2.0)
    assert summary.ttft_s.p99 == pytest.approx(2.0 + 0.98 * 2.0)
    assert summary.e2e_s.count == 2  # 5, 3
    assert summary.e2e_s.p50 == pytest.approx(4.0)
    assert summary.itl_s.count == 7
    assert summary.itl_s.p50 == pytest.approx(1.0)


def test_an_aborted_request_has_no_end_to_end_time() -> None:
    summary = summarize(record(finished_s=[5.0, 4.0, 9.0, NAN]))
    assert summary.e2e_s.count == 2


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(), 2),
        (Slo(ttft_s=1.0), 1),  # the bound itself is still good
        (Slo(ttft_s=0.99), 0),
        (Slo(itl_s=1.0), 2),  # (5 - 1) / 4 gaps; the second has one token and no gap
        (Slo(itl_s=0.5), 1),
        (Slo(e2e_s=3.0), 1),
        (Slo(ttft_s=2.0, itl_s=0.5, e2e_s=3.0), 1),
        (Slo(ttft_s=1.0, e2e_s=3.0), 0),
    ],
)
def test_goodput_counts_finished_requests_that_met_every_bound(slo: Slo, good: int) -> None:
    assert summarize(record(), slo=slo).goodput_per_s == pytest.approx(good / 10)


def test_no_slo_no_goodput() -> None:
    assert summarize(record()).goodput_per_s is None


def test_cost_is_the_price_of_all_replicas_over_useful_tokens() -> None:
    assert summarize(record()).cost_per_million_tokens is None
    summary = summarize(record(num_replicas=2), device_hour_price=3.6)
    assert summary.cost_per_million_tokens == pytest.approx(3.6 * 2 * 10 / 3600 / 62 * 1e6)


def test_percentiles_of_a_hundred_and_one_values() -> None:
    values = np.arange(101.0)
    np.random.default_rng(0).shuffle(values)
    found = distribution(values)
    assert (found.mean, found.p50, found.p90, found.p99) == (50.0, 50.0, 90.0, 99.0)
    assert found.tail_ratio == pytest.approx(99 / 50)


def test_one_value_is_every_percentile() -> None:
    found = distribution(np.array([NAN, 0.25, NAN]))
    assert (found.count, found.mean, found.p50, found.p99, found.tail_ratio) == (1, 0.25, 0.25, 0.25, 1.0)


def test_a_median_of_zero_has_no_ratio() -> None:
    assert distribution(np.array([0.0, 0.0, 1.0])).tail_ratio is None


def test_an_empty_run_has_no_measures_and_no_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        summary = summarize(empty(), slo=Slo(ttft_s=1.0), device_hour_price=2.0)
    assert sum(summary.requests.values()) == 0
    for name in (
        "requests_per_s",
        "output_tokens_per_s",
        "total_tokens_per_s",
        "goodput_per_s",
        "cost_per_million_tokens",
        "padded_tokens",
        "padded_share",
        "slot_occupancy",
        "kv_occupancy",
        "kv_waste",
        "busy_share",
        "preemptions_per_request",
        "preemptions_per_s",
        "prefix_hit_share",
        "prompt_device_s",
    ):
        assert getattr(summary, name) is None, name
    assert summary.ttft_s.p99 is None


def test_a_run_in_which_nothing_finished() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        summary = summarize(
            record(
                outcome=[4, 4, 4, 4],
                admitted_s=[NAN] * 4,
                first_token_s=[NAN] * 4,
                finished_s=[NAN] * 4,
                output_len=[0] * 4,
                cached_tokens=[0] * 4,
                itl_s=[],
            ),
            slo=Slo(itl_s=0.1),
            device_hour_price=1.0,
        )
    assert summary.requests_per_s == 0.0
    assert summary.goodput_per_s == 0.0
    assert summary.useful_tokens == 0
    assert summary.cost_per_million_tokens is None
    assert summary.padded_share == 1.0
    assert summary.e2e_s.p50 is None


def test_steps_that_take_no_time_do_not_divide_by_zero() -> None:
    summary = summarize(record(step_end_s=[0.0, 1.0, 4.0]))
    assert summary.slot_occupancy is None
    assert summary.kv_waste is None
    assert summary.busy_share == 0.0


def test_sums_do_not_overflow_the_columns() -> None:
    summary = summarize(record(prompt_len=[2_000_000_000] * 4, cached_tokens=[0] * 4))
    assert summary.useful_tokens == 6_000_000_010


def test_columns_must_agree() -> None:
    with pytest.raises(
        InputError, match=r"run 'hand': finished_s has shape \(3,\), not one entry per request"
    ):
        record(finished_s=[1.0, 2.0, 3.0])
    with pytest.raises(InputError, match="step_padded has shape .* not one entry per step"):
        record(step_padded=[0])
    with pytest.raises(InputError, match="itl_s"):
        record(itl_s=[[1.0]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outcome": [0, 0, 0, 5]}, "outcome must be below 5"),
        ({"max_num_seqs": 0}, "at least 1"),
        ({"num_replicas": 0}, "at least 1"),
        ({"duration_s": -1.0}, "duration_s"),
        ({"duration_s": NAN}, "duration_s"),
    ],
)
def test_impossible_records_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        record(**changes)


def test_columns_get_their_types() -> None:
    made = record()
    assert made.arrival_s.dtype == np.float64
    assert made.itl_s.dtype == np.float32
    assert made.outcome.dtype == np.uint8
    assert made.step_rows.dtype == np.int32
    assert (made.num_requests, made.num_steps) == (4, 3)
