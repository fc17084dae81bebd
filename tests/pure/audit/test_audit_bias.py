"""Whether a difference between groups is found where there is one, and not where there is none."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest

from paceline.audit.bias import UNKNOWN, compare, length_class, rank_test, requests_of
from paceline.core.service_class import CLASSES
from paceline.errors import InputError


def requests(seed: int, slower: float = 0.0, count: int = 200) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "tenant": "ab"[index % 2],
            "class": CLASSES[index % 3],
            "num_prompt": int(rng.integers(1, 1000)),
            "delay_s": float(rng.exponential()) + slower * (index % 2),
            "preemptions": int(rng.random() < 0.1),
        }
        for index in range(count)
    ]


def exact(one: list[float], other: list[float]) -> float:
    """The chance of a difference in ranks as large, over every way to choose the group."""
    values = np.array([*one, *other])
    ranks = np.array([(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values])
    middle = len(one) * (len(values) + 1) / 2
    distance = abs(ranks[: len(one)].sum() - middle)
    ways = list(itertools.combinations(range(len(values)), len(one)))
    return float(np.mean([abs(ranks[list(way)].sum() - middle) >= distance - 1e-9 for way in ways]))


@pytest.mark.parametrize("seed", range(6))
def test_the_rank_test_agrees_with_counting_every_way(seed: int) -> None:
    rng = np.random.default_rng(seed)
    one, other = rng.integers(0, 9, 8).astype(float), rng.integers(seed % 3, 12, 9).astype(float)
    higher, chance = rank_test(one, other)
    assert chance == pytest.approx(exact(one.tolist(), other.tolist()), abs=0.03)
    pairs = [(a > b) + 0.5 * (a == b) for a in one for b in other]
    assert higher == pytest.approx(np.mean(pairs))


def test_values_that_are_all_the_same_say_nothing() -> None:
    assert rank_test(np.zeros(9), np.zeros(12)) == (0.5, 1.0)


def test_a_key_that_waits_longer_is_found() -> None:
    found = compare(requests(1, slower=1.0), ["key", "class", "length"])
    # Of two groups one is compared with the other, and that is all there is to say.
    assert [(each.by, each.group, each.measure) for each in found if each.chance < 0.01] == [
        ("key", "a", "delay_s")
    ]
    assert found[0].mean < found[0].mean_others and found[0].higher < 0.3 and found[0].count == 100


def test_where_there_is_no_difference_hardly_one_is_found() -> None:
    """Fifty times fourteen comparisons: without the correction some thirty would be below one in twenty."""
    alarms = [
        any(each.chance < 0.05 for each in compare(requests(seed), ["key", "class", "length"]))
        for seed in range(50)
    ]
    assert sum(alarms) <= 6


def test_groups_that_are_too_small_are_left_out() -> None:
    found = compare(requests(1, count=15), ["class"])
    assert found == []


def test_lengths_fall_into_classes() -> None:
    assert [length_class(n) for n in (1, 128, 129, 8192, 8193)] == [
        "0-128",
        "0-128",
        "129-512",
        "2049-8192",
        "8193-",
    ]


def test_only_requests_that_were_admitted_count() -> None:
    facts = [30, 10, 0.5, "key", 0, None, "batch"]
    pages = [
        {"adds": [[number, *facts] for number in (1, 2, 3)], "decisions": [["admit", 1, "fits", 0, 1, 1.0]]},
        {"lost": 3},
        {"decisions": [["finish", 1, "stop", 5, 2, 2.0], ["finish", 2, "abort", 0, 2, 2.0]]},
        {"decisions": [["refuse", 3, "queue_full", 40, 2, 2.0], ["finish", 99, "stop", 1, 2, 2.0]]},
    ]
    assert requests_of(map(json.dumps, pages)) == [
        {"tenant": "key", "class": "batch", "num_prompt": 30, "delay_s": 0.0, "preemptions": 0}
    ]


def test_a_log_from_before_classes_were_kept_can_be_read() -> None:
    decisions = [["admit", 1, "fits", 0, 1, 1.0], ["finish", 1, "stop", 5, 2, 2.0]]
    page = {"adds": [[1, 30, 10, 0.5, "key", 2, None]], "decisions": decisions}
    assert [request["class"] for request in requests_of([json.dumps(page)])] == [UNKNOWN]


def test_an_unknown_group_is_rejected() -> None:
    with pytest.raises(InputError, match="--by takes key, class, length"):
        compare([], ["colour"])
