"""How far a prompt with stretches may be computed in a step, and what it pays for on the way.

The scheduled counter of a row stays one number, and stops at the first stretch that cannot be computed yet: at a
picture without vectors, whose encoding the row pays for with its own share of the step. So a picture never makes a step
longer than a prompt would, and a row that is preempted, forked or resumed meets its stretches again.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.events import DecisionKind, Rule
from paceline.core.request import Request
from paceline.scheduler.encodings import Encoding
from paceline.scheduler.state import SchedulerState
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
        break
    draft.bounds = {**draft.bounds, row: Rule.PAGES if encodings.lacks_pages else Rule.GROUP}
    return limit


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
        _record(state, media.request, media.held[index], Rule.FOUND_ENCODED, f"at step {step}")


def _record_encoded(state: SchedulerState, draft: StepDraft) -> None:
    group, state.encodings.last_completed = state.encodings.last_completed, None
    assert group is not None
    for encoding in group.encodings:
        first, last = encoding.first_step, encoding.last_step
        steps = f"in step {first}" if first == last else f"in steps {first} to {last}"
        beside = f" beside {draft.num_decoding} decoding rows" if draft.num_decoding else ""
        for request in state.encodings.holders(encoding):
            _record(state, request, encoding, Rule.ENCODED, steps + beside)


def _record(state: SchedulerState, request: Request, encoding: Encoding, rule: Rule, how: str) -> None:
    place = 1 + next(at for at, item in enumerate(request.media) if item.key == encoding.item.key)
    detail = f"picture {place} of {len(request.media)}: {how}"
    state.decide(DecisionKind.ENCODE, request, rule, encoding.item.outputs, detail=detail)
