"""Drafts on the device: columns and buffers, what a step with drafts launches around its forward pass.

A step makes its own drafts: guesses from what the rows have, the choice of those that are verified, their tokens behind
the last one of each row; then the forward pass; then what of it counts. So steps without drafts know nothing of all
this. The host says how many there may be, and learns how many there were with the step's tokens.
Decision: docs/decisions/0040-drafts-on-the-gpu.md.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.engine import ORACLE, PROBE_EVERY, DraftConfig
from paceline.core.plan import DRAFT_KINDS, RowJoins, StepPlan
from paceline.runner.drafts import FATES, PARTLY
from paceline.runner.gpu.device_head import DeviceGuesser
from paceline.runner.gpu.forced_tokens import ForcedTokens
from paceline.runner.gpu.kernels.decode_attention import RowQueries
from paceline.runner.gpu.kernels.draft_history import allocate_ring, propose_history, remember
from paceline.runner.gpu.kernels.draft_layout import (
    FLOOR,
    NUM_LIMITS,
    TOKENS,
    TRUST,
    WIDTH,
    allocate_layout,
    allocate_proposals,
    choose_drafts,
    write_drafted_tokens,
)
from paceline.runner.gpu.kernels.draft_predictions import (
    SEEN,
    STATE_WORDS,
    Predictions,
    propose_predictions,
)
from paceline.runner.gpu.kernels.drafters import Answers, DraftColumns, propose_answers, propose_ngrams
from paceline.runner.gpu.kernels.step_rows import StepTokens
from paceline.runner.gpu.kernels.verify import TALLIES, DrawnBehind, VerifiedTokens, verify
from paceline.runner.gpu.row_memory import RowMemory
from paceline.runner.sampling.processors import uses_penalties

I32 = NDArray[np.int32]

PROBE_MODEL_EVERY = 64  # as `PROBE_EVERY`, where a head or a model makes drafts, which takes time
REPORT_COLUMNS = 4  # of a report, before its tokens
TALLY_WORDS = TALLIES * DRAFT_KINDS


class DeviceDrafts:
    """Columns, buffers and launches of drafts."""

    def __init__(
        self,
        config: DraftConfig,
        memory: RowMemory,
        *,
        vocab_size: int,
        max_tokens: int,
        depth: int,
        device: torch.device,
        guesser: DeviceGuesser | None = None,
    ) -> None:
        """`guesser`: a head or a model that guesses too."""
        self._memory, self.width = memory, config.width
        self._columns = DraftColumns(may_draft=memory.column("may_draft"), fate=memory.column("draft_fate"))
        self._answers: Answers | None = None
        if config.method == ORACLE:
            self._answers = Answers(
                tokens=memory["answers"].device,
                end=memory.column("answer_end"),
                vocabulary=vocab_size,
                acceptance=config.acceptance,
            )
        else:
            self._predictions = Predictions(
                tokens=memory["predictions"].device,
                place=memory.column("prediction_place"),
                count=memory.column("prediction_count"),
                state=memory["prediction_state"].device,
                num_prompt=memory.column("num_prompt"),
            )
            self._free_places = list(range(len(memory["predictions"].host)))
        self._places: dict[int, int] = {}  # of predictions, by row
        self._ring = allocate_ring(device=device) if config.method == "history" else None
        self.forced = ForcedTokens(
            memory,
            config.width,
            vocab_size=vocab_size,
            max_draws=max(max_tokens, memory.max_slots),
            device=device,
        )
        self.failed: set[int] = set()  # rows whose numbers were not usable: their texts are not kept
        slots, width = memory.max_slots, config.width
        self._guesser = guesser
        self._made = allocate_proposals(slots, width, device, of_each=guesser is not None)
        self.layout = allocate_layout(slots, max_tokens, device)
        # The report, as it goes to the host in one copy: code, count, drafts, those of them that are
        # predictions, tokens [width + 1] of each slot; tally.
        size = (REPORT_COLUMNS + width + 1) * slots + TALLY_WORDS
        self.report = torch.zeros(size, dtype=torch.int32, device=device)
        columns = self.report[:-TALLY_WORDS].view(-1, slots)
        self._verified = VerifiedTokens(
            code=columns[0],
            count=columns[1],
            verified=columns[2],
            predicted=columns[3],
            tokens=columns[REPORT_COLUMNS:],
            tally=self.report[-TALLY_WORDS:],
        )
        self.ring = torch.empty(depth + 2, size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._limits: I32 = np.zeros(NUM_LIMITS, np.int32)
        self._since_probe = 0
        self._probe_every = PROBE_EVERY if guesser is None else PROBE_MODEL_EVERY

    # -- the host's side -------------------------------------------------------------------------------------

    def join(self, joins: RowJoins) -> None:
        """Before the row memory is sent: rows start."""
        memory, at = self._memory, joins.row.astype(np.int64)
        # What a penalty takes off depends on the tokens before: those of drafts would have to be counted in turn.
        # A guide's rows have the drafts of their guide alone, whose masks are known.
        may_draft = [
            not uses_penalties(params) and params.structured_outputs is None for params in joins.sampling
        ]
        memory.put("may_draft", at, np.array(may_draft, np.int32))
        memory.put("draft_fate", at, np.full(len(at), PARTLY, np.int32))
        self.forced.join(joins)
        if self._guesser is not None:
            self._guesser.join(joins)
        if self._ring is not None:
            memory.put_wide("texts", at, joins.texts if len(joins.texts) else np.zeros(len(at), np.int64))
        if self._answers is None:
            self._put_predictions(joins)
            return
        columns = zip(at.tolist(), joins.num_prompt.tolist(), joins.sampling, strict=True)
        for row, num_prompt, params in columns:
            answer = np.array(params.prediction, np.int32)
            answer = answer[: memory["answers"].width - num_prompt]
            memory.put_tokens(row, answer, "answers", num_prompt)
            memory.put("answer_end", np.array([row]), [num_prompt + len(answer) if len(answer) else 0])

    def _put_predictions(self, joins: RowJoins) -> None:
        """What rows are expected to say, as long as there is a place for it: without, a row has other drafts."""
        memory = self._memory
        self._forget_predictions(joins.row.tolist())
        for index, params in enumerate(joins.sampling):
            if not params.prediction or not self._free_places:
                continue
            row = joins.row.item(index)
            place = self._places[row] = self._free_places.pop()
            text = np.array(params.prediction, np.int32)[: memory["predictions"].width]
            memory.put_tokens(place, text, "predictions")
            at = np.array([row])
            memory.put("prediction_place", at, [place])
            memory.put("prediction_count", at, [len(text)])
            state = np.zeros((1, STATE_WORDS), np.int32)
            state[0, SEEN] = joins.num_prompt[index]
            memory.put("prediction_state", at, state)

    def _forget_predictions(self, rows: list[int]) -> None:
        given = [row for row in rows if row in self._places]
        if given:
            self._free_places += [self._places.pop(row) for row in given]
            self._memory.put("prediction_count", np.array(given), np.zeros(len(given), np.int32))

    def leave(self, rows: list[int]) -> None:
        """Rows lose their owners: texts that have come to their end are kept."""
        self._forget_predictions(rows)
        if self._ring is not None:
            texts = self._memory.wide("texts", torch.int64)
            for row in rows:
                if row not in self.failed:
                    remember(self._ring, self._memory.columns, texts, row)
        self.failed.difference_update(rows)

    def is_due(self, plan: StepPlan) -> bool:
        """Whether the step of a plan makes drafts: it verifies some, or only compares them now and then, so that trust
        in them can return."""
        if len(plan.trust):
            self._limits[TRUST:] = plan.trust.view(np.int32)
        self._since_probe += 1
        return plan.draft_width > 0 or self._since_probe >= self._probe_every

    def looks_ahead(self, plan: StepPlan) -> bool:
        """Whether the step behind that of a plan may make drafts, so that it matters what guides are certain of."""
        return plan.draft_width > 0 or self._since_probe + 1 >= self._probe_every

    def put_limits(self, plan: StepPlan, most: int) -> None:
        """How many drafts the next step may have: `most` at most."""
        self._since_probe = 0
        words = self._limits
        words[WIDTH], words[TOKENS] = plan.draft_width, min(plan.draft_tokens, most)
        words[FLOOR] = np.float32(plan.draft_floor).view(np.int32)
        if not np.array_equal(self._memory["draft_limits"].host[:, 0], words):
            self._memory.put("draft_limits", slice(0, NUM_LIMITS), words)

    def warm_up(self) -> None:
        """Launch what no step does: the dummy row has no text."""
        self.leave([self._memory.dummy_row])

    # -- a step ------------------------------------------------------------------------------------------------

    def lay_out(
        self,
        into: StepTokens,
        visible: Tensor,
        slot_rows: Tensor,
        num_tokens: int,
        *,
        overlapped: bool,
        guided: bool,
    ) -> RowQueries:
        """Make drafts, and the tokens of a step with them; returns whose they are. `guided`: some rows have guides."""
        memory, made, layout, count = self._memory, self._made, self.layout, len(slot_rows)
        rows = memory.columns
        if self._answers is None:
            propose_ngrams(made, rows, self._columns, slot_rows)
        else:
            propose_answers(made, rows, self._columns, slot_rows, self._answers)
        limits, tally = memory.column("draft_limits"), self._verified.tally
        if self._ring is not None:
            texts = memory.wide("texts", torch.int64)
            fates = FATES if self._guesser is None else 1  # as on a CPU: kinds are left for it
            propose_history(made, rows, self._columns, slot_rows, self._ring, texts, limits, fates)
        if self._answers is None:
            propose_predictions(made, rows, self._columns, slot_rows, self._predictions, limits)
        if guided:
            self.forced.propose(made, slot_rows)
        if self._guesser is not None:
            self._guesser.guess(made, slot_rows, num_tokens - 1, overlapped=overlapped)
        choose_drafts(layout, visible, made, limits, rows, slot_rows, tally)
        write_drafted_tokens(
            into,
            layout,
            made,
            rows,
            slot_rows,
            memory.tables,
            num_tokens=num_tokens,
            dummy_row=memory.dummy_row,
        )
        return RowQueries(
            first=layout.first[:count],
            count=layout.count[:count],
            lengths=visible,
            width=queries_of(self.width),
        )

    @property
    def counts(self) -> Tensor:
        """Tokens that the rows of each slot got in the last step, int32."""
        return self._verified.count

    def take(self, slot_rows: Tensor, drawn: DrawnBehind) -> Tensor:
        """Rows take the tokens that count; returns the first of each slot."""
        verify(
            self._memory.columns,
            self._columns.fate,
            self._verified,
            self.layout,
            self._made,
            slot_rows,
            drawn,
        )
        return self._verified.tokens[0, : len(slot_rows)]


def queries_of(width: int) -> int:
    """Queries of a row that attention is launched for, where it has so many drafts: a power of two."""
    return 1 << width.bit_length()
