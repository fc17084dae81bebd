"""The runner on the CPU: plain torch in float32, and the reference the GPU is checked against.

Plans are computed in order when they are waited for. Copies and swaps are done at once and reported with the step
they came in. Knows rows and numbers; never a request, never text.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.engine import EngineConfig
from paceline.core.plan import (
    AT_LENGTH,
    EMPTY,
    RUNNING_ON,
    STOPPED,
    RowLogprobs,
    StepPlan,
    StepResult,
    StepTimes,
    Swaps,
)
from paceline.core.pulse import Pulse
from paceline.models.decoder import Decoder
from paceline.runner.attention import StepAttention
from paceline.runner.device_rows import DeviceRows
from paceline.runner.flat_batch import FlatBatch, make_batch
from paceline.runner.kv_tensors import Index, KVTensors
from paceline.runner.sampling import Sampler, prompt_logprobs
from paceline.runner.workers import Workers

Bool = NDArray[np.bool_]

_logger = logging.getLogger("paceline")


class CPURunner:
    """Computes plans with a decoder."""

    def __init__(
        self,
        config: EngineConfig,
        decoder: Decoder,
        eos_token_ids: tuple[int, ...] | None = None,
        pulse: Pulse | None = None,
        workers: Workers | None = None,
    ) -> None:
        self._config = config
        self._decoder = decoder
        self._pulse = pulse if pulse is not None else Pulse()
        spec = decoder.spec
        self._kv = KVTensors(spec, config.kv)
        self._rows = DeviceRows(config)
        eos = spec.eos_token_ids if eos_token_ids is None else eos_token_ids
        self._sampler = Sampler(len(self._rows.limit), spec.vocab_size, eos)
        self._broken: set[int] = set()  # rows that could not be set up: they end with their first step
        self._workers = workers if workers is not None else Workers()
        self._queue: deque[StepPlan] = deque()
        self._done: dict[int, StepResult] = {}
        self._next_seq = 1

    def copy_out_and_back(self, count: int) -> None:
        """Copy `count` blocks to the swap pool and back; only while they are not in use."""
        blocks, places = np.arange(1, count + 1), np.arange(count)
        with torch.inference_mode():
            self._kv.swap_out(0, blocks, places)
            self._kv.swap_in(0, blocks, places)

    # -- the runner seam -----------------------------------------------------------------------------------

    def reset(self, full: StepPlan) -> None:
        # A plan without rows follows a failed step: what that left on the device may be anything.
        if not len(full.joins.row):
            self._kv.wipe()
        self._queue.clear()
        self._done.clear()
        self._next_seq = full.seq + 1
        self._rows = DeviceRows(self._config)
        self._apply(full)

    def submit(self, plan: StepPlan) -> CPUPending:
        assert plan.seq == self._next_seq, f"plan {plan.seq} after {self._next_seq - 1}"
        self._next_seq += 1
        self._queue.append(plan)
        return CPUPending(self, plan.seq)

    def finish_until(self, seq: int) -> StepResult:
        while self._queue and self._queue[0].seq <= seq:
            plan = self._queue.popleft()
            tokens = plan.work.decode_rows + plan.work.prefill_tokens
            with torch.inference_mode(), self._workers.step(tokens):
                self._done[plan.seq] = self._execute(plan)
        return self._done.pop(seq)

    # -- one step ------------------------------------------------------------------------------------------

    def _execute(self, plan: StepPlan) -> StepResult:
        started_s = time.perf_counter()
        self._apply(plan)
        tickets = self._move_blocks(plan)
        batch = make_batch(self._rows, plan, self._kv.block_size)
        if not len(batch.tokens):
            return _nothing(plan.seq, tickets, started_s)
        hidden = self._forward(batch)
        finite = self._finite_rows(batch, hidden)
        tokens, count, finished, logprobs = self._sample(batch, hidden, finite)
        rows = self._rows
        at = batch.rows
        rows.computed[at] += np.where(batch.masked, 0, batch.count)
        return StepResult(
            seq=plan.seq,
            rows=at.astype(np.int32),
            generation=rows.generation[at],
            tokens=tokens[:, None],
            count=count,
            finished=finished,
            finite=finite,
            copies_done=tickets,
            logprobs=logprobs,
            times=StepTimes(start_s=started_s, end_s=time.perf_counter()),
        )

    def _apply(self, plan: StepPlan) -> None:
        self._rows.apply(plan)
        for row, sampling in zip(plan.joins.row.tolist(), plan.joins.sampling, strict=True):
            known = self._rows.tokens[row, : self._rows.num_tokens[row]].astype(np.int32)
            self._broken.discard(row)
            try:
                self._sampler.join(row, sampling, known, int(self._rows.num_prompt[row]))
            except Exception:
                _logger.exception("row %d cannot be set up", row)
                self._broken.add(row)

    def _move_blocks(self, plan: StepPlan) -> NDArray[np.int32]:
        """Swap-outs, copies and swap-ins, in this order; returns the tickets of the swaps."""
        kv, copies = self._kv, plan.block_copies
        self._swap(plan.swap_out, kv.swap_out)
        if len(copies.row):
            for group in range(len(kv.windows)):
                mine = copies.group == group
                kv.copy_blocks(
                    group, copies.source[mine].astype(np.int64), copies.target[mine].astype(np.int64)
                )
            self._rows.replace_blocks(copies)
        self._swap(plan.swap_in, kv.swap_in)
        if not (len(plan.swap_out.ticket) or len(plan.swap_in.ticket)):
            return EMPTY
        return np.unique(np.concatenate([plan.swap_out.ticket, plan.swap_in.ticket]))

    def _swap(self, swaps: Swaps, move: Callable[[int, Index, Index], None]) -> None:
        for group in np.unique(swaps.group).tolist():
            mine = swaps.group == group
            move(group, swaps.block[mine].astype(np.int64), swaps.place[mine].astype(np.int64))

    def _forward(self, batch: FlatBatch) -> Tensor:
        attend = StepAttention(
            self._kv, self._rows, batch, scale=self._decoder.spec.softmax_scale, workers=self._workers
        )

        def attend_and_beat(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self._pulse.beat()
            return attend(layer, queries, keys, values)

        return self._decoder.forward(
            torch.from_numpy(batch.tokens),
            torch.from_numpy(batch.positions),
            torch.from_numpy(batch.lengths),
            attend_and_beat,
        )

    def _finite_rows(self, batch: FlatBatch, hidden: Tensor) -> Bool:
        """Which rows have usable numbers; what the others stored is wiped at once."""
        finite = np.ones(len(batch.rows), np.bool_)
        if self._broken:
            finite[np.isin(batch.rows, list(self._broken))] = False
        good = torch.isfinite(hidden).all(dim=-1).numpy()
        if good.all():
            return finite | batch.masked
        bad_rows = np.unique(batch.row_of[~good])
        bad = np.isin(batch.row_of, bad_rows[bad_rows < len(batch.rows)])
        for group, slots in enumerate(batch.slots):
            self._kv.clear(group, torch.from_numpy(slots[bad & (slots >= 0)]))
        finite[bad_rows[bad_rows < len(batch.rows)]] = False
        return finite | batch.masked

    def _sample(
        self, batch: FlatBatch, hidden: Tensor, finite: Bool
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint8], tuple[RowLogprobs, ...]]:
        """Draw a token for every row that has computed all it knows, and write it into the row."""
        rows, at = self._rows, batch.rows
        tokens = np.zeros(len(at), np.int32)
        count = np.zeros(len(at), np.int32)
        finished = np.full(len(at), RUNNING_ON, np.uint8)
        asked = self._prompt_logprobs(batch, hidden, finite)
        is_due = (batch.start + batch.count == rows.num_tokens[at]) & ~batch.masked
        if self._broken:
            is_due &= finite
        due = np.flatnonzero(is_due)
        if not len(due):
            return tokens, count, finished, asked
        sampled = at[due]
        position = rows.num_tokens[sampled]
        logits = self._decoder.logits(hidden[torch.from_numpy(batch.last[due])])
        drawn = self._sampler.sample(logits, sampled, position)
        known = (drawn.tokens >= 0) & (drawn.tokens < self._decoder.spec.vocab_size)
        finite[due] &= drawn.finite & known  # an unknown token must not reach the next step, or a client
        rows.tokens[sampled, position] = np.where(known, drawn.tokens, 0)
        rows.num_tokens[sampled] += 1
        tokens[due], count[due] = rows.tokens[sampled, position], 1
        at_length = rows.num_tokens[sampled] >= rows.limit[sampled]
        finished[due] = np.where(drawn.stopped, STOPPED, np.where(at_length, AT_LENGTH, RUNNING_ON))
        rows.ended[sampled] = drawn.stopped | at_length
        return tokens, count, finished, asked + drawn.logprobs

    def _prompt_logprobs(self, batch: FlatBatch, hidden: Tensor, finite: Bool) -> tuple[RowLogprobs, ...]:
        """How likely each prompt token was, for the few rows that want to know."""
        rows = self._rows
        found: list[RowLogprobs] = []
        wanted = (rows.prompt_logprobs[batch.rows] > -2) & ~batch.masked
        for index in np.flatnonzero(wanted).tolist():
            row, start = int(batch.rows[index]), int(batch.start[index])
            end = min(start + int(batch.count[index]), int(rows.num_prompt[row]) - 1)
            if start >= end:
                continue
            first = int(batch.last[index]) + 1 - int(batch.count[index])
            logits = self._decoder.logits(hidden[first : first + end - start])
            positions = np.arange(start + 1, end + 1)
            targets = rows.tokens[row, positions]
            try:
                found += prompt_logprobs(logits, targets, positions, row, int(rows.prompt_logprobs[row]))
            except Exception:
                _logger.exception("no logprobs for the prompt of row %d", row)
                finite[index] = False
        return tuple(found)


class CPUPending:
    """A submitted step; computed when it is waited for."""

    def __init__(self, runner: CPURunner, seq: int) -> None:
        self._runner = runner
        self._seq = seq

    def wait(self) -> StepResult:
        return self._runner.finish_until(self._seq)


def _nothing(seq: int, tickets: NDArray[np.int32], started_s: float) -> StepResult:
    """The result of a step that only moved blocks."""
    return StepResult(
        seq=seq,
        rows=EMPTY,
        generation=EMPTY,
        tokens=np.zeros((0, 1), np.int32),
        count=EMPTY,
        finished=np.zeros(0, np.uint8),
        finite=np.zeros(0, np.bool_),
        copies_done=tickets,
        times=StepTimes(start_s=started_s, end_s=time.perf_counter()),
    )
