"""A runner without a model, for tests: it computes on integers and really executes what a plan says.

Its KV memory holds, per slot, a hash of all tokens up to that slot, written and read through the block tables of
the plans. The next token is a function of the hash read back, so a wrong block anywhere changes the output; and
every step compares the memory a row can see with what its own tokens say it should be (the shadow check, S26).
Results exist only at `wait`; swaps complete a few steps late and move their data only then.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.config import Capacity, EngineConfig
from paceline.core.plan import AT_LENGTH, RUNNING_ON, STOPPED, StepPlan, StepResult, StepTimes, Swaps
from paceline.core.sampling import SamplingParams

VOCAB = 1 << 20
MASK = (1 << 64) - 1
PRIME = 0x9E3779B97F4A7C15
U64 = NDArray[np.uint64]


class KVCorruption(AssertionError):
    """A row saw KV that is not its own (S26), or two rows wrote one slot (S7)."""


class DeviceFault(RuntimeError):
    """An injected failure of a whole step."""


def extend_hash(value: int, token: int) -> int:
    return (value * PRIME + token + 1) & MASK


def pick_token(value: int, seed: int) -> int:
    mixed = ((value ^ (seed & MASK)) * PRIME) & MASK
    return (mixed >> 40) % VOCAB


def reference_output(prompt: list[int], sampling: SamplingParams) -> tuple[list[int], str]:
    """What a request must produce, computed alone and without any cache: the oracle of O1 and O5."""
    value = 0
    for token in prompt:
        value = extend_hash(value, token)
    output: list[int] = []
    while True:
        token = pick_token(value, sampling.seed or 0)
        output.append(token)
        if is_stop(token, sampling):
            return output, "stop"
        if len(output) == sampling.max_tokens:
            return output, "length"
        value = extend_hash(value, token)


def is_stop(token: int, sampling: SamplingParams) -> bool:
    """Tokens below the first stop id stop: a range, so that random tokens hit it with a chosen probability."""
    return bool(sampling.stop_token_ids) and token < sampling.stop_token_ids[0]


@dataclass
class Faults:
    """What goes wrong on the device, drawn from a seeded source. All off by default."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    step_failure: float = 0.0
    nan_row: float = 0.0
    late_copies: int = 2  # a copy completes up to this many steps late


@dataclass
class _Copy:
    due: int
    ticket: int
    incoming: bool
    group: list[int]
    block: list[int]
    place: list[int]


