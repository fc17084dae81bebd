"""A runner that takes time and computes nothing.

Owns the device's timeline: a step starts when the host has planned it and the device is free, and ends when
the cost model says. Knows of each row only how many known tokens it has still to compute and how many tokens
it may still get. Tokens are all zero, since they are never read. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.core.clock import ManualClock
from paceline.core.guide import Guide
from paceline.core.plan import AT_LENGTH, EMPTY, RUNNING_ON, StepPlan, StepResult, StepTimes, StepWork
from paceline.costs.model import CostModel, StepShape

I32 = NDArray[np.int32]
Scalar = TypeVar("Scalar", bound=np.generic)
Observer = Callable[[StepPlan, float, float], None]  # a plan, and when its step starts and ends


class TimedRunner:
    """Answers plans after their time has passed on `clock`.

    host_step_s: what planning a step costs the host; hidden behind the device when steps overlap.
    block_bytes: KV bytes of one block, which is what a swapped block moves over the host link.
    stretch: the factor by which a step that reads prompts, or one that does not, takes longer than it should.
    """

    def __init__(
        self,
        cost: CostModel,
        clock: ManualClock,
        num_rows: int,
        *,
        block_bytes: int = 0,
        host_step_s: float = 0.0,
        stretch: Callable[[bool], float] = lambda reads_prompts: 1.0,
    ) -> None:
        self.observe: Observer = lambda plan, start_s, end_s: None  # called with every plan that is submitted
        self.num_submitted = 0
        self.num_completed = 0
        self._cost = cost
        self._clock = clock
        self._block_bytes = block_bytes
        self._host_step_s = host_step_s
        self._stretch = stretch
        self._free_s = 0.0  # when the device has done everything it was given
        self._next_seq = 1
        self._decoding = np.zeros(num_rows, np.bool_)
        self._generation: I32 = np.zeros(num_rows, np.int32)
        self._uncomputed: I32 = np.zeros(num_rows, np.int32)  # known tokens still to compute
        self._remaining: I32 = np.zeros(num_rows, np.int32)  # tokens the row may still get
        # Rows in plain decode all get a token in every step. So their columns are settled only when the set
        # changes, and a step in between costs the same for any number of rows.
        self._decode_rows: I32 = EMPTY
        self._decode_generation: I32 = EMPTY
        self._unsettled = 0  # tokens each of them got since their columns were settled
        self._first_end = 0  # tokens until the first of them has its last one
        # Columns that never change are cut from these; a result is read, never written.
        self._tokens: I32 = _frozen(np.zeros((num_rows, 1), np.int32))
        self._ones: I32 = _frozen(np.ones(num_rows, np.int32))
        self._on: NDArray[np.uint8] = _frozen(np.full(num_rows, RUNNING_ON, np.uint8))
        self._finite = _frozen(np.ones(num_rows, np.bool_))

    def reset(self, full: StepPlan) -> None:
        """Forget every row, then take over those of a full plan."""
        assert full.full
        self._decoding[:] = False
        self._decode_rows, self._unsettled = EMPTY, 0
        self._next_seq = full.seq + 1
        self._take_over(full)

    def submit(self, plan: StepPlan) -> _Pending:
        assert plan.seq == self._next_seq, f"plan {plan.seq} came after plan {self._next_seq - 1}"
        self._next_seq += 1
        self.num_submitted += 1
        self._clock.advance(self._host_step_s)
        self._take_over(plan)
        start_s = max(self._clock.now(), self._free_s)
        seconds = self._cost.step_seconds(step_shape(plan.work, self._block_bytes))
        end_s = self._free_s = start_s + seconds * self._stretch(plan.work.prefill_tokens > 0)
        self.observe(plan, start_s, end_s)
        return _Pending(self, self._compute(plan, StepTimes(start_s=start_s, end_s=end_s)))

    def complete(self, result: StepResult) -> StepResult:
        """The host waits: time passes until the step has ended."""
        self._clock.advance_to(result.times.end_s)
        self.num_completed += 1
        return result

    def _take_over(self, plan: StepPlan) -> None:
        """Follow the plan's changes of rows."""
        joins, change, leaves = plan.joins, plan.decode_rows, plan.leaves
        changed = bool(len(leaves) or len(change.added) or len(change.removed))
        if changed:
            self._settle()  # before a row is given to its next owner
        if len(joins.row):
            self._generation[joins.row] = joins.generation
            self._uncomputed[joins.row] = joins.num_tokens - joins.num_computed
            self._remaining[joins.row] = joins.limit - joins.num_tokens
        if changed:
            self._decoding[leaves] = False
            self._decoding[change.removed] = False
            self._decoding[change.added] = True
            rows = np.flatnonzero(self._decoding)
            self._decode_rows = rows.astype(np.int32)
            self._decode_generation = self._generation[rows]
            self._first_end = int(self._remaining[rows].min(initial=0x7FFFFFFF))

    def _settle(self) -> None:
        self._remaining[self._decode_rows] -= self._unsettled
        self._unsettled = 0

    def _compute(self, plan: StepPlan, times: StepTimes) -> StepResult:
        """One token for every decoding row and for every span that ends what its row knows."""
        self._unsettled += 1
        rows, generation = self._decode_rows, self._decode_generation
        count, finished = self._ones[: len(rows)], self._on[: len(rows)]
        if self._unsettled >= self._first_end:
            # A row of a padded batch goes on past its last token; it is masked and gives no more.
            remaining = self._remaining[rows] - self._unsettled
            count = (remaining >= 0).astype(np.int32)
            finished = _at_length(remaining == 0)
        spans = plan.spans
        if len(spans.row):
            left = self._uncomputed[spans.row] - spans.num_scheduled
            assert left.min() >= 0, "a span goes beyond what is known"
            self._uncomputed[spans.row] = left
            ends = left == 0
            remaining = self._remaining[spans.row] - ends
            self._remaining[spans.row] = remaining
            rows = np.concatenate([rows, spans.row])
            generation = np.concatenate([generation, self._generation[spans.row]])
            count = np.concatenate([count, ends.astype(np.int32)])
            finished = np.concatenate([finished, _at_length(ends & (remaining == 0))])
        return StepResult(
            seq=plan.seq,
            rows=rows,
            generation=generation,
            tokens=self._tokens[: len(rows)],
            count=count,
            finished=finished,
            finite=self._finite[: len(rows)],
            copies_done=_tickets(plan),
            times=times,
        )


