"""A runner without a model, for tests: it computes on integers and really executes what a plan says.

Its KV memory holds, per slot, a hash of all tokens up to that slot, written and read through the block tables of
the plans. The next token is a function of the hash read back, so a wrong block anywhere changes the output; and
every step compares the memory a row can see with what its own tokens say it should be (the shadow check, S26).
Results exist only at `wait`; swaps complete a few steps late and move their data only then. Plain Python lists:
at the few rows of a test they are faster than arrays. Pictures: `tests.fake_encoder`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.config.engine import EngineConfig
from paceline.config.sized import Capacity
from paceline.core.guide import Guide
from paceline.core.parameters import PoolingParams
from paceline.core.plan import (
    AT_LENGTH,
    DRAFT_KINDS,
    EMPTY,
    RUNNING_ON,
    SAME_ROWS,
    STOPPED,
    DraftTally,
    GuideWork,
    Moves,
    RowVector,
    StepPlan,
    StepResult,
    Swaps,
    i32,
)
from paceline.core.sampling import SamplingParams
from paceline.scheduler.invariants import InvariantViolation
from tests.fake_copies import copy_placed, end_jumps, starts_of
from tests.fake_encoder import NO_ENCODER, POISON, FakeEncoder
from tests.fake_faults import DeviceFault, Faults
from tests.guides import PRIME, VOCAB, FakeGuide
from tests.reference_output import MASK, Placed, placed_values, stop_bound, unseen, vector_of

_MASKED = (0, 0, RUNNING_ON)  # no token


class KVCorruption(InvariantViolation):
    """A row saw KV that is not its own (S26), or two rows wrote one slot (S7)."""


@dataclass
class _Copy:
    due: int
    ticket: int
    incoming: bool
    parts: list[tuple[int, int, int]]  # group, block, place
    is_move: bool  # between host and disk
    fails: bool


@dataclass
class _Row:
    """The device's columns of one row."""

    generation: int = 0
    tokens: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)  # the shadow: what the KV of its tokens must hold
    full: list[list[int]] = field(default_factory=list)  # the same, cut into full blocks
    computed: int = 0
    limit: int = 0
    seed: int = 0
    stop_below: int = 0
    is_guided: bool = False
    guide: FakeGuide | None = None  # a copy, of the step that is computed
    adapter: int = 0
    is_predicted: bool = False  # its request came with a prediction: all drafts are from it
    ended: bool = False
    pooling: PoolingParams | None = None  # of a row that ends with a vector
    total: int = 0  # of the hashes that it has computed, for a vector of all tokens
    # First tokens that this step places, and where they end.
    jumps: dict[int, int] = field(default_factory=dict)
    media: tuple[tuple[int, int, int], ...] = ()  # where its items stand, and their numbers
    sampling: SamplingParams | None = None  # of a row that drops blocks
    num_prompt: int = 0
    dropped: int = 0  # tokens that its tables have no entries for
    tables: list[list[int]] = field(default_factory=list)
    # Each table and the memory it is for.
    kv: list[tuple[list[int], list[list[int]]]] = field(default_factory=list)
    changed: bool = True  # its tables changed since they were last compared whole


