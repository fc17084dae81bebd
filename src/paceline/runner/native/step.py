"""A step computed by the native kernels (`cpu.SamplingStep`)."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import EngineConfig
from paceline.core.counters import CPUWork
from paceline.core.standing import Pulse
from paceline.runner.device_rows import DeviceRows, FlatBatch
from paceline.runner.machine_load import MANY_TOKENS, FreeCores
from paceline.runner.native.adapters import NativeAdapters
from paceline.runner.native.code import Code
from paceline.runner.native.kv_pool import KVPool
from paceline.runner.native.model import NativeModel
from paceline.runner.native.step_memory import StepMemory
from paceline.runner.native.team import Team
from paceline.runner.native.token_sampling import TokenSampling
from paceline.runner.pictures import NO_VECTOR, Pictures
from paceline.runner.sampling.sampler import Settled, Wanted

Index = NDArray[np.int64]
LOOK_S = 0.5  # between two looks at the phase of a step
# Phases are timed in one step of this many: the clocks take half a percent of a small one. Not a power of two, so that
# requests of equal lengths do not put every prompt into a timed step.
TIMED_EVERY = 7
TIMED_TOKENS = 64  # of a prompt, to learn what a token takes


class BadPlan(RuntimeError):
    """A step that would read or write outside its tables; nothing of it has been computed."""


class NativeStep:
    """One compiled call for each step."""

    def __init__(
        self,
        model: NativeModel,
        config: EngineConfig,
        code: Code,
        threads: int,
        free: FreeCores | None = None,
        pulse: Pulse | None = None,
        look_s: float = LOOK_S,
        kv_dtype: str = "float32",
    ) -> None:
        self.spec = model.spec
        self.kv = KVPool(model.spec, config.kv, kv_dtype, code)
        self.pictures: Pictures | None = None
        self.adapters = NativeAdapters(model.spec)
        self.memory = StepMemory(model, self.kv, config.scheduler.max_model_len, threads)
        self._sampling = TokenSampling(self.memory.parameters, model.spec.vocab_size)
        self.team = Team(code, self.memory.parameters, threads)
        # Not the team: it ends its threads when it is let go of.
        phase = partial(self.memory.parameters.get, "phase")
        self._beats = PhaseBeats(pulse if pulse is not None else Pulse(), phase, look_s)
        weakref.finalize(self, self._beats.close).atexit = False
        self.checks = self.team.checks  # of the checking form
        self._max_positions = model.max_positions
        self._last_norm = model.last_norm_weight
        self._threads = threads
        self._free = free
        self._due: Index = np.zeros(0, np.int64)
        self._count = 0
        self._steps = 0
        self._call_ns = 0
        # Of the threads: in calls since the last look, in phases of timed steps until then, in phases of all steps.
        self._spent_ns = 0
        self._laps: dict[str, int] = {}
        self._phase_s: dict[str, float] = {}

    def see(self, pictures: Pictures | None) -> None:
        """Tokens may stand for vectors of pictures."""
        self.pictures = pictures
        self.memory.vectors = None if pictures is None else pictures.vectors

    def forward_and_draw(
        self, rows: DeviceRows, batch: FlatBatch, due: Index, wanted: Wanted
    ) -> tuple[NDArray[np.bool_], Settled]:
        self._sampling.load(wanted)
        try:
            good = self.forward(rows, batch, due)
        finally:
            self._sampling.clear()
        return good, self._sampling.settle()

    def forward(self, rows: DeviceRows, batch: FlatBatch, due: Index) -> NDArray[np.bool_]:
        count = self._count = len(batch.tokens)
        self._check(rows, batch)
        numbers = rows.adapters_of(batch)
        adapters = None if numbers is None else self.adapters.of_tokens(numbers)
        self.memory.load(batch, rows.tables, due, adapters, self._seen(rows, batch), self._turns(rows, batch))
        self.memory.parameters.set(only_logits=0)
        if self._free is not None:
            # All threads help in a step of any size, because those that wait for each other let go of their cores.
            self._threads = self._free.refresh(MANY_TOKENS)
            self.memory.parameters.set(sleeps=int(self._free.is_shared))
        self._steps += 1
        self.run(timed=self._steps % TIMED_EVERY == 1)
        self._due = due
        good: NDArray[np.bool_] = self.memory.finite[:count] != 0
        return good

    def _seen(self, rows: DeviceRows, batch: FlatBatch) -> Index | None:
        """For each token the address of the vector that it stands for, or 0; None: all are text."""
        slots = None if self.pictures is None else self.pictures.slots(rows, batch)
        if slots is None or self.pictures is None:
            return None
        vectors = self.pictures.vectors
        _check_below(slots[slots != NO_VECTOR], len(vectors), "vector")
        return np.where(slots == NO_VECTOR, 0, vectors.ctypes.data + slots * vectors.strides[0])

    def _turns(self, rows: DeviceRows, batch: FlatBatch) -> Index | None:
        if self.pictures is None or not self.spec.has_turns:
            return None
        turns = self.pictures.turns(rows, batch)
        if turns is not None:
            _check_below(turns, self._max_positions, "turn")
        return turns

    def logits(self, tokens: Index) -> NDArray[np.float32]:
        if tokens is not self._due and not np.array_equal(tokens, self._due):
            self.memory.sample(self._count, tokens)
            self.memory.parameters.set(only_logits=1)
            self.run()
            self._due = tokens
        return self.memory.logits[: len(tokens), : self.spec.vocab_size]

    def states(self, batch: FlatBatch, index: int, *, only_last: bool) -> NDArray[np.float32]:
        end = int(batch.last[index]) + 1
        residual = self.memory.residual(end - 1 if only_last else end - int(batch.count[index]), end)
        square = np.einsum("tw,tw->t", residual, residual) / np.float32(self.spec.hidden_size)
        scale = 1.0 / np.sqrt(square + np.float32(self.spec.norm_eps))
        normed: NDArray[np.float32] = residual * scale[:, None] * self._last_norm
        return normed

    def classify(self, states: NDArray[np.float32], *, raw: bool) -> NDArray[np.float32]:
        raise AssertionError("a decoder has no labels")

    def work(self) -> CPUWork:
        """Counters that only grow: the time since the last look, shared out as in its timed steps."""
        laps = self.team.laps()
        new = {phase: spent - self._laps.get(phase, 0) for phase, spent in laps.items()}
        if timed := sum(new.values()):
            scale = 1e-9 * self._spent_ns / timed
            self._phase_s = {
                phase: self._phase_s.get(phase, 0.0) + spent * scale for phase, spent in new.items()
            }
            self._laps, self._spent_ns = laps, 0
        return CPUWork(self._threads, self._phase_s, self._call_ns * 1e-9)

    def close(self) -> None:
        self._beats.close()
        self.team.close()

    def run(self, *, timed: bool = False) -> None:
        """Compute what the memory describes."""
        others = self.memory.ranges() if self.checks is not None else None
        began_ns = time.perf_counter_ns()
        with self._beats:
            self.team.run(self._threads, timed, others)
        took_ns = time.perf_counter_ns() - began_ns
        self._call_ns += took_ns
        self._spent_ns += took_ns * self._threads

    def _check(self, rows: DeviceRows, batch: FlatBatch) -> None:
        """A plan that names what does not exist ends here, and not in memory of others. Raises BadPlan.

        In every step: each line costs microseconds. Counts are what `make_batch` has repeated rows by.
        """
        tables, block_size = rows.tables, self.kv.block_size
        longest, widest = min(rows.tokens.shape[1], self._max_positions), tables[0].shape[1] * block_size
        _check_below(batch.tokens, self.spec.vocab_size, "token")
        _check_below(batch.positions, longest, "position")
        used = _check_below(batch.places, min(longest, widest), "position") // block_size + 1
        _check_below(batch.rows, len(tables[0]) - 1, "row")
        for group, (slots, table) in enumerate(zip(batch.slots, tables, strict=True)):
            slot_count = self.kv.num_slots(group)
            if np.maximum.reduce(slots) >= slot_count:  # nothing is stored where it is negative
                raise BadPlan(f"a plan names slot {slots.max()}, and there are {slot_count}")
            _check_below(table[:, :used].take(batch.rows, 0), slot_count // block_size, "block")


def token_seconds(step: NativeStep, config: EngineConfig) -> float:
    """Seconds that a token of a prompt takes, in a step made for this; it is closed."""
    rows, size = DeviceRows(config), config.kv.block_size
    count = min(TIMED_TOKENS, config.scheduler.max_model_len, (config.kv.num_blocks - 1) * size)
    positions = np.arange(count)
    for table in rows.tables:
        table[0, : -(-count // size)] = 1 + np.arange(-(-count // size))
    batch = FlatBatch(
        rows=np.zeros(1, np.int64),
        start=np.zeros(1, np.int64),
        count=np.full(1, count),
        masked=np.zeros(1, np.bool_),
        tokens=np.zeros(count, np.int64),
        positions=positions,
        places=positions,
        lengths=positions + 1,
        row_of=np.zeros(count, np.int64),
        slots=tuple(size + positions for _ in rows.tables),
    )
    taken = []
    for _ in range(3):  # the first pays for threads and memory
        began_s = time.perf_counter()
        step.forward(rows, batch, batch.last)
        taken.append(time.perf_counter() - began_s)
    step.close()
    return min(taken) / count


def _check_below(values: Index, bound: int, name: str) -> int:
    """The largest; raises BadPlan unless all are from 0 to the bound. Without its sign a negative number is large."""
    # A step of padding alone has no rows.
    highest = int(np.maximum.reduce(values.view(np.uint64), axis=None, initial=0))
    if highest >= bound:
        wrong = values[(values < 0) | (values >= bound)][0]
        raise BadPlan(f"a plan names {name} {wrong}, and there are {bound}")
    return highest


class PhaseBeats:
    """Beats from inside a native step; entered around the call that computes it.

    A step is one call, and the thread that makes it cannot beat meanwhile. A second thread looks at the counter of
    phases now and then, and beats for it as long as the counter moves: a step that hangs gives no beat. Does nothing as
    long as nothing listens to the pulse.
    """

    def __init__(self, pulse: Pulse, phase: Callable[[], int], look_s: float = LOOK_S) -> None:
        self._pulse = pulse
        self._phase = phase
        self._look_s = look_s
        # Held while it beats: `on_beat` is never called from two threads at once.
        self._lock = threading.Lock()
        self._in_step = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self._thread is None and self._pulse.on_beat is not None and not self._closed.is_set():
            self._thread = threading.Thread(target=self._watch, name="step-pulse", daemon=True)
            self._thread.start()
        self._in_step = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._in_step = False

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        last = self._phase()
        while not self._closed.wait(self._look_s):
            phase = self._phase()
            if phase == last:
                continue
            last = phase
            with self._lock:
                if self._in_step:
                    self._pulse.beat()
