"""Ways to break what holds of places taken from others, of paused requests, of trees, of levels and of adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config.engine import PreemptionCosts
from paceline.core.events import Decision, DecisionKind, Rule
from paceline.core.parameters import KVKeep
from paceline.core.request import RequestId, RequestState, RequestTree, TreeLimits
from paceline.kv.reuse import REMEMBERED_TIMES, ReuseOrder
from paceline.scheduler.loading import Load
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt
from tests.pure.scheduler.planned_states import PlannedState, breaks, shared_out


@breaks("a_displacing_request_goes_before")
def a_request_is_displaced_by_one_after_it(planned: PlannedState) -> None:
    planned.decisions.append(place_taken(1, by=3))


def classes() -> PlannedState:
    """Request 1 has priority 1, request 2 priority 0."""
    bench = Bench(engine_config(scheduling_policy="priority", ageing_s=1e6))
    for priority in (1, 0):
        bench.add(prompt(9, priority), 20, priority=priority)
    bench.step(2)
    return PlannedState(bench, bench.scheduler.schedule())


@breaks("a_displacing_request_goes_before", classes)
def a_request_is_displaced_by_a_lower_class(planned: PlannedState) -> None:
    planned.decisions.append(place_taken(2, by=1))


@breaks("a_displacing_request_goes_before", shared_out)
def a_request_is_displaced_by_its_own_tenant(planned: PlannedState) -> None:
    planned.bench.request(RequestId(1)).tenant = "other"
    planned.decisions.append(place_taken(1, by=2))


@breaks("progress_is_not_lost_twice")
def a_request_is_displaced_before_it_is_where_it_was(planned: PlannedState) -> None:
    planned.displaced = {RequestId(3): 12}
    planned.decisions.append(place_taken(3, by=1, value=12))


@breaks("progress_is_not_lost_twice")
def a_request_is_displaced_twice_at_once(planned: PlannedState) -> None:
    planned.decisions += [place_taken(3, by=1, value=12), place_taken(3, by=2, value=13)]


@breaks("progress_is_not_lost_twice")
def a_protected_request_is_displaced(planned: PlannedState) -> None:
    planned.bench.request(RequestId(3)).preemptions = 5
    planned.decisions.append(place_taken(3, by=1, value=12))


def place_taken(number: int, *, by: int, value: int = 9) -> Decision:
    kind, rule = DecisionKind.PREEMPT, Rule.PLACE_RECOMPUTE
    return Decision(kind, RequestId(number), rule, value, against=RequestId(by))


@breaks("paused_requests_hold_nothing")
def a_request_is_paused_on_its_row(planned: PlannedState) -> None:
    planned.bench.request(RequestId(1)).state = RequestState.PAUSED


@breaks("paused_requests_hold_nothing")
def a_request_is_held_on_its_row(planned: PlannedState) -> None:
    planned.bench.request(RequestId(1)).state = RequestState.HELD


def tree() -> PlannedState:
    """Request 1 and two branches of it, which go in the order of their scores: 3, 1, 2."""
    bench = Bench(engine_config())
    first = bench.add(prompt(9, 0), 20, tree=TreeLimits(max_rows=3, max_tokens=90, max_branches=3))
    bench.step(3)
    bench.fork(first, score=-1.0)
    bench.fork(first, score=1.0)
    bench.step(2)
    return PlannedState(bench, bench.scheduler.schedule())


@breaks("trees_are_within_their_limits", tree)
def a_tree_counts_its_rows_wrongly(planned: PlannedState) -> None:
    tree_of(planned).num_rows -= 1


@breaks("trees_are_within_their_limits", tree)
def a_tree_has_a_row_too_many(planned: PlannedState) -> None:
    tree_of(planned).limits = TreeLimits(max_rows=2)


@breaks("trees_are_within_their_limits", tree)
def a_tree_has_a_branch_too_many(planned: PlannedState) -> None:
    tree_of(planned).limits = TreeLimits(max_branches=2)


@breaks("trees_are_within_their_limits", tree)
def a_tree_forgets_what_ended_branches_said(planned: PlannedState) -> None:
    tree_of(planned).num_spent = 80


@breaks("trees_are_within_their_limits", tree)
def a_branch_may_say_more_than_its_tree_knows(planned: PlannedState) -> None:
    request = planned.bench.request(RequestId(2))
    request.sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens + 1)


@breaks("branches_have_their_parents_beginning", tree)
def a_branch_shares_what_is_not_its_parents(planned: PlannedState) -> None:
    request = planned.bench.request(RequestId(2))
    request.tokens = request.tokens.copy()
    request.tokens[5] += 1


@breaks("the_best_of_a_tree_goes_first", tree)
def a_score_is_not_heard(planned: PlannedState) -> None:
    planned.bench.request(RequestId(2)).score = 2.0


@breaks("the_best_of_a_tree_goes_first", tree)
def a_place_is_given_twice(planned: PlannedState) -> None:
    planned.state.orders[RequestId(2)] = planned.state.orders[RequestId(1)]


def tree_of(planned: PlannedState) -> RequestTree:
    found = planned.bench.request(RequestId(1)).tree
    assert found is not None
    return found


def loading() -> PlannedState:
    """The last request loads its prompt from the host, where a disk is below."""
    costs = PreemptionCosts(token_s=1e-2, block_s=1e-4, step_s=0.0, disk_block_s=1e-3, disk_write_s=0.5)
    options: dict[str, Any] = {
        "num_host_blocks": 64,
        "num_disk_blocks": 64,
        "cache_on_host": True,
        "eviction": "lru",
    }
    bench = Bench(engine_config(**options, preemption_costs=costs))
    for start in (0, *range(50, 70)):
        bench.add(prompt(17, start), 2)
        bench.run()
    bench.add(prompt(17), 2)
    return PlannedState(bench, bench.scheduler.schedule())


@breaks("places_are_free_or_held", loading)
def a_place_is_free_while_it_is_read(planned: PlannedState) -> None:
    ticket = next(each for each in planned.kv.tickets.open.values() if each.incoming)
    planned.kv.places[0].give_back(ticket.places[0])


@breaks("a_copy_has_its_target_alone", loading)
def two_copies_write_one_block(planned: PlannedState) -> None:
    tickets = planned.kv.tickets
    tickets.issue(next(iter(tickets.open.values())))


@breaks("nothing_is_hit_before_it_is_there", loading)
def a_block_is_cached_while_it_is_loaded(planned: PlannedState) -> None:
    ticket = next(each for each in planned.kv.tickets.open.values() if each.incoming)
    planned.pool.cached[ticket.blocks[0][0]] = True


@breaks("no_request_waits_for_a_level_too_long", loading)
def a_request_waits_for_the_disk_for_ever(planned: PlannedState) -> None:
    admission, number = planned.bench.scheduler.composer.admission, next(iter(planned.state.requests))
    admission.loading.waiting.append(number)
    load = Load(Rule.LOADING, 4, load_s=1.0, compute_s=1e9, busy_s=0.0)
    admission.loading.patience[number] = planned.state.now_s, load


@breaks("no_request_waits_for_a_level_too_long", loading)
def a_request_waits_for_what_comes_later_than_computing_would(planned: PlannedState) -> None:
    admission, number = planned.bench.scheduler.composer.admission, next(iter(planned.state.requests))
    admission.loading.waiting.append(number)
    load = Load(Rule.LOADING, 4, load_s=1.1e-3, compute_s=1e-3, busy_s=0.0)
    admission.loading.patience[number] = planned.state.now_s, load


@breaks("few_evicted_keys_are_remembered", shared_out)
def an_order_remembers_more_than_it_may(planned: PlannedState) -> None:
    order = planned.pool.evictable
    assert isinstance(order, ReuseOrder)
    names = range(REMEMBERED_TIMES * planned.pool.num_blocks + 1)
    order._evicted.update({b"%d" % name: 0 for name in names})


@breaks("writes_stay_within_their_budget", loading)
def more_is_written_than_the_disk_may_take(planned: PlannedState) -> None:
    planned.stored = 1000


@breaks("a_load_is_sooner_than_computing", loading)
def what_is_dear_is_loaded(planned: PlannedState) -> None:
    number = next(number for number, request in planned.state.requests.items() if request.blocked)
    load = Load(Rule.LOADS, 4, load_s=9e9, compute_s=1e-3, busy_s=0.0)
    planned.bench.scheduler.composer.admission.loading.started.append((number, load))


def adapted() -> PlannedState:
    """Request 1 has adapter 1, request 2 adapter 2, request 3 none; there are two places."""
    bench = Bench(engine_config(max_loras=2))
    for number in (1, 2, 3):
        bench.engine.adapters.load("", Path(str(number)))
    for number in (1, 2, 0):
        bench.add(prompt(9, number), 20, adapter=number)
    bench.step(2)
    return PlannedState(bench, bench.scheduler.schedule())


@breaks("rows_have_their_adapter", adapted)
def a_row_has_an_adapter_that_is_not_in_memory(planned: PlannedState) -> None:
    del planned.state.adapters.resident[1]


@breaks("rows_have_their_adapter", adapted)
def a_rows_number_stands_for_nothing(planned: PlannedState) -> None:
    planned.state.adapters.identities[2] = ""


def adapted_and_joining() -> PlannedState:
    """The same, when the rows join."""
    bench = Bench(engine_config())
    bench.engine.adapters.load("", Path("1"))
    bench.add(prompt(9, 1), 20, adapter=1)
    return PlannedState(bench, bench.scheduler.schedule())


@breaks("rows_have_their_adapter", adapted_and_joining)
def a_row_joins_with_the_adapter_of_another(planned: PlannedState) -> None:
    assert planned.plan is not None
    joins = planned.plan.joins
    planned.plan = planned.plan._replace(joins=replace(joins, adapter=joins.adapter + 1))


@breaks("no_adapter_with_rows_is_evicted", adapted)
def a_row_of_an_adapter_is_not_counted(planned: PlannedState) -> None:
    del planned.state.adapters.rows[1]


@breaks("no_adapter_with_rows_is_evicted", adapted)
def a_request_with_an_adapter_is_not_counted(planned: PlannedState) -> None:
    planned.state.adapters.users[2] += 1


@breaks("no_adapter_with_rows_is_evicted", adapted)
def an_adapter_leaves_under_its_rows(planned: PlannedState) -> None:
    places = planned.state.adapters
    places.leaving[1] = places.resident.pop(1) or 0


@breaks("no_adapter_with_rows_is_evicted", adapted)
def an_adapter_leaves_under_a_step(planned: PlannedState) -> None:
    planned.state.adapters.last_plan[3] = planned.kv.submitted


@breaks("no_adapter_with_rows_is_evicted", adapted)
def there_are_more_adapters_than_places(planned: PlannedState) -> None:
    planned.state.adapters.coming.add(3)


def dropping() -> PlannedState:
    """Request 1 has dropped blocks 1 to 3."""
    bench = Bench(engine_config(block_size=4, num_blocks=40))
    bench.add(prompt(9), 20, kv_keep=KVKeep(first=4, recent=4))
    bench.step(9)
    assert bench.state.kv.dropped[bench.request(RequestId(1)).row]
    return PlannedState(bench, bench.scheduler.schedule())


@breaks("dropped_rows_hold_what_they_see", dropping)
def a_row_drops_a_block_too_many(planned: PlannedState) -> None:
    planned.bench.state.kv.dropped[planned.bench.request(RequestId(1)).row] += 1


@breaks("dropped_rows_hold_what_they_see", dropping)
def a_row_has_a_block_that_it_dropped(planned: PlannedState) -> None:
    planned.bench.state.kv.groups[0].table[planned.bench.request(RequestId(1)).row, 1] = 30


@breaks("dropped_rows_hold_what_they_see", dropping)
def a_row_that_dropped_offers_a_block(planned: PlannedState) -> None:
    group = planned.bench.state.kv.groups[0]
    row = planned.bench.request(RequestId(1)).row
    group.pool.cached[group.table[row, int(group.held[row]) - 1]] = True


def with_slabs() -> PlannedState:
    """Slabs of four blocks, of which the second has gone to another model."""
    bench = Bench(engine_config(num_blocks=24, slab_blocks=4, least_blocks=8, most_slabs=5, max_model_len=28))
    for slab in (1, 3):
        bench.engine.move_slab(slab, gained=True)
    bench.add(prompt(9, 1), 4)
    bench.step(1)
    return PlannedState(bench, bench.scheduler.schedule())


@breaks("no_block_of_a_slab_that_left_is_held", with_slabs)
def a_block_is_in_another_models_slab(planned: PlannedState) -> None:
    group = planned.bench.scheduler.state.kv.groups[0]
    held = int(group.table[0, 0])
    group.table[0, 0], group.pool.refs[held] = 8, 0
    group.pool._stack[group.pool._depth] = held
    group.pool._depth += 1
    group.pool.num_free += 1
