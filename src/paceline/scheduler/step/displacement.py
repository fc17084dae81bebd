"""Places for urgent requests: the first waiting request may take the place of a running one that it clearly outranks.

Checked before a plan is begun, for policies that have `yields`. The last in order are preempted, only as many as are
enough; none does when all that may would not be, or when those that end will sooner give back what is short. No request
gives its place a second time before it has got further than it ever was.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from paceline.core.events import NO_NUMBER, Rule
from paceline.core.request import Request, RequestState
from paceline.scheduler.state import SchedulerState
from paceline.scheduler.step.admission import PASSABLE, Admission, StepDraft, Verdict
from paceline.scheduler.step.preemption import CostEstimate, estimate, preempt, seconds_until

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
