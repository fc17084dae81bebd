"""Composing one step: decodes, then prompts under way, then new requests, under one token budget.

There are no phases: a row computes what it knows and has not computed. Plain decode is handled for all rows at
once over columns; Python loops run only over rows that joined, crossed a block, or compute a prompt.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from paceline.core.events import NOBODY, DecisionKind, Rule
from paceline.core.plan import EMPTY, SAME_ROWS, StepPlan, StepWork, i32
from paceline.core.request import NO_ROW, Request, RequestId
from paceline.scheduler.state import Flight, SchedulerState
from paceline.scheduler.step import shortage
from paceline.scheduler.step.admission import NO_BUDGET, Admission
from paceline.scheduler.step.columns import build_joins, build_spans, row_changes
from paceline.scheduler.step.displacement import Displacement
from paceline.scheduler.step.pace import make_pace, step_budget
from paceline.scheduler.step.preemption import pick_victim, preempt

Mask = NDArray[np.bool_]
_NO_MASK: Mask = np.zeros(0, np.bool_)
_NO_ROWS: NDArray[np.int64] = np.zeros(0, np.int64)


class Composer:
    """Builds plans. All state lives in `SchedulerState`; what is here is one step's bookkeeping."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.admission = Admission(state)
        self.displacement = Displacement(state, self.admission)
        self.pace = make_pace(state.config)
        self._last_mask = _NO_MASK  # plain decode rows of the last plan
        self._last_context = 0  # tokens of KV they read
        self._full = False  # all rows were taken when somebody waited, and that is on record
        self._spans: dict[int, int] = {}  # tokens by row
        self.budget = self.tokens_left = 0  # of the last plan
        self.passed: set[int] = set()  # requests the last schedule asked and passed over, for checks
        self._pads: dict[int, int] = {}  # of padding
        self._left = self._products = self._logit_rows = self._decode_count = 0
        self._advancing = _NO_MASK
        self.held = _NO_ROWS  # rows that leave the step being made to others
        self._at_length = False

    def compose(self) -> StepPlan | None:
        """The next plan, or None when there is nothing to compute or copy."""
        state = self._state
        self._spans, self._pads, self.passed = {}, {}, set()
        self.budget = self._left = state.most_decoding
        self._products, self._logit_rows, self._at_length, self.held = 0, 0, False, _NO_ROWS
        self.admission.begin()
        self._promote()
        if state.kv.windowed:
            live = state.rows.live[: state.rows.high].nonzero()[0]
            state.kv.slide_each(live, state.rows.computed[live])
            state.kv.settle()
        if len(state.queue):
            self.displacement.make_places()
        if state.prefilling or len(state.queue):
            self.held = self.displacement.held_back(self._prompt_room)
        mask = self._decode()
        prompts = self._prompts()
        if prompts or len(state.queue):
            self.budget = step_budget(state, self.pace, mask, prompts)
            self._left = self.budget - self._decode_count
        if prompts:
            self._continue_prefills(prompts)
        if len(state.queue):
            self._admit_waiting(len(prompts))
        if self._left > 0 and state.prefilling:
            for row in self._prompts():  # what nobody else took goes to the prompts that were held back
                self._span(row, self._left)
        if len(self.held) and not (self._decode_count or self._spans):
            mask = self._decode_held()
        self.tokens_left = self._left
        if not (self._decode_count or self._spans or self._pads or self.has_open_copies):
            return None
        return self._plan(mask)

    def _decode_held(self) -> Mask:
        """Whom rows were held back for has failed: they decode after all, and the step is theirs alone."""
        self.held = _NO_ROWS
        self.budget = self._left = self._state.most_decoding
        mask = self._decode()
        self.budget = step_budget(self._state, self.pace, mask, [])
        self._left = self.budget - self._decode_count
        return mask

    @property
    def has_open_copies(self) -> bool:
        """A swap is to be sent or under way: word of its completion comes back with a step."""
        kv = self._state.kv
        return kv.delta.has_copies or bool(kv.tickets.open)

    def forget(self) -> None:
        """The runner has been reset: no row is in plain decode there."""
        self._last_mask = _NO_MASK

    def decode_rows(self) -> NDArray[np.int64]:
        """Rows in plain decode as of the last plan."""
        return np.flatnonzero(self._last_mask)

    # -- plain decode --------------------------------------------------------------------------------------

    def _promote(self) -> None:
        """Rows whose last known token has been scheduled decode from now on."""
        state = self._state
        rows = state.rows
        for row, generation in state.promoted:
            if rows.generation[row] == generation and rows.live[row]:
                rows.decoding[row] = True
        state.promoted.clear()

    def _decode(self) -> Mask:
        """Schedule one token for every row in plain decode that can have one."""
        state = self._state
        rows, kv = state.rows, state.kv
        mask, crossing, shared = self._decode_needs()
        if len(crossing) + len(shared) + self._prompt_need() > kv.room():
            mask, crossing, shared = self._make_room()
        for row in shared:
            kv.copy_on_write(row, int(rows.scheduled[row]))
            rows.sharing[row] = False
        if len(crossing):
            kv.extend_each(crossing)
        high = len(mask)
        scheduled = rows.scheduled[:high]
        advancing = mask & ~rows.padding[:high] if state.mode.keeps_finished else mask
        scheduled += advancing
        ended = scheduled + 1 >= rows.max_len[:high]
        ended &= advancing
        self._advancing = advancing
        if 1 in ended.tobytes():
            self._at_length = True
            self._end_of_length(ended)
        count = mask.tobytes().count(1)
        self._decode_count = count
        self._left -= count
        self._logit_rows += count
        return mask

    def _decode_needs(self) -> tuple[Mask, NDArray[np.int64], list[int]]:
        """Rows that decode, those that need a block for it, and those that must copy a shared one first."""
        rows, kv = self._state.rows, self._state.kv
        high = rows.high
        mask = rows.decoding[:high].copy()
        mask[self.held] = False
        if rows.num_needs_host:  # the host must see the last token first
            mask &= ~(rows.needs_host[:high] & (rows.scheduled[:high] != rows.computed[:high]))
        if high >= self._left and np.count_nonzero(mask) >= self._left:
            shortage.trim(self._state, mask, self._left)
        full = rows.scheduled[:high] >= kv.groups[0].held[:high] * kv.block_size
        full &= mask
        if self._state.mode.keeps_finished:  # padding is computed into the null block
            full &= ~rows.padding[:high]
        crossing = full.nonzero()[0]
        return mask, crossing, shortage.shared_writes(self._state, mask) if rows.any_sharing else []

    def _prompt_room(self) -> int:
        """Tokens a step has for prompts if all rows decode."""
        mask = self._state.rows.decoding[: self._state.rows.high]
        return step_budget(self._state, self.pace, mask, self._prompts()) - int(np.count_nonzero(mask))

    def _prompt_need(self) -> int:
        """Blocks the first prompt under way needs for its next token."""
        return shortage.prompt_need(self._state, self._prompts()[0]) if self._state.prefilling else 0

    def _make_room(self) -> tuple[Mask, NDArray[np.int64], list[int]]:
        """Blocks are short: preempt until the rest fits, or stall rows until blocks on their way are here."""
        state = self._state
        kv = state.kv
        remark = ""
        while True:
            mask, crossing, shared = self._decode_needs()
            short = kv.short_of(crossing, len(shared) + self._prompt_need())
            if short <= 0:
                return mask, crossing, shared
            chosen = pick_victim(state, short) if short > kv.coming() else None
            if chosen is None:
                break
            needy = {*crossing.tolist(), *shared, *(self._prompts()[:1] if self._prompt_need() else ())}
            remark = shortage.worth_waiting(state, chosen[0], needy, short)
            if remark:
                break
            figures = (self._left, kv.room(), short, shortage.who_gains(state, chosen[0], needy))
            preempt(state, chosen[0], swap=chosen[1], reason="blocks", figures=figures)
        kept = self._prompt_need() if shortage.prompt_goes_first(state) else 0
        needy = {*crossing.tolist(), *shared}
        shortage.stall(state, mask, needy, set(shared), kept=kept, tokens_left=self._left, remark=remark)
        return mask, crossing[mask[crossing]], [row for row in shared if mask[row]]

    def _end_of_length(self, ended: Mask) -> None:
        """Rows that have been given their last token: they leave plain decode, or stay as padding."""
        rows = self._state.rows
        if self._state.mode.keeps_finished:
            rows.padding[: len(ended)] |= ended
        else:
            rows.decoding[: len(ended)] &= ~ended

    # -- prompts -------------------------------------------------------------------------------------------

    def _prompts(self) -> list[int]:
        """Rows with known tokens still to compute, in order."""
        rows = [request.row for request in self._state.prefilling.values()]
        if len(rows) < 2:
            return rows
        ordered: list[int] = self._state.in_order(np.array(rows, np.int64)).tolist()
        return ordered

    def _continue_prefills(self, prompts: list[int]) -> None:
        """Tokens for the prompts under way, in order. Who waits and outranks one of them goes before it."""
        cap = self._cap(len(prompts))
        outranked: set[int] = set()
        if len(self._state.queue):
            head = self._state.waiting_in_order(1)[0]
            outranked = set(self.displacement.outranked(head).tolist())
        behind = [row for row in prompts if row in outranked]
        for row in prompts:
            if row not in outranked:
                self._span(row, min(self._left, cap))
        if behind:
            self._admit_urgent(set(behind), cap)
        for row in behind:
            if row not in self._spans:
                self._span(row, min(self._left, cap))

    def _admit_urgent(self, behind: set[int], cap: int) -> None:
        """Admit those who wait and outrank one of the prompts `behind`, for as long as there is room."""
        state = self._state
        for request in state.waiting_in_order(self.admission.rows_left()):
            if self._left < 1 or behind.isdisjoint(self.displacement.outranked(request).tolist()):
                return
            if not self._admit_in_turn([request], cap):
                return
            computes = state.prefilling.get(self.admission.against) if request.id in self.passed else None
            if computes is not None and computes.row in behind and computes.row not in self._spans:
                self._span(computes.row, min(self._left, cap))  # what it waits for is as urgent as it is

    def _cap(self, num_prompts: int) -> int:
        """Most tokens one prompt may take while others could use them."""
        state = self._state
        if self._left < 1 or not (num_prompts > 1 or (len(state.queue) and not state.mode.keeps_finished)):
            return self.budget
        return state.share(state.queue.view(state.now_s), self.budget)

    def _span(self, row: int, limit: int) -> None:
        """Schedule up to `limit` of a row's known tokens, its padding first."""
        rows = self._state.rows
        pad = max(0, min(rows.pad_left.item(row), limit))
        if pad:  # in a padded batch
            rows.pad_left[row] -= pad
            self._pads[row] = self._pads.get(row, 0) + pad
            self._left -= pad
            self._products += pad * pad // 2
        scheduled = rows.scheduled.item(row)
        count = wanted = min(rows.num_known.item(row) - scheduled, limit - pad)
        if count > 0:
            count = self._give_room(row, scheduled, count)
        if count > 0:
            self._advance(row, scheduled, count, wanted, limit - pad)

    def _give_room(self, row: int, scheduled: int, count: int) -> int:
        """Blocks for up to `count` tokens of a row from `scheduled` on; how many there is room for."""
        state = self._state
        rows, kv = state.rows, state.kv
        try:
            room = kv.room(row)
            if rows.sharing[row]:
                if kv.shared_writes(np.array([row]), np.array([scheduled]))[0]:
                    if room < 1:
                        return 0
                    kv.copy_on_write(row, scheduled)
                    room -= 1
                rows.sharing[row] = False
            fitting = (kv.groups[0].held.item(row) + (room if room > 0 else 0)) * kv.block_size - scheduled
            count = count if count < fitting else fitting
            if count > 0:
                kv.extend(row, scheduled + count)
        except Exception as error:  # it fails alone; what it was given in this plan already goes with it
            request = rows.requests[row]
            assert request is not None
            kv.delta.forget(row)
            self._spans.pop(row, None)
            state.fail(request, error)
            kv.settle()
            return 0
        return count

    def _advance(self, row: int, scheduled: int, count: int, wanted: int, limit: int) -> None:
        """Schedule `count` known tokens, where `wanted` were to be, and no more than `limit`."""
        state = self._state
        rows = state.rows
        request = rows.requests[row]
        assert request is not None
        rows.scheduled[row] = scheduled + count
        self._spans[row] = self._spans.get(row, 0) + count
        before, self._left = self._left, self._left - count
        self._products += count * (scheduled + rows.pad.item(row)) + count * (count + 1) // 2
        if scheduled + count < rows.num_known.item(row):
            reason = Rule.BLOCKS if count < wanted else Rule.SHARE if limit < before else Rule.BUDGET
            figures = (
                self._left,
                state.kv.room(row),
                state.kv.missing(row, rows.num_known.item(row)),
                NOBODY,
            )
            state.decide(DecisionKind.CHUNK, request, reason, count, figures)
            return
        del state.prefilling[request.id]
        self._logit_rows += 1
        ends = scheduled + count + 1 >= rows.max_len.item(row)
        self._at_length |= ends
        if ends and state.mode.keeps_finished:
            rows.padding[row] = True
        if not ends or state.mode.keeps_finished:
            state.promoted.append((row, rows.generation.item(row)))

    # -- new requests --------------------------------------------------------------------------------------

    def _admit_waiting(self, num_prompts: int) -> None:
        """Admit waiting requests in order, for as long as there is room; `num_prompts` are under way already."""
        state = self._state
        rows_left = self.admission.rows_left()
        if rows_left < 1:
            if not self._full:  # once for each time that the rows run out, so that a steady step pays nothing
                self._full = True
                head = state.waiting_in_order(1)[0]
                self.admission.ask(self._left, state.ahead_of(head))
                self.admission.defer(head, Rule.ROWS)
            return
        self._full = False
        view = state.queue.view(state.now_s)
        limit = min(state.mode.admit_limit(view, state.rows.num_live), rows_left)
        if limit < 1:
            return
        if state.mode.keeps_finished:
            waiting = len(state.queue) + 1
            while len(state.queue) < waiting and not state.rows.num_live:  # a batch that all failed is none
                waiting = len(state.queue)
                self._admit_batch(state.waiting_in_order(limit))
            return
        cap = self._cap(num_prompts)
        seen: set[int] = set()
        while len(seen) < len(view):
            found = state.waiting_in_order(len(seen) + self.admission.rows_left())
            batch = [request for request in found if request.id not in seen]
            if not batch or not self._admit_in_turn(batch, cap):
                return
            seen.update(request.id for request in batch)

    def _admit_in_turn(self, batch: list[Request], cap: int) -> bool:
        """Admit each; False as soon as one has to wait for room: nobody passes it."""
        for request in batch:
            if self._left < 1 and not request.host_places:  # to be copied back takes no token
                last = next(reversed(self._spans), None)
                took = NOBODY if last is None else RequestId(self._state.rows.request_id.item(last))
                self.admission.ask(self._left, took)
                self.admission.defer(request, NO_BUDGET)
                return False
            reason = self._guarded(request, self.admission.admit)
            if request.id in self._state.prefilling:
                self._span(request.row, min(self._left, cap))
            elif reason is not None:
                self.admission.defer(request, reason)
                if not self.admission.may_be_passed(reason):
                    return False
                self.passed.add(request.id)
        return self.admission.rows_left() > 0

    def _admit_batch(self, candidates: list[Request]) -> None:
        """Admit a padded batch: as many of the candidates as their rectangle has room for.

        Not before the last step of the batch before has completed: only then is all of its memory free.
        """
        if self._state.flights:
            return
        shape = self._state.mode.shape(candidates, self._rectangle_fits)
        if shape is None:
            return
        for request in candidates[: shape.count]:
            self._guarded(request, lambda request: self.admission.admit_padded(request, shape))
            if request.row != NO_ROW:
                self._span(request.row, self._left)

    def _guarded(self, request: Request, admit: Callable[[Request], Rule | None]) -> Rule | None:
        """Admit one request; if that raises, it fails alone and nothing of it stays behind."""
        state = self._state
        self.admission.ask(self._left, state.ahead_of(request))
        mark = state.kv.delta.mark()
        try:
            reason = admit(request)
        except Exception as error:
            state.kv.delta.rollback(mark)
            state.fail(request, error)
            state.kv.settle()
            return None
        return reason

    def _rectangle_fits(self, count: int, slots: int) -> bool:
        kv = self._state.kv
        return count * kv.blocks_for(slots) <= kv.room()

    # -- the plan ------------------------------------------------------------------------------------------

    def _plan(self, mask: Mask) -> StepPlan:
        state = self._state
        rows = state.rows
        seq = state.kv.submitted + 1
        advancing, pad_tokens, filling = self._decode_count, 0, None
        if state.mode.keeps_finished:
            advancing, pad_tokens = int(np.count_nonzero(self._advancing)), sum(self._pads.values())
            filling = mask & ~self._advancing
        decode_rows = row_changes(self._last_mask, mask, state.leaves)
        self._last_mask = mask
        if decode_rows is SAME_ROWS:  # of the same owners too, or some would have left
            self._last_context += advancing
        else:
            self._last_context = int(np.dot(rows.scheduled[: len(mask)], mask))
        spans = tuple([(row, rows.generation.item(row), count) for row, count in self._spans.items()])
        appends, copies, swap_out, swap_in = state.kv.delta.take()
        joins, row_copies = build_joins(state, state.joins)
        plan = StepPlan(
            seq=seq,
            leaves=i32(state.leaves) if state.leaves else EMPTY,
            joins=joins,
            spans=build_spans(self._spans),
            decode_rows=decode_rows,
            new_blocks=appends,
            block_copies=copies,
            row_copies=row_copies,
            swap_out=swap_out,
            swap_in=swap_in,
            pad_tokens=pad_tokens,
            padding_rows=self._decode_count - advancing,
            work=StepWork(
                decode_rows=self._decode_count,
                decode_context=self._last_context,
                prefill_tokens=sum(self._spans.values()) + pad_tokens,
                prefill_context_products=self._products,
                logit_rows=self._logit_rows,
                swap_blocks=len(swap_out.block) + len(swap_in.block),
            ),
        )
        state.counters.planned(plan, state.rows.num_live)
        state.leaves, state.joins = [], []
        state.kv.submitted = seq
        padding = () if filling is None else (tuple(self._pads.items()), filling)
        flight = Flight(seq, self._advancing, spans, self._at_length, self.budget, plan.work, *padding)
        state.flights.append(flight)
        return plan
