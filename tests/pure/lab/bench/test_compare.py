"""Differences that are there are found, and chance is called chance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.lab.bench.compare import _percentile, compare, differing, worse_than


def result(*, ttft_s: float = 0.2, gap_s: float = 0.02, count: int = 200, seed: int = 0) -> dict[str, Any]:
    """A run of `count` requests at ten a second with noise of a tenth."""
    random = np.random.default_rng(seed)
    ttfts = ttft_s * random.normal(1.0, 0.1, count)
    itls = gap_s * random.normal(1.0, 0.1, (count, 20))
    due = np.arange(count) / 10.0
    e2els = ttfts + itls.sum(axis=1)
    duration = float((due + e2els).max())
    return {
        "model_id": "m",
        "workload": "random",
        "duration": duration,
        "completed": count,
        "request_throughput": count / duration,
        "output_throughput": count * 21 / duration,
        "total_token_throughput": count * 121 / duration,
        "request_goodput": None,
        "median_ttft_ms": float(np.median(ttfts)) * 1e3,
        "p99_ttft_ms": float(np.percentile(ttfts, 99)) * 1e3,
        "mean_itl_ms": float(itls.mean()) * 1e3,
        "median_tpot_ms": float(np.median(itls.mean(axis=1))) * 1e3,
        "p50_e2el_ms": float(np.median(e2els)) * 1e3,
        "ttfts": ttfts.tolist(),
        "itls": itls.tolist(),
        "e2els": e2els.tolist(),
        "due_times": due.tolist(),
        "input_lens": [100] * count,
        "output_lens": [21] * count,
        "errors": [""] * count,
        "goodput": {"ttft": 210.0},
    }


def test_too_few_requests_say_nothing() -> None:
    found = compare(result(count=6), result(count=200, ttft_s=9.0))
    assert {each.verdict for each in found} == {"too few"} and not any(each.is_worse for each in found)


def verdicts(before: dict[str, Any], after: dict[str, Any]) -> dict[str, str]:
    return {each.name: each.verdict for each in compare(before, after)}


def test_two_runs_of_the_same_are_noise() -> None:
    found = compare(result(seed=1), result(seed=2), confidence=99.5)
    assert len(found) == 8
    assert {each.verdict for each in found} == {"noise"}
    assert all(each.low is not None and each.low < 0.0 < (each.high or 0.0) for each in found)


@pytest.mark.slow
def test_slower_first_tokens_are_seen_where_they_are() -> None:
    found = verdicts(result(seed=1), result(seed=2, ttft_s=0.23))
    assert found["median_ttft_ms"] == found["p99_ttft_ms"] == "worse"
    assert found["mean_itl_ms"] == "noise" and found["output_throughput"] == "noise"
    assert verdicts(result(seed=2, ttft_s=0.23), result(seed=1))["median_ttft_ms"] == "better"


def test_gaps_and_whole_answers_are_compared() -> None:
    found = verdicts(result(seed=1), result(seed=2, gap_s=0.018))
    assert found["mean_itl_ms"] == found["median_tpot_ms"] == found["p50_e2el_ms"] == "better"


def test_goodput_has_an_interval() -> None:
    before, after = result(seed=1), result(seed=2, ttft_s=0.26)
    before["request_goodput"], after["request_goodput"] = 6.5, 0.3
    assert verdicts(before, after)["request_goodput"] == "worse"


def test_without_samples_a_difference_is_taken_as_it_is() -> None:
    names = ("median_ttft_ms", "output_throughput")
    before = {name: result(seed=1)[name] for name in names}
    found = {each.name: each for each in compare(before, {**before, "median_ttft_ms": 500.0})}
    assert found["median_ttft_ms"].low is None and found["median_ttft_ms"].verdict == "worse"
    assert found["output_throughput"].verdict == "the same"


def test_files_of_other_tools_need_not_hold_everything() -> None:
    before, after = result(seed=1), result(seed=2)
    for value in (before, after):
        for name in ("e2els", "due_times", "errors", "goodput"):
            del value[name]
    found = {each.name: each for each in compare(before, after)}
    assert found["p50_e2el_ms"].low is not None  # the sum of its parts
    assert found["output_throughput"].low is None


def test_results_of_the_engine_alone_are_compared_too() -> None:
    before = {
        "workload": "nano",
        "output_tokens_per_s": 100.0,
        "e2e_s": {"mean": 1.0, "p50": 1.0, "p99": None},
    }
    after = {"workload": "nano", "output_tokens_per_s": 120.0, "e2e_s": {"mean": 2.0, "p50": 1.0, "p99": 3.0}}
    assert verdicts(before, after) == {
        "output_tokens_per_s": "better",
        "e2e_s.mean": "worse",
        "e2e_s.p50": "the same",
    }


def test_what_is_worse_by_how_much() -> None:
    found = compare(result(seed=1), result(seed=2, ttft_s=0.23))
    assert {each.name for each in worse_than(found, 0.10)} == {"median_ttft_ms", "p99_ttft_ms"}
    assert worse_than(found, 0.50) == []


def test_runs_that_differ_in_more_than_the_server_are_told() -> None:
    before = {"workload": "a", "request_rate": 3.0, "client": {"cpu": {"cores": 2}}}
    after = {"workload": "a", "request_rate": 4.0, "client": {"cpu": {"cores": 8}}, "temperature": 0.5}
    assert differing(before, after) == [
        "request_rate differs: 3.0 and 4.0",
        "temperature differs: nothing and 0.5",
        "client.cpu differs: {'cores': 2} and {'cores': 8}",
    ]
    assert differing(before, before) == []


@pytest.mark.parametrize("count", [0, 5])
def test_a_handful_of_requests_gives_no_interval(count: int) -> None:
    before = result(seed=1)
    after = {**before, "ttfts": before["ttfts"][:count], "itls": before["itls"][:count]}
    assert all(each.low is None for each in compare(before, after))


@pytest.mark.parametrize("percent", [0.0, 37.0, 50.0, 99.0, 100.0])
def test_percentiles_of_repeated_values_are_those_of_the_list(percent: float) -> None:
    values, times = np.array([1.0, 2.0, 5.0, 9.0]), np.array([3, 0, 2, 4])
    assert _percentile(values, times, percent) == pytest.approx(
        np.percentile(np.repeat(values, times), percent)
    )
