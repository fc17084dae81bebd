"""No invariant is dead: each is silent on a sound state and speaks up, under its own name, on one broken by hand."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from paceline.core.events import Decision, DecisionKind, Rule
from paceline.core.parameters import PoolingParams
from paceline.core.plan import i32
from paceline.core.request import RequestId, RequestState
from paceline.scheduler.dial.engine_dial import DialLimits
from paceline.scheduler.invariants import INVARIANTS
from paceline.scheduler.invariants.half_steps import BlocksInUse
from paceline.scheduler.policy.fair import FairShare
from tests.pure.engine.engine_helpers import prompt
from tests.pure.scheduler import broken_places
from tests.pure.scheduler.planned_states import (
    CASES,
    Break,
    PlannedState,
    ahead,
    before_any_plan,
    breaks,
    crowded,
    drafted,
    forked,
    long_prompt,
    paced,
    pictured,
    pinned,
    placing,
    shared_out,
    unplanned,
    vacated,
)

assert broken_places  # importing it adds to the cases


@breaks("every_block_is_free_or_live")
@breaks("references_are_what_holds_blocks")
@breaks("the_free_list_has_each_free_block_once")
def a_free_block_gets_a_reference(planned: PlannedState) -> None:
    planned.pool.refs[planned.pool.free_blocks()[0]] = 1


@breaks("every_block_is_free_or_live")
def a_block_is_released_while_a_row_holds_it(planned: PlannedState) -> None:
    planned.pool.refs[planned.group.blocks_of(0)[0]] = 0


@breaks("the_free_list_has_each_free_block_once")
def a_live_block_is_on_the_free_list(planned: PlannedState) -> None:
    planned.pool.evictable.add([int(planned.group.blocks_of(0)[0])])


@breaks("references_are_what_holds_blocks")
def a_reference_too_many(planned: PlannedState) -> None:
    planned.pool.refs[planned.group.blocks_of(0)[0]] += 1


@breaks("references_are_what_holds_blocks", vacated)
def a_reference_without_an_owner(planned: PlannedState) -> None:
    planned.pool.share(planned.pool.allocate(1))


@breaks("no_row_holds_a_block_twice")
def a_row_holds_a_block_twice(planned: PlannedState) -> None:
    planned.group.table[0, 1] = planned.group.table[0, 0]


@breaks("tables_cover_what_is_computed")
def more_is_scheduled_than_the_table_holds(planned: PlannedState) -> None:
    planned.rows.scheduled[0] = 40


@breaks("tables_cover_what_is_computed")
def blocks_lie_beyond_what_is_computed(planned: PlannedState) -> None:
    planned.group.held[0] += 3


@breaks("nothing_is_written_where_others_read")
def two_rows_write_into_one_block(planned: PlannedState) -> None:
    at = int(planned.rows.scheduled[0] - 1) // 4
    planned.group.table[1, at] = planned.group.table[0, at]


@breaks("nothing_is_written_where_others_read", forked)
def a_branch_writes_without_a_copy(planned: PlannedState) -> None:
    at = int(planned.rows.scheduled[0] - 1) // 4
    planned.group.table[planned.row(2), at] = planned.group.table[planned.row(1), at]


@breaks("rows_not_in_use_hold_nothing", vacated)
def an_empty_row_holds_a_block(planned: PlannedState) -> None:
    planned.group.held[0] = 1


@breaks("requests_without_a_row_own_nothing")
def a_running_request_keeps_host_places(planned: PlannedState) -> None:
    planned.bench.request(RequestId(1)).host_places = (np.array([0]),)


@breaks("requests_without_a_row_own_nothing")
@breaks("each_request_is_in_one_place")
def a_waiting_request_has_a_row(planned: PlannedState) -> None:
    planned.bench.request(RequestId(1)).state = RequestState.WAITING


@breaks("promised_blocks_are_there")
def more_is_promised_than_is_free(planned: PlannedState) -> None:
    planned.group.reserved = planned.pool.num_free + 1


@breaks("places_are_free_or_held")
def a_host_place_is_lost(planned: PlannedState) -> None:
    planned.kv.places[0].take(1)


@breaks("places_are_free_or_held")
def a_host_place_is_given_back_twice(planned: PlannedState) -> None:
    planned.kv.places[0].give_back(np.array([3]))


@breaks("the_cache_and_its_blocks_agree")
def an_entry_is_lost(planned: PlannedState) -> None:
    planned.group.cache.drop(planned.group.cache.blocks()[:1])


@breaks("the_cache_and_its_blocks_agree")
def a_block_waits_for_eviction_without_a_key(planned: PlannedState) -> None:
    planned.pool.evictable.add(planned.pool.allocate(1).tolist())


@breaks("only_computed_blocks_are_cached")
def a_block_is_offered_before_it_is_computed(planned: PlannedState) -> None:
    assert planned.pool.cached[planned.group.blocks_of(0)[0]]
    planned.rows.computed[0] = 3


@breaks("no_block_changes_hands_under_a_step")
def a_block_in_flight_is_written_by_another_row(planned: PlannedState) -> None:
    touched = np.full(planned.pool.num_blocks, -1, np.int64)
    touched[planned.group.table[0, int(planned.rows.scheduled[0] - 1) // 4]] = 1
    planned.in_flight.append(BlocksInUse(touched))


@breaks("tenants_never_share_blocks", forked)
def one_of_two_sharers_changes_its_tenant(planned: PlannedState) -> None:
    planned.rows.tenant[planned.row(2)] = 7


@breaks("no_row_changes_hands_under_a_step", ahead)
def a_row_joins_that_an_earlier_step_uses(planned: PlannedState) -> None:
    earlier = planned.state.flights[0]
    planned.state.flights[0] = replace(earlier, spans=((planned.row(2), 1, 1),))


@breaks("work_is_done_when_there_is_any", unplanned)
def nothing_is_planned_for_a_waiting_request(planned: PlannedState) -> None:
    planned.bench.add(prompt(4), 3)


@breaks("a_request_that_fits_is_in_the_plan")
def a_request_that_fits_is_left_out(planned: PlannedState) -> None:
    planned.bench.add(prompt(4, 9), 3)


@breaks("the_last_in_order_is_preempted")
def an_older_request_is_preempted(planned: PlannedState) -> None:
    planned.decisions.append(Decision(DecisionKind.PREEMPT, RequestId(1), Rule.BLOCKS_RECOMPUTE))


@breaks("no_request_is_passed_over", crowded)
def a_younger_request_is_admitted_first(planned: PlannedState) -> None:
    planned.decisions.append(Decision(DecisionKind.ADMIT, RequestId(3), Rule.FITS))


@breaks("no_request_is_passed_over", crowded)
def a_module_is_admitted_past_another(planned: PlannedState) -> None:
    planned.bench.scheduler.composer.last_draft.only_modules = True
    for number in (2, 3):
        planned.state.requests[RequestId(number)].is_module = True
    planned.decisions.append(Decision(DecisionKind.ADMIT, RequestId(3), Rule.FITS))


@breaks("the_first_always_progresses")
def the_oldest_is_not_in_the_plan(planned: PlannedState) -> None:
    planned.state.flights[-1].mask[0] = False


@breaks("a_long_prompt_leaves_room_for_others", long_prompt)
def a_request_waits_behind_a_prompt_with_all_tokens(planned: PlannedState) -> None:
    planned.bench.add(prompt(4, 9), 3)


@breaks("counters_are_in_order")
def more_is_computed_than_was_scheduled(planned: PlannedState) -> None:
    planned.rows.computed[0] = planned.rows.scheduled[0] + 1


@breaks("counters_are_in_order")
def more_tokens_than_the_limit(planned: PlannedState) -> None:
    planned.rows.num_tokens[0] = planned.rows.max_len[0] + 1


@breaks("what_is_scheduled_is_what_is_under_way", drafted)
def more_is_scheduled_than_drafts_allow(planned: PlannedState) -> None:
    planned.rows.scheduled[0] += 1


@breaks("each_request_is_in_one_place", crowded)
def a_waiting_request_is_not_in_the_queue(planned: PlannedState) -> None:
    planned.state.queue.remove(planned.bench.request(RequestId(2)))


@breaks("each_request_is_in_one_place")
def an_ended_request_is_still_listed(planned: PlannedState) -> None:
    planned.state.orders[RequestId(77)] = 77


@breaks("requests_are_conserved")
def a_request_vanishes(planned: PlannedState) -> None:
    planned.state.counters.added += 1


@breaks("families_list_live_children")
def a_family_lists_a_stranger(planned: PlannedState) -> None:
    planned.state.children[RequestId(1)] = {RequestId(2)}


@breaks("families_list_live_children")
def a_family_without_branches_stays_listed(planned: PlannedState) -> None:
    planned.state.children[RequestId(1)] = set()


@breaks("rows_are_what_their_requests_say")
def a_column_is_not_reset(planned: PlannedState) -> None:
    planned.rows.priority[0] = 5


@breaks("rows_are_what_their_requests_say")
def a_live_row_has_no_owner(planned: PlannedState) -> None:
    planned.rows.requests[0] = None


@breaks("rows_are_what_their_requests_say", vacated)
def a_row_is_lost(planned: PlannedState) -> None:
    planned.rows.num_rows += 1


@breaks("gauges_are_what_they_count")
def a_gauge_of_rows_is_stuck(planned: PlannedState) -> None:
    planned.rows.num_live += 1


@breaks("gauges_are_what_they_count", crowded)
def a_gauge_of_tokens_is_stuck(planned: PlannedState) -> None:
    planned.state.queue.num_tokens -= 1


@breaks("the_plan_keeps_its_bounds")
def a_plan_goes_over_its_budget(planned: PlannedState) -> None:
    assert planned.plan is not None
    planned.plan = planned.plan._replace(pad_tokens=32)


@breaks("the_plan_keeps_its_bounds")
def a_plan_may_carry_more_than_is_configured(planned: PlannedState) -> None:
    planned.state.flights[-1].budget = planned.state.config.max_num_batched_tokens + 1


@breaks("the_plan_keeps_its_bounds")
def a_plan_leaves_nothing_to_prompts(planned: PlannedState) -> None:
    planned.state.flights[-1].budget = 5


@breaks("the_plan_keeps_its_bounds", paced)
def a_plan_goes_over_the_budget_of_its_pace(planned: PlannedState) -> None:
    assert planned.plan is not None and planned.state.flights[-1].budget == 8
    planned.plan = planned.plan._replace(pad_tokens=1)


@breaks("the_plan_keeps_its_bounds", before_any_plan)
def a_plan_has_an_empty_span(planned: PlannedState) -> None:
    assert planned.plan is not None
    planned.plan = planned.plan._replace(spans=replace(planned.plan.spans, num_scheduled=i32([0])))


@breaks("the_plan_keeps_its_bounds")
def a_row_is_planned_twice(planned: PlannedState) -> None:
    assert planned.plan is not None
    planned.plan = planned.plan._replace(
        spans=replace(planned.plan.spans, row=i32([0]), num_scheduled=i32([1]))
    )


@breaks("times_are_in_order")
def a_first_token_comes_before_admission(planned: PlannedState) -> None:
    planned.bench.request(RequestId(1)).admitted_s = planned.state.now_s + 1


@breaks("times_are_in_order", crowded)
def a_token_comes_without_admission(planned: PlannedState) -> None:
    planned.bench.request(RequestId(2)).first_token_s = 0.0


@breaks("pages_have_the_references_of_rows_and_groups", pictured)
def a_page_loses_a_reference(planned: PlannedState) -> None:
    encodings = planned.state.encodings
    encodings.pool.refs[encodings.rows[0].held[0].pages[0]] -= 1


@breaks("pages_have_the_references_of_rows_and_groups", pictured)
def an_item_is_found_that_nothing_encodes(planned: PlannedState) -> None:
    encodings = planned.state.encodings
    for encoding in encodings.unfinished.pop().encodings:
        encodings.pool.refs[encoding.pages] -= 1


@breaks("no_vector_is_read_before_it_is_computed", pictured)
def a_picture_is_read_while_it_is_encoded(planned: PlannedState) -> None:
    planned.rows.scheduled[0] = 15


@breaks("no_vector_is_read_before_it_is_computed", pictured)
def a_picture_is_read_that_the_row_does_not_hold(planned: PlannedState) -> None:
    del planned.state.encodings.rows[0].held[0]


@breaks("the_line_of_a_group_goes_in_order", pictured)
def a_position_is_planned_twice(planned: PlannedState) -> None:
    planned.state.encodings.unfinished[-1].planned -= 1


@breaks("the_line_of_a_group_goes_in_order", pictured)
def a_group_comes_to_its_end_and_stays(planned: PlannedState) -> None:
    planned.state.encodings.group = planned.state.encodings.unfinished[-1]


@breaks("a_placed_slot_is_written_once_from_its_module", placing)
def keys_are_turned_too_far(planned: PlannedState) -> None:
    assert planned.plan is not None
    placements = planned.plan.placements
    planned.plan = planned.plan._replace(placements=replace(placements, shift=placements.shift + 1))


@breaks("a_placed_slot_is_written_once_from_its_module", placing)
def tokens_are_placed_that_are_computed(planned: PlannedState) -> None:
    assert planned.plan is not None
    placements = planned.plan.placements
    planned.plan = planned.plan._replace(placements=replace(placements, start=placements.start - 4))


@breaks("a_placed_slot_is_written_once_from_its_module", placing)
def a_run_of_tokens_is_left_out(planned: PlannedState) -> None:
    planned.rows.scheduled[0] += 1


@breaks("a_placed_slot_is_written_once_from_its_module", placing)
def a_source_is_free_while_it_is_copied(planned: PlannedState) -> None:
    planned.pool.refs[planned.state.flights[-1].sources[0]] = 0


@breaks("a_placed_slot_is_written_once_from_its_module", placing)
def a_row_holds_no_module_any_more(planned: PlannedState) -> None:
    planned.kv.sources.rows.clear()


@breaks("a_placed_slot_is_written_once_from_its_module", placing)
def a_row_holds_another_block(planned: PlannedState) -> None:
    held = planned.kv.sources.rows[0][1][0]
    held[0] = held[1]


@breaks("what_ends_with_a_vector_has_no_output")
def a_request_for_a_vector_decodes(planned: PlannedState) -> None:
    request = planned.bench.request(RequestId(1))
    request.sampling = replace(request.sampling, pooling=PoolingParams(kind="last"))
    planned.rows.decoding[request.row] = True


@breaks("pins_are_within_their_limits", pinned)
def more_is_pinned_than_may_be(planned: PlannedState) -> None:
    planned.state.kv.pins.most_of_tenant = 0


@breaks("pins_are_within_their_limits")
def blocks_are_counted_as_pinned_and_no_pin_has_them(planned: PlannedState) -> None:
    planned.group.pinned = 1


@breaks("a_pinned_block_is_never_evicted", pinned)
def a_pin_has_lost_its_block(planned: PlannedState) -> None:
    name, block = next(iter(planned.state.kv.pins.entries(0).items()))
    planned.group.cache.drop([block])
    assert planned.group.cache.named(name) is None


@breaks("each_pin_is_of_one_tenant", pinned)
def two_tenants_have_a_block_pinned(planned: PlannedState) -> None:
    users = planned.state.kv.pins.users()
    users["another"] = dict(next(iter(users.values())))


@breaks("preemptions_are_bounded")
def a_request_is_preempted_too_often(planned: PlannedState) -> None:
    planned.bench.request(RequestId(1)).preemptions = 5


@breaks("preemptions_are_bounded")
def a_request_runs_unreserved_after_its_last_preemption(planned: PlannedState) -> None:
    planned.bench.request(RequestId(1)).preemptions = 4


@breaks("deadlines_have_been_kept")
def a_deadline_has_passed_unnoticed(planned: PlannedState) -> None:
    request = planned.bench.request(RequestId(1))
    request.deadline_s = planned.state.now_s - 1
    planned.state.watch_deadline(request)


@breaks("the_tenant_served_least_is_admitted_first", shared_out)
def a_tenant_that_was_served_much_is_admitted(planned: PlannedState) -> None:
    assert isinstance(planned.state.policy, FairShare)
    planned.state.policy.counters[0] += 100.0


@breaks("no_tenant_saves_up_service", shared_out)
def a_tenant_brings_what_it_did_not_use(planned: PlannedState) -> None:
    planned.backlog = {0: 50.0}


@breaks("time_is_counted_for_the_blocks_rows_hold")
def a_block_is_held_for_nothing(planned: PlannedState) -> None:
    planned.state.kv.block_time.held[0] -= 1


@breaks("plans_keep_the_limits_of_the_dial", ahead)
@breaks("plans_keep_the_limits_of_the_dial", long_prompt)
def a_plan_knows_nothing_of_the_dial(planned: PlannedState) -> None:
    planned.state.dial.limits, planned.state.dial.fewest = (
        DialLimits(target_s=None, tokens=1, share=1.0, rows=1),
        0,
    )


@pytest.mark.parametrize(("check", "build", "damage"), CASES, ids=[f"{c}-{f.__name__}" for c, _, f in CASES])
def test_an_invariant_speaks_up(check: str, build: Callable[[], PlannedState], damage: Break) -> None:
    planned = build()
    assert planned.objections() == {}, "a sound state is silent"
    damage(planned)
    assert planned.objections(check).keys() == {check}


def test_every_invariant_has_a_state_that_it_objects_to() -> None:
    assert {entry.check.__name__ for entry in INVARIANTS} == {check for check, _, _ in CASES}
