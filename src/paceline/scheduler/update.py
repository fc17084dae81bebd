"""Taking in a step's result: counters, tokens, endings, completed copies.

A result speaks of rows as they were when its plan was made. Rows that have left since are known by their
generation and skipped: an abort beats a finish, and a late token is discarded. Everything per token is done over
columns; Python loops run over prompts and over rows that ended.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paceline.core.events import DecisionKind, LogprobEvent, Rule, TokenEvents
from paceline.core.fast import all_set, any_set, count_set, has_either, total
from paceline.core.plan import AT_LENGTH, I32, STOPPED, StepResult
from paceline.core.request import NO_ROW, FinishReason, Request, RequestId, RequestState, account_of
from paceline.kv.block_time import MICROSECONDS
from paceline.kv.swap import NO_OWNER, Ticket
from paceline.scheduler import steering
from paceline.scheduler.encodings import Group
from paceline.scheduler.recovery import forget_places
from paceline.scheduler.state import Flight, SchedulerState, caught_up
from paceline.scheduler.step import pinning

Index = NDArray[np.int64]


def apply_result(state: SchedulerState, result: StepResult) -> None:
    """Bring the state up to date with a completed step."""
    flight = state.flights.popleft()
    assert flight.seq == result.seq, f"result {result.seq} came before {flight.seq}"
    rows = state.rows
    state.kv.complete(result.seq)
    rows.complete(result.seq)
    if len(result.copies_done):
        for ticket in result.copies_done.tolist():
            _copy_done(state, ticket)
    for ticket in result.copies_failed.tolist() if len(result.copies_failed) else ():
        copy_failed(state, ticket)
    if result.disk_is_off:
        state.tiers.turn_off_disk()
    if state.encodings.fences:
        state.encodings.complete(result.seq)
    if flight.group is not None:
        _encoded(state, flight.group, flight.work.encode_positions, result.bad_encodings)
    at = result.rows.astype(np.int64)
    current = rows.generation[at] == result.generation  # leaving raises it, so a row that left never matches
    if not all_set(current):
        state.counters.late_results += len(current) - count_set(current)
    if not all_set(result.finite):
        for row in at[current & ~result.finite].tolist():
            _numerical_error(state, _owner(state, row))
        if state.mode.keeps_finished:
            retire_batch(state)  # it may have been the last one that was not done
        current = rows.generation[at] == result.generation
    if flight.width:
        _verified(state, result, flight, at, current)
    else:
        rows.computed[: len(flight.mask)] += flight.mask
    if flight.spans and _spans_done(state, flight):
        current = rows.generation[at] == result.generation
    if result.vectors:
        _deliver_vectors(state, result, at[current])
        current = rows.generation[at] == result.generation
    if result.logprobs:
        _deliver_logprobs(state, result, flight, at[current])
    _deliver(state, result, flight, at, current)
    state.kv.settle()


def _verified(
    state: SchedulerState, result: StepResult, flight: Flight, at: Index, current: NDArray[np.bool_]
) -> None:
    """Rows have computed their token and the drafts that were right; how far they may be now is a smaller bound."""
    rows, high, count = state.rows, len(flight.mask), result.count
    decoding = current
    if flight.spans:  # of rows that may have joined behind those that decode
        decoding = current & flight.mask[np.minimum(at, high - 1)] & (at < high)
    rows.computed[at] += count if all_set(decoding) else count * decoding
    if len(result.verified):
        counters, drafted = state.counters, result.verified > 0
        counters.drafts += count_set(drafted)
        counters.draft_tokens += int(total(result.verified))
        drafted &= decoding
        right = count if all_set(drafted) else count[drafted]
        counters.accepted_tokens += int(total(right)) - len(right)
    if len(result.predicted):
        _count_predictions(state, result, at, decoding)
    bound = rows.computed[:high].copy() if state.flights else rows.computed[:high]
    for later in state.flights:
        part = min(high, len(later.mask))
        bound[:part] += later.mask[:part] * (later.width + 1)
    np.minimum(bound, rows.max_len[:high] - 1, out=rows.scheduled[:high], where=flight.mask)


def _count_predictions(
    state: SchedulerState, result: StepResult, at: Index, decoding: NDArray[np.bool_]
) -> None:
    """Requests that came with a prediction learn what became of it; a row's drafts are all of one source."""
    for index in np.flatnonzero(decoding & (result.predicted > 0)).tolist():
        request, verified = _owner(state, at.item(index)), result.predicted.item(index)
        right = min(result.count.item(index) - 1, verified)
        cost = request.cost
        request.cost = cost._replace(
            accepted_predictions=cost.accepted_predictions + right,
            rejected_predictions=cost.rejected_predictions + verified - right,
        )