def step_shape(work: StepWork, block_bytes: int) -> StepShape:
    """The work of a plan as a cost model sees it."""
    return StepShape(
        decode_rows=work.decode_rows,
        decode_context=work.decode_context,
        prefill_tokens=work.prefill_tokens,
        prefill_context_products=work.prefill_context_products,
        logit_rows=work.logit_rows,
        copy_bytes=work.swap_blocks * block_bytes,
    )


class _Pending:
    """A step on its way."""

    __slots__ = ("_result", "_runner")

    def __init__(self, runner: TimedRunner, result: StepResult) -> None:
        self._runner = runner
        self._result = result

    def supply(self, guides: Mapping[int, Guide]) -> None:
        raise AssertionError("a simulated request has no guide")

    def wait(self) -> StepResult:
        return self._runner.complete(self._result)


def _at_length(ended: NDArray[np.bool_]) -> NDArray[np.uint8]:
    return np.where(ended, np.uint8(AT_LENGTH), np.uint8(RUNNING_ON))


def _tickets(plan: StepPlan) -> I32:
    """The swaps of a plan; they complete with its step."""
    if not len(plan.swap_out.ticket) and not len(plan.swap_in.ticket):
        return EMPTY
    return np.unique(np.concatenate([plan.swap_out.ticket, plan.swap_in.ticket]))


def _frozen(column: NDArray[Scalar]) -> NDArray[Scalar]:
    column.flags.writeable = False
    return column
