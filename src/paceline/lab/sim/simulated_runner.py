"""A runner that takes time and computes nothing.

Owns the device's timeline: a step starts when the host has planned it and the device is free, and ends when
the cost model says. Knows of each row only how many known tokens it has still to compute and how many tokens
it may still get. Tokens are all zero, since they are never read; which drafts are right is drawn. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.config.speculative import MOST_DRAFTS, PROBE_EVERY
from paceline.core.clock import ManualClock
from paceline.core.guide import Guide
from paceline.core.plan import (
    AT_LENGTH,
    DRAFT_KINDS,
    EMPTY,
    RUNNING_ON,
    DraftTally,
    StepPlan,
    StepResult,
    StepTimes,
    StepWork,
    draft_depth,
)
from paceline.core.stretch import MediaInput
from paceline.costs.cost_model import CostModel, StepShape
from paceline.lab.sim.acceptance import Acceptance

LOOK_S = 0.002  # that a step without tokens waits for a copy
I32 = NDArray[np.int32]
Scalar = TypeVar("Scalar", bound=np.generic)
Column = NDArray[np.int64]
Observer = Callable[[StepPlan, float, float], None]  # a plan, and when its step starts and ends


class SimulatedDrafts(NamedTuple):
    """Which drafts are right, and what steps with drafts take."""

    acceptance: Acceptance
    # Tokens of steps with drafts, as of a GPU: such a step takes as long as the next larger size, whatever it has of
    # that. Empty: it takes what its tokens take.
    sizes: tuple[int, ...] = ()


class Links(NamedTuple):
    """What it takes to copy a block, beside the steps: over the link to the host, each way, and from or to the disk."""

    host_block_s: float
    disk_block_s: float


class _Drafted(NamedTuple):
    """Drafts of the decoding rows in one step."""

    verified: Column
    right: Column
    tally: DraftTally | None
    computed: int  # tokens of drafts that take their time


class TimedRunner:
    """Answers plans after their time has passed on `clock`.

    host_step_s: what planning a step costs the host; hidden behind the device when steps overlap.
    block_bytes: KV bytes of one block, which is what a swapped block moves over the host link.
    stretch: the factor by which a step that reads prompts, or one that does not, takes longer than it should.
    drafts: None: there are none.
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
        drafts: SimulatedDrafts | None = None,
        seed: int = 0,
    ) -> None:
        self.observe: Observer = lambda plan, start_s, end_s: None  # called with every plan that is submitted
        self.num_submitted = 0
        self.num_completed = 0
        self._cost = cost
        self._clock = clock
        self._block_bytes = block_bytes
        self._host_step_s = host_step_s
        self._stretch = stretch
        self._acceptance = None if drafts is None else drafts.acceptance
        self._draft_sizes = () if drafts is None else drafts.sizes
        self._seed = seed
        self.host_row_s = 0.0  # what each decoding row costs the host on top of its step
        # Over which copies run beside steps; None: swaps are part of their step.
        self.links: Links | None = None
        self._link_free_s = [0.0, 0.0, 0.0]  # out, in, disk: when each has done everything it was given
        self._copying: list[tuple[float, int]] = []  # when each copy ends, and its ticket
        self._since_drafts = 0  # steps
        self._trust = [0.0] * DRAFT_KINDS
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
        self._tokens: I32 = _frozen(np.zeros((num_rows, MOST_DRAFTS + 1), np.int32))
        self._ones: I32 = _frozen(np.ones(num_rows, np.int32))
        self._on: NDArray[np.uint8] = _frozen(np.full(num_rows, RUNNING_ON, np.uint8))
        self._finite = _frozen(np.ones(num_rows, np.bool_))

    def reset(self, full: StepPlan) -> None:
        """Forget every row, then take over those of a full plan."""
        assert full.full
        self._decoding[:] = False
        self._decode_rows, self._unsettled = EMPTY, 0
        self._copying = []
        self._next_seq = full.seq + 1
        self._take_over(full)

    def hold(self, media: int, given: MediaInput) -> None:
        """There are no pixels."""

    def drop(self, media: int) -> None: ...

    def submit(self, plan: StepPlan) -> _Pending:
        assert plan.seq == self._next_seq, f"plan {plan.seq} came after plan {self._next_seq - 1}"
        self._next_seq += 1
        self.num_submitted += 1
        self._clock.advance(self._host_step_s + plan.work.decode_rows * self.host_row_s)
        self._take_over(plan)
        drafted = None if self._acceptance is None else self._draft(plan, self._acceptance)
        start_s = max(self._clock.now(), self._free_s)
        num_drafts = 0 if drafted is None else drafted.computed
        seconds = self._cost.step_seconds(step_shape(plan.work, self._block_bytes, num_drafts))
        seconds *= self._stretch(plan.work.prefill_tokens > 0)
        if self.links is not None:
            self._start_copies(plan, start_s, self.links)
            if not (plan.work.decode_rows or plan.work.prefill_tokens) and self._copying:
                # It is there to bring tickets back: until the next one, or for a moment.
                seconds = min(max(min(self._copying)[0] - start_s, 0.0), LOOK_S)
        end_s = self._free_s = start_s + seconds
        self.observe(plan, start_s, end_s)
        return _Pending(self, self._compute(plan, StepTimes(start_s=start_s, end_s=end_s), drafted))

    def complete(self, result: StepResult) -> StepResult:
        """The host waits: time passes until the step has ended."""
        self._clock.advance_to(result.times.end_s)
        self.num_completed += 1
        return result

    def _start_copies(self, plan: StepPlan, start_s: float, links: Links) -> None:
        """Copies run beside steps, those of one link one after another."""
        for tickets, link in (
            (plan.swap_out.ticket, 0),
            (plan.swap_in.ticket, 1),
            (plan.store.ticket, 2),
            (plan.fetch.ticket, 2),
        ):
            if len(tickets):
                block_s = links.disk_block_s if link == 2 else links.host_block_s
                for ticket, count in zip(*np.unique(tickets, return_counts=True), strict=True):
                    end_s = max(self._link_free_s[link], start_s) + int(count) * block_s
                    self._link_free_s[link] = end_s
                    self._copying.append((end_s, int(ticket)))

    def _copied(self, plan: StepPlan, end_s: float) -> I32:
        """Tickets that come back with a step which ends at `end_s`."""
        if self.links is None:
            return _tickets(plan)
        if not self._copying:
            return EMPTY
        done = [ticket for done_s, ticket in self._copying if done_s <= end_s]
        self._copying = [copy for copy in self._copying if copy[0] > end_s]
        return np.array(done, np.int32)

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

    def _draft(self, plan: StepPlan, acceptance: Acceptance) -> _Drafted | None:
        """As many drafts as a drafter would make, which of them are right, and what that tells of their kinds."""
        if len(plan.trust):
            self._trust = plan.trust.tolist()
        rows = self._decode_rows
        if not len(rows) or not self._compares(plan):
            return None
        self._settle()
        owner = rows.astype(np.int64) << 32 | self._decode_generation
        remaining = self._remaining[rows].astype(np.int64)
        kind = acceptance.kinds(self._seed, owner, remaining)
        most = acceptance.right(self._seed, owner, remaining, kind)
        depths = [draft_depth(trust, plan.draft_floor, plan.draft_width) for trust in self._trust]
        depth = np.array([*depths, 0])  # the last is of rows without drafts
        number = np.minimum(depth[kind], np.maximum(remaining - 1, 0))
        if number.sum() > plan.draft_tokens:
            number = _likeliest(np.array(self._trust)[kind], number, plan.draft_tokens)
        right = np.minimum(most, number)
        # Of drafts that are not verified, the first is compared with the token that comes.
        compared = np.where(number > 0, np.minimum(right + 1, number), 1) * ((kind >= 0) & (remaining > 0))
        equal = np.where(number > 0, right, np.minimum(most, 1)) * (compared > 0)
        sums = [
            np.bincount(kind + 1, weights=each, minlength=DRAFT_KINDS + 1)[1:].astype(np.int32)
            for each in (compared, equal, compared > 0)
        ]
        computed = int(number.sum())
        if not self._draft_sizes:
            del sums[2]
        else:
            size = next((size for size in self._draft_sizes if size >= len(rows) + plan.draft_tokens), 0)
            computed = max(computed, size - len(rows))
        return _Drafted(number, right, DraftTally(*sums) if compared.any() else None, computed)

    def _compares(self, plan: StepPlan) -> bool:
        """Whether drafts are made in this step: on a GPU, where they are verified, and now and then where not."""
        if not self._draft_sizes:
            return True
        self._since_drafts += 1
        if len(plan.spans.row) or not (plan.draft_width or self._since_drafts >= PROBE_EVERY):
            return False
        self._since_drafts = 0
        return True

    def _decoded(self, drafted: _Drafted | None) -> tuple[I32, NDArray[np.uint8]]:
        """How many tokens the decoding rows get, and how they end."""
        rows = self._decode_rows
        if drafted is not None:
            had = self._remaining[rows]
            count = np.where(had > 0, np.minimum(1 + drafted.right, had), 0).astype(np.int32)
            self._remaining[rows] = left = had - np.maximum(count, 1)
            self._first_end = int(left.min())
            return count, _at_length(had - count == 0)
        self._unsettled += 1
        if self._unsettled < self._first_end or not len(rows):
            return self._ones[: len(rows)], self._on[: len(rows)]
        # A row of a padded batch goes on past its last token; it is masked and gives no more.
        remaining = self._remaining[rows] - self._unsettled
        return (remaining >= 0).astype(np.int32), _at_length(remaining == 0)

    def _compute(self, plan: StepPlan, times: StepTimes, drafted: _Drafted | None) -> StepResult:
        """One token for every decoding row and for every span that ends what its row knows."""
        rows, generation = self._decode_rows, self._decode_generation
        count, finished = self._decoded(drafted)
        spans = plan.spans
        if plan.work.placed_tokens:
            first = plan.placements.group == 0
            np.subtract.at(self._uncomputed, plan.placements.row[first], plan.placements.count[first])
        if len(spans.row):
            np.subtract.at(self._uncomputed, spans.row, spans.num_scheduled)
            left = self._uncomputed[spans.row]
            assert left.min() >= 0, "a span goes beyond what is known"
            ends = (left == 0) & _last_of_row(spans.row)
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
            tokens=self._tokens[: len(rows), : plan.draft_width + 1],
            count=count,
            finished=finished,
            finite=self._finite[: len(rows)],
            copies_done=self._copied(plan, times.end_s),
            times=times,
            verified=_by_row(drafted, len(rows), plan.draft_width > 0 and bool(self._draft_sizes)),
            drafts=None if drafted is None else drafted.tally,
        )


