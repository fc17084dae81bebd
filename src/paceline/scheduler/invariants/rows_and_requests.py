"""Invariants of requests and rows: each in one place, counters in order, nothing left behind. Of the pictures that rows
read: pages are counted right, no vector is read before it is computed, a line goes in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from paceline.core.fast import count_set
from paceline.core.plan import StepPlan
from paceline.core.request import NO_ROW, Request, RequestId, RequestState, RequestTree
from paceline.scheduler.encodings import Encodings
from paceline.scheduler.invariants.half_steps import (
    NO_REQUEST,
    SAYS,
    SEVERAL,
    Entries,
    Frames,
    Index,
    Mask,
    first_true,
    in_time,
)
from paceline.scheduler.invariants.registry import CHANGES, PLANNED, CheckContext, Findings, invariant, sweep
from paceline.scheduler.state import SchedulerState

# Read for all requests; see core.fast.
RUNNING, WAITING, SWAPPED, BLOCKED = (
    RequestState.RUNNING,
    RequestState.WAITING,
    RequestState.SWAPPED,
    RequestState.BLOCKED,
)


@invariant("E1")
def pages_have_the_references_of_rows_and_groups(context: CheckContext) -> str | None:
    """Free and live pages are all pages; references are those of rows, of groups under way and of fences."""
    encodings = context.scheduler.state.encodings
    pool = encodings.pool
    if encodings.work is None or not (encodings.rows or encodings.items or pool.num_free < pool.usable):
        return None
    wanted = np.zeros(pool.num_blocks, np.int32)
    for _, pages in encodings.fences:
        wanted[pages] += 1
    for group in encodings.unfinished:
        for encoding in group.encodings:
            wanted[encoding.pages] += 1
    for media in encodings.rows.values():
        for encoding in media.held.values():
            wanted[encoding.pages] += 1
    if not np.array_equal(wanted, pool.refs):
        page = int((wanted != pool.refs).argmax())
        return f"page {page} has {pool.refs[page]} references, and {wanted[page]} are known"
    if np.count_nonzero(pool.refs == 0) != pool.num_free:
        return (
            f"{pool.num_free} pages are counted as free, {np.count_nonzero(pool.refs == 0)} have no reference"
        )
    return _wrong_items(encodings)


def _wrong_items(encodings: Encodings) -> str | None:
    cached = np.zeros(encodings.pool.num_blocks, np.bool_)
    for key, encoding in encodings.items.items():
        if encoding.item.key != key:
            return f"item {encoding.media} is found under the key of another"
        if encoding.is_done:
            cached[encoding.pages] = True
        elif not any(encoding in group.encodings for group in encodings.unfinished):
            return f"item {encoding.media} is neither encoded nor being encoded"
    if not np.array_equal(cached, encodings.pool.cached):
        return "a page that can be evicted holds no vectors, or one that does cannot be"
    return None


@invariant("E2", moment=PLANNED)
def no_vector_is_read_before_it_is_computed(context: CheckContext) -> str | None:
    """What a row is scheduled to compute of an item, the row holds, and the whole line of it stands in plans."""
    state = context.scheduler.state
    scheduled, computed = state.rows.scheduled, state.rows.computed
    for row, media in state.encodings.rows.items():
        for index in range(media.passed, len(media.stretches)):
            stretch = media.stretches[index]
            if max(stretch.start, computed[row]) >= scheduled[row]:
                break
            encoding = media.held.get(index)
            if encoding is None or not encoding.is_planned:
                return f"row {row} computes token {stretch.start} of an item that is not encoded"
            if encoding.item.key != media.request.media[stretch.item].key:
                return f"row {row} holds another item than that of its stretch"
    return None


@invariant("E3", moment=PLANNED)
def the_line_of_a_group_goes_in_order(context: CheckContext) -> str | None:
    """Each position of a line stands in exactly one plan, in order, and one group at most has positions left."""
    state = context.scheduler.state
    for group in state.encodings.unfinished:
        underway = sum(flight.work.encode_positions for flight in state.flights if flight.group is group)
        if group.done + underway != group.planned or group.planned > group.total:
            return f"{group.planned} of {group.total} positions are planned, {group.done} done, {underway} under way"
        if (group is state.encodings.group) != (group.planned < group.total):
            return "a group that is not planned to its end is not the one under way"
    return None if context.plan is None else _wrong_part(state, context.plan)


def _wrong_part(state: SchedulerState, plan: StepPlan) -> str | None:
    part, group = plan.encodes, state.flights[-1].group
    if group is None:
        return "a plan encodes, and no group is under way" if part.count else None
    if part.first + part.count != group.planned or part.count < 1 or bool(part.joins) != (not part.first):
        return f"a plan computes {part.count} positions from {part.first} on, of {group.planned} planned"
    return None


@sweep("S9")
def counters_are_in_order(frames: Frames) -> Findings:
    names = ("computed", "scheduled", "num_tokens", "max_len", "num_known")
    computed, scheduled, tokens, limit, known = (frames.counts[name][frames.live] for name in names)
    wrong = (computed > scheduled) | ((computed > tokens) & ~frames.flags["done"][frames.live])
    wrong |= (tokens > limit) | (tokens < known)
    wrong |= (limit > frames.state.config.max_model_len) | (computed < 0)
    at = first_true(wrong)
    if at is not None:
        step, row = (int(part[at]) for part in frames.live)
        says = f"computed {computed[at]}, scheduled {scheduled[at]}, tokens {tokens[at]} of {limit[at]}"
        yield step, f"row {row}: {says}"


@invariant("S11", moment=CHANGES)
def each_request_is_in_one_place(context: CheckContext) -> str | None:
    state = context.scheduler.state
    queue, owners = state.queue.ids(), state.rows.requests
    counts = 0
    for request in state.requests.values():
        queued, on_row, now = request.id in queue, request.row != NO_ROW, request.state
        counts += queued + on_row
        if now is RUNNING:
            good = on_row and not queued and owners[request.row] is request
        elif now is WAITING or now is SWAPPED:
            good = queued and not on_row and bool(request.host_places) == (now is SWAPPED)
        else:
            good = not queued and (not on_row or now is BLOCKED)
        if not good:
            return f"request {request.id} says {now.value}, its place does not"
    if counts != len(queue) + state.rows.num_live:
        return "a place holds a request that is not live"
    if not state.prefilling.keys() <= state.requests.keys() or state.orders.keys() != state.requests.keys():
        return "a finished request is still listed"
    return None


@invariant("S12")
def requests_are_conserved(context: CheckContext) -> str | None:
    state = context.scheduler.state
    counters = state.counters
    if counters.added != len(state.requests) + counters.finished + counters.rejected:
        return f"{counters.added} added, {len(state.requests)} live, {counters.finished} finished"
    return None


@invariant("S21", moment=CHANGES)
def families_list_live_children(context: CheckContext) -> str | None:
    state = context.scheduler.state
    for parent, children in state.children.items():
        for child in children:
            request = state.requests.get(child)
            if request is None or request.parent != parent:
                return f"request {child} is listed as a branch of {parent}"
        if not children:
            return f"request {parent} is listed without branches"
    return None


@invariant("S30", moment=CHANGES)
def trees_are_within_their_limits(context: CheckContext) -> str | None:
    state = context.scheduler.state
    seen: dict[RequestTree, int] = {}
    for request in state.requests.values():
        tree = request.tree
        if tree is not None:
            seen[tree] = seen.get(tree, 0) + (request.row != NO_ROW)
            if tree.members.get(request.id) != request.most_generated:
                return f"request {request.id} may generate another number of tokens than its tree knows"
    for tree, num_rows in seen.items():
        limits = tree.limits
        if not tree.members.keys() <= state.requests.keys() or num_rows != tree.num_rows:
            return f"a tree says {sorted(tree.members)} with {tree.num_rows} rows, and has {num_rows}"
        keeps_rows = limits.max_rows is None or state.mode.keeps_finished  # padded batches are filled whole
        if not keeps_rows and num_rows > (limits.max_rows or 0):
            return f"a tree has {num_rows} rows, {limits.max_rows} are allowed"
        if len(tree.members) > limits.max_branches:
            return f"a tree has {len(tree.members)} branches, {limits.max_branches} are allowed"
        most = tree.num_spent + sum(tree.members.values())
        if limits.max_tokens is not None and most > limits.max_tokens:
            return f"a tree may come to {most} tokens, {limits.max_tokens} are allowed"
    return None


@invariant("S31", moment=CHANGES)
def branches_have_their_parents_beginning(context: CheckContext) -> str | None:
    """What a branch may share with its parent is the same in both."""
    state = context.scheduler.state
    for parent, children in state.children.items():
        known = None
        for branch in [state.requests[child] for child in children]:
            if parent not in state.requests or branch.shares > branch.num_prompt:
                continue
            known = context.scheduler.tokens_of(parent) if known is None else known
            if not np.array_equal(branch.tokens[: branch.shares], known[: branch.shares]):
                return f"request {branch.id} says that it has {branch.shares} tokens of request {parent}"
    return None


@invariant("S32", moment=CHANGES)
def the_best_of_a_tree_goes_first(context: CheckContext) -> str | None:
    """Of two branches of a tree the one with the higher score has the earlier place; a place is one request's."""
    state = context.scheduler.state
    # A request that computes a module goes where the one goes that waits for it.
    orders = [order for number, order in state.orders.items() if not state.requests[number].is_module]
    if len(set(orders)) != len(orders):
        return "two requests have one place in the order of arrival"
    for request in state.requests.values():
        tree = request.tree
        if tree is None or request.parent in state.requests or len(tree.members) < 2:
            continue
        branches = sorted((state.requests[RequestId(number)] for number in tree.members), key=_place(state))
        scores = [branch.score for branch in branches]
        if any(scores) and scores != sorted(scores, reverse=True):
            return f"the branches of a tree go in the order of the scores {scores}"
    return None