class FakeRunner:
    """Executes plans on integer memory, in order, when waited for."""

    def __init__(self, config: EngineConfig, faults: Faults | None = None, *, check: bool = True) -> None:
        self.config = config
        self.faults = faults if faults is not None else Faults(late_copies=0)
        self.check = check
        self.violation: AssertionError | None = None
        self.steps_failed = 0
        self.nan_rows = 0
        self._size = config.kv.block_size
        self._windows = [group.window for group in config.kv.groups]
        self._capacity = Capacity.of(config)
        self._num_blocks = [group.num_blocks or config.kv.num_blocks for group in config.kv.groups]
        self._finite = np.ones(2 * self._capacity.num_rows, np.bool_)  # most results: all numbers are usable
        self._finite.flags.writeable = False
        self._host: list[dict[int, list[int]]] = [{} for _ in config.kv.groups]
        self._disk: list[dict[int, list[int]]] = [{} for _ in config.kv.groups]
        self.copies_failed = 0
        self._queue: deque[StepPlan] = deque()
        self._done: dict[int, StepResult] = {}
        self.guides: dict[int, Mapping[int, Guide]] = {}  # supplied, by step
        # Those in memory, and what the hashes of their rows start from; None: they change nothing.
        self.adapters: dict[int, int] | None = None
        self.encoder = FakeEncoder(config.scheduler.encoder or NO_ENCODER)
        self.hold, self.drop = self.encoder.hold, self.encoder.drop
        # What is placed of a row's prompt, see `Placed`; a plan says it only where it is copied.
        self.placed_of: Callable[[int], Placed] = lambda row: ()
        self._placed: dict[tuple[int, int], Placed] = {}  # by row and generation
        self._clear(0)

    def _clear(self, seq: int) -> None:
        self._rows = [_Row() for _ in range(self._capacity.num_rows)]
        self._decoding: list[int] = []
        self._kv = [[[POISON] * self._size for _ in range(blocks)] for blocks in self._num_blocks]
        self._copies: list[_Copy] = []
        self.encoder.clear()
        self._guided_rows: set[int] = set()  # as of the last plan submitted
        self._queue.clear()
        self.guides.clear()
        self._done.clear()
        self._next_seq = seq + 1

    # -- the runner seam -----------------------------------------------------------------------------------

    def reset(self, full: StepPlan) -> None:
        """Start from a full plan. KV memory survives only when the plan has rows that live in it."""
        assert full.full
        kept = self._kv
        self._clear(full.seq)
        if len(full.joins.row):
            self._kv = kept
        self._note_placed(full)
        self._apply_rows(full)

    def submit(self, plan: StepPlan) -> _Pending:
        assert plan.seq == self._next_seq, f"plan {plan.seq} after {self._next_seq - 1}"
        self._check_supplied(plan)
        self._note_placed(plan)
        self._next_seq += 1
        self._queue.append(plan)
        return _Pending(self, plan.seq)

    def _note_placed(self, plan: StepPlan) -> None:
        for row, generation in zip(plan.joins.row.tolist(), plan.joins.generation.tolist(), strict=True):
            self._placed[row, generation] = self.placed_of(row)

    def _check_supplied(self, plan: StepPlan) -> None:
        """G2: a device draws in order, so a step with guided rows has its guides before another is submitted."""
        if self._queue and self._guided_rows and self._queue[-1].seq not in self.guides:
            self.violation = InvariantViolation("G2", f"step {plan.seq} goes before the guides of the last")
            raise self.violation
        self._guided_rows -= {*plan.leaves.tolist(), *plan.joins.row.tolist()}
        joined = zip(plan.joins.row.tolist(), plan.joins.sampling, strict=True)
        self._guided_rows |= {row for row, sampling in joined if sampling.structured_outputs is not None}

    def finish_until(self, seq: int) -> StepResult:
        while self._queue and self._queue[0].seq <= seq:
            plan = self._queue.popleft()
            if self.faults.step_failure and self.faults.rng.random() < self.faults.step_failure:
                self.steps_failed += 1
                raise DeviceFault(f"step {plan.seq}")
            try:
                self._done[plan.seq] = self._execute(plan)
            except AssertionError as violation:  # the engine takes it for a failed step: keep it for the test
                self.violation = violation
                raise
        return self._done.pop(seq)

    # -- execution -----------------------------------------------------------------------------------------

    def _execute(self, plan: StepPlan) -> StepResult:
        self._apply_rows(plan)
        if len(plan.swap_out.ticket):
            self._start_copies(plan.swap_out, incoming=False, seq=plan.seq)
        for moves, incoming in ((plan.store, False), (plan.fetch, True)):
            if len(moves.ticket):
                self._start_copies(moves, incoming=incoming, seq=plan.seq)
        copies = plan.block_copies
        if len(copies.row):
            columns = (copies.row, copies.group, copies.index, copies.source, copies.target)
            for row, group, index, source, target in zip(*(c.tolist() for c in columns), strict=True):
                self._kv[group][target] = self._kv[group][source].copy()
                self._rows[row].tables[group][index] = target
                self._rows[row].changed = True
        if len(plan.placements.row):
            copy_placed(plan.placements, self._rows, self._kv, self._size)
        if len(plan.swap_in.ticket):
            self._start_copies(plan.swap_in, incoming=True, seq=plan.seq)
        tickets, failed = self._finish_copies(plan.seq) if self._copies else ([], [])
        whole = self.encoder.compute(plan.encodes) if plan.encodes.count else ()
        result = self._compute(plan, tickets)
        if whole and self.faults.bad_encoding and self.faults.rng.random() < self.faults.bad_encoding:
            self.nan_rows += 1
            result = result._replace(bad_encodings=i32([self.faults.rng.choice(whole)]))
        return result._replace(copies_failed=np.array(failed, np.int32)) if failed else result

    def _apply_rows(self, plan: StepPlan) -> None:
        change = plan.decode_rows
        if len(plan.leaves) or len(plan.joins.row) or change is not SAME_ROWS:
            gone = {*plan.leaves.tolist(), *plan.joins.row.tolist(), *change.removed.tolist()}
            if len(plan.joins.row):
                self._join(plan)
            self._decoding = [row for row in self._decoding if row not in gone] + change.added.tolist()
        for row, count in zip(plan.drops.row.tolist(), plan.drops.num_tokens.tolist(), strict=True):
            self._rows[row].dropped = count
            self._rows[row].changed = True
        appends = plan.new_blocks
        if len(appends.row):
            columns = (appends.row, appends.group, appends.index, appends.block)
            for row, group, index, block in zip(*(c.tolist() for c in columns), strict=True):
                table = self._rows[row].tables[group]
                table.extend([0] * (index + 1 - len(table)))
                table[index] = block
                self._rows[row].changed = True

    def _join(self, plan: StepPlan) -> None:
        joins, copies = plan.joins, plan.row_copies
        source_of = dict(zip(copies.target.tolist(), copies.source.tolist(), strict=True))
        for at, row in enumerate(joins.row.tolist()):
            count = int(joins.num_tokens[at])
            tokens = joins.tokens[at].tolist()
            if row in source_of:
                tokens = self._rows[source_of[row]].tokens[:count]
            assert len(tokens) == count, "a row joins with fewer tokens than it says"
            adapter = int(joins.adapter[at]) if len(joins.adapter) else 0
            value, hashes = self._adapter(row, adapter), []
            jumps = placed_values(tokens, self._placed.pop((row, int(joins.generation[at])), ()), value)
            size, sampling, num_prompt = self._size, joins.sampling[at], int(joins.num_prompt[at])
            media = joins.media[at] if joins.media else ()
            seen = self.encoder.expected(media)
            for position, token in enumerate(tokens):
                salt = seen.get(position, 0)
                salt += 0 if sampling.kv_keep is None else unseen(sampling, position, num_prompt, size)
                value = (value * PRIME + token + 1 + salt) & MASK
                value = jumps.get(position, value)
                hashes.append(value)
            tables: list[list[int]] = [[] for _ in self._windows]
            self._rows[row] = _Row(
                generation=int(joins.generation[at]),
                tokens=tokens,
                hashes=hashes,
                full=[hashes[end - size : end] for end in range(size, count + 1, size)],
                computed=int(joins.num_computed[at]),
                limit=int(joins.limit[at]),
                seed=(sampling.seed or 0) & MASK,
                stop_below=stop_bound(sampling),
                is_guided=sampling.structured_outputs is not None,
                adapter=adapter,
                is_predicted=bool(sampling.prediction),
                pooling=sampling.pooling,
                media=media,
                sampling=None if sampling.kv_keep is None else sampling,
                num_prompt=num_prompt,
                tables=tables,
                kv=list(zip(tables, self._kv, strict=True)),
            )

    def _adapter(self, row: int, number: int) -> int:
        """A2: what a row computes with is in memory."""
        if not number or self.adapters is None:
            return 0
        if number not in self.adapters:
            raise InvariantViolation("A2", f"row {row} computes without its adapter {number}")
        return self.adapters[number]

    def _start_copies(self, swaps: Swaps | Moves, *, incoming: bool, seq: int) -> None:
        parts: dict[int, list[tuple[int, int, int]]] = {}
        pair = (swaps.block, swaps.place) if isinstance(swaps, Swaps) else (swaps.host, swaps.disk)
        columns = (swaps.ticket, swaps.group, *pair)
        faults, is_move = self.faults, isinstance(swaps, Moves)
        most = faults.late_moves if is_move else faults.late_copies
        for ticket, group, block, place in zip(*(c.tolist() for c in columns), strict=True):
            parts.setdefault(ticket, []).append((group, block, place))
        for ticket, moved in parts.items():
            late = faults.rng.randint(0, most) if most else 0
            fails = faults.copy_failure > 0.0 and faults.rng.random() < faults.copy_failure
            self._copies.append(_Copy(seq + late, ticket, incoming, moved, is_move, fails))

    def _finish_copies(self, seq: int) -> tuple[list[int], list[int]]:
        """Copies that are due happen now, in the order they were asked for: those that succeeded, and that failed."""
        due = [copy for copy in self._copies if copy.due <= seq]
        self._copies = [copy for copy in self._copies if copy.due > seq]
        for copy in due:
            for group, block, place in copy.parts if not copy.fails else ():
                above: Any = self._host[group] if copy.is_move else self._kv[group]
                below = self._disk[group] if copy.is_move else self._host[group]
                if copy.incoming:
                    above[block] = below[place].copy()
                else:
                    below[place] = above[block].copy()
        failed = [copy.ticket for copy in due if copy.fails]
        self.copies_failed += len(failed)
        return [copy.ticket for copy in due if not copy.fails], failed

    def _compute(self, plan: StepPlan, tickets: list[int]) -> StepResult:
        rows = self._rows
        guides = self.guides.pop(plan.seq, {})
        for number, guide in guides.items():
            rows[number].guide = guide  # type: ignore[assignment]
        live = [number for number in self._decoding if number in guides and not rows[number].ended]
        certain = sum(len(guides[number].forced()) for number in live)
        guesses = self._guess(plan) if plan.draft_width else {}
        work = [(number, rows[number], 1 + len(guesses.get(number, ()))) for number in self._decoding]
        if len(plan.spans.row):
            spans = zip(plan.spans.row.tolist(), plan.spans.num_scheduled.tolist(), strict=True)
            work += [(number, rows[number], num) for number, num in spans]
        starts = starts_of(plan, [(number, num) for number, _, num in work], rows)
        if self.check:
            self._check_step(work, starts)
        outcomes: list[int] = []  # row, generation, token, count and ending of each
        more: dict[int, list[int]] = {}  # tokens of rows whose first draft was right
        vectors: list[RowVector] = []
        for place, (number, row, num) in enumerate(work):
            outcomes += (number, row.generation)
            row.computed = starts.get(place, row.computed)
            # An ended row is masked: it computes into the null block.
            if row.ended:
                outcomes += _MASKED
                continue
            if row.adapter:
                self._adapter(number, row.adapter)
            if row.media:
                self.encoder.check(number, row.media, row.computed, row.computed + num)
            if number in guesses and place < len(self._decoding):
                tokens, ending = self._verify(row, guesses[number])
                outcomes += (tokens[0], len(tokens), ending)
                more[place] = tokens
            else:
                outcomes += self._advance(row, num)
                if row.pooling is not None and row.ended:
                    vectors.append(self._vector(number, row.pooling))
        for number in guides:
            rows[number].guide = None
        end_jumps(plan.placements, rows)
        columns = np.array(outcomes, np.int32)
        drawn = columns[2::5, None]
        if plan.draft_width:
            drawn = np.zeros((len(work), plan.draft_width + 1), np.int32)
            drawn[:, 0] = columns[2::5]
            for place, tokens in more.items():
                drawn[place, : len(tokens)] = tokens
        finite = self._finite[: len(work)]
        if self.faults.nan_row and work and self.faults.rng.random() < self.faults.nan_row:
            finite = finite.copy()
            finite[self.faults.rng.randrange(len(work))] = False
            self.nan_rows += 1
        return StepResult(
            seq=plan.seq,
            rows=columns[::5],
            generation=columns[1::5],
            tokens=drawn,
            count=columns[3::5],
            finished=columns[4::5].astype(np.uint8),
            finite=finite,
            copies_done=np.array(tickets, np.int32) if tickets else EMPTY,
            vectors=tuple(vectors),
            guided=GuideWork(0, 0.0, certain=certain) if guides else None,
            **self._drafted(work, guesses, more),
        )

    # -- drafts --------------------------------------------------------------------------------------------

    def _guess(self, plan: StepPlan) -> dict[int, list[int]]:
        """Drafts of decoding rows, by row: right and wrong ones, as long as may be or shorter, or none."""
        rng, left = self.faults.rng, plan.draft_tokens
        guesses: dict[int, list[int]] = {}
        for number in self._decoding:
            row = self._rows[number]
            most = min(plan.draft_width, row.limit - len(row.tokens) - 1, left)
            if row.ended or most < 1 or rng.random() < 0.2:
                continue
            drafts: list[int] = []
            value = row.hashes[-1]
            guide = row.guide.copy() if row.guide is not None else None
            for _ in range(most if rng.random() < 0.6 else rng.randint(1, most)):
                token = (((value ^ row.seed) * PRIME) & MASK) >> 44
                if guide is not None:
                    token = guide.choose(token)
                    guide.consume((token,))
                drafts.append(token if rng.random() < self.faults.right_drafts else rng.randrange(VOCAB))
                value = (value * PRIME + drafts[-1] + 1) & MASK
            if row.guide is not None:  # nothing is drawn behind the end of a structure
                drafts = drafts[: min(row.guide.accepts(drafts), row.guide.left - 1)]
                if not drafts:
                    continue
            guesses[number] = drafts
            left -= len(drafts)
        return guesses

    def _verify(self, row: _Row, drafts: list[int]) -> tuple[list[int], int]:
        """A row computes its token and drafts behind it; returns the tokens it gets, and how it ended."""
        start, size = row.computed, self._size
        value = row.hashes[start]
        for position, draft in enumerate(drafts, start + 1):  # rejected ones stay where they were written
            value = (value * PRIME + draft + 1) & MASK
            for table, memory in row.kv:
                memory[table[position // size]][position % size] = value
        tokens: list[int] = []
        for draft in [*drafts, -1]:
            token, _, ending = self._advance(row, 1)
            tokens.append(token)
            if token != draft or ending != RUNNING_ON:
                break
        return tokens, ending

    def _drafted(
        self, work: list[tuple[int, _Row, int]], guesses: dict[int, list[int]], more: dict[int, list[int]]
    ) -> dict[str, Any]:
        """What a result says of drafts. Their kind is their place."""
        if not guesses:
            return {}
        compared, equal = np.zeros(DRAFT_KINDS, np.int32), np.zeros(DRAFT_KINDS, np.int32)
        for tokens in more.values():
            compared[: len(tokens)] += 1
            equal[: len(tokens) - 1] += 1
        verified = np.zeros(len(work), np.int32)
        verified[list(more)] = [len(guesses[work[place][0]]) for place in more]
        predicted = np.where([row.is_predicted for _, row, _ in work], verified, 0)
        found = {"verified": verified, "drafts": DraftTally(compared, equal)}
        return found | ({"predicted": predicted.astype(np.int32)} if predicted.any() else {})

    def _advance(self, row: _Row, num: int) -> tuple[int, int, int]:
        """Compute `num` tokens of a row through its block tables; returns the token, its count, how it ended."""
        size, tokens, hashes, start = self._size, row.tokens, row.hashes, row.computed
        end = start + num
        assert end <= len(tokens), "a row computes beyond what it knows"
        value, dropped = 0, row.dropped
        if dropped:
            value = hashes[start - 1]  # which it may not see any more
        elif start:
            table, memory = row.kv[0]
            value = memory[table[(start - 1) // size]][(start - 1) % size]
        if not start or value == hashes[start - 1]:  # then so are all that follow from it
            value = hashes[end - 1]
            if num == 1:
                index, slot = divmod(start - dropped, size)
                for table, memory in row.kv:
                    memory[table[index]][slot] = value
            else:
                _write(row, start, end, size)
        else:
            for position in range(start, end):
                value = (value * PRIME + tokens[position] + 1) & MASK
                for table, memory in row.kv:
                    memory[table[position // size]][position % size] = value
        row.computed = end
        if row.pooling is not None:
            table, memory = row.kv[0]
            row.total += sum(memory[table[at // size]][at % size] for at in range(start, end))
            row.ended = end == len(tokens)
            return _MASKED
        if end < len(tokens):
            return _MASKED
        token = (((value ^ row.seed) * PRIME) & MASK) >> 44  # as the reference has it
        if row.is_guided:
            token = self._guided(row, token)
        tokens.append(token)
        salt = 0 if row.sampling is None else unseen(row.sampling, end, row.num_prompt, size)
        hashes.append((hashes[-1] * PRIME + token + 1 + salt) & MASK)
        end += 1
        if end % size == 0:
            row.full.append(hashes[-size:])
        if token < row.stop_below:
            row.ended = True
            return token, 1, STOPPED
        if end >= row.limit:
            row.ended = True
            return token, 1, AT_LENGTH
        return token, 1, RUNNING_ON

    def _vector(self, number: int, pooling: PoolingParams) -> RowVector:
        """Of a row that has computed its prompt, from what the memory holds."""
        (table, memory), last = self._rows[number].kv[0], self._rows[number].computed - 1
        found = memory[table[last // self._size]][last % self._size]
        return RowVector(number, vector_of(pooling, found, self._rows[number].total))

    def _guided(self, row: _Row, token: int) -> int:
        guide = row.guide
        if guide is None:
            raise InvariantViolation("G1", "a row draws without its guide")
        token = guide.choose(token)
        row.guide = guide.copy()  # the engine's own moves on when the token is delivered
        row.guide.consume((token,))
        return token

    # -- the shadow ----------------------------------------------------------------------------------------

    def _check_step(self, work: list[tuple[int, _Row, int]], starts: Mapping[int, int]) -> None:
        """S26: all a row can see is what its own tokens say. S7: no slot is written twice in one step."""
        size = self._size
        written: set[int] = set()
        total = 0
        for place, (number, row, num) in enumerate(work):
            if row.ended:
                continue
            # Whole after a change of its tables and every eighth token, else what was written last.
            start = starts.get(place, row.computed)
            if row.sampling is not None:
                self._check_sight(number, row, num)
                start -= row.dropped
            if row.changed or row.dropped or not start & 7:
                self._check_all(number, row)
                row.changed = False
            else:
                last, slot = divmod(start - 1, size)
                for table, memory in row.kv:
                    if memory[table[last]][slot] != row.hashes[start - 1]:
                        raise KVCorruption("S26", f"row {number} reads foreign KV in position {start - 1}")
            total += num
            if num == 1:
                index, slot = divmod(start, size)
                table = row.tables[0]
                block = table[index] if index < len(table) else 0
                if block == 0:
                    raise KVCorruption("S7", f"row {number} writes position {start} into the null block")
                written.add(block * size + slot)
            else:
                self._note_span(number, row, start, num, written)
        if len(written) < total:
            raise KVCorruption("S7", "a slot is written twice in one step")

    def _check_sight(self, number: int, row: _Row, num: int) -> None:
        """D2: what a row has dropped is what the tokens it computes must not see, no more and no less."""
        assert row.sampling is not None
        for position in (row.computed, row.computed + num - 1):
            if row.dropped != unseen(row.sampling, position, row.num_prompt, self._size):
                raise KVCorruption("D2", f"row {number} computes token {position}, {row.dropped} dropped")

    def _note_span(self, number: int, row: _Row, start: int, num: int, written: set[int]) -> None:
        """The slots a row writes, block by block. `start`: the first, those left out that it has dropped."""
        size, table = self._size, row.tables[0]
        end = start + num
        for first in range(start - start % size, end, size):  # of each block written
            index = first // size
            block = table[index] if index < len(table) else 0
            if block == 0:
                raise KVCorruption("S7", f"row {number} writes position {first} into the null block")
            shift = block * size - first
            written.update(range(shift + max(first, start), shift + min(first + size, end)))

    def _check_all(self, number: int, row: _Row) -> None:
        """Everything the row can see: the blocks that are full and inside its window at once, then the two ends."""
        size, end = self._size, row.computed
        if row.dropped:
            assert row.sampling is not None and row.sampling.kv_keep is not None
            first = row.sampling.kv_keep.start(size) * size
            shown = row.hashes[:first] + row.hashes[first + row.dropped : end]
            for table, memory in row.kv:
                held = [slot for block in table[: -(-len(shown) // size)] for slot in memory[block]]
                if held[: len(shown)] != shown:
                    raise KVCorruption("S26", f"row {number} reads foreign KV up to {end}")
            return
        for window, (table, memory) in zip(self._windows, row.kv, strict=True):
            low = 0 if window is None else max(0, end - window + 1)
            first, last = -(-low // size), end // size
            good = first >= last or [memory[block] for block in table[first:last]] == row.full[first:last]
            if last * size < end:
                start = max(low - last * size, 0)
                good &= memory[table[last]][start : end % size] == row.hashes[last * size + start : end]
            if low < min(first, last) * size:
                good &= memory[table[first - 1]][low % size :] == row.hashes[low : first * size]
            if not good:
                raise KVCorruption("S26", f"row {number} reads foreign KV in positions {low} to {end}")


def _write(row: _Row, start: int, end: int, size: int) -> None:
    """What the tokens `start` to `end` of a row say goes into its blocks."""
    hashes, dropped = row.hashes, row.dropped
    start, end = start - dropped, end - dropped
    for first in range(start - start % size, end, size):  # of each block
        low, high = max(first, start), min(first + size, end)
        for table, memory in row.kv:
            memory[table[first // size]][low - first : high - first] = hashes[low + dropped : high + dropped]


class _Pending:
    def __init__(self, runner: FakeRunner, seq: int) -> None:
        self._runner = runner
        self._seq = seq

    def supply(self, guides: Mapping[int, Guide]) -> None:
        self._runner.guides[self._seq] = guides

    def wait(self) -> StepResult:
        return self._runner.finish_until(self._seq)
