"""How far a prompt with stretches may be computed in a step, and what it pays for on the way.

The scheduled counter of a row stays one number, and stops at the first stretch that cannot be computed yet: at a
picture without vectors, whose encoding the row pays for with its own share of the step. So a picture never makes a step
longer than a prompt would, and a row that is preempted, forked or resumed meets its stretches again.

At the body of a text that is placed, the counter goes on behind it at once: what is copied takes no token of the step.
The row then has several runs of tokens in one plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from paceline.core.events import NO_NUMBER, NO_REQUEST, DecisionKind, Rule
from paceline.core.plan import MORE_SPANS
from paceline.core.request import Request
from paceline.core.stretch import Stretch
from paceline.scheduler.encodings import Encoding
from paceline.scheduler.state import SchedulerState
from paceline.scheduler.step import pinning
from paceline.scheduler.step.admission import StepDraft
from paceline.scheduler.step.preemption import preempt


def reach(
    state: SchedulerState, draft: StepDraft, row: int, limit: int, prompts: Callable[[], list[int]]
) -> int:
    """Known tokens of a row that may be computed now, of at most `limit`. Encoding takes some of the step."""
    encodings, start = state.encodings, state.rows.scheduled.item(row)
    end = state.rows.num_known.item(row)
    while limit > 0:
        stretch = encodings.open_stretch(row, start)
        _record_found(state)
        if stretch is None or stretch.start >= min(start + limit, end):
            _end_wait(state, row)
            return limit
        before = max(0, stretch.start - start)
        step = state.kv.submitted + 1
        spent = encodings.buy(limit - before, prompts, step)
        draft.left -= spent
        limit -= spent
        if encodings.last_completed is not None:
            _record_encoded(state, draft)
            continue
        limit = min(limit, before)
        if encodings.rows[row].waits_since_s is None:
            encodings.rows[row].waits_since_s = state.now_s
        break
    draft.bounds = {**draft.bounds, row: Rule.PAGES if encodings.lacks_pages else Rule.GROUP}
    return limit


class NextPart(NamedTuple):
    """What comes next of a row that places texts: tokens up to a body, or what is left of one."""

    start: int
    end: int
    stretch: Stretch | None = None  # that is placed; None: the tokens are computed


def next_part(state: SchedulerState, draft: StepDraft, row: int) -> NextPart | None:
    """What comes next of a row; None: nothing more in this step."""
    request, start = state.rows.requests[row], state.rows.scheduled.item(row)
    if request is None or request.id not in state.prefilling:  # it has failed, or has all it knows
        return None
    body = state.modules.next_body(row, start) if row in state.modules.rows else None
    if body is None:
        return NextPart(start, state.rows.num_known.item(row))
    if start < body.start:
        return NextPart(start, body.start)
    if draft.num_jumps >= MORE_SPANS:
        return None
    return NextPart(start, body.end, body.stretch)


def place(state: SchedulerState, draft: StepDraft, row: int, part: NextPart, count: int) -> None:
    """The row has blocks for `count` tokens of a body: they are copied there, and it goes on behind them."""
    request, stretch = state.rows.requests[row], part.stretch
    assert request is not None and stretch is not None
    draft.num_jumps += 1
    draft.jumps = {**draft.jumps, row: [*draft.jumps.get(row, ()), (part.start, count)]}
    draft.spans.setdefault(row, 0)
    state.kv.place(row, stretch.item, part.start, part.start - stretch.start, count)
    end = state.rows.scheduled[row] = part.start + count
    _count_placed(state, request, stretch, part.start, end)
    if end == stretch.end:
        _record_placed(state, request, stretch)


def settle(state: SchedulerState, draft: StepDraft, seq: int) -> int:
    """The plan is made: rows let go of the modules that they have placed, once it is done. Returns how many tokens are
    placed."""
    for row in draft.jumps:
        scheduled, request = state.rows.scheduled.item(row), state.rows.requests[row]
        for item in list(state.kv.sources.rows[row]):
            if next(body.end for body in state.modules.rows[row] if body.stretch.item == item) <= scheduled:
                if request is not None:
                    pinning.keep_module(state, request, request.modules[item])
                state.kv.placed(row, item, seq)
    return sum([count for jumps in draft.jumps.values() for _, count in jumps])


def _count_placed(state: SchedulerState, request: Request, stretch: Stretch, start: int, end: int) -> None:
    """Tokens from `start` to `end` are placed. What is placed again after a preemption is counted once."""
    reused = end - max(start, request.placed_to)
    if reused <= 0:
        return
    is_first = request.placed_to <= stretch.start
    recomputed = _num_recomputed(request, stretch) if is_first else 0
    request.placed_to = end
    cost = request.cost
    request.cost = cost._replace(reused=cost.reused + reused, recomputed=cost.recomputed + recomputed)
    state.counters.reused_tokens += reused
    state.counters.recomputed_tokens += recomputed


def _num_recomputed(request: Request, stretch: Stretch) -> int:
    """Tokens at the beginning of a placed text that its row did not find in the cache."""
    body = stretch.start + request.modules[stretch.item].recompute
    return max(0, body - max(stretch.start, request.joined_at))


def _record_placed(state: SchedulerState, request: Request, stretch: Stretch) -> None:
    """A context stands in its place."""
    module = request.modules[stretch.item]
    reused = stretch.end - max(stretch.start + module.recompute, request.joined_at)
    figures = (NO_NUMBER, NO_NUMBER, len(module.keys), NO_REQUEST)
    again = _num_recomputed(request, stretch)
    detail = f"context {stretch.item + 1} of {len(request.modules)}: {again} tokens computed again"
    state.decide(DecisionKind.PLACE, request, Rule.PLACED, reused, figures, detail=detail)


def _end_wait(state: SchedulerState, row: int) -> None:
    """What a row stood at has vectors now."""
    media = state.encodings.rows[row]
    if media.waits_since_s is not None:
        state.counters.encode_waits += 1
        state.counters.encode_wait_s += state.now_s - media.waits_since_s
        media.waits_since_s = None


def make_room_for_pages(state: SchedulerState, prompts: list[int]) -> bool:
    """Nothing can be computed, because the first item in order finds no pages: preempt the last row that holds some."""
    encodings = state.encodings
    reserved = state.rows.reserved
    holders = [
        row for row in prompts[1:] if row in encodings.rows and encodings.rows[row].held and not reserved[row]
    ]
    if not encodings.lacks_pages or state.flights or not holders:
        return False
    request = state.rows.requests[holders[-1]]
    assert request is not None
    preempt(state, request, swap=None, reason="pages")
    state.kv.settle()
    return True


def _record_found(state: SchedulerState) -> None:
    """Rows that met items whose vectors were there."""
    found, state.encodings.found = state.encodings.found, []
    for media, index in found:
        step = state.kv.submitted + 1
        state.counters.media_queries += 1
        state.counters.media_hits += 1
        _charge(media.request, reused=1)
        _record(state, media.request, media.held[index], Rule.FOUND_ENCODED, f"at step {step}")


def _record_encoded(state: SchedulerState, draft: StepDraft) -> None:
    group, state.encodings.last_completed = state.encodings.last_completed, None
    assert group is not None
    counters = state.counters
    counters.encode_as_tokens = state.encodings.as_tokens
    counters.media_queries += len(group.encodings)
    counters.encoded += len(group.encodings)
    counters.encoded_units += group.units
    for encoding in group.encodings:
        first, last = encoding.first_step, encoding.last_step
        steps = f"in step {first}" if first == last else f"in steps {first} to {last}"
        beside = f" beside {draft.num_decoding} decoding rows" if draft.num_decoding else ""
        for place, request in enumerate(state.encodings.holders(encoding)):
            _charge(request, units=0 if place else encoding.item.units, reused=int(place > 0))
            _record(state, request, encoding, Rule.ENCODED, steps + beside)


def _charge(request: Request, *, units: int = 0, reused: int = 0) -> None:
    cost = request.cost
    request.cost = cost._replace(
        encoded_units=cost.encoded_units + units, encodings_reused=cost.encodings_reused + reused
    )


def _record(state: SchedulerState, request: Request, encoding: Encoding, rule: Rule, how: str) -> None:
    place = 1 + next(at for at, item in enumerate(request.media) if item.key == encoding.item.key)
    detail = f"picture {place} of {len(request.media)}: {how}"
    state.decide(DecisionKind.ENCODE, request, rule, encoding.item.outputs, detail=detail)