def _place(state: SchedulerState) -> Callable[[Request], int]:
    return lambda request: state.orders[request.id]


@sweep("S23", moment=CHANGES)
def rows_are_what_their_requests_say(frames: Frames) -> Findings:
    taken = [(step, frame.owners) for step, frame in enumerate(frames.frames) if frame.owners is not None]
    if not taken:
        return
    steps = np.array([step for step, _ in taken], np.int64)
    live = frames.flags["live"][steps]
    num_live = np.add.reduce(live, axis=1, dtype=np.int64)
    allowed, num_rows = frames.state.config.max_num_seqs, frames.state.rows.num_rows
    for (step, owners), count in zip(taken, num_live.tolist(), strict=True):
        if count > allowed:
            yield step, f"{count} rows are live, {allowed} are allowed"
        if count != len(owners.says):
            yield step, "a live row has no owner"
            return  # what comes after it has no place among the rows
        if owners.num_free + count != num_rows or owners.num_different < owners.num_free:
            yield step, "a row is lost or free twice"
    yield from _wrong_columns(frames, steps, live, [owners.says for _, owners in taken])


def _wrong_columns(
    frames: Frames, steps: Index, live: Mask, says: Sequence[Sequence[tuple[int, ...]]]
) -> Findings:
    """Where a column of a row in use is not what its owner says; there are as many owners as rows in use."""
    taken, row = live.nonzero()
    step = steps[taken]
    width = len(SAYS)
    said = np.fromiter(chain.from_iterable(chain.from_iterable(says)), np.int64, len(row) * width)
    columns = [row, *(frames.column(name)[step, row] for name in SAYS[1:])]
    wrong = first_true(said.reshape(-1, width) != np.array(columns).T)
    if wrong is not None:
        at, column = divmod(wrong, width)
        yield int(step[at]), f"row {row[at]}: its {SAYS[column]} is not what its request says"


