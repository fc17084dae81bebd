"""Whose share a request counts against: a salt keeps cached prefixes apart, and makes no new tenant."""

from __future__ import annotations

from paceline.core.request import SALT, account_of
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt


def test_a_salt_is_no_account_of_its_own() -> None:
    assert account_of(f"a{SALT}pepper") == account_of("a") == "a"


def test_salts_do_not_multiply_a_tenants_share() -> None:
    bench = Bench(engine_config(scheduling_policy="fair", max_num_seqs=4))
    for number in range(12):
        bench.add(prompt(20, number), 8, tenant=f"greedy{SALT}{number}")
    bench.step()
    modest = [bench.add(prompt(20, 50 + number), 8, tenant="modest") for number in range(3)]
    state = bench.scheduler.state
    assert len({state.tenant_index(request.tenant) for request in state.requests.values()}) == 2
    bench.run()
    ended = [request for request, _ in sorted(bench.finished.items(), key=lambda item: item[1].time_s)]
    assert max(ended.index(request) for request in modest) < 12  # not behind every salt of the other
