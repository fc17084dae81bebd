"""The policies: fair shares and their accounts, slack, length, soft priorities, and an operator's own class."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.engine import POLICIES, SchedulerConfig, StepCosts
from paceline.core.request import SALT, account_of
from paceline.errors import ConfigError
from paceline.policy import RequestView
from paceline.scheduler.policy import make_policy
from paceline.scheduler.policy.deadline import LeastSlack, token_seconds
from paceline.scheduler.policy.fair import FairShare, parse_weights
from paceline.scheduler.policy.tail import SoftTail
from paceline.scheduler.tenants import TenantAccounting
from paceline.scheduler.waiting_queue import first
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt


def view_of(count: int, now_s: float = 10.0, **columns: Any) -> RequestView:
    """`count` requests of 10 prompt tokens and up to 10 more that came one after another; `columns` as given."""
    floats = ("arrival_s", "deadline_s", "first_due_s")
    view = RequestView(
        now_s=now_s,
        row=np.full(count, -1, np.int64),
        order=np.arange(count),
        arrival_s=np.arange(count, dtype=np.float64),
        priority=np.zeros(count, np.int64),
        tenant=np.zeros(count, np.int64),
        num_prompt=np.full(count, 10, np.int64),
        num_tokens=np.full(count, 10, np.int64),
        max_total=np.full(count, 20, np.int64),
        preemptions=np.zeros(count, np.int64),
        deadline_s=np.full(count, np.inf),
        first_due_s=np.full(count, np.inf),
        num_computed=np.zeros(count, np.int64),
        peak_computed=np.zeros(count, np.int64),
        started=np.zeros(count, np.int64),
    )
    given_columns: dict[str, Any] = {
        name: np.array(values, np.float64 if name in floats else np.int64) for name, values in columns.items()
    }
    return replace(view, **given_columns)


def ranked(policy: Any, view: RequestView) -> list[int]:
    order: list[int] = first(view, policy.order(view), len(view)).tolist()
    return order


def fair(weights: str = "") -> FairShare:
    return FairShare(SchedulerConfig(tenant_weights=weights))


def slack(
    prompt_s: float, output_s: float, *, ageing_s: float = 30.0, first_token_s: float | None = None
) -> LeastSlack:
    """The policy where a token of a prompt and one of output take so long."""
    costs = StepCosts(sizes=(1,), seconds=(prompt_s,), row_s=output_s - prompt_s)
    return LeastSlack(
        SchedulerConfig(max_num_seqs=1, step_costs=costs, ageing_s=ageing_s, first_token_s=first_token_s)
    )


def serve(policy: FairShare, tenant: int, prompts: int = 0, outputs: int = 0) -> None:
    policy.served(np.array([tenant]), np.array([prompts]), np.array([outputs]))


# -- fair --------------------------------------------------------------------------------------------------


def test_the_request_served_least_goes_first_and_the_one_served_most_is_preempted() -> None:
    policy = fair()
    serve(policy, 0, prompts=100)
    serve(policy, 1, outputs=20)
    view = view_of(3, tenant=[0, 1, 2], started=[1, 1, 1])
    assert ranked(policy, view) == [2, 1, 0]
    assert policy.victim(view, 1).index == 0


def test_requests_of_one_tenant_queue_behind_each_other() -> None:
    """As if each were charged before the next is chosen: two tenants take turns."""
    view = view_of(4, tenant=[0, 0, 0, 1])
    assert ranked(fair(), view) == [0, 3, 1, 2]
    assert fair().order(view).tolist() == [0.0, 10.0, 20.0, 0.0]
    running = view_of(4, tenant=[0, 0, 0, 1], started=[1, 1, 1, 1])
    assert fair().order(running).tolist() == [0.0] * 4  # charged already


def test_a_weight_divides_what_is_charged() -> None:
    policy = fair("big=4")
    policy.began(0, "big", ())
    serve(policy, 0, prompts=8, outputs=4)
    assert policy.counter(0) == 4.0
    assert policy.order(view_of(2, tenant=[0, 0])).tolist() == [4.0, 6.5]


def test_a_tenant_that_comes_back_is_lifted_to_the_least_of_those_that_wait() -> None:
    policy = fair()
    for tenant, tokens in ((0, 50), (1, 70), (2, 10)):
        serve(policy, tenant, prompts=tokens)
    policy.began(2, "late", {0, 1})
    assert policy.counter(2) == 50.0
    policy.began(1, "rich", {0, 2})
    assert policy.counter(1) == 70.0  # never lowered
    policy.began(3, "alone", ())
    assert policy.counter(3) == 0.0


def test_counters_do_not_pile_up_when_names_are_made_up() -> None:
    policy = fair()
    serve(policy, 0, prompts=5)
    for tenant in range(1, 30_000):
        policy.began(tenant, f"name-{tenant}", {0})
        serve(policy, 0, prompts=1)
    assert len(policy.counters) < 20_000
    assert policy.counter(0) == 30_004.0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50)), min_size=1, max_size=30))
def test_the_order_of_many_is_that_of_choosing_one_at_a_time(requests: list[tuple[int, int]]) -> None:
    tenants, prompts = zip(*requests, strict=True)
    policy, chosen = fair(), []
    left = list(range(len(requests)))
    while left:
        best = min(left, key=lambda index: (policy.counter(tenants[index]), index))
        serve(policy, tenants[best], prompts=prompts[best])
        chosen.append(best)
        left.remove(best)
    assert ranked(fair(), view_of(len(requests), tenant=tenants, num_prompt=prompts)) == chosen


@pytest.mark.parametrize("text", ["alice", "alice=", "=2", "alice=0", "alice=nan", "alice=-1", "a=1,b=inf"])
def test_weights_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--tenant-weights"):
        parse_weights(text)


def test_weights_are_read_by_name() -> None:
    assert parse_weights(" alice=2, b=ob=0.5,") == {"alice": 2.0, "b=ob": 0.5}
    assert parse_weights("") == {}


def test_a_flooding_tenant_leaves_the_others_their_share() -> None:
    """Both always wait: what they are served stays within a request of each other, as the weights say."""
    for weights, ratio in (("", 1.0), ("quiet=2", 2.0)):
        config = engine_config(max_num_seqs=2, scheduling_policy="fair", tenant_weights=weights)
        bench = Bench(config)
        for _ in range(60):
            bench.add(prompt(4), 4, tenant="flood")
        for _ in range(30):
            bench.add(prompt(4), 4, tenant="quiet")
        bench.step(60)
        policy = bench.state.policy
        assert isinstance(policy, FairShare)
        flood, quiet = (policy.counter(bench.state.tenant_index(name)) for name in ("flood", "quiet"))
        assert {"flood", "quiet"} <= {request.tenant for request in bench.state.queue}
        assert abs(flood - quiet) <= 2 * (4 + 2 * 4)
        served = [bench.state.tenant_index(name) for name in ("flood", "quiet")]
        done = np.bincount(
            [bench.state.tenant_index(end_tenant) for end_tenant in tenants_of_finished(bench)], minlength=2
        )
        assert done[served[1]] == pytest.approx(ratio * done[served[0]], abs=3)


def tenants_of_finished(bench: Bench) -> list[str]:
    return ["flood" if number <= 60 else "quiet" for number in bench.finished]


def test_a_prompt_is_charged_once_and_output_as_it_comes() -> None:
    bench = Bench(engine_config(scheduling_policy="fair"))
    rid = bench.add(prompt(6), 5, tenant="one")
    bench.step(3)
    bench.scheduler.preempt(rid)
    bench.run()
    bench.scheduler.state.accounting.settle()
    policy = bench.state.policy
    assert isinstance(policy, FairShare)
    assert policy.counters == {0: 6 + 2 * 5.0}


# -- deadline, tail ----------------------------------------------------------------------------------------


def test_least_slack_goes_first_and_late_requests_go_last() -> None:
    policy = slack(0.1, 1.0)
    # Each needs 1 s for its prompt and 10 s for its output; it is 10 s now.
    view = view_of(5, deadline_s=[30.0, 22.0, 20.0, np.inf, 11.0], arrival_s=[0, 0, 0, 0, 0])
    assert policy.order(view)[:2].tolist() == [9.0, 1.0]
    assert policy.order(view)[3] == 20.0
    assert ranked(policy, view) == [1, 0, 3, 2, 4]
    assert policy.victim(view, 1).index == 4
    nearly_done = replace(view, num_tokens=np.full(5, 19), peak_computed=np.full(5, 18))
    assert policy.order(nearly_done)[2] == pytest.approx(10.0 - 0.1 - 1.0)


def test_a_request_without_a_deadline_comes_first_in_the_end() -> None:
    policy = slack(0.0, 0.0)
    view = view_of(2, now_s=100.0, arrival_s=[0.0, 99.0], deadline_s=[np.inf, 100.5])
    assert ranked(policy, view) == [0, 1]


def test_a_first_token_may_be_due_before_the_rest() -> None:
    policy = slack(0.1, 1.0, first_token_s=4.0)
    view = view_of(3, deadline_s=[100.0] * 3, arrival_s=[10.0, 9.5, 6.0], num_tokens=[10, 10, 12])
    # It takes 1 s for the prompt and 2 for the steps before it; the last has its first token.
    assert policy.order(view).tolist() == pytest.approx([1.0, 0.5, 100.0 - 1.2 - 8.0 - 10.0])
    late = replace(view, now_s=11.2)
    assert ranked(policy, late) == [2, 1, 0]


def test_what_a_token_takes_comes_from_the_table_of_steps() -> None:
    assert token_seconds(SchedulerConfig()) == (1e-4, 0.02)
    costs = StepCosts(sizes=(64, 1000), seconds=(0.005, 0.02), row_s=1e-5)
    config = SchedulerConfig(step_costs=costs, max_num_seqs=50)
    assert token_seconds(config) == pytest.approx((2e-5, 0.0055))
    assert token_seconds(replace(config, step_target_ms=30.0)) == pytest.approx((2e-5, 0.03))


def test_small_work_passes_large_work_and_age_passes_all() -> None:
    policy = SoftTail(SchedulerConfig())
    view = view_of(3, arrival_s=[0.0, 5.0, 9.0], num_prompt=[5000, 100, 100])
    assert ranked(policy, view) == [1, 0, 2]
    later = replace(view, now_s=1000.0)
    assert ranked(policy, replace(later, arrival_s=np.array([0.0, 990.0, 995.0])))[0] == 0
    grown = replace(view, peak_computed=np.array([0, 9000, 0]))
    assert policy.victim(replace(grown, arrival_s=np.array([0.0, 5.0, 5.0])), 1).index == 1


# -- all of them -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_answers_for_no_request_and_without_changing_anything(name: str) -> None:
    policy = make_policy(SchedulerConfig(scheduling_policy=name))
    assert policy.order(view_of(0)).tolist() == []
    view = view_of(6, tenant=[0, 1, 0, 2, 1, 0], deadline_s=[9, 20, 30, 40, np.inf, 12])
    before = [column.tobytes() for column in (view.arrival_s, view.deadline_s, view.num_tokens)]
    assert policy.order(view).tolist() == policy.order(view).tolist()
    assert policy.victim(view, 2) == policy.victim(view, 2)
    assert [column.tobytes() for column in (view.arrival_s, view.deadline_s, view.num_tokens)] == before
    assert np.isfinite(policy.order(view)).all()
    assert policy.keeps_accounts == (name == "fair")


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_every_request_under_pressure(name: str) -> None:
    bench = Bench(engine_config(max_num_seqs=4, num_blocks=12, scheduling_policy=name, ageing_s=0.05))
    for number in range(24):
        deadline_s = 1000.0 if number % 3 else None
        bench.add(prompt(3 + number % 9), 9, tenant=f"t{number % 3}", deadline_s=deadline_s)
    bench.run()
    assert len(bench.finished) == 24


# -- changes while serving ---------------------------------------------------------------------------------


def test_another_policy_orders_from_the_next_plan_on() -> None:
    bench = Bench(engine_config(max_num_seqs=1))
    bench.add(prompt(4), 2)
    bench.step()
    long, short = bench.add(prompt(4), 20), bench.add(prompt(4), 1)
    bench.scheduler.set_policy("shortest", output_handicap_ms=1000.0)
    bench.run()
    assert list(bench.finished)[1:] == [short, long]


def test_what_tenants_were_served_is_known_to_the_next_fair_policy() -> None:
    bench = Bench(engine_config(scheduling_policy="fair"))
    bench.add(prompt(6), 9, tenant="one")
    bench.step(3)
    bench.scheduler.set_policy("fair", tenant_weights="one=2")
    policy = bench.state.policy
    assert isinstance(policy, FairShare) and policy.counter(0) >= 6.0 and policy.weight(0) == 2.0
    bench.scheduler.set_policy("fcfs")
    bench.scheduler.set_policy("fair")
    assert isinstance(bench.state.policy, FairShare) and bench.state.policy.counter(0) == 0.0
    bench.run()


@pytest.mark.parametrize(
    ("name", "options"),
    [("lifo", {}), ("json:JSONDecoder", {}), ("fcfs", {"max_num_seqs": 3}), ("priority", {"ageing_s": -1.0})],
)
def test_a_change_that_makes_no_sense_changes_nothing(name: str, options: dict[str, Any]) -> None:
    bench = Bench(engine_config())
    before, noted = bench.state.policy, list(bench.state.journal)
    with pytest.raises(ConfigError):
        bench.scheduler.set_policy(name, **options)
    assert bench.state.policy is before and bench.state.journal == noted


# -- an operator's own -------------------------------------------------------------------------------------

MODULE = """
from paceline.policy import Policy, Victim

