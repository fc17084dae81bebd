"""Invariants of requests and rows: each in one place, counters in order, nothing left behind."""

from __future__ import annotations

import numpy as np

from paceline.core.request import NO_ROW, RequestState
from paceline.scheduler.invariants.registry import PLANNED, Look, invariant


@invariant("S9")
def counters_are_in_order(look: Look) -> str | None:
    rows, live = look.scheduler.state.rows, look.live
    computed, upper, tokens = rows.computed[live], rows.upper[live], rows.num_tokens[live]
    done = rows.done[live]
    if (computed < 0).any() or (computed > upper).any():
        return "computed is not between 0 and what was scheduled"
    if ((computed > tokens) & ~done).any() or (tokens > rows.limit[live]).any():
        return "a row has computed more than it knows, or has more tokens than its limit"
    if (tokens < rows.known[live]).any() or (rows.limit[live] > look.scheduler.state.config.max_model_len).any():
        return "a row has lost tokens or is longer than the model allows"
    return None


@invariant("S11")
def each_request_is_in_one_place(look: Look) -> str | None:
    state = look.scheduler.state
    counts = 0
    for request in state.requests.values():
        places = (request.id in state.queue) + (request.row != NO_ROW)
        outside = request.state in (RequestState.PAUSED, RequestState.BLOCKED) and request.row == NO_ROW
        if places + outside != 1:
            return f"request {request.id} ({request.state.value}) is in {places} places"
        expected = {
            RequestState.WAITING: request.id in state.queue,
            RequestState.SWAPPED: request.id in state.queue and bool(request.host_places),
            RequestState.RUNNING: request.row != NO_ROW and state.rows.requests[request.row] is request,
        }.get(request.state, True)
        if not expected:
            return f"request {request.id} says {request.state.value}, its place does not"
        counts += places
    if counts != len(state.queue) + state.rows.num_live:
        return "a place holds a request that is not live"
    if set(state.prefilling) - set(state.requests) or set(state.orders) != set(state.requests):
        return "a finished request is still listed"
    return None


@invariant("S12")
def requests_are_conserved(look: Look) -> str | None:
    state = look.scheduler.state
    counters = state.counters
    if counters.added != len(state.requests) + counters.finished + counters.rejected:
        return f"{counters.added} added, {len(state.requests)} live, {counters.finished} finished"
    return None


@invariant("S21")
def families_list_live_children(look: Look) -> str | None:
    state = look.scheduler.state
    expected: dict[int, set[int]] = {}
    for request in state.requests.values():
        for parent, children in state.children.items():
            if request.id in children and request.parent == parent:
                expected.setdefault(parent, set()).add(request.id)
    listed = {parent: set(children) for parent, children in state.children.items()}
    if listed != expected:
        return f"families {listed} are not those of the live requests {expected}"
    return None


@invariant("S23")
def rows_are_what_their_requests_say(look: Look) -> str | None:
    state = look.scheduler.state
    rows = state.rows
    if rows.num_live != len(look.live) or rows.num_live > state.config.max_num_seqs:
        return f"{len(look.live)} rows are live, {rows.num_live} are counted"
    if rows.num_reserved != int(np.count_nonzero(rows.reserved[look.live])):
        return "the count of reserved rows is wrong"
    for row in look.live.tolist():
        request = rows.requests[row]
        if request is None or request.row != row or request.id != rows.request_id[row]:
            return f"row {row} does not belong to the request it names"
        same = (
            rows.known[row] == request.num_tokens
            and rows.limit[row] == request.max_total
            and rows.num_prompt[row] == request.num_prompt
            and rows.priority[row] == request.priority
            and rows.arrival_s[row] == request.arrival_s
            and rows.order[row] == state.orders[request.id]
            and rows.preemptions[row] == request.preemptions
            and rows.needs_host[row] == request.needs_host
            and rows.reserved[row] == request.reserved
        )
        if not same:
            return f"a column of row {row} is not what request {request.id} says"
    free = rows.free_rows() + rows.fenced_rows()
    if len(free) + rows.num_live != rows.num_rows or len(set(free)) != len(free):
        return "a row is lost or free twice"
    return None


@invariant("S14", moment=PLANNED)
def the_plan_keeps_its_bounds(look: Look) -> str | None:
    plan = look.plan
    if plan is None:
        return None
    state = look.scheduler.state
    flight = state.flights[-1]
    decode = np.flatnonzero(flight.mask)
    spans = plan.spans.row
    total = plan.work.decode_rows + int(plan.spans.num_scheduled.sum()) + plan.pad_tokens
    if total > state.config.max_num_batched_tokens:
        return f"{total} tokens are planned, {state.config.max_num_batched_tokens} are allowed"
    if len(spans) and (plan.spans.num_scheduled < 1).any():
        return "a span is empty"
    if len(np.intersect1d(decode, spans)) or len(np.unique(spans)) != len(spans):
        return "a row is planned twice"
    if not state.rows.live[decode].all() or not state.rows.live[spans].all():
        return "a row that is not in use is planned"
    if plan.work.logit_rows > plan.work.decode_rows + len(spans):
        return "more rows are sampled than planned"
    return None


@invariant("S28")
def times_are_in_order(look: Look) -> str | None:
    for request in look.scheduler.state.requests.values():
        times = [request.admitted_s, request.first_token_s]
        known = [time_s for time_s in times if time_s is not None]
        if known != sorted(known) or (known and known[-1] > look.scheduler.state.now_s):
            return f"request {request.id}: admitted {request.admitted_s}, first token {request.first_token_s}"
    return None


@invariant("L5")
def preemptions_are_bounded(look: Look) -> str | None:
    """Forced ones aside: a request that was preempted often enough holds its reservation instead."""
    state = look.scheduler.state
    if not state.config.max_preemptions:
        return None
    for request in state.requests.values():
        running = request.state is RequestState.RUNNING and request.preemptions >= state.config.max_preemptions
        if running and not request.reserved:
            return f"request {request.id} runs unreserved after {request.preemptions} preemptions"
    return None


@invariant("L7")
def the_queue_is_bounded(look: Look) -> str | None:
    state = look.scheduler.state
    tokens = sum(request.num_tokens for request in state.queue)
    if tokens != state.queue.num_tokens:
        return f"{state.queue.num_tokens} tokens are counted in the queue, {tokens} are there"
    return None


@invariant("L8")
def deadlines_have_been_kept(look: Look) -> str | None:
    state = look.scheduler.state
    for request in state.requests.values():
        if request.deadline_s is not None and request.deadline_s < state.now_s and look.plan is not None:
            return f"request {request.id} lives past its deadline {request.deadline_s}"
    return None