def _deliver(
    state: SchedulerState, result: StepResult, flight: Flight, at: Index, current: NDArray[np.bool_]
) -> None:
    """Hand out the tokens of the rows that are still there, and end those that are through."""
    rows = state.rows
    wanted = current & (result.count > 0)
    if state.mode.keeps_finished:
        wanted &= ~rows.done[at]
    tokens, count, finished = result.tokens, result.count, result.finished
    if not all_set(wanted):
        if not any_set(wanted):
            return
        at, tokens, count, finished = at[wanted], tokens[wanted], count[wanted], finished[wanted]
    before = rows.num_tokens[at]
    place = before - rows.num_known[at]
    index = before - rows.num_prompt[at]
    if flight.width:  # a row gets one token, and those of its drafts that were right
        after = before + count
        first = after - before  # where the tokens of each row begin, if all stand one behind the other
        each = np.arange(len(at)).repeat(first)
        first = np.cumsum(first) - first
        number = np.arange(len(each))
        # One index instead of two: that takes half the time.
        flat = tokens.reshape(-1)[(np.arange(0, tokens.size, tokens.shape[1]) - first)[each] + number]
        rows.outputs.reshape(-1)[(at * rows.outputs.shape[1] + (place - first))[each] + number] = flat
        owner, index = at[each], (index - first)[each] + number
    else:
        owner, flat, after = at, tokens[:, 0], before + 1
        rows.outputs[at, place] = flat
    rows.num_tokens[at] = after
    if state.accounting.accounts is not None:
        state.accounting.delivered(rows.tenant[owner])
    state.events.tokens.append(
        TokenEvents(
            seq=result.seq, time_s=state.now_s, requests=rows.request_id[owner], tokens=flat, index=index
        )
    )
    if flight.spans:  # a row that computes known tokens may get its first
        for row in at[place == 0].tolist():
            request = _owner(state, row)
            if request.first_token_s is not None:
                continue
            request.first_token_s = state.now_s
            if state.dial.watches:
                state.dial.first_token(state.now_s - request.arrival_s)
    if state.dial.watches:
        steering.delivered(state, flight, at, place)
    if flight.at_length or has_either(finished, STOPPED, AT_LENGTH):
        stopped = finished == STOPPED
        ended = after >= rows.max_len[at]
        ended |= stopped
        if any_set(ended):
            _end_rows(state, at[ended], stopped[ended])


def _deliver_logprobs(state: SchedulerState, result: StepResult, flight: Flight, current: Index) -> None:
    rows, known = state.rows, set(current.tolist())
    # Of the tokens that a row gets in a step, the last was drawn; those before it were drafts.
    ends = dict(zip(result.rows.tolist(), result.count.tolist(), strict=True)) if flight.width else {}
    for logprobs in result.logprobs:
        if logprobs.row in known:
            request, count = _owner(state, logprobs.row).id, ends.get(logprobs.row, 1)
            if count > 1 and 0 <= logprobs.position - rows.num_tokens.item(logprobs.row) < count - 1:
                logprobs = replace(logprobs, is_drafted=True)
            state.events.logprobs.append(LogprobEvent(request=request, logprobs=logprobs))


def _deliver_vectors(state: SchedulerState, result: StepResult, current: Index) -> None:
    """Pooled rows whose prompt is computed end, each with its vector."""
    known = set(current.tolist())
    for vector in result.vectors:
        if vector.row in known:
            request = _owner(state, vector.row)
            request.vector = vector.values.astype("<f4", copy=False).tobytes()
            state.counters.vectors += 1
            state.counters.pooled_tokens += request.num_prompt
            finish(state, request, FinishReason.STOP)


def _end_rows(state: SchedulerState, ended: Index, stopped: NDArray[np.bool_]) -> None:
    """Rows that have their last token leave, or wait for their batch, as the mode has it."""
    rows = state.rows
    if state.mode.keeps_finished:
        rows.done[ended] = True
        rows.padding[ended] = True
        for row, is_stop in zip(ended.tolist(), stopped.tolist(), strict=True):
            _owner(state, row).fail_detail = "stop" if is_stop else "length"
        retire_batch(state)
        return
    reasons = (FinishReason.LENGTH, FinishReason.STOP)
    for row, is_stop in zip(ended.tolist(), stopped.tolist(), strict=True):
        finish(state, _owner(state, row), reasons[is_stop])


def retire_batch(state: SchedulerState) -> None:
    """A padded batch leaves once all its rows are done."""
    rows = state.rows
    if rows.num_live and bool(np.all(rows.done[rows.live])):
        for row in np.flatnonzero(rows.live).tolist():
            request = _owner(state, row)
            finish(state, request, FinishReason(request.fail_detail))


def finish(state: SchedulerState, request: Request, reason: FinishReason, detail: str = "") -> None:
    """A request on a row has come to its end: what it computed may serve others, then it goes, or is held."""
    try:
        state.publish(request)
    except Exception as error:
        state.fail(request, error)
        return
    if request.sampling.pin is not None:
        pinning.keep(state, request)
    if request.sampling.cache_share < 1.0:
        share = request.sampling.cache_share
        state.wishes.hold_to_share(account_of(request.tenant), request.keys, share)
    state.close(request, reason, detail)


