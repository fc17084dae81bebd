"""Composing one step: decodes, then prompts under way, then new requests, under one token budget.

There are no phases: a row computes what it knows and has not computed. Plain decode
is handled for all rows at once over columns; Python loops run only over rows that joined, crossed a block, or compute
a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

import numpy as np

from paceline.core.events import NO_REQUEST, DecisionKind, Rule
from paceline.core.fast import any_set, count_set
from paceline.core.plan import EMPTY, NO_ENCODES, NO_PLACEMENTS, NO_TRUST, SAME_ROWS, StepPlan, StepWork, i32
from paceline.core.request import NO_ROW, Request, RequestId
from paceline.scheduler import steering
from paceline.scheduler.state import SchedulerState
from paceline.scheduler.step import shortage, stretches
from paceline.scheduler.step.admission import (
    NO_BUDGET,
    NO_MASK,
    NO_ROOM_ROWS,
    NO_ROWS,
    Admission,
    Index,
    Mask,
    StepDraft,
    Verdict,
)
from paceline.scheduler.step.columns import build_joins, build_spans, decode_context, flight_of, row_changes
from paceline.scheduler.step.pace import long_limit, make_pace, step_budget, step_room
from paceline.scheduler.step.preemption import pick_victim, preempt
from paceline.scheduler.step.shortage import Displacement


class Composer:
    """Builds plans. What belongs to one step is in its `StepDraft`; here is only what the next plan is a delta to."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.admission = Admission(state)
        self.displacement = Displacement(state, self.admission)
        self.pace = make_pace(state.config)
        self.last_draft = StepDraft(budget=0)  # of the last `compose`, for checks
        self._last_mask = NO_MASK  # plain decode rows of the last plan
        self._last_context = 0  # tokens of KV they read
        self._full = False  # all rows were taken while a request waited, and that is recorded

    def compose(self) -> StepPlan | None:
        """The next plan, or None when there is nothing to compute or copy."""
        state = self._state
        draft = self.last_draft = StepDraft(state.most_decoding)
        self.admission.loading.begin_step()
        if state.adapters.identities:
            state.adapters.begin_step(state.kv.completed)
        if state.drafts is not None:
            draft.unsure = state.unsure_rows()
        if state.promoted:
            state.rows.promote(state.promoted)
        if state.kv.windowed:
            live = state.rows.live[: state.rows.high].nonzero()[0]
            state.kv.slide_each(live, state.rows.computed[live])
        if state.kv.keeping:
            for row in [row for row in state.kv.keeping if state.rows.decoding[row]]:
                self._drop(row)
        if len(state.queue):
            if state.tiers.is_on:
                self.admission.loading.ask()
            self.displacement.make_places(draft)
        if state.prefilling or len(state.queue):
            draft.held = self.displacement.held_back(self._prompt_tokens_free)
        mask = self._decode(draft)
        prompts = self._prompts() if state.prefilling else []
        if prompts or len(state.queue):
            draft.budget, draft.for_long = step_room(state, self.pace, mask, prompts)
            draft.left = draft.budget - draft.num_decoding
        if prompts:
            self._continue_prefills(draft, prompts)
        if len(state.queue):
            self._admit_waiting(draft, len(prompts))
        state.wishes.settle()
        if draft.left > 0 and state.prefilling:
            for row in self._prompts():  # what is left goes to the prompts that were held to their share
                self._span(draft, row, draft.left)
        if len(draft.held) and not (draft.num_decoding or draft.spans or state.encodings.now is not None):
            mask = self._decode_held(draft)
        if state.drafts is not None and draft.num_decoding and draft.left > 0:
            self._widen(draft, mask)
        if state.tiers.is_on:
            state.tiers.sink(draft.num_decoding, bool(draft.spans))
        if not (draft.num_decoding or draft.spans or draft.pads or self.has_open_copies):
            if stretches.make_room_for_pages(state, self._prompts()):
                return self.compose()
            if state.encodings.now is None:
                return None
        return self._plan(draft, mask)

    def _decode_held(self, draft: StepDraft) -> Mask:
        """The request that rows were held back for has failed: the rows decode after all, and nothing else does."""
        draft.held = NO_ROWS
        draft.budget = draft.left = self._state.most_decoding
        mask = self._decode(draft)
        draft.budget = step_budget(self._state, self.pace, mask, [])
        draft.left = draft.budget - draft.num_decoding
        return mask

    @property
    def has_open_copies(self) -> bool:
        """A swap is to be sent or under way: its completion is reported with a step."""
        kv = self._state.kv
        return kv.delta.has_copies or bool(kv.tickets.open)

    def forget(self) -> None:
        """The runner has been reset: no row is in plain decode there."""
        self._last_mask = NO_MASK

    def decode_rows(self) -> Index:
        """Rows in plain decode as of the last plan."""
        return np.flatnonzero(self._last_mask)

    # -- plain decode --------------------------------------------------------------------------------------

    def _decode(self, draft: StepDraft) -> Mask:
        """Schedule one token for every row in plain decode that can have one."""
        state = self._state
        rows, kv = state.rows, state.kv
        mask, crossing, shared = self._decode_needs(draft)
        if len(crossing) + len(shared) + self._prompt_need() > kv.free_for():
            mask, crossing, shared = self._make_room(draft)
        for row in shared:
            kv.copy_on_write(row, int(rows.scheduled[row]))
            rows.sharing[row] = False
        if len(crossing):
            kv.extend_each(crossing)
        high = len(mask)
        scheduled = rows.scheduled[:high]
        draft.advancing = advancing = mask & ~rows.padding[:high] if state.mode.keeps_finished else mask
        if state.drafts is None:
            scheduled += advancing
            ended = scheduled + 1 >= rows.max_len[:high]
            ended &= advancing
        else:
            ended = self._advance_unsure(draft, advancing)
        if any_set(ended):
            draft.at_length = True
            rows.end_of_length(ended, self._state.mode.keeps_finished)
        count = count_set(mask)
        draft.num_decoding = count
        draft.left -= count
        draft.num_sampled += count
        return mask

    def _advance_unsure(self, draft: StepDraft, advancing: Mask) -> Mask:
        """As `scheduled += advancing` where drafts are made; returns the rows that surely get their last token."""
        rows, high = self._state.rows, len(advancing)
        scheduled, last = rows.scheduled[:high], rows.max_len[:high] - 1
        unsure = draft.unsure
        draft.first = scheduled.copy() if unsure is None else self._state.least_computed()
        np.minimum(scheduled + advancing, last, out=scheduled, where=advancing)
        ended: Mask = (scheduled >= last) & advancing
        return ended if unsure is None else ended & ~unsure

    def _widen(self, draft: StepDraft, mask: Mask) -> None:
        """Room for drafts in what the step has left, and in blocks that are free."""
        state = self._state
        rows, kv, high = state.rows, state.kv, len(mask)
        assert state.drafts is not None
        left = draft.left
        if state.keeps_pace:  # no draft makes a step longer than rows want to wait for their next token
            left = min(left, step_budget(state, self.pace, mask, []) - draft.num_decoding)
        width, tokens = state.drafts.choose(draft.num_decoding, left, sum(draft.spans.values()))
        if width != state.drafts.recorded:
            steering.record_drafts(state, draft.num_decoding, width, tokens)
        if not width:
            return
        scheduled = rows.scheduled[:high]
        further = scheduled + width
        np.minimum(further, rows.max_len[:high] - 1, out=further)
        crossing = ((further > kv.table_len[:high] * kv.block_size) & mask).nonzero()[0]
        if len(crossing) > kv.free_for():
            return  # blocks are for tokens that are certain
        if len(crossing):
            kv.extend_each(crossing)
        np.copyto(scheduled, further, where=mask)
        draft.at_length = True
        draft.draft_width, draft.draft_tokens = width, tokens
        draft.left -= tokens

    def _decode_needs(self, draft: StepDraft) -> tuple[Mask, Index, list[int]]:
        """Rows that decode, those that need a block for it, and those that must copy a shared one first."""
        rows, kv = self._state.rows, self._state.kv
        high = rows.high
        mask = rows.decoding[:high].copy()
        mask[draft.held] = False
        if self._state.drafts is not None:
            self._leave_out(draft, mask)
        if high >= draft.left and count_set(mask) >= draft.left:
            shortage.trim(self._state, mask, draft.left)
        full = rows.scheduled[:high] >= kv.table_len[:high] * kv.block_size
        full &= mask
        if self._state.drafts is not None:  # a row that may have all its tokens writes no further
            full &= rows.scheduled[:high] < rows.max_len[:high] - 1
        if self._state.mode.keeps_finished:  # padding is computed into the null block
            full &= ~rows.padding[:high]
        crossing = full.nonzero()[0]
        return mask, crossing, shortage.shared_writes(self._state, mask) if rows.any_sharing else []

    def _leave_out(self, draft: StepDraft, mask: Mask) -> None:
        """Where drafts are made: rows that have all their tokens, and those that copy a block it is not known where."""
        rows, high = self._state.rows, len(mask)
        unsure = draft.unsure
        done = rows.scheduled[:high] >= rows.max_len[:high] - 1
        if unsure is not None:
            done &= ~unsure
            if rows.any_sharing:
                mask &= ~(unsure & rows.sharing[:high])
        mask &= ~done

    def _prompt_tokens_free(self) -> int:
        """Tokens a step has for prompts if all rows decode."""
        mask = self._state.rows.decoding[: self._state.rows.high]
        return step_budget(self._state, self.pace, mask, self._prompts()) - int(np.count_nonzero(mask))

    def _prompt_need(self) -> int:
        """Blocks the first prompt under way needs for its next token."""
        return shortage.prompt_need(self._state, self._prompts()[0]) if self._state.prefilling else 0

    def _make_room(self, draft: StepDraft) -> tuple[Mask, Index, list[int]]:
        """Blocks are short: preempt until the rest fits, or stall rows until blocks on their way are here."""
        state = self._state
        kv = state.kv
        remark = ""
        while True:
            mask, crossing, shared = self._decode_needs(draft)
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
            figures = (draft.left, kv.free_for(), short, shortage.first_to_gain(state, chosen[0], needy))
            preempt(state, chosen[0], swap=chosen[1], reason="blocks", figures=figures)
        kept = self._prompt_need() if shortage.prompt_goes_first(state) else 0
        needy = {*crossing.tolist(), *shared}
        shortage.stall(state, mask, needy, set(shared), kept=kept, tokens_left=draft.left, remark=remark)
        return mask, crossing[mask[crossing]], [row for row in shared if mask[row]]

    # -- prompts -------------------------------------------------------------------------------------------

    def _prompts(self) -> list[int]:
        """Rows with known tokens still to compute, in order."""
        rows = [request.row for request in self._state.prefilling.values()]
        if len(rows) < 2:
            return rows
        ordered: list[int] = self._state.in_order(np.array(rows, np.int64)).tolist()
        return ordered

    def _continue_prefills(self, draft: StepDraft, prompts: list[int]) -> None:
        """Tokens for the prompts under way, in order. A waiting request that outranks one is admitted before it."""
        cap = self._cap(draft, len(prompts))
        owners = self._state.rows.requests
        behind = {row: owners[row] for row in prompts}
        if len(self._state.queue):
            head = self._state.waiting_in_order(1)[0]
            if len(self.displacement.outranked(head)):
                self._admit_urgent(draft, behind, cap)
        self._continue_first(draft, behind, len(behind), cap)

    def _continue_first(
        self, draft: StepDraft, behind: dict[int, Request | None], count: int, cap: int
    ) -> None:
        """Tokens for the first `count` of the prompts `behind`, which are no longer among them."""
        for row in list(behind)[:count]:
            request = behind.pop(row)
            if row not in draft.spans and self._state.rows.requests[row] is request:  # it may have failed
                self._span(draft, row, min(draft.left, cap))

    def _admit_urgent(self, draft: StepDraft, behind: dict[int, Request | None], cap: int) -> None:
        """Admit waiting requests that outrank the last of the prompts `behind`, for as long as there is room, each
        behind the prompts that it does not outrank."""
        state = self._state
        for request in state.waiting_in_order(self.admission.rows_left()):
            outranked = set(self.displacement.outranked(request).tolist())
            # Only the end of the order: age may put a prompt before others that no waiting request outranks.
            num_outranked = sum(1 for _ in takewhile(outranked.__contains__, reversed(behind)))
            self._continue_first(draft, behind, len(behind) - num_outranked, cap)
            if draft.left < 1 or not behind or not self._admit_in_turn(draft, [request], cap):
                return
            computes = state.prefilling.get(draft.passed.get(request.id, NO_REQUEST))
            if computes is not None and computes.row in behind and computes.row not in draft.spans:
                # What it waits for is as urgent as it is.
                self._span(draft, computes.row, min(draft.left, cap))

    def _cap(self, draft: StepDraft, num_prompts: int) -> int:
        """Most tokens one prompt may take while others could use them."""
        state = self._state
        if draft.left < 1 or not (num_prompts > 1 or (len(state.queue) and not state.mode.keeps_finished)):
            return draft.budget
        return state.share(state.queue.view(state.now_s), draft.budget)

    def _span(self, draft: StepDraft, row: int, limit: int) -> None:
        """Schedule up to `limit` of a row's known tokens, and what is placed between them."""
        if row not in self._state.modules.rows:
            self._compute(draft, row, limit)
            return
        end = draft.left - limit
        while (part := stretches.next_part(self._state, draft, row)) is not None:
            if not self._take(draft, row, part, draft.left - end):
                return

    def _take(self, draft: StepDraft, row: int, part: stretches.NextPart, limit: int) -> bool:
        """Compute or place what comes next of a row; False: it stops there."""
        if part.stretch is None:
            return limit > 0 and self._compute(draft, row, limit, part.end)
        count = self._give_blocks(draft, row, part.start, part.end - part.start)
        if count > 0:
            stretches.place(self._state, draft, row, part, count)
        return count == part.end - part.start

    def _compute(self, draft: StepDraft, row: int, limit: int, until: int | None = None) -> bool:
        """Schedule up to `limit` of a row's known tokens, its padding first, those before `until` at most. Whether it
        may go on behind them in this step."""
        rows = self._state.rows
        limit = long_limit(self._state, self.pace, draft, row, limit)
        if row in self._state.encodings.rows:
            limit = stretches.reach(self._state, draft, row, limit, self._prompts)
        pad = max(0, min(rows.pad_left.item(row), limit))
        if pad:  # in a padded batch
            rows.pad_left[row] -= pad
            draft.pads[row] = draft.pads.get(row, 0) + pad
            draft.left -= pad
            draft.products += pad * pad // 2
        scheduled = rows.scheduled.item(row)
        end = rows.num_known.item(row) if until is None else until
        count = wanted = min(end - scheduled, limit - pad)
        if row in self._state.kv.keeping and count > 0:
            if row in draft.spans:  # one span sees from one block on
                return False
            self._drop(row)
            kept, num_prompt = self._state.kv.keeping[row]
            count = wanted = min(count, kept.alike(scheduled, num_prompt, self._state.kv.block_size))
        if count > 0:
            count = self._give_blocks(draft, row, scheduled, count)
        if count > 0:
            self._advance(
                draft, row, scheduled, count, wanted, limit - pad, goes_on=scheduled + count == until
            )
        return count > 0 and scheduled + count == until

    def _drop(self, row: int) -> None:
        """Let go of what the next token of a row does not see."""
        request = self._state.rows.requests[row]
        assert request is not None
        dropped = self._state.kv.drop(row, self._state.rows.scheduled.item(row))
        if dropped > request.cost.dropped:
            request.cost = request.cost._replace(dropped=dropped)

    def _give_blocks(self, draft: StepDraft, row: int, scheduled: int, count: int) -> int:
        """Blocks for up to `count` tokens of a row from `scheduled` on; how many there is room for."""
        state = self._state
        rows, kv = state.rows, state.kv
        try:
            free = kv.free_for(row)
            if rows.sharing[row]:
                if kv.shared_writes(np.array([row]), np.array([scheduled]))[0]:
                    if free < 1:
                        return 0
                    kv.copy_on_write(row, scheduled)
                    free -= 1
                rows.sharing[row] = False
            fitting = (kv.table_len.item(row) + (free if free > 0 else 0)) * kv.block_size - scheduled
            count = count if count < fitting else fitting
            if count > 0:
                kv.extend(row, scheduled + count)
        except Exception as error:  # it fails alone; what it was given in this plan already goes with it
            request = rows.requests[row]
            assert request is not None
            kv.delta.forget(row)
            draft.spans.pop(row, None)
            draft.jumps = {each: jumps for each, jumps in draft.jumps.items() if each != row}
            self._fail(request, error)
            return 0
        return count

    def _advance(
        self,
        draft: StepDraft,
        row: int,
        scheduled: int,
        count: int,
        wanted: int,
        limit: int,
        *,
        goes_on: bool,
    ) -> None:
        """Schedule `count` known tokens, where `wanted` were to be, and no more than `limit`. `goes_on`: and others."""
        state = self._state
        rows = state.rows
        request = rows.requests[row]
        assert request is not None
        rows.scheduled[row] = scheduled + count
        draft.spans[row] = draft.spans.get(row, 0) + count
        before, draft.left = draft.left, draft.left - count
        draft.products += count * (scheduled + rows.pad.item(row)) + count * (count + 1) // 2
        if scheduled + count < rows.num_known.item(row):
            if goes_on:
                return
            reason = draft.bounds.get(row) or (Rule.SHARE if limit < before else Rule.BUDGET)
            reason = Rule.BLOCKS if count < wanted else reason
            figures = (
                draft.left,
                state.kv.free_for(row),
                state.kv.missing(row, rows.num_known.item(row)),
                NO_REQUEST,
            )
            state.decide(DecisionKind.CHUNK, request, reason, count, figures)
            return
        del state.prefilling[request.id]
        draft.num_sampled += request.sampling.pooling is None
        ends = scheduled + count + 1 >= rows.max_len.item(row)
        draft.at_length |= ends
        if ends and state.mode.keeps_finished:
            rows.padding[row] = True
        if not ends or state.mode.keeps_finished:
            state.promoted.append((row, rows.generation.item(row)))

    # -- new requests --------------------------------------------------------------------------------------

    def _admit_waiting(self, draft: StepDraft, num_prompts: int) -> None:
        """Admit waiting requests in order, for as long as there is room; `num_prompts` are under way already."""
        state = self._state
        rows_left = self.admission.rows_left()
        if rows_left < 1:
            if not self._full:  # once each time the rows run out, so that a steady step pays nothing
                self._full = True
                head = state.waiting_in_order(1)[0]
                self.admission.defer(head, Verdict(NO_ROOM_ROWS, state.ahead_of(head)), draft)
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
                self._admit_batch(draft, state.waiting_in_order(limit))
            return
        cap = self._cap(draft, num_prompts)
        seen, width, most = set[int](), rows_left, len(view) - state.queue.num_parked
        while len(seen) < most:
            found = state.waiting_in_order(len(seen) + width, state.queue.unparked())
            batch = [request for request in found if request.id not in seen]
            if not batch or not self._admit_in_turn(draft, batch, cap):
                return
            seen.update(request.id for request in batch)
            # Where all of them were passed the order is what it was: hundreds may wait for one prefix, with few rows.
            before, rows_left = rows_left, self.admission.rows_left()
            width = 2 * width if rows_left == before else rows_left

    def _admit_in_turn(self, draft: StepDraft, batch: list[Request], cap: int) -> bool:
        """Admit each; False as soon as one has to wait for room: no request passes it."""
        for request in batch:
            if self.admission.rows_left() < 1:
                return False
            if draft.only_modules and not request.is_module:
                continue
            if draft.left < 1 and not request.host_places:  # to be copied back takes no token
                last = next(reversed(draft.spans), None)
                took = NO_REQUEST if last is None else RequestId(self._state.rows.request_id.item(last))
                self.admission.defer(request, Verdict(NO_BUDGET, compared_with=took), draft)
                return False
            verdict = self._guarded(draft, request, self.admission.admit)
            if request.id in self._state.prefilling:
                self._span(draft, request.row, min(draft.left, cap))
            elif verdict is not None and verdict.rule is not None:
                self.admission.defer(request, verdict, draft)
                draft.num_sparing += verdict.rule is Rule.SPARE
                draft.only_modules |= verdict.rule is Rule.MODULE_EVICTED
                if not self.admission.may_be_passed(verdict.rule, draft.num_sparing):
                    return False
                draft.passed[request.id] = verdict.waits_for
        return self.admission.rows_left() > 0

    def _admit_batch(self, draft: StepDraft, candidates: list[Request]) -> None:
        """Admit a padded batch: as many of the candidates as their rectangle has room for.

        Not before the last step of the batch before has completed: only then is all of its memory free.
        """
        if self._state.flights:
            return
        missing = [
            each for each in candidates if each.adapter and not self._state.adapters.is_there(each.adapter)
        ]
        for request in missing:
            self.admission.defer(request, Verdict(Rule.ADAPTER, self._state.ahead_of(request)), draft)
        if missing:
            return
        shape = self._state.mode.shape(candidates, self._rectangle_fits)
        if shape is None:
            return
        for request in candidates[: shape.count]:
            self._guarded(
                draft, request, lambda request, left: self.admission.admit_padded(request, shape, left)
            )
            if request.row != NO_ROW:
                self._span(draft, request.row, draft.left)

    def _guarded(
        self, draft: StepDraft, request: Request, admit: Callable[[Request, int], Verdict]
    ) -> Verdict | None:
        """Admit one request; if that raises, it fails alone, nothing of it stays behind, and there is no verdict."""
        delta = self._state.kv.delta
        mark = delta.mark()
        try:
            return admit(request, draft.left)
        except Exception as error:
            delta.rollback(mark)
            self._fail(request, error)
            return None

    def _fail(self, request: Request, error: Exception) -> None:
        """A request fails alone; its blocks are free for the rest of the step unless a step under way uses them."""
        self._state.fail(request, error)
        self._state.kv.settle()

    def _rectangle_fits(self, count: int, slots: int) -> bool:
        kv = self._state.kv
        return count * kv.blocks_for(slots) <= kv.free_for()

    # -- the plan ------------------------------------------------------------------------------------------

    def _plan(self, draft: StepDraft, mask: Mask) -> StepPlan:
        state = self._state
        seq, advancing, pad_tokens, filling = state.kv.submitted + 1, draft.num_decoding, 0, None
        if state.mode.keeps_finished:
            advancing, pad_tokens = count_set(draft.advancing), sum(draft.pads.values())
            filling = mask & ~draft.advancing
        decode_rows = row_changes(self._last_mask, mask, state.leaves)
        self._last_mask = mask
        if (
            decode_rows is SAME_ROWS and draft.first is None
        ):  # of the same owners too, or some would have left
            self._last_context += advancing
        else:
            self._last_context = decode_context(state, draft, mask, advancing)
        appends, copies, swap_out, swap_in = state.kv.delta.take()
        store, fetch = state.kv.delta.take_moves()
        joins, row_copies = build_joins(state, state.joins)
        encodes, group = NO_ENCODES, None
        if state.encodings.now is not None:
            encodes, group = state.encodings.take_plan()
        plan = StepPlan(
            seq=seq,
            leaves=i32(state.leaves) if state.leaves else EMPTY,
            joins=joins,
            spans=build_spans(state, draft.spans, draft.jumps),
            decode_rows=decode_rows,
            new_blocks=appends,
            block_copies=copies,
            row_copies=row_copies,
            swap_out=swap_out,
            swap_in=swap_in,
            store=store,
            fetch=fetch,
            drops=state.kv.delta.take_drops(),
            encodes=encodes,
            placements=state.kv.delta.take_placements() if draft.jumps else NO_PLACEMENTS,
            pad_tokens=pad_tokens,
            padding_rows=draft.num_decoding - advancing,
            work=StepWork(
                decode_rows=draft.num_decoding,
                decode_context=self._last_context,
                prefill_tokens=sum(draft.spans.values()) + pad_tokens,
                prefill_context_products=draft.products,
                logit_rows=draft.num_sampled,
                swap_blocks=0 if state.tiers.is_on else len(swap_out.block) + len(swap_in.block),
                encode_positions=encodes.count,
                encode_products=0 if group is None else encodes.count * group.products // 2,
                placed_tokens=stretches.settle(state, draft, seq) if draft.jumps else 0,
            ),
            draft_width=draft.draft_width,
            draft_tokens=draft.draft_tokens,
            draft_floor=0.0 if state.drafts is None else state.drafts.floor,
            trust=NO_TRUST if state.drafts is None else state.drafts.tell_trust(),
        )
        state.counters.planned(plan, state.rows.num_live)
        state.counters.evicted_blocks = state.kv.num_evicted
        state.leaves, state.joins = [], []
        state.kv.submitted = seq
        state.flights.append(flight_of(state, draft, plan, group, filling))
        return plan
