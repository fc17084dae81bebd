"""Whether decisions tell the truth: what they say is worked out again from inputs, plans and results alone.

Keeps its own picture of which request is on which row, which blocks each row holds and which rest behind a step under
way, and compares it with every admission, deferral, preemption and ending on record. Takes from the decisions only
which requests joined: a plan knows rows, not requests; the sizes of the two have to agree. Knows engines with one
layer group, rows that come and go one by one, no swaps, and nothing that fails; others are passed over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.config.engine import EngineConfig, SchedulerConfig
from paceline.config.sized import Capacity
from paceline.core.events import NO_NUMBER, NO_REQUEST, Decision, DecisionKind, Rule
from paceline.core.inputs import (
    AbortRequest,
    AddRequest,
    Done,
    Expired,
    FailRequest,
    FinishRequest,
    Idle,
    Input,
    Keys,
    Pause,
    Preempt,
)
from paceline.core.plan import STOPPED, StepPlan, StepResult
from paceline.core.recorder import Inputs, StepRecord
from paceline.scheduler.dial.engine_dial import Dial
from paceline.scheduler.invariants import InvariantViolation
from paceline.scheduler.policy.fair import SPARE
from tests.dst.settings import Trouble

NAME = "T1"
_ENDS: dict[type[Input], tuple[Rule, ...]] = {
    AbortRequest: (Rule.ABORT, Rule.PRUNED),
    Expired: (Rule.DEADLINE, Rule.ERROR),  # an error: what it waited for outside did not come in time
    FinishRequest: (Rule.STOP,),
    FailRequest: (Rule.GRAMMAR_ERROR,),
}
_IN_THE_PLAN = (Rule.BLOCKS_RECOMPUTE, Rule.PLACE_RECOMPUTE)  # preempted while it was made
_JOINED = (DecisionKind.ADMIT, DecisionKind.RESUME)


def can_tell(config: EngineConfig, trouble: Trouble) -> bool:
    """Whether runs like this one are understood here."""
    plain = config.scheduler.mode == "continuous" and len(config.kv.groups) == 1
    plain &= config.scheduler.drafts is None and config.scheduler.encoder is None
    return plain and not (
        config.kv.num_host_blocks
        or config.kv.slab_blocks
        or trouble.cursed
        or trouble.alloc_failure
        or trouble.step_failure
    )


@dataclass(slots=True)
class Known:
    """A request as its add describes it, and what has become of it."""

    num_prompt: int
    max_total: int
    num_tokens: int
    parent: int | None
    keys: tuple[bytes, ...]
    preemptions: int = 0
    has_run: bool = False
    ends_by: tuple[Rule, ...] = ()  # why it may have ended


@dataclass(slots=True)
class TrackedRow:
    """A row and the request on it."""

    owner: int
    generation: int
    known: int  # tokens it joined with
    scheduled: int  # tokens scheduled
    table: dict[int, int] = field(default_factory=dict)


class Truth:
    """Looks at the records of one run, in order."""

    def __init__(self, config: EngineConfig) -> None:
        self.num_checked = 0
        self._config = config
        self._size = config.kv.block_size
        self._usable = (config.kv.groups[0].num_blocks or config.kv.num_blocks) - 1
        self._num_rows = Capacity.of(config).num_rows
        self._requests: dict[int, Known] = {}
        self._rows: dict[int, TrackedRow] = {}
        self._decoding: set[int] = set()
        self._fences: list[tuple[int, frozenset[int]]] = []
        self._resting: list[tuple[int, int]] = []  # rows that may not be used before a step is done
        self._results: dict[int, StepResult] = {}
        self._left: list[int] = []  # rows whose request left since the last plan
        self._holders: dict[bytes, int] = {}  # how many requests have a first key
        self._admitted: list[int] = [int(NO_REQUEST), int(NO_REQUEST)]  # the last two different requests
        self._dialled = config.scheduler.has_dial
        limits = Dial(config.scheduler, 1).limits
        self._most_rows = config.scheduler.max_num_seqs if limits is None else limits.rows
        self._submitted = self._completed = 0

    # -- records -------------------------------------------------------------------------------------------

    def step(self, record: StepRecord) -> None:
        plan = record.plan
        self._submitted = plan.seq - 1
        self._take_moves(record.decisions)
        victims = deque(each for each in record.decisions if each.reason in _IN_THE_PLAN)
        self._take_inputs(record.inputs, victims)
        self._endings(record.decisions)
        self._preemptions(plan, victims)
        if sorted(self._left) != sorted(plan.leaves.tolist()):
            raise InvariantViolation(
                NAME, f"rows {self._left} were left, and plan {plan.seq} says {plan.leaves}"
            )
        self._left.clear()
        self._count_preemptions(record.decisions)
        self._decode(plan)
        joined = [decision for decision in record.decisions if decision.kind in _JOINED]
        self._prompts(plan, joined)
        for decision in record.decisions:
            # A request judged while there was no plan was judged in a state that no plan shows.
            if decision.time_s == record.t_plan and decision.kind is DecisionKind.DEFER:
                self._check_deferral(decision, plan)
            elif decision.time_s == record.t_plan and decision.kind is DecisionKind.CHUNK:
                self._check_chunk(decision, plan)
        for row, count in zip(plan.spans.row.tolist(), plan.spans.num_scheduled.tolist(), strict=True):
            self._rows[row].scheduled += count
        if record.result is not None:
            self._results[plan.seq] = record.result

    def close(self, inputs: Inputs, decisions: Sequence[Decision]) -> None:
        self._take_inputs(inputs, deque())
        self._endings(decisions)

    def _take_moves(self, decisions: Sequence[Decision]) -> None:
        """Where a controller stands is not worked out again here: that it replays is another test's business."""
        for decision in decisions:
            if decision.kind is DecisionKind.DIAL:
                self._dialled = True
                self._most_rows = int(decision.detail.rpartition("rows=")[2])

    # -- the picture ---------------------------------------------------------------------------------------

    def _take_inputs(self, inputs: Inputs, victims: deque[Decision]) -> None:
        for time_s, given in inputs:
            match given:
                case AddRequest():
                    max_total = given.num_prompt + (0 if given.pooling else given.max_tokens)
                    known = Known(given.num_prompt, max_total, given.num_tokens, given.parent, ())
                    self._requests[given.id] = known
                    self._learn(known, given.keys)
                case Done():
                    self._done(given.seq)
                case AbortRequest() | Expired() | Preempt() | Pause() | FinishRequest() | FailRequest():
                    self._leave(given.request)
                    self._requests[given.request].ends_by = _ENDS.get(type(given), ())
                case Keys():
                    self._learn(self._requests[given.request], given.keys)
                case Idle():  # no plan was made, but room may have been, and results may have come after it
                    while victims and victims[0].time_s <= time_s:
                        self._preempt(victims.popleft())
            if isinstance(given, FinishRequest):
                known = self._requests[given.request]
                known.num_tokens = known.num_prompt + given.num_output

    def _learn(self, known: Known, keys: tuple[bytes, ...]) -> None:
        if keys and not known.keys:
            self._holders[keys[0]] = self._holders.get(keys[0], 0) + 1
        known.keys += keys

    def _done(self, seq: int) -> None:
        self._completed = seq
        self._settle()
        result = self._results.pop(seq)
        pooled = {vector.row for vector in result.vectors}
        columns = (result.rows, result.generation, result.count, result.finite, result.finished)
        for row, generation, count, finite, end in zip(*(column.tolist() for column in columns), strict=True):
            tracked = self._rows.get(row)
            if tracked is None or tracked.generation != generation:
                continue
            known = self._requests[tracked.owner]
            if finite:
                known.num_tokens += count
            at_length = count and known.num_tokens >= known.max_total
            if not finite or end == STOPPED or at_length or row in pooled:
                well = Rule.VECTOR if row in pooled else Rule.STOP if end == STOPPED else Rule.LENGTH
                known.ends_by = (well if finite else Rule.NUMERICAL_ERROR,)
                self._leave(tracked.owner)

    def _settle(self) -> None:
        self._fences = [fence for fence in self._fences if fence[0] > self._completed]
        self._resting = [resting for resting in self._resting if resting[0] > self._completed]

    def _leave(self, owner: int) -> None:
        """Off its row, if it has one: no request gets row or blocks before the last plan that knew it is done."""
        row = self._row_of(owner)
        if row is not None:
            self._left.append(row)
            self._decoding.discard(row)
            self._fences.append((self._submitted, frozenset(self._rows.pop(row).table.values())))
            self._resting.append((self._submitted, row))
            self._settle()

    def _row_of(self, owner: int) -> int | None:
        return next((row for row, tracked in self._rows.items() if tracked.owner == owner), None)

    def _decode(self, plan: StepPlan) -> None:
        """Decoding rows and prompts under way come before those that join."""
        joining = set(plan.joins.row.tolist())
        for row, index, source, target in _copies(plan):
            if row not in joining:
                self._fences.append((plan.seq, frozenset((source,))))
                self._rows[row].table[index] = target
        self._decoding -= set(plan.decode_rows.removed.tolist())
        self._decoding |= set(plan.decode_rows.added.tolist())
        spans = set(plan.spans.row.tolist())
        for row, index, block in _appends(plan):
            if row not in spans and row not in joining:
                self._rows[row].table[index] = block
        for row in self._decoding:
            self._rows[row].scheduled += 1

    def _prompts(self, plan: StepPlan, joined: Sequence[Decision]) -> None:
        """Prompts and new rows in the order in which they were given blocks."""
        joins = plan.joins
        columns = (joins.row, joins.generation, joins.num_tokens, joins.num_computed, joins.limit)
        waiting = {entry[0]: entry for entry in zip(*(column.tolist() for column in columns), strict=True)}
        if len(waiting) != len(joined):
            raise InvariantViolation(NAME, f"{len(waiting)} rows joined and {len(joined)} decisions say so")
        joined_by_row = dict(zip(waiting, joined, strict=True))
        spans = {*plan.spans.row.tolist(), *waiting}
        appends = [entry for entry in _appends(plan) if entry[0] in spans]
        for row, index, block in appends:
            if row in waiting:
                own = [each for each in appends if each[0] == row]
                self._check_join(joined_by_row[row], waiting.pop(row), own, plan)
                # Its copy of a block that it shares is taken before another request is judged.
                copied = [frozenset((source, target)) for at, _, source, target in _copies(plan) if at == row]
                self._fences += [(plan.seq, blocks) for blocks in copied]
            self._rows[row].table[index] = block
        for row, entry in waiting.items():
            raise InvariantViolation(
                NAME, f"request {joined_by_row[row].request} joined with nothing: {entry}"
            )
        for row, index, _, target in _copies(plan):
            self._rows[row].table[index] = target

    def _free(self) -> int:
        held: set[int] = set()
        for tracked in self._rows.values():
            held.update(tracked.table.values())
        for _, blocks in self._fences:
            held |= blocks
        return self._usable - len(held)

    @property
    def _has_reserved(self) -> bool:
        most = self._config.scheduler.max_preemptions
        return any(self._requests[tracked.owner].preemptions >= most > 0 for tracked in self._rows.values())

    # -- what is said --------------------------------------------------------------------------------------

    def _same(self, decision: Decision, what: str, said: object, found: object) -> None:
        self.num_checked += 1
        if said != found:
            raise InvariantViolation(
                NAME,
                f"{decision.kind.value} of {decision.request}: {what} is {said}, and was {found}: {decision}",
            )

    def _check_join(
        self, decision: Decision, join: tuple[int, ...], own: list[tuple[int, int, int]], plan: StepPlan
    ) -> None:
        row, generation, num_tokens, num_computed, limit = join
        known = self._requests[decision.request]
        self._same(decision, "its step", decision.step, plan.seq)
        self._same(decision, "its length", known.max_total, limit)
        self._same(decision, "what is computed", decision.value, num_computed)
        self._same(decision, "the request ahead", decision.against, self._ahead_of(decision.request))
        if not self._has_reserved and known.preemptions < (self._config.scheduler.max_preemptions or 1 << 30):
            self._same(decision, "blocks free", decision.blocks_free, self._free())
            needs = {
                self._need(
                    num_tokens, [block for _, index, block in own if index * self._size < num_computed]
                )
            }
            if known.parent is not None:
                needs.add(self._blocks(num_tokens) - self._blocks(num_computed) + 1)
            self._same(decision, "blocks needed", decision.blocks_needed in needs, True)
        known.has_run = True
        self._rows[row] = TrackedRow(decision.request, generation, num_tokens, num_computed)
        if decision.request != self._admitted[1]:
            self._admitted = [self._admitted[1], decision.request]

    def _need(self, num_tokens: int, found: list[int]) -> int:
        """New blocks, and those found in the cache that no row holds."""
        held = {block for tracked in self._rows.values() for block in tracked.table.values()}
        held |= {block for _, blocks in self._fences for block in blocks}
        return self._blocks(num_tokens) - len(found) + sum(block not in held for block in found)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._size)

    def _ahead_of(self, request: int) -> int:
        return self._admitted[1] if self._admitted[1] != request else self._admitted[0]

    def _check_deferral(self, decision: Decision, plan: StepPlan) -> None:
        config, known = self._config.scheduler, self._requests[decision.request]
        if decision.step != plan.seq or decision.request in [
            tracked.owner for tracked in self._rows.values()
        ]:
            raise InvariantViolation(NAME, f"request {decision.request} was let in: {decision}")
        if decision.reason is Rule.ROWS:
            taken = len(self._rows) >= self._most_rows or (
                len(self._rows) + len(self._resting) >= self._num_rows
            )
            self._same(decision, "that all rows are taken", True, taken)
            self._same(decision, "the last one let in", decision.against, self._ahead_of(decision.request))
        elif decision.reason is Rule.BUDGET and self._has_constant_sizes:
            self._same(decision, "that the step is full", True, _is_full(plan, config))
        elif decision.reason is Rule.PREFIX:
            other = self._requests.get(decision.against)
            shares = other is not None and set(other.keys) & set(known.keys)
            self._same(
                decision,
                "the request that computes its prefix",
                True,
                bool(shares) or decision.against == known.parent,
            )
        elif decision.reason is Rule.SPARE and decision.blocks_needed == NO_NUMBER:
            left = self._most_rows - len(self._rows)
            self._same(decision, "that few rows are left", True, left <= int(SPARE * self._most_rows))
        elif decision.reason is Rule.BLOCKS and not self._has_reserved:
            self._check_shortage(decision, known, plan)
        elif decision.reason is Rule.SPARE:  # others may have passed it since, and taken or given back blocks
            stated = decision.blocks_free - decision.value
            self._same(decision, "that it needs more", True, decision.blocks_needed > stated)
            self._same(decision, "that enough is kept", True, decision.value >= int(SPARE * self._usable))

    @property
    def _has_constant_sizes(self) -> bool:
        config = self._config.scheduler
        return config.step_costs is None and config.learned_steps is None and not self._dialled

    def _check_chunk(self, decision: Decision, plan: StepPlan) -> None:
        config = self._config.scheduler
        if decision.reason is Rule.BUDGET:
            self._same(decision, "tokens left", decision.budget_left, 0)
            if self._has_constant_sizes:
                self._same(decision, "that the step is full", True, _is_full(plan, config))
        elif decision.reason is Rule.SHARE:
            self._same(decision, "that tokens are left", decision.budget_left > 0, True)

    def _check_shortage(self, decision: Decision, known: Known, plan: StepPlan) -> None:
        """What prompts take after the deferral they were promised before it: the difference of the two stays."""
        scheduled = dict(zip(plan.spans.row.tolist(), plan.spans.num_scheduled.tolist(), strict=True))
        promised = sum(
            max(0, self._blocks(tracked.known) - len(tracked.table))
            for row, tracked in self._rows.items()
            if tracked.scheduled + scheduled.get(row, 0) < tracked.known
        )
        watermark = int(self._usable * self._config.scheduler.watermark) if self._rows else 0
        left = self._free() - promised - watermark
        self._same(decision, "blocks left for it", decision.blocks_free - decision.value, left)
        self._same(decision, "that it needs more", True, decision.blocks_needed > left)
        self._same(decision, "the last one let in", decision.against, self._ahead_of(decision.request))
        if (
            not known.has_run  # else it may find what it computed itself
            and all(self._holders[key] == 1 for key in known.keys[:1])
            and known.parent is None
        ):
            self._same(decision, "blocks needed", decision.blocks_needed, self._blocks(known.num_tokens))

    def _preemptions(self, plan: StepPlan, victims: deque[Decision]) -> None:
        """Requests that were preempted for blocks when the plan was made, and for which request."""
        rows = {tracked.owner: row for row, tracked in self._rows.items()}
        given = {*plan.new_blocks.row.tolist(), *plan.block_copies.row.tolist()}
        for decision in victims:
            self._preempt(decision)
            if decision.reason is Rule.PLACE_RECOMPUTE:
                self._same(decision, "that the other waited", decision.against in rows, False)
            elif decision.against != NO_REQUEST:
                gains = rows.get(decision.against)
                stays = gains in given or gains not in plan.decode_rows.added
                self._same(decision, "the request that got its place", True, gains is not None and stays)

    def _preempt(self, decision: Decision) -> None:
        if not self._has_reserved:
            self._same(decision, "blocks free", decision.blocks_free, self._free())
        self._same(decision, "that it is preempted for another", True, decision.against != decision.request)
        self._same(decision, "that it ran", True, self._row_of(decision.request) is not None)
        self._leave(decision.request)

    def _count_preemptions(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if decision.kind is DecisionKind.PREEMPT and not decision.reason.startswith("paused"):
                self._requests[decision.request].preemptions += 1

    def _endings(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            known = self._requests.get(decision.request)
            if decision.kind is not DecisionKind.FINISH or known is None:
                continue
            self._same(decision, "its output", decision.value, known.num_tokens - known.num_prompt)
            if known.ends_by:
                self._same(decision, "why it ended", decision.reason in known.ends_by, True)
            if decision.reason is Rule.LENGTH:
                self._same(decision, "its length", known.num_tokens, known.max_total)


def _appends(plan: StepPlan) -> list[tuple[int, int, int]]:
    new = plan.new_blocks
    return list(zip(new.row.tolist(), new.index.tolist(), new.block.tolist(), strict=True))


def _copies(plan: StepPlan) -> list[tuple[int, int, int, int]]:
    copies = plan.block_copies
    columns = (copies.row, copies.index, copies.source, copies.target)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _is_full(plan: StepPlan, config: SchedulerConfig) -> bool:
    """Whether a step carries what it may. Rows that stand still are not in a plan: beside them it may carry less."""
    work = plan.work
    carried = work.decode_rows + work.prefill_tokens
    return carried in (config.max_num_batched_tokens, config.step_tokens(work.decode_rows))
