"""A flood of trees takes no more from other tenants than the same requests without trees."""

from __future__ import annotations

import pytest

from benchmarks.tree_flood import FLOOD, arrivals, compared


@pytest.mark.slow
def test_first_tokens_of_other_tenants_under_fair() -> None:
    """The small form of `python -m benchmarks.tree_flood`, with every invariant checked."""
    load = arrivals(2.0, rate=12.0, flood_rate=40.0, seed=1)
    assert {arrival.tenant for arrival in load} > {FLOOD}
    trees, plain, alone = compared("fair", load, check=True)
    assert trees["forks"] == plain["forks"] > 400 and not trees["refused"] and not plain["refused"]
    assert trees["requests of others"] == alone["requests of others"] > 20
    assert trees["TTFT p95 ms"] <= 1.05 * plain["TTFT p95 ms"]
