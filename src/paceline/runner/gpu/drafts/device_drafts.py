"""Drafts on the device: columns and buffers, what a step with drafts launches around its forward pass.

A step makes its own drafts: guesses from what the rows have, the choice of those that are verified, their tokens behind
the last one of each row; then the forward pass; then what of it counts. So steps without drafts know nothing of all
this. The host says how many there may be, and learns how many there were with the step's tokens.
Decision: docs/decisions/0040-drafts-on-the-gpu.md.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.speculative import ORACLE, PROBE_EVERY, DraftConfig
from paceline.core.guide import Guide
from paceline.core.plan import DRAFT_KINDS, GuideWork, RowJoins, StepPlan
from paceline.runner.drafts import FATES, PARTLY, is_over_behind
from paceline.runner.gpu.drafts.device_head import DeviceGuesser, queries_of
from paceline.runner.gpu.kernels.decode_attention import RowQueries
from paceline.runner.gpu.kernels.draft_history import allocate_ring, propose_history, remember
from paceline.runner.gpu.kernels.draft_layout import (
    FLOOR,
    NUM_LIMITS,
    TOKENS,
    TRUST,
    WIDTH,
    DraftLayout,
    Proposals,
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
from paceline.runner.gpu.kernels.forced_tokens import CertainTokens, place_masks, propose_certain
from paceline.runner.gpu.kernels.logit_rules import mask_logits
from paceline.runner.gpu.kernels.step_rows import StepTokens
from paceline.runner.gpu.kernels.verify import TALLIES, DrawnBehind, VerifiedTokens, verify
from paceline.runner.gpu.row_memory import RowMemory
from paceline.runner.sampling.processors import uses_penalties
from paceline.text.guide.matcher import GuideBatch

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


# Guides beside drafts: tokens a guide is certain of become its row's drafts, and each of its draws has its own mask.
#
# When the guides of a step have come, they are asked what must come next. The first of these tokens is drawn by that
# very step; the others are drafts of the next one, told to the device by their position. The masks along them are
# made when the guides of that step come: by then it is known how far the row is, and so which drafts the device had.
# Decision: docs/decisions/0040-drafts-on-the-gpu.md.


I64 = NDArray[np.int64]


class ForcedTokens:
    """What guides are certain of, by row, and the masks of steps with drafts."""

    def __init__(
        self, memory: RowMemory, width: int, *, vocab_size: int, max_draws: int, device: torch.device
    ) -> None:
        self._memory, self._width = memory, width
        self._most = memory["certain"].width
        self._known: I64 = np.zeros(memory.num_rows + 1, np.int64)  # tokens of each row, by the last result
        self._may_draft: set[int] = set()
        # By row: the position of the first token, and the tokens. Found by guides, and told to the device.
        self._found: dict[int, tuple[int, list[int]]] = {}
        self._told: dict[int, tuple[int, list[int]]] = {}
        self._columns = CertainTokens(
            tokens=memory["certain"].device,
            first=memory.column("certain_first"),
            count=memory.column("certain_count"),
        )
        self._room = memory.max_slots  # for masks behind drafts, beside one for each row
        words, pinned = (vocab_size + 31) // 32, device.type == "cuda"
        count, rows = memory.max_slots + self._room, memory.num_rows + 1
        # Filled for a step when the step before is done, and so is its copy to the device.
        self._masks = torch.zeros(count, words, dtype=torch.int32, pin_memory=pinned)
        self._first_masks = torch.full((rows,), -1, dtype=torch.int32, pin_memory=pinned)
        self._device_masks = torch.zeros(count, words, dtype=torch.int32, device=device)
        self._device_first = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self._mask_of = torch.full((max_draws,), -1, dtype=torch.int32, device=device)

    # -- rows ------------------------------------------------------------------------------------------------

    def join(self, joins: RowJoins) -> None:
        """Before the row memory is sent: rows start, and nothing is certain of them."""
        self._known[joins.row] = joins.num_tokens
        told = []
        for row, params in zip(joins.row.tolist(), joins.sampling, strict=True):
            self._found.pop(row, None)
            if self._told.pop(row, None) is not None:
                told.append(row)
            self._may_draft.discard(row)
            if params.structured_outputs is not None and not uses_penalties(params):
                self._may_draft.add(row)
        if told:
            self._memory.put("certain_count", np.array(told), np.zeros(len(told), np.int32))

    def took(self, rows: NDArray[np.int32], count: NDArray[np.int32]) -> None:
        """A result is there: these rows have got this many tokens."""
        self._known[rows] += count

    # -- what is certain -------------------------------------------------------------------------------------

    def look(self, rows: Sequence[int], guides: Mapping[int, Guide]) -> None:
        """Ask the guides of rows that get tokens in a step whose guides have come."""
        for row in rows:
            guide = guides.get(row)
            if guide is None or row not in self._may_draft:
                continue
            tokens = guide.forced()[: self._most]
            while tokens and is_over_behind(guide, tokens):
                tokens.pop()  # the last token of a structure is drawn: nothing is drawn behind it
            if len(tokens) > 1:  # the first comes with the step under way
                self._found[row] = (self._known.item(row), tokens)

    def tell(self) -> None:
        """Before the row memory is sent: what was found goes to the device, as long as there is room for the masks."""
        known, memory = self._known, self._memory
        told = self._told = {
            row: (first, tokens)
            for row, (first, tokens) in self._told.items()
            if known[row] < first + len(tokens)
        }
        left = self._room - sum(min(len(tokens), self._width) for _, tokens in told.values())
        for row, (first, tokens) in self._found.items():
            before = min(len(told[row][1]), self._width) if row in told else 0
            needed = min(len(tokens), self._width) - before
            if needed > left:
                continue
            left -= needed
            told[row] = (first, tokens)
            at = np.array([row])
            memory.put("certain_first", at, [first])
            memory.put("certain_count", at, [len(tokens)])
            memory.put_tokens(row, np.array(tokens, np.int32), "certain")
        self._found.clear()

    def _drafts(self, row: int, width: int) -> list[int]:
        """Those the device may have for a row in the step whose guides have come."""
        first, tokens = self._told.get(row, (0, []))
        at = self._known.item(row) - first
        return tokens[at : at + width] if 0 <= at < len(tokens) else []

    # -- a step ----------------------------------------------------------------------------------------------

    def propose(self, into: Proposals, slot_rows: Tensor) -> None:
        propose_certain(into, self._memory.columns, slot_rows, self._columns)

    def load_masks(self, rows: Sequence[int], guides: Mapping[int, Guide], width: int) -> GuideWork:
        """What the guides of these rows allow at their next token and behind each of at most `width` drafts."""
        started_s = time.perf_counter()
        along: list[Guide] = []
        first = self._first_masks.numpy()
        first[:] = -1
        for row in rows:
            first[row] = len(along)
            along += _guides_along(guides[row], self._drafts(row, width))
        count = len(along)
        GuideBatch(along).fill_masks(self._masks[:count].numpy().view(np.uint32))
        taken_s = time.perf_counter() - started_s
        self._device_masks[:count].copy_(self._masks[:count], non_blocking=True)
        self._device_first.copy_(self._first_masks, non_blocking=True)
        return GuideWork(count, taken_s)

    def hide(self, logits: Tensor, layout: DraftLayout) -> None:
        """Hide what the guides of rows do not allow, as the masks that were loaded last say."""
        mask_of = self._mask_of[: len(logits)]
        place_masks(mask_of, layout, self._memory.columns, self._device_first)
        mask_logits(logits, self._device_masks, mask_of)


def _guides_along(guide: Guide, drafts: Sequence[int]) -> list[Guide]:
    """The guide, and one behind each of the drafts. What is behind a draft it does not allow is never drawn."""
    along = [guide]
    allowed = guide.accepts(drafts) if drafts else 0
    for number, draft in enumerate(drafts):
        guide = guide.copy()  # one of its own each: masks are made side by side
        if number < allowed:
            guide.consume((draft,))
        along.append(guide)
    return along