@invariant("S24", moment=CHANGES)
def gauges_are_what_they_count(context: CheckContext) -> str | None:
    """Running totals equal what counting now gives."""
    state = context.scheduler.state
    rows, queue, live = state.rows, state.queue, context.scheduler.state.rows.live
    gauges = [
        ("live rows", rows.num_live, count_set(live)),
        ("reserved rows", rows.num_reserved, count_set(rows.reserved & live)),
        ("queued tokens", queue.num_tokens, sum([len(request.tokens) for request in queue])),
    ]
    for group in state.kv.groups:
        if group.reserved or rows.num_reserved:
            promised = int(group.reserved_for[context.live].sum())
            gauges.append((f"blocks promised in group {group.index}", group.reserved, promised))
    for name, says, counted in gauges:
        if says != counted:
            return f"{name}: the gauge says {says}, there are {counted}"
    return None


_NONE: list[int] = []


@sweep("S14", moment=PLANNED)
def the_plan_keeps_its_bounds(frames: Frames) -> Findings:
    writes, config, fewest = frames.writes, frames.state.config, frames.state.dial.fewest
    planned = writes.decoding.astype(np.int64)  # how often each row is planned: [plan, row]
    for number, (step, one) in enumerate(zip(writes.steps, writes.plans, strict=True)):
        plan, work, scheduled = one.plan, one.plan.work, _NONE
        if len(plan.spans.row):
            scheduled = plan.spans.num_scheduled.tolist()
            for row in set(plan.spans.row.tolist()):  # K5 looks at what a row has several of
                planned[number, row] += 1
            if min(scheduled) < 1:
                yield step, "a span is empty"
        total = work.decode_rows + sum(scheduled) + plan.pad_tokens
        allowed, most = one.flight.budget, config.most_step_tokens(work.decode_rows)
        if allowed > most:
            yield step, f"{allowed} tokens are allowed, {most} at most may be"
        if allowed < min(work.decode_rows + fewest, config.max_num_batched_tokens):
            yield (
                step,
                f"{allowed} tokens are allowed, too few for the prompts beside {work.decode_rows} rows",
            )
        if total + plan.draft_tokens > allowed:
            drafts = f" and {plan.draft_tokens} drafts" if plan.draft_tokens else ""
            yield step, f"{total} tokens{drafts} are planned, {allowed} are allowed"
        if work.logit_rows > work.decode_rows + len(scheduled):
            yield step, "more rows are sampled than planned"
    steps = np.array(writes.steps, np.int64)
    wrong = first_true(planned > 1)
    if wrong is not None:
        yield int(steps[wrong // frames.num_rows]), "a row is planned twice"
    wrong = first_true(planned.astype(np.bool_) & ~frames.flags["live"][steps])
    if wrong is not None:
        yield int(steps[wrong // frames.num_rows]), "a row that is not in use is planned"


@invariant("S9d")
def what_is_scheduled_is_what_is_under_way(context: CheckContext) -> str | None:
    """With drafts a row may advance by several tokens in a step: as many as steps under way allow, and no more."""
    state = context.scheduler.state
    if state.drafts is None:
        return None
    rows = state.rows
    bound = rows.computed[: rows.high].copy()
    for flight in state.flights:
        bound[: len(flight.mask)] += flight.mask * (flight.width + 1)
        for row, generation, count in flight.spans:
            bound[row] += count if rows.generation[row] == generation else 0
    # The last token of an answer is never computed; one that ends with a vector computes all it knows.
    last = np.maximum(rows.max_len[: rows.high] - 1, rows.num_known[: rows.high])
    np.minimum(bound, last, out=bound)
    wrong = (rows.scheduled[: rows.high] != bound) & rows.live[: rows.high]
    if np.count_nonzero(wrong):
        row = int(wrong.argmax())
        return f"row {row}: {rows.scheduled[row]} tokens are scheduled, at most {bound[row]} can be computed"
    return None


@invariant("M6", moment=CHANGES)
def what_ends_with_a_vector_has_no_output(context: CheckContext) -> str | None:
    """A pooled request computes its prompt and ends: it never decodes, and its vector comes with its ending alone."""
    rows = context.scheduler.state.rows
    for request in context.scheduler.state.requests.values():
        if request.sampling.pooling is None:
            continue
        if request.num_tokens != request.num_prompt or request.vector:
            return f"request {request.id} is to end with a vector and has output, or has its vector and lives"
        if request.row != NO_ROW and rows.decoding[request.row]:
            return f"request {request.id} is to end with a vector and decodes"
    return None


@invariant("S28", moment=CHANGES)
def times_are_in_order(context: CheckContext) -> str | None:
    now_s = context.scheduler.state.now_s
    for request in context.scheduler.state.requests.values():
        admitted_s, first_s = request.admitted_s, request.first_token_s
        if admitted_s is None:
            good = first_s is None
        else:
            good = admitted_s <= (now_s if first_s is None else first_s) <= now_s
        if not good:
            return f"request {request.id}: admitted {admitted_s}, first token {first_s}, now {now_s}"
    return None


@invariant("L5", moment=CHANGES)
def preemptions_are_bounded(context: CheckContext) -> str | None:
    """A request that was preempted often enough runs with its full length reserved, and is not preempted again."""
    state = context.scheduler.state
    if not state.config.max_preemptions:
        return None
    for request in state.requests.values():
        if request.preemptions < state.config.max_preemptions:
            continue
        if request.preemptions > state.config.max_preemptions:
            return f"request {request.id} was preempted {request.preemptions} times"
        if request.state is RUNNING and not request.reserved:
            return f"request {request.id} runs unreserved after {request.preemptions} preemptions"
    return None


@invariant("L8", moment=PLANNED)
def deadlines_have_been_kept(context: CheckContext) -> str | None:
    state = context.scheduler.state
    if not state.deadlines:
        return None
    for request in state.requests.values():
        if request.deadline_s is not None and request.deadline_s < state.now_s and context.plan is not None:
            return f"request {request.id} lives past its deadline {request.deadline_s}"
    return None


# Invariants of what is under way: nothing a step or a copy still uses is given to another.


def remember(frames: Frames) -> None:
    """Note which row of each plan touches which block, for the plans that are made while it runs."""
    writes, starts = frames.writes, frames.block_starts
    touched = np.full((len(writes.plans), starts[-1]), NO_REQUEST, np.int64)
    flat = touched.reshape(-1)
    for group, start in zip(frames.groups, starts.tolist(), strict=False):
        entries = Entries(group, writes.picture, writes.row)
        place = entries.block + entries.spread(writes.number * starts[-1] + start)
        flat[place] = entries.row
        flat[place[flat[place] != entries.row]] = SEVERAL
    for planned, mine in zip(writes.plans, touched, strict=True):
        copies = planned.plan.block_copies
        if len(copies.row):
            mine[starts[copies.group] + copies.source] = SEVERAL
        planned.touched = mine


@sweep("S22", moment=PLANNED)
def no_block_changes_hands_under_a_step(frames: Frames) -> Findings:
    """What a plan writes is not touched by an earlier step of another row, nor by a copy, still under way."""
    writes, starts = frames.writes, frames.block_starts
    underway = dict.fromkeys(chain.from_iterable(planned.in_flight for planned in writes.plans))
    if not underway:
        return
    untouched = np.full(starts[-1], NO_REQUEST, np.int64)
    touched = np.array([untouched, *(one.touched for one in underway)])
    place = {one: at for at, one in enumerate(underway, start=1)}
    for lag in range(max(len(planned.in_flight) for planned in writes.plans)):
        behind = [place[p.in_flight[lag]] if lag < len(p.in_flight) else 0 for p in writes.plans]
        at = np.array(behind, np.int64)[writes.number]
        for group, start in zip(frames.groups, starts.tolist(), strict=False):
            for blocks in writes.blocks_of(group, frames.state.kv.block_size):
                owner = touched[at, start + blocks]
                for wrong in in_time(writes.step, (owner != NO_REQUEST) & (owner != writes.row)):
                    what = f"row {writes.row[wrong]} writes a block that a step under way still uses"
                    yield int(writes.step[wrong]), what
    for step, planned in zip(writes.steps, writes.plans, strict=True):
        copies, swaps = planned.plan.block_copies, planned.plan.swap_in
        if not len(copies.row) and not len(swaps.block):
            continue
        fresh = np.concatenate([starts[copies.group] + copies.target, starts[swaps.group] + swaps.block])
        if any(np.count_nonzero(one.touched[fresh] != NO_REQUEST) for one in planned.in_flight):
            yield step, "a copy goes into a block that a step under way still uses"


@invariant("S22r", moment=PLANNED)
def no_row_changes_hands_under_a_step(context: CheckContext) -> str | None:
    """A row that joins takes part in no earlier step whose result is still to come."""
    flights = context.scheduler.state.flights
    if context.plan is None or len(flights) < 2:
        return None
    joined = context.plan.joins.row
    for flight in list(flights)[:-1] if len(joined) else ():
        busy = {row for row, _, _ in flight.spans}.union(np.flatnonzero(flight.mask).tolist())
        if not busy.isdisjoint(joined.tolist()):
            return f"rows {sorted(busy.intersection(joined.tolist()))} join while step {flight.seq} uses them"
    return None


@invariant("A1", moment=PLANNED)
def rows_have_their_adapter(context: CheckContext) -> str | None:
    """What a plan says of a row is its request's adapter, and it stands for one that is in memory."""
    state = context.scheduler.state
    places = state.adapters
    if not places.identities and not places.rows:
        return None
    owners = state.rows.requests
    for row in context.live.tolist():
        request = owners[row]
        number = 0 if request is None else request.adapter
        if number and (number not in places.resident or not places.identities.get(number)):
            return f"row {row} has adapter {number}, which is not in memory"
    plan = context.plan
    if plan is not None and len(plan.joins.adapter):
        for row, number in zip(plan.joins.row.tolist(), plan.joins.adapter.tolist(), strict=True):
            request = owners[row]
            if request is not None and request.adapter != number:
                return f"row {row} joins with adapter {number}, its request has {request.adapter}"
    return None


@invariant("A2")
def no_adapter_with_rows_is_evicted(context: CheckContext) -> str | None:
    """Rows, and steps under way, keep an adapter in memory; there are no more of them than there are places."""
    state = context.scheduler.state
    places = state.adapters
    if not places.identities and not places.users:
        return None
    requests = [request for request in state.requests.values() if request.adapter]
    rows = Counter(request.adapter for request in requests if request.row != NO_ROW)
    if rows != places.rows or Counter(request.adapter for request in requests) != places.users:
        return f"rows have adapters {dict(rows)}, and {places.rows} are counted"
    kept = places.resident.keys() | places.leaving.keys()
    for number, last in places.last_plan.items():
        if last > state.kv.completed and number not in kept and number in places.identities:
            return f"adapter {number} was let go of before step {last} has completed"
    if not rows.keys() <= places.resident.keys():
        return f"adapters {sorted(rows.keys() - places.resident.keys())} have rows and were evicted"
    taken = len(places.resident) + len(places.coming) + len(places.leaving)
    if places.most and taken > places.most:
        return f"{taken} adapters are in memory or on their way, and there are {places.most} places"
    return None
