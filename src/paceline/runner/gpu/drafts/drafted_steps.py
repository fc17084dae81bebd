"""Steps in which rows decode and verify drafts: which sizes there are, how one is launched, and how it is drawn.

A step makes its drafts, computes and draws in one graph. Where rows have rules or guides it ends with the logits, and a
second graph draws: of rows with guides when these have come. Plans and rows are the runner's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.guide import Guide
from paceline.core.plan import DRAFT_KINDS, EMPTY, DraftTally, GuideWork, StepPlan, StepResult, StepTimes
from paceline.runner.gpu.adapters import DeviceAdapters
from paceline.runner.gpu.device_attention import FEW_ROWS, DeviceAttention, LaunchShape
from paceline.runner.gpu.device_queue import DeviceQueue, Mark
from paceline.runner.gpu.drafts.device_drafts import REPORT_COLUMNS, TALLY_WORDS, DeviceDrafts
from paceline.runner.gpu.drafts.device_head import DeviceGuesser, FollowedStep
from paceline.runner.gpu.forward import DeviceDecoder
from paceline.runner.gpu.graphs import (
    DRAWS,
    DraftDrawKey,
    DraftKey,
    Step,
    StepGraphs,
    draft_key,
    draft_keys,
)
from paceline.runner.gpu.host_rows import DeviceBatch, HostRows
from paceline.runner.gpu.kernels.step_rows import NOT_FINITE, StepTokens
from paceline.runner.gpu.pending import CODES, I32
from paceline.runner.gpu.token_sampling import DeviceSampler


@dataclass(slots=True, kw_only=True, eq=False)
class DraftedPending:
    """A submitted step with drafts."""

    seq: int
    batch: DeviceBatch
    width: int  # most drafts of a row, as planned; 0: they were only compared
    ring: I32
    max_slots: int
    failed: set[int]
    swapped: Callable[[], tuple[I32, I32]]
    started_s: float
    draw: Callable[[Mapping[int, Guide]], tuple[Mark, GuideWork | None]]
    took: Callable[[I32, I32], None]
    is_guided: NDArray[np.bool_]  # of its rows
    done: Mark | None = None  # None: its tokens are drawn when the guides of its rows have come
    guided: GuideWork | None = None

    def supply(self, guides: Mapping[int, Guide]) -> None:
        if self.done is None:
            self.done, self.guided = self.draw(guides)

    def wait(self) -> StepResult:
        assert self.done is not None, "rows with guides draw when these have come"
        self.done.wait()
        count = len(self.batch.decode)
        words = self.ring.copy()  # the next step but one writes there
        columns = words[:-TALLY_WORDS].reshape(-1, self.max_slots)[:, :count]
        code, number, verified, predicted = columns[:REPORT_COLUMNS]
        tally = DraftTally(*words[-TALLY_WORDS:].reshape(-1, DRAFT_KINDS))
        known = np.maximum(code, 0)
        self.failed.update(self.batch.decode[known == NOT_FINITE].tolist())
        rows, guided = self.batch.decode.astype(np.int32), self.guided
        self.took(rows, number)
        if guided is not None:  # their drafts were certain, not predicted
            guided = guided._replace(forced=int(np.maximum(number - 1, 0)[self.is_guided].sum()))
            predicted = np.where(self.is_guided, 0, predicted)
        copied, lost = self.swapped()
        return StepResult(
            seq=self.seq,
            rows=rows,
            generation=self.batch.generation,
            tokens=np.ascontiguousarray(columns[REPORT_COLUMNS : REPORT_COLUMNS + self.width + 1].T),
            count=number,
            finished=CODES[known],
            finite=known != NOT_FINITE,
            copies_done=copied,
            copies_failed=lost,
            times=StepTimes(start_s=self.started_s, end_s=time.perf_counter()),
            verified=verified if self.width else EMPTY,
            predicted=predicted if predicted.any() else EMPTY,
            drafts=tally,  # empty too: that rows have no drafts is news
            guided=guided,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepParts:
    """What the steps of a runner are computed with."""

    queue: DeviceQueue
    rows: HostRows
    decoder: DeviceDecoder
    attention: DeviceAttention
    sampler: DeviceSampler
    tokens: StepTokens
    visible: Tensor
    graphs: StepGraphs
    adapters: DeviceAdapters | None


class DraftedSteps:
    """The steps with drafts of a runner."""

    def __init__(
        self, parts: StepParts, drafts: DeviceDrafts, guesser: DeviceGuesser | None, max_tokens: int
    ) -> None:
        self._parts, self._drafts, self._guesser = parts, drafts, guesser
        self._max_slots = slots = parts.rows.memory.max_slots
        # By whether they are drawn apart, and whether rows have adapters.
        self._keys = {
            (undrawn, adapted): draft_keys(slots, max_tokens, undrawn=undrawn, adapted=adapted)
            for undrawn in (False, True)
            for adapted in ((False,) if parts.adapters is None else (False, True))
        }
        # By tokens of a step: what its guesser keeps of it; always the same.
        self._behind: dict[int, Tensor] = {}

    # -- which there are ---------------------------------------------------------------------------------------

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of the steps that there are."""
        return tuple(dict.fromkeys(key.tokens for key in self._keys[False, False]))

    def steps(self) -> list[Step]:
        """Every step that is captured."""
        steps: list[Step] = []
        for keys in self._keys.values():
            steps += [(key, partial(self._compute, key)) for key in keys]
        for key in self._keys[True, False]:
            for draw in DRAWS:
                drawn = DraftDrawKey(key.tokens, key.slots, *draw)
                steps.append((drawn, partial(self._draw, drawn)))
        return steps

    def warm_up(self) -> None:
        """Run steps of every kind that kernels are compiled for."""
        self._drafts.warm_up()
        is_gpu = self._parts.queue.is_gpu
        for keys in self._keys.values():
            # Up to 16, 32, 64 tokens, and more: rows of a product's tile.
            tiles = {key: min((key.tokens - 1 >> 4).bit_length(), 3) for key in keys}
            kinds = {(tiles[key], key.slots < 16, key.slots <= 256): key for key in keys}
            # A guesser's products are as large as there are slots.
            guessing = keys if self._guesser is not None else ()
            of_slots = {(key.tokens <= FEW_ROWS, key.slots): key for key in guessing}
            for key in {*kinds.values(), *of_slots.values()} if is_gpu else keys[:1]:
                self._compute(key)
                for draw in DRAWS if key.undrawn else ():
                    self._draw(DraftDrawKey(key.tokens, key.slots, *draw))

    def run_size(self, num_tokens: int) -> None:
        """A step of that size, to see how long it takes."""
        self._run(next(key for key in self._keys[False, False] if key.tokens == num_tokens))

    # -- a step ------------------------------------------------------------------------------------------------

    def key(self, plan: StepPlan, batch: DeviceBatch) -> DraftKey | None:
        """How a step with drafts is run; None: it has none, as planned or because of what its rows are."""
        drafts, sampler, rows = self._drafts, self._parts.sampler, batch.decode
        if not drafts.is_due(plan) or not len(rows):
            return None
        if len(batch.spans) or batch.num_pad or batch.has_lent or len(self._parts.rows.sharing):
            return None
        if sampler.logprobs.any_asked(batch) or sampler.is_host[rows].any():
            return None
        undrawn = bool(sampler.has_logit_rules[rows].any()) or sampler.any_guided(batch)
        adapters = self._parts.adapters
        adapted = adapters is not None and adapters.are_in(batch)
        return draft_key(self._keys[undrawn, adapted], len(rows), plan.draft_tokens)

    def submit(
        self,
        plan: StepPlan,
        batch: DeviceBatch,
        key: DraftKey,
        *,
        started_s: float,
        swapped: Callable[[], tuple[NDArray[np.int32], NDArray[np.int32]]],
    ) -> DraftedPending:
        drafts, parts = self._drafts, self._parts
        is_guided = parts.sampler.is_guided[batch.decode]
        guided: list[int] = batch.decode[is_guided].tolist()
        if guided:
            drafts.forced.tell()
        drafts.put_limits(plan, key.tokens - len(batch.decode))
        parts.rows.memory.send()
        self._run(key)
        ring = drafts.ring[plan.seq % len(drafts.ring)]
        pending = DraftedPending(
            seq=plan.seq,
            batch=batch,
            width=plan.draft_width,
            ring=ring.numpy(),
            max_slots=self._max_slots,
            failed=drafts.failed,
            swapped=swapped,
            started_s=started_s,
            draw=partial(self._draw_late, plan, batch, key, guided, ring),
            took=drafts.forced.took,
            is_guided=is_guided,
        )
        if not guided:
            pending.done, _ = self._finish(plan, batch, key, guided, ring, {})
        return pending

    def _draw_late(
        self,
        plan: StepPlan,
        batch: DeviceBatch,
        key: DraftKey,
        guided: list[int],
        ring: Tensor,
        guides: Mapping[int, Guide],
    ) -> tuple[Mark, GuideWork | None]:
        with self._parts.queue.entered():
            found = self._finish(plan, batch, key, guided, ring, guides)
        if self._drafts.looks_ahead(plan):
            self._drafts.forced.look(guided, guides)
        return found

    def _finish(
        self,
        plan: StepPlan,
        batch: DeviceBatch,
        key: DraftKey,
        guided: list[int],
        ring: Tensor,
        guides: Mapping[int, Guide],
    ) -> tuple[Mark, GuideWork | None]:
        """Draw the tokens of a step, unless its graph has, and send them to the host. `guided`: rows with guides."""
        drafts, work = self._drafts, None
        if guided:
            work = drafts.forced.load_masks(guided, guides, plan.draft_width)
        if key.undrawn:
            with_rules = bool(self._parts.sampler.has_logit_rules[batch.decode].any())
            draw = DraftDrawKey(key.tokens, key.slots, with_rules, bool(guided))
            if not self._parts.graphs.replay(draw):
                self._draw(draw)
        ring.copy_(drafts.report, non_blocking=True)
        return self._parts.queue.mark(), work

    def _run(self, key: DraftKey) -> None:
        if not self._parts.graphs.replay(key):
            self._compute(key)

    def _slot_rows(self, slots: int) -> Tensor:
        return self._parts.rows.memory.column("slot_rows")[:slots]

    def _compute(self, key: DraftKey) -> None:
        """All rows decode, each with the drafts that are made for it here."""
        drafts, parts = self._drafts, self._parts
        tokens, visible, slot_rows = parts.tokens, parts.visible, self._slot_rows(key.slots)
        overlapped = parts.queue.is_gpu and key.tokens <= FEW_ROWS
        shape = LaunchShape(num_tokens=key.tokens, num_slots=key.slots, overlapped=overlapped)
        queries = drafts.lay_out(
            tokens, visible, slot_rows, key.tokens, overlapped=overlapped, guided=key.undrawn
        )
        step = parts.attention.begin(shape, slot_rows, visible, None, queries=queries)
        adapters = None
        if key.adapted:
            assert parts.adapters is not None
            adapters = parts.adapters.of_rows(drafts.layout.draw_rows[: key.tokens])
        hidden = parts.decoder.forward(tokens, parts.attention, step, adapters)
        if self._guesser is not None:
            followed = FollowedStep(
                shape=shape,
                tokens=tokens,
                visible=visible,
                slot_rows=slot_rows,
                queries=queries,
                draft_rows=drafts.layout.draw_rows[: key.tokens],
            )
            self._behind[key.tokens] = self._guesser.follow(followed, hidden)
        parts.decoder.logits(hidden, None)
        if not key.undrawn:
            self._draw(DraftDrawKey(key.tokens, key.slots, False, False))

    def _draw(self, key: DraftDrawKey) -> None:
        """The draw of a step that was computed up to its logits: rows take what counts of it."""
        drafts, sampler, tokens = self._drafts, self._parts.sampler, self._parts.tokens
        slot_rows, layout = self._slot_rows(key.slots), drafts.layout
        logits = self._parts.decoder.last_logits(key.tokens)
        if key.guided:
            drafts.forced.hide(logits, layout)
        draws, positions = layout.draw_rows[: key.tokens], layout.draw_positions[: key.tokens]
        sampler.sample(logits, draws, with_rules=key.with_rules, positions=positions)
        first = drafts.take(slot_rows, sampler.drawn_behind(tokens.ids[: key.tokens]))
        if self._guesser is not None:
            self._guesser.keep(tokens, self._behind[key.tokens], slot_rows, layout.first, drafts.counts)
        if key.with_rules:
            sampler.note_first(slot_rows, first)