def _spans_done(state: SchedulerState, flight: Flight) -> bool:
    """Prompt tokens are computed: their full blocks may be shared from now on. True if a request has left its row."""
    rows, kv = state.rows, state.kv
    has_left = False
    for row, generation, count in flight.spans:
        if rows.generation[row] != generation:  # leaving raises it
            continue
        request = _owner(state, row)
        before = rows.computed.item(row)
        computed = before + count
        rows.computed[row] = computed
        if row in state.encodings.rows:
            state.encodings.computed(row, computed)
        if before < request.peak_computed <= computed:
            caught_up(request, kv.block_time.so_far(row))
        try:
            kv.publish(row, request.keys, computed)
        except Exception as error:
            state.fail(request, error)
            has_left = True
            continue
        if state.computing:
            state.computed_keys(request, before // kv.block_size, computed // kv.block_size)
        if request.ends_with_prompt and computed >= request.num_prompt:
            finish(state, request, FinishReason.STOP)  # the token drawn behind its prompt is not wanted
            has_left = True
    return has_left


def _encoded(state: SchedulerState, group: Group, count: int, bad: I32) -> None:
    """Some of a group is computed; requests on rows that need an item whose numbers are not finite end."""
    for encoding in state.encodings.was_computed(group, count, bad.tolist()):
        for request in state.encodings.holders(encoding):
            if request.row != NO_ROW:
                _numerical_error(state, request)


def _copy_done(state: SchedulerState, number: int) -> None:
    """A copy has completed; a request that was coming back, or loading, runs."""
    ticket = state.kv.complete_ticket(number)
    if ticket is None:
        return
    state.tiers.arrived(ticket)
    taken_s = _count_copy(state, ticket)
    request = _waits_for(state, ticket, number)
    if request is None:
        return
    request.blocked = None
    request.move(RequestState.RUNNING)
    state.prefilling[request.id] = request
    if ticket.keys is None:
        return
    computed, size = state.rows.computed.item(request.row), state.kv.block_size
    try:
        state.kv.publish(request.row, request.keys, computed)
    except Exception as error:
        state.fail(request, error)
        return
    state.tiers.loaded(ticket)
    state.counters.load_saved_s += max(0.0, ticket.compute_s - taken_s)
    if state.computing:
        state.computed_keys(request, 0, computed // size)


def copy_failed(state: SchedulerState, number: int) -> None:
    """What was copied is not there: a request that needs it computes it again."""
    ticket = state.kv.complete_ticket(number, failed=True)
    if ticket is not None:
        _count_copy(state, ticket, failed=True)
    if ticket is None or ticket.owner == NO_OWNER:
        return
    request = _waits_for(state, ticket, number)
    if request is not None:
        tokens = len(ticket.blocks[0]) * state.kv.block_size
        state.counters.judged(Rule.LOAD_FAILED)
        state.decide(DecisionKind.LOAD, request, Rule.LOAD_FAILED, tokens)
        if ticket.keys is not None and not request.preemptions:
            request.num_cached -= tokens
            state.counters.cached_tokens -= tokens
            state.counters.found(-tokens, -request.cost.from_host, -request.cost.from_disk)
            request.cost = request.cost._replace(from_host=0, from_disk=0)
        request.blocked, request.reserved, request.num_computed = None, False, 0
        state.kv.release(request.row)
        state.leave_row(request)
        state.enqueue(request)
    elif not ticket.incoming:  # a request that was swapped out
        request = state.requests.get(RequestId(ticket.owner))
        if request is not None and request.host_places:
            forget_places(state, request)


def _count_copy(state: SchedulerState, ticket: Ticket, *, failed: bool = False) -> float:
    """Returns the seconds from its plan until now."""
    seconds = (state.kv.block_time.now_us - ticket.issued_us) / MICROSECONDS
    count, incoming = ticket.num_blocks, ticket.incoming
    state.counters.copied(ticket.level, incoming=incoming, num_blocks=count, seconds=seconds, failed=failed)
    return seconds


def _waits_for(state: SchedulerState, ticket: Ticket, number: int) -> Request | None:
    """The request that is blocked until this copy is here."""
    request = state.requests.get(RequestId(ticket.owner))
    if request is None or request.blocked is None or request.blocked.ticket != number:
        return None
    return request


def _numerical_error(state: SchedulerState, request: Request) -> None:
    """Numbers that are not finite end their request alone; its blocks never reach the prefix cache."""
    state.kv.quarantine(request.row)
    state.end(request, FinishReason.ERROR, "numerical_error")


def _owner(state: SchedulerState, row: int) -> Request:
    request = state.rows.requests[row]
    assert request is not None
    return request