class LastComeFirstServed(Policy):
    def order(self, view):
        return -view.arrival_s

class WithoutBase:
    def __init__(self, config):
        self.config = config
    def order(self, view):
        return -view.arrival_s
    def victim(self, view, need):
        return Victim(0)
    def share(self, view, budget):
        return 7
    def yields(self, running, waiting):
        return running.priority > waiting.priority

class Half:
    def order(self, view):
        return view.arrival_s

class Raises(LastComeFirstServed):
    def __init__(self, config):
        raise RuntimeError("no licence")

NOT_A_CLASS = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_policies.py").write_text(MODULE)
    (tmp_path / "own_broken.py").write_text("import no_such_module_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("own_policies", "own_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "own_policies"


def test_a_class_of_ones_own_is_loaded_by_name(own_module: str) -> None:
    name = f"{own_module}:LastComeFirstServed"
    bench = Bench(engine_config(max_num_seqs=1, scheduling_policy=name))
    one, other = bench.add(prompt(3), 2, arrival_s=0.0), bench.add(prompt(3), 2, arrival_s=1.0)
    bench.run()
    assert list(bench.finished) == [other, one]


def test_a_class_that_is_not_derived_from_policy_gets_the_defaults_of_what_it_lacks(own_module: str) -> None:
    policy = make_policy(SchedulerConfig(scheduling_policy=f"{own_module}:WithoutBase"))
    assert policy.share(view_of(2), 100) == 7 and policy.victim(view_of(2), 1).index == 0
    assert policy.displaces and policy.yields(view_of(2, priority=[0, 2]), view_of(1)).tolist() == [
        False,
        True,
    ]
    assert not (policy.pauses_rows or policy.keeps_room or policy.keeps_accounts or policy.relative)
    bench = Bench(engine_config(max_num_seqs=1, scheduling_policy=f"{own_module}:WithoutBase"))
    one, other = bench.add(prompt(3), 2, arrival_s=0.0), bench.add(prompt(3), 2, arrival_s=1.0)
    bench.run()
    assert list(bench.finished) == [other, one]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("no_such_policies:Thing", "cannot be imported"),
        ("own_broken:Thing", "no_such_module_at_all"),
        ("own_policies:Missing", "has no class Missing"),
        ("own_policies:NOT_A_CLASS", "has no class NOT_A_CLASS"),
        ("own_policies:Half", "lacks victim, share"),
        ("own_policies:Raises", "no licence"),
        (":Thing", "give the module and the class"),
        ("own_policies:", "give the module and the class"),
    ],
)
def test_what_is_wrong_with_ones_own_is_said_in_a_sentence(own_module: str, spec: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_policy(SchedulerConfig(scheduling_policy=spec))


@pytest.mark.parametrize(
    "scores, word", [([1.0, math.nan, 2.0], "NaN"), ([1.0, 2.0], "shape"), (1.0, "shape")]
)
def test_an_order_that_is_none_is_told_as_such(scores: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        first(view_of(3), np.array(scores), 1)


# ----------------------------------------------------------------
# Whose share a request counts against, and what tenants begin with that come back to wait.


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
    """The tenants that wait, as far as accounts are concerned."""

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
        accounting.comes(tenant, str(tenant), back=True)  # in this order; no other tenant waits
        queue.tenants[tenant] = 1
    accounting.settle()
    assert (policy.counter(1), policy.counter(2)) == (314.0, 314.0)
