"""Log-probabilities of rows that ask for them: made on the device behind the draw, read with the step's tokens.

Steps in which no row asks do nothing of this. It knows which rows ask and where the reports of a step come to; what a
report says is `kernels/token_logprobs.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.plan import RowLogprobs
from paceline.runner.gpu.forward import DeviceDecoder
from paceline.runner.gpu.host_rows import DeviceBatch, HostRows
from paceline.runner.gpu.kernels.step_rows import NOT_FINITE
from paceline.runner.gpu.kernels.token_logprobs import (
    MOST_LOGPROBS,
    REPORT_WIDTH,
    LogprobColumns,
    allocate_logprob_parts,
    token_logprobs,
)
from paceline.runner.gpu.row_memory import RowMemory
from paceline.runner.sampling.sampler import prompt_logprobs

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
NOT_ASKED = -1  # 0 asks for the drawn token alone


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AskedLogprobs:
    """The draws of one step whose rows ask, and where the host finds what is reported of them."""

    places: I64  # among the draws
    rows: I64
    positions: I64  # of the tokens drawn
    counts: I64  # likeliest tokens of each
    words: Tensor  # int32 [slots, REPORT_WIDTH], pinned

    def read(self, tokens: I32, codes: I32) -> tuple[RowLogprobs, ...]:
        """When the step is done; `tokens` and `codes` are those of all its draws."""
        code = codes[self.places]
        told = np.flatnonzero((code >= 0) & (code != NOT_FINITE))
        at = self.places[told]
        words = self.words.numpy()[at]
        numbers = words.view(np.float32)
        columns = (
            self.rows[told].tolist(),
            self.positions[told].tolist(),
            tokens[at].tolist(),
            numbers[:, 0].tolist(),
            words[:, 1].tolist(),
            self.counts[told].tolist(),
            words[:, 2 : 2 + MOST_LOGPROBS].tolist(),
            numbers[:, 2 + MOST_LOGPROBS :].tolist(),
        )
        return tuple(
            RowLogprobs(
                row=row,
                position=position,
                token=token,
                logprob=logprob,
                rank=rank,
                top_tokens=tuple(likeliest[:count]),
                top_logprobs=tuple(logprobs[:count]),
            )
            for row, position, token, logprob, rank, count, likeliest, logprobs in zip(*columns, strict=True)
        )


class LogprobReports:
    """Which rows ask, and the reports of steps."""

    def __init__(self, memory: RowMemory, vocab_size: int, device: torch.device) -> None:
        self._memory, self._vocab_size = memory, vocab_size
        self._counts: I64 = np.full(memory.num_rows + 1, NOT_ASKED)  # likeliest tokens, by row
        self._asking: set[int] = set()  # rows
        self._parts = allocate_logprob_parts(memory.max_slots, vocab_size, device)
        shape = (memory.max_slots, REPORT_WIDTH)
        self._report = torch.zeros(shape, dtype=torch.int32, device=device)
        # One for each step under way, as for tokens.
        steps = memory.depth + 2
        self._ring = torch.zeros((steps, *shape), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._turn = 0

    def join(self, rows: I64, counts: I64) -> None:
        """Rows start anew; `counts`: how many of the likeliest tokens each asks for, or NOT_ASKED."""
        self._counts[rows] = np.minimum(counts, self._vocab_size)
        asks = counts != NOT_ASKED
        self._asking.difference_update(rows.tolist())
        self._asking.update(rows[asks].tolist())
        self._memory.put("logprobs", rows, asks)

    def leave(self, row: int) -> None:
        self._asking.discard(row)

    def any_asked(self, batch: DeviceBatch) -> bool:
        """Whether a row that gets a token asks."""
        return bool(self._asking) and bool((self._counts[batch.sampled] != NOT_ASKED).any())

    def asked(self, batch: DeviceBatch, num_tokens: I64) -> AskedLogprobs | None:
        """What the rows that get a token in a step ask for; None: nothing. `num_tokens`: of all rows, the ones to be
        drawn included."""
        if not self.any_asked(batch):
            return None
        rows = batch.sampled
        places = np.flatnonzero(self._counts[rows] != NOT_ASKED)
        self._turn = (self._turn + 1) % len(self._ring)
        asking = rows[places]
        return AskedLogprobs(
            places=places,
            rows=asking,
            positions=num_tokens[asking] - 1,
            counts=self._counts[asking],
            words=self._ring[self._turn],
        )

    def make(self, logits: Tensor, slot_rows: Tensor, tokens: Tensor) -> None:
        """The reports of drawn `tokens` [draws] from raw `logits` [draws, vocabulary]."""
        columns = LogprobColumns(slot_rows=slot_rows, wanted=self._memory.column("logprobs"), tokens=tokens)
        token_logprobs(self._report[: len(logits)], logits, columns, self._parts)

    def send(self, asked: AskedLogprobs) -> None:
        """To the host, as far as a row asks."""
        count = int(asked.places[-1]) + 1
        asked.words[:count].copy_(self._report[:count], non_blocking=True)


def reports_of_prompts(
    rows: HostRows, batch: DeviceBatch, hidden: Tensor, decoder: DeviceDecoder
) -> tuple[RowLogprobs, ...]:
    """How likely each prompt token was, for the few rows that want to know. Waits for the device."""
    found: list[RowLogprobs] = []
    firsts = len(batch.decode) + np.cumsum(batch.count) - batch.count
    most = rows.memory.max_slots  # rows of logits there is room for
    for index in np.flatnonzero(rows.prompt_logprobs[batch.spans] > -2).tolist():
        row, start = int(batch.spans[index]), int(batch.start[index])
        end = min(start + int(batch.count[index]), int(rows.num_prompt[row]) - 1)
        if start >= end:
            continue
        first = int(firsts[index])
        positions = np.arange(start + 1, end + 1)
        targets = rows.memory["tokens"].host[row, positions].astype(np.int64)
        for begin in range(0, end - start, most):
            part = slice(begin, min(begin + most, end - start))
            states = hidden[first + part.start : first + part.stop]
            logits = decoder.logits(states, None).float().cpu()
            found += prompt_logprobs(
                logits.numpy(), targets[part], positions[part], row, int(rows.prompt_logprobs[row])
            )
    return tuple(found)