def _last_of_row(rows: NDArray[np.int32]) -> NDArray[np.bool_]:
    """The last span of each row: those of a row stand one behind the other."""
    return np.append(rows[1:] != rows[:-1], True)


def step_shape(work: StepWork, block_bytes: int, num_drafts: int = 0) -> StepShape:
    """The work of a plan as a cost model sees it. A draft passes layers and head as any token does; keys and values are
    read once for the row."""
    return StepShape(
        decode_rows=work.decode_rows + num_drafts,
        decode_context=work.decode_context,
        prefill_tokens=work.prefill_tokens,
        prefill_context_products=work.prefill_context_products,
        logit_rows=work.logit_rows + num_drafts,
        copy_bytes=work.swap_blocks * block_bytes,
        encode_positions=work.encode_positions,
        encode_products=work.encode_products,
        placed_tokens=work.placed_tokens,
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


def _likeliest(trust: NDArray[np.float64], number: Column, most: int) -> Column:
    """Of the drafts of rows those that are trusted most; one is never likelier than the one before it."""
    row = np.repeat(np.arange(len(number)), number)
    depth = np.arange(len(row)) - np.repeat(np.cumsum(number) - number, number)
    chosen = np.lexsort((row, -(trust[row] ** (depth + 1))))[:most]
    kept: Column = np.bincount(row[chosen], minlength=len(number))
    return kept


def _by_row(drafted: _Drafted | None, num_rows: int, always: bool) -> I32:
    """Drafts verified, of all rows of a result; the decoding ones come first. `always`: even if there are none."""
    if drafted is None or not (always or drafted.verified.any()):
        return EMPTY
    verified = np.zeros(num_rows, np.int32)
    verified[: len(drafted.verified)] = drafted.verified
    return verified


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
