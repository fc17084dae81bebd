"""Whose share a request counts against, and what tenants begin with that come back to wait."""

from __future__ import annotations

import numpy as np

from paceline.config.engine import SchedulerConfig
from paceline.core.request import SALT, account_of
from paceline.scheduler.policy.fair import FairShare
from paceline.scheduler.tenants import TenantAccounting
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


class Waiting:
    """Who waits, as far as accounts are concerned."""

    def __init__(self) -> None:
        self.tenants: dict[int, int] = {}

    def backlog(self, beside: set[int]) -> set[int]:
        return self.tenants.keys() - beside


def test_two_that_come_back_between_two_plans_are_lifted_one_after_the_other() -> None:
    policy, queue = FairShare(SchedulerConfig()), Waiting()
    accounting = TenantAccounting(policy, queue)  # type: ignore[arg-type]
    for tenant, served in ((1, 314), (2, 100)):
        policy.began(tenant, str(tenant), ())
        policy.served(np.array([tenant]), np.array([served]), np.array([0]))
        accounting.comes(tenant, str(tenant), back=True)  # in this order; nobody else waits
        queue.tenants[tenant] = 1
    accounting.settle()
    assert (policy.counter(1), policy.counter(2)) == (314.0, 314.0)
