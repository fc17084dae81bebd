"""Room that a flooding tenant leaves free under the fair policy, for those that come and go."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.audit.story import story
from paceline.config.engine import SchedulerConfig
from paceline.core.events import DecisionKind, Rule
from paceline.core.request import RequestState
from paceline.scheduler.policy.fair import FairShare
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt

pytestmark = pytest.mark.slow

WAITING: list[int] = []


def fair(flood_tokens: int = 40) -> FairShare:
    return FairShare(SchedulerConfig(flood_tokens=flood_tokens))


def serve(policy: FairShare, tenant: int, tokens: float) -> None:
    policy.counters[tenant] = policy.counter(tenant) + tokens


def test_only_a_flood_leaves_room_and_only_for_a_tenant_that_was_here_lately() -> None:
    policy = fair()
    policy.began(1, "flood", WAITING)
    serve(policy, 1, 100.0)
    assert policy.spare(1) == 0.0  # no other tenant was ever here
    policy.began(2, "other", [1])
    assert policy.spare(1) > 0.0 and policy.spare(2) == 0.0
    serve(policy, 1, 8 * 40.0 + 1.0)
    assert policy.spare(1) == 0.0  # it has stayed away


def test_two_floods_leave_each_other_no_room() -> None:
    policy = fair()
    for tenant in (1, 2):
        policy.began(tenant, f"flood-{tenant}", WAITING)
        serve(policy, tenant, 100.0)
    assert policy.spare(1) == policy.spare(2) == 0.0


def test_a_tenant_with_nothing_waiting_for_a_moment_is_no_flood() -> None:
    policy = fair()
    policy.began(1, "flood", WAITING)
    serve(policy, 1, 100.0)
    policy.began(2, "other", [1])
    policy.began(1, "flood", [2])
    assert policy.spare(1) == 0.0


def flooded(**options: Any) -> Bench:
    """A flood that has run for a while, and a tenant that came and went."""
    common = {"max_num_seqs": 10, "scheduling_policy": "fair", "flood_tokens": 200, "num_blocks": 257}
    bench = Bench(engine_config(**{**common, **options}))
    for start in range(1, 200):
        bench.add(prompt(8, start), 12, tenant="flood")
    bench.step(20)
    bench.add(prompt(4, 200), 2, tenant="quiet")
    while any(request.tenant == "quiet" for request in bench.state.requests.values()):
        bench.step()
    bench.step(30)
    return bench


def running(bench: Bench) -> list[str]:
    live = bench.state.rows.requests
    return [request.tenant for request in live if request is not None]


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 64, "num_blocks": 33}], ids=["rows", "blocks"])
def test_a_new_request_finds_room_at_once(options: dict[str, Any]) -> None:
    bench = flooded(**options)
    state = bench.state
    assert set(running(bench)) == {"flood"}
    if options:
        assert state.kv.free_for() >= int(0.2 * state.kv.groups[0].pool.usable) - len(running(bench))
    else:
        assert len(running(bench)) == 8  # two of ten are left
    quiet = bench.add(prompt(4, 201), 4, tenant="quiet")
    bench.step()
    assert bench.states()[quiet] is RequestState.RUNNING
    waits = [d for d in bench.watch.decisions if d.kind is DecisionKind.DEFER and d.reason is Rule.SPARE]
    assert waits and all("tenants with less to do than its own" in story([each])[0] for each in waits)
    bench.run()


def test_a_request_that_leaves_room_is_passed_and_not_forgotten() -> None:
    """Requests of the flood come first in order here: its counter is that of the new request."""
    bench = flooded()
    order = [bench.add(prompt(4, 300 + number), 3, tenant=f"quiet-{number}") for number in range(4)]
    bench.step(2)
    assert any(tenant.startswith("quiet") for tenant in running(bench))
    bench.run()
    assert set(order) <= set(bench.finished)


def test_a_flood_alone_uses_everything() -> None:
    bench = Bench(engine_config(max_num_seqs=10, scheduling_policy="fair", flood_tokens=40, num_blocks=257))
    for start in range(1, 60):
        bench.add(prompt(8, start), 12, tenant="flood")
    bench.step(15)
    most = 0
    for _ in range(15):
        bench.step()
        most = max(most, len(running(bench)))
    assert most == 10
    bench.run()
