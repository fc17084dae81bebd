"""When decoding rows need more blocks or tokens than there are: which rows stall, which gain, and whether to wait.

The composer asks; which request is preempted is the policy's choice. A row that stalls keeps its blocks and continues
when there is a block for it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.core.events import NO_REQUEST, DecisionKind, Rule
from paceline.core.request import Request, RequestId
from paceline.scheduler.state import SchedulerState
from paceline.scheduler.step.preemption import estimate, first_in_order, seconds_until


def stall(
    state: SchedulerState,
    mask: NDArray[np.bool_],
    needy: set[int],
    copying: set[int],
    *,
    kept: int,
    tokens_left: int,
    remark: str,
) -> None:
    """Take rows out of `mask` that there is no block for: of the `needy`, the first in order are served.

    Those in `copying` need one for a copy, which nothing is set aside for. `kept` blocks are for a prompt before them.
    """
    kv, rows = state.kv, state.rows
    free = [group.free_for(None) - kept for group in kv.groups]
    served = NO_REQUEST
    for row in state.in_order(np.array(sorted(needy), np.int64)).tolist():
        # In some groups a block may be set aside for it; what slid out of a window is not set aside again.
        own = [row not in copying and int(group.reserved_for[row]) > 0 for group in kv.groups]
        if all(mine or left > 0 for mine, left in zip(own, free, strict=True)):
            free = [left - (not mine) for mine, left in zip(own, free, strict=True)]
            served = RequestId(rows.request_id.item(row))
            continue
        mask[row] = False
        request = rows.requests[row]
        assert request is not None
        figures = (tokens_left, max(0, min(free)), 1, served)
        scheduled = int(rows.scheduled[row])
        state.decide(DecisionKind.STALL, request, Rule.BLOCKS, scheduled, figures, detail=remark)


def first_to_gain(state: SchedulerState, victim: Request, needy: set[int]) -> RequestId:
    """The first in order of the rows that need a block: the victim is preempted for it."""
    ordered = state.in_order(np.array(sorted(needy - {victim.row}), np.int64))
    return RequestId(state.rows.request_id.item(ordered[0])) if len(ordered) else NO_REQUEST


def worth_waiting(state: SchedulerState, victim: Request, needy: set[int], short: int) -> str:
    """What each way costs, if to let rows stall until others have ended is the cheapest; "" if not.

    Only rows that need no more blocks are waited for, and only while the first in order goes on.
    """
    foremost = first_in_order(state)
    if state.config.preemption != "auto" or (foremost in needy and state.kv.free_for(foremost) < 1):
        return ""
    wait_s = seconds_until(state, short - state.kv.coming(), 0, certain=True)
    cost = estimate(state, [victim.row], wait_s)
    share = min(short, len(needy)) / state.rows.num_live  # the others go on meanwhile
    return str(cost) if wait_s * share < cost.preempt_s else ""


def trim(state: SchedulerState, mask: NDArray[np.bool_], limit: int) -> None:
    """More rows than tokens: the first in order decode. A prompt that goes before them keeps a token."""
    if state.prefilling:
        oldest = first_in_order(state)
        limit -= 1 if oldest is not None and not mask[oldest] else 0
    ordered = state.in_order(np.flatnonzero(mask))
    if state.mode.keeps_finished:  # a row that only pads must not keep the others waiting
        ordered = ordered[np.argsort(state.rows.padding[ordered], kind="stable")]
    mask[ordered[limit:]] = False


def prompt_need(state: SchedulerState, row: int) -> int:
    """Blocks a prompt under way needs for its next token."""
    position = int(state.rows.scheduled[row])
    need = state.kv.missing(row, position + 1)
    if state.rows.sharing[row]:
        need += int(state.kv.shared_writes(np.array([row]), np.array([position]))[0])
    return need


def prompt_goes_first(state: SchedulerState) -> bool:
    """Whether the first in order still computes its prompt."""
    oldest = first_in_order(state)
    request = None if oldest is None else state.rows.requests[oldest]
    return request is not None and request.id in state.prefilling


def shared_writes(state: SchedulerState, mask: NDArray[np.bool_]) -> list[int]:
    """Those of the rows in `mask` that would write into a block others read."""
    rows, high = state.rows, len(mask)
    candidates = (mask & rows.sharing[:high]).nonzero()[0]
    is_shared = state.kv.shared_writes(candidates, rows.scheduled[candidates])
    rows.sharing[candidates[~is_shared]] = False  # no other row reads its last block any more
    rows.any_sharing = bool(np.count_nonzero(rows.sharing[:high]))
    shared: list[int] = candidates[is_shared].tolist()
    return shared
