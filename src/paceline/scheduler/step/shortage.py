"""When decoding rows need more blocks or tokens than there are: which rows stall, which gain, and whether to wait;
and which running requests the first waiting one may displace.

The composer asks; which request is preempted is the policy's choice. A row that stalls keeps its blocks and continues
when there is a block for it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from paceline.core.events import NO_NUMBER, NO_REQUEST, DecisionKind, Rule
from paceline.core.request import Request, RequestId, RequestState
from paceline.scheduler.state import SchedulerState
from paceline.scheduler.step.admission import PASSABLE, Admission, StepDraft, Verdict
from paceline.scheduler.step.preemption import CostEstimate, estimate, first_in_order, preempt, seconds_until


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


# Places for urgent requests: the first waiting request may take the place of a running one that it clearly outranks.
#
# Checked before a plan is begun, for policies that have `yields`. The last in order are preempted, only as many as
# are enough; none does when all that may would not be, or when those that end will sooner give back what is short. No
# request gives its place a second time before it has got further than it ever was.


MOST_LOOKED_AT = 8  # waiting requests in one plan
Index = NDArray[np.int64]


class Displacement:
    """Takes places from running requests, before a plan is begun."""

    def __init__(self, state: SchedulerState, admission: Admission) -> None:
        self._state = state
        self._admission = admission

    def outranked(self, request: Request) -> Index:
        """Running rows that yield to a waiting request, whether or not they may be taken."""
        state, policy = self._state, self._state.policy
        live = state.rows.live[: state.rows.high].nonzero()[0]
        if not policy.displaces or not len(live) or state.mode.keeps_finished:
            return live[:0]
        given: Index = live[policy.yields(state.row_view(live), state.queue.view_of(request, state.now_s))]
        return given

    def held_back(self, prompt_tokens_free: Callable[[], int]) -> Index:
        """Decoding rows that leave this step to prompts that outrank them and want more tokens than are free.

        Most policies hold no row back: then the free tokens are not counted.
        They keep what they hold and lose nothing but time, so that nothing bounds it but the order itself.
        """
        state = self._state
        rows, none = state.rows, np.zeros(0, np.int64)
        if not state.policy.pauses_rows or state.mode.keeps_finished:
            return none
        free_tokens = prompt_tokens_free()
        prompts = state.in_order(np.array([request.row for request in state.prefilling.values()], np.int64))
        urgent, wanted = None, 0
        if len(prompts):
            urgent = state.row_view(prompts[:1])
            wanted = int((rows.num_known[prompts] - rows.scheduled[prompts]).sum())
        if len(state.queue) and wanted <= free_tokens:
            head = state.waiting_in_order(1)[0]
            if self._admission.judge(head).rule is None:
                wanted += head.num_tokens
                urgent = state.queue.view_of(head, state.now_s) if urgent is None else urgent
        if urgent is None or wanted <= free_tokens:
            return none
        decoding = rows.decoding[: rows.high].nonzero()[0]
        held: Index = decoding[state.policy.holds_back(state.row_view(decoding), urgent)]
        return held

    def make_places(self, draft: StepDraft) -> None:
        """Preempt running requests for the first waiting ones, in order, as far as that helps."""
        state = self._state
        if not state.policy.displaces or state.mode.keeps_finished or not state.rows.num_live:
            return
        rows = blocks = 0  # that the requests before it will take
        for request in state.waiting_in_order(MOST_LOOKED_AT):
            verdict = self._admission.judge(request, has_row=True)
            if verdict.rule in PASSABLE:
                continue
            if verdict.rule not in (None, Rule.BLOCKS):
                return
            if not self._make_place(draft, request, rows, blocks, verdict):
                return
            rows, blocks = rows + 1, blocks + verdict.needed

    def _make_place(
        self, draft: StepDraft, request: Request, rows_before: int, blocks_before: int, verdict: Verdict
    ) -> bool:
        """Make room for one more request, if possible. False: the requests behind it wait too."""
        state = self._state
        num_rows = rows_before + 1 + state.rows.num_live - state.most_rows
        num_blocks = blocks_before + verdict.lacking - state.kv.coming()
        if num_rows <= 0 and num_blocks <= 0:
            return True
        chosen = self._choose(draft, request, num_rows, num_blocks)
        for row in chosen:
            victim = state.rows.requests[row]
            assert victim is not None
            victim.displaced_at = max(state.rows.peak_computed.item(row), state.rows.computed.item(row))
            figures = (NO_NUMBER, state.kv.free_for(), verdict.needed, request.id)
            preempt(state, victim, reason="place", figures=figures)
        return bool(chosen)

    def _choose(self, draft: StepDraft, request: Request, num_rows: int, num_blocks: int) -> list[int]:
        """The rows to preempt: the last in order, just enough; none if that is not enough or not worth it."""
        rows = self._eligible(request)
        chosen: list[int] = []
        given = 0
        last_first = self._state.in_order(rows)[::-1].tolist()
        for row in sorted(last_first, key=lambda row: not self._is_spot(row)):
            if len(chosen) >= num_rows and given >= num_blocks:
                break
            chosen.append(row)
            given += self._given_back(row)
        if len(chosen) < max(1, num_rows) or given < num_blocks:
            return []
        wait_s = seconds_until(self._state, num_blocks, num_rows)
        cost = estimate(self._state, chosen, wait_s)
        if wait_s <= self._price(cost):
            draft.remarks[request.id] = str(cost)
            return []
        return chosen

    def _price(self, cost: CostEstimate) -> float:
        kind = self._state.config.preemption
        return {"recompute": cost.recompute_s, "swap": cost.swap_s}.get(kind, cost.preempt_s)

    def _eligible(self, request: Request) -> Index:
        """Of the rows that yield to a request, those that may be taken now."""
        rows, outranked = self._state.rows, self.outranked(request)
        further = rows.computed[outranked] > rows.displaced_at[outranked]
        free = ~rows.reserved[outranked] & ~rows.done[outranked] & further
        return np.array([row for row in outranked[free].tolist() if self._runs(row)], np.int64)

    def _runs(self, row: int) -> bool:
        request = self._state.rows.requests[row]
        return request is not None and request.state is RequestState.RUNNING

    def _is_spot(self, row: int) -> bool:
        request = self._state.rows.requests[row]
        return request is not None and request.is_spot

    def _given_back(self, row: int) -> int:
        """Blocks that no other row holds."""
        return min(int((group.pool.refs[group.blocks_of(row)] == 1).sum()) for group in self._state.kv.groups)
