"""Guides beside drafts: tokens a guide is certain of become its row's drafts, and each of its draws has its own mask.

When the guides of a step have come, they are asked what must come next. The first of these tokens is drawn by that very
step; the others are drafts of the next one, told to the device by their position. The masks along them are made when
the guides of that step come: by then it is known how far the row is, and so which drafts the device had.
Decision: docs/decisions/0040-drafts-on-the-gpu.md.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.guide import Guide
from paceline.core.plan import GuideWork, RowJoins
from paceline.guide.matcher import GuideBatch
from paceline.runner.drafts import is_over_behind
from paceline.runner.gpu.kernels.draft_layout import DraftLayout, Proposals
from paceline.runner.gpu.kernels.forced_tokens import CertainTokens, place_masks, propose_certain
from paceline.runner.gpu.kernels.logit_rules import mask_logits
from paceline.runner.gpu.row_memory import RowMemory
from paceline.runner.sampling.processors import uses_penalties

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
        """A result is there: these rows have got so many tokens."""
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