class FakeRunner:
    """Executes plans on integer memory, in order, when waited for."""

    def __init__(self, config: EngineConfig, faults: Faults | None = None, *, check: bool = True) -> None:
        capacity = Capacity.of(config)
        self.config = config
        self.block_size = config.kv.block_size
        self.windows = [group.window for group in config.kv.groups]
        self.faults = faults if faults is not None else Faults(late_copies=0)
        self.check = check
        self.steps_failed = 0
        self.nan_rows = 0
        num_rows = capacity.num_rows
        width = capacity.max_blocks_per_row * self.block_size
        self._num_blocks = [group.num_blocks or config.kv.num_blocks for group in config.kv.groups]
        self.host: list[U64] = [
            np.zeros((config.kv.num_host_blocks, self.block_size), np.uint64) for _ in config.kv.groups
        ]
        self._shape = (num_rows, width, capacity.max_blocks_per_row)
        self._queue: deque[StepPlan] = deque()
        self._done: dict[int, StepResult] = {}
        self._clear(0)
        positions = np.arange(width, dtype=np.int64)
        self._pos_block, self._pos_slot, self._positions = (
            positions // self.block_size,
            positions % self.block_size,
            positions,
        )

    def _clear(self, seq: int) -> None:
        num_rows, width, num_entries = self._shape
        self.tokens = np.zeros((num_rows, width), np.int64)
        self.shadow: U64 = np.zeros((num_rows, width), np.uint64)
        self.length = np.zeros(num_rows, np.int64)
        self.computed = np.zeros(num_rows, np.int64)
        self.limit = np.zeros(num_rows, np.int64)
        self.generation = np.zeros(num_rows, np.int32)
        self.stopped = np.zeros(num_rows, np.bool_)
        self.seed: U64 = np.zeros(num_rows, np.uint64)
        self.stop_below = np.zeros(num_rows, np.int64)
        self.decoding = np.zeros(num_rows, np.bool_)
        self.table = [np.zeros((num_rows, num_entries), np.int64) for _ in self.windows]
        # Poison: a slot nobody wrote must never be read.
        self.kv: list[U64] = [
            np.full(blocks * self.block_size, 0xDEADBEEFDEADBEEF, np.uint64) for blocks in self._num_blocks
        ]
        self._copies: list[_Copy] = []
        self._queue.clear()
        self._done.clear()
        self._next_seq = seq + 1

    # -- the runner seam -----------------------------------------------------------------------------------

    def reset(self, full: StepPlan) -> None:
        assert full.full
        kept = self.kv if hasattr(self, "kv") and len(full.joins.row) else None
        self._clear(full.seq)
        if kept is not None:
            self.kv = kept
        self._apply_rows(full)

    def submit(self, plan: StepPlan) -> _Pending:
        assert plan.seq == self._next_seq, f"plan {plan.seq} after {self._next_seq - 1}"
        self._next_seq += 1
        self._queue.append(plan)
        return _Pending(self, plan.seq)

    def finish_until(self, seq: int) -> StepResult:
        while self._queue and self._queue[0].seq <= seq:
            plan = self._queue.popleft()
            if self.faults.step_failure and self.faults.rng.random() < self.faults.step_failure:
                self.steps_failed += 1
                raise DeviceFault(f"step {plan.seq}")
            self._done[plan.seq] = self._execute(plan)
        return self._done.pop(seq)

    # -- execution -----------------------------------------------------------------------------------------

    def _execute(self, plan: StepPlan) -> StepResult:
        self._apply_rows(plan)
        self._start_copies(plan.swap_out, incoming=False, seq=plan.seq)
        copies = plan.block_copies
        for row, group, index, source, target in zip(
            *(c.tolist() for c in (copies.row, copies.group, copies.index, copies.source, copies.target)),
            strict=True,
        ):
            size = self.block_size
            memory = self.kv[group]
            memory[target * size : (target + 1) * size] = memory[source * size : (source + 1) * size]
            self.table[group][row, index] = target
        self._start_copies(plan.swap_in, incoming=True, seq=plan.seq)
        tickets = self._finish_copies(plan.seq)
        return self._compute(plan, tickets)

    def _apply_rows(self, plan: StepPlan) -> None:
        if len(plan.leaves):
            self.decoding[plan.leaves] = False
        joins = plan.joins
        if len(joins.row):
            self._join(plan)
        self.decoding[plan.decode_rows.removed] = False
        self.decoding[plan.decode_rows.added] = True
        appends = plan.new_blocks
        if len(appends.row):
            for group, table in enumerate(self.table):
                mine = appends.group == group
                table[appends.row[mine], appends.index[mine]] = appends.block[mine]

    def _join(self, plan: StepPlan) -> None:
        joins = plan.joins
        sources = dict(zip(plan.row_copies.target.tolist(), plan.row_copies.source.tolist(), strict=True))
        counts = dict(zip(plan.row_copies.target.tolist(), plan.row_copies.num_tokens.tolist(), strict=True))
        for at, row in enumerate(joins.row.tolist()):
            count = int(joins.num_tokens[at])
            tokens = joins.tokens[at]
            if row in sources:
                assert counts[row] == count
                tokens = self.tokens[sources[row], :count].copy()
            self.tokens[row, :count] = tokens[:count]
            value = 0
            hashes = []
            for token in self.tokens[row, :count].tolist():
                value = extend_hash(value, token)
                hashes.append(value)
            self.shadow[row, :count] = np.array(hashes, np.uint64)
            sampling = joins.sampling[at]
            self.seed[row] = (sampling.seed or 0) & MASK
            self.stop_below[row] = sampling.stop_token_ids[0] if sampling.stop_token_ids else 0
            for table in self.table:
                table[row] = 0
            self.decoding[row] = self.stopped[row] = False
        self.length[joins.row] = joins.num_tokens
        self.computed[joins.row] = joins.num_computed
        self.limit[joins.row] = joins.limit
        self.generation[joins.row] = joins.generation

    def _start_copies(self, swaps: Swaps, *, incoming: bool, seq: int) -> None:
        for ticket in dict.fromkeys(swaps.ticket.tolist()):
            mine = swaps.ticket == ticket
            late = self.faults.rng.randint(0, self.faults.late_copies) if self.faults.late_copies else 0
            self._copies.append(
                _Copy(
                    seq + late,
                    ticket,
                    incoming,
                    swaps.group[mine].tolist(),
                    swaps.block[mine].tolist(),
                    swaps.place[mine].tolist(),
                )
            )

    def _finish_copies(self, seq: int) -> list[int]:
        """Copies that are due happen now, in the order they were asked for."""
        done = []
        for copy in [copy for copy in self._copies if copy.due <= seq]:
            self._copies.remove(copy)
            for group, block, place in zip(copy.group, copy.block, copy.place, strict=True):
                slots = slice(block * self.block_size, (block + 1) * self.block_size)
                if copy.incoming:
                    self.kv[group][slots] = self.host[group][place]
                    self.host[group][place] = 0xDEADBEEFDEADBEEF
                else:
                    self.host[group][place] = self.kv[group][slots]
            done.append(copy.ticket)
        return done

    def _compute(self, plan: StepPlan, tickets: list[int]) -> StepResult:
        decode = np.flatnonzero(self.decoding)
        spans = plan.spans
        if self.check:
            self._shadow_check(np.concatenate([decode, spans.row]))
            self._check_writes(decode, plan)
        rows = np.concatenate([decode, spans.row]).astype(np.int32)
        count = np.ones(len(rows), np.int32)
        final = np.empty(len(rows), np.uint64)
        active = ~self.stopped[decode]  # a stopped row is masked: it computes into the null block
        final[: len(decode)] = self._decode(decode, active)
        count[: len(decode)] = active
        for at, (row, num) in enumerate(
            zip(spans.row.tolist(), spans.num_scheduled.tolist(), strict=True), len(decode)
        ):
            final[at] = self._span(row, num)
            count[at] = self.computed[row] == self.length[row]
        return self._sample(plan.seq, rows, count, final, tickets)

    def _decode(self, rows: NDArray[np.intp], active: NDArray[np.bool_]) -> U64:
        position = self.computed[rows]
        token = self.tokens[rows, position].astype(np.uint64)
        block, slot = position // self.block_size, position % self.block_size
        before = np.maximum(position - 1, 0)
        size = self.block_size
        previous = self.kv[0][self.table[0][rows, before // size] * size + before % size]
        previous = np.where(position > 0, previous, 0).astype(np.uint64)
        value = previous * np.uint64(PRIME) + token + np.uint64(1)
        for table, memory in zip(self.table, self.kv, strict=True):
            where = np.where(active, table[rows, block] * size + slot, 0)
            memory[where] = value
        self.computed[rows] += active
        return value

    def _span(self, row: int, num: int) -> int:
        start = int(self.computed[row])
        assert start + num <= self.length[row], "a span goes beyond what is known"
        size = self.block_size
        value = 0
        if start:
            value = int(self.kv[0][self.table[0][row, (start - 1) // size] * size + (start - 1) % size])
        hashes = []
        for token in self.tokens[row, start : start + num].tolist():
            value = extend_hash(value, token)
            hashes.append(value)
        written = np.array(hashes, np.uint64)
        block, slot = self._pos_block[start : start + num], self._pos_slot[start : start + num]
        for table, memory in zip(self.table, self.kv, strict=True):
            memory[table[row, block] * size + slot] = written
        self.computed[row] = start + num
        return value

    def _sample(
        self, seq: int, rows: NDArray[np.int32], count: NDArray[np.int32], final: U64, tickets: list[int]
    ) -> StepResult:
        mixed = (final ^ self.seed[rows]) * np.uint64(PRIME)
        tokens = ((mixed >> np.uint64(40)) % np.uint64(VOCAB)).astype(np.int32)
        sampled = rows[count > 0]
        chosen = tokens[count > 0]
        at = self.length[sampled]
        self.tokens[sampled, at] = chosen
        self.shadow[sampled, at] = (
            self.shadow[sampled, at - 1] * np.uint64(PRIME) + chosen.astype(np.uint64) + np.uint64(1)
        )
        self.length[sampled] = at + 1
        finished = np.full(len(rows), RUNNING_ON, np.uint8)
        stops = chosen < self.stop_below[sampled]
        ends = np.where(stops, STOPPED, np.where(at + 1 >= self.limit[sampled], AT_LENGTH, RUNNING_ON))
        finished[count > 0] = ends
        self.stopped[sampled] |= ends != RUNNING_ON
        finite = np.ones(len(rows), np.bool_)
        if self.faults.nan_row and len(rows) and self.faults.rng.random() < self.faults.nan_row:
            finite[self.faults.rng.randrange(len(rows))] = False
            self.nan_rows += 1
        return StepResult(
            seq=seq,
            rows=rows,
            generation=self.generation[rows],
            tokens=tokens[:, None],
            count=count,
            finished=finished,
            finite=finite,
            copies_done=np.array(tickets, np.int32),
            times=StepTimes(),
        )

    # -- the shadow ----------------------------------------------------------------------------------------

    def _shadow_check(self, rows: NDArray[np.intp]) -> None:
        """S26: all a row can see is what its own tokens say."""
        if not len(rows):
            return
        computed = self.computed[rows][:, None]
        longest = int(computed.max())
        positions = self._positions[:longest]
        expected = self.shadow[rows, :longest]
        for window, table, memory in zip(self.windows, self.table, self.kv, strict=True):
            slots = table[rows][:, self._pos_block[:longest]] * self.block_size + self._pos_slot[:longest]
            seen = positions < computed
            if window is not None:
                seen &= positions > computed - window
            wrong = (memory[slots] != expected) & seen
            if wrong.any():
                at, position = np.argwhere(wrong)[0]
                raise KVCorruption(f"S26: row {rows[at]} reads foreign KV at position {position}")

    def _check_writes(self, decode: NDArray[np.intp], plan: StepPlan) -> None:
        """S7: no two tokens of a step share a slot, and none goes to the null block."""
        position = self.computed[decode]
        active = ~self.stopped[decode]
        writes = [
            self.table[0][decode, position // self.block_size] * self.block_size + position % self.block_size
        ]
        writes[0] = writes[0][active]
        for row, num in zip(plan.spans.row.tolist(), plan.spans.num_scheduled.tolist(), strict=True):
            start = int(self.computed[row])
            block = self.table[0][row, self._pos_block[start : start + num]]
            writes.append(block * self.block_size + self._pos_slot[start : start + num])
        slots = np.sort(np.concatenate(writes))
        if len(slots) and (slots[0] < self.block_size or (slots[1:] == slots[:-1]).any()):
            raise KVCorruption("S7: a slot is written twice in one step, or the null block is written")


class _Pending:
    def __init__(self, runner: FakeRunner, seq: int) -> None:
        self._runner = runner
        self._seq = seq

    def wait(self) -> StepResult:
        return self._runner.finish_until(self._seq)
