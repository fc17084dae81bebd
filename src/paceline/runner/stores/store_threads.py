"""Copies between host places and a store: threads that carry out `store` and `fetch` of plans.

A ticket is reported with the next result after its last block. A thread never holds on to host memory while the store
works: a block is copied into the thread's own buffer first, or out of it last, and not at all once its ticket has been
dropped. So a store that hangs delays its own tickets only. Used by every runner; decides nothing but when a store that
keeps failing is left alone. Decision: docs/decisions/0047-the-disk.md.
"""

from __future__ import annotations

import logging
import mmap
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from paceline.core.guide import Guide
from paceline.core.plan import EMPTY, MediaRunner, Moves, Pending, Runner, StepPlan, StepResult
from paceline.core.store import NO_STORE_WORK, BlockHead, BlockStore, StoreWork
from paceline.core.stretch import MediaInput

I32 = NDArray[np.int32]
Bytes = NDArray[np.uint8]

READERS, WRITERS = 4, 2
PATIENCE_S = 30.0  # a ticket that takes longer has failed
LOOK_S = 0.005  # that a step without tokens waits for a ticket
FAILURES, WITHIN_S = 3, 60.0  # that turn a store off
NEWS_S = 0.5  # between two looks at what other servers have left in a store

_logger = logging.getLogger("paceline")


class HostBlocks(Protocol):
    """Blocks in host places, as bytes."""

    def pack(self, place: int, into: Bytes) -> None: ...
    def unpack(self, place: int, source: Bytes) -> None: ...


class Reported(NamedTuple):
    """What came of tickets since the last look."""

    done: I32 = EMPTY
    failed: I32 = EMPTY

    @property
    def has_any(self) -> bool:
        return bool(len(self.done) or len(self.failed))


NOTHING = Reported()


class Move:
    """A ticket under way."""

    __slots__ = ("has_failed", "is_dropped", "left", "lock", "started_s", "ticket")

    def __init__(self, ticket: int, left: int) -> None:
        self.ticket = ticket
        self.left = left  # blocks that no thread has done yet
        self.started_s = time.monotonic()
        self.has_failed = False
        self.is_dropped = False
        self.lock = threading.Lock()  # while a thread touches host memory


class Job(NamedTuple):
    """One block of a ticket."""

    move: Move
    host: int
    place: int
    head: BlockHead


class StoreThreads:
    """Carries out the moves of plans on one store."""

    def __init__(
        self,
        store: BlockStore,
        host: HostBlocks,
        block_bytes: int,
        *,
        readers: int = READERS,
        writers: int = WRITERS,
        patience_s: float = PATIENCE_S,
        is_shared: bool = False,
    ) -> None:
        """`is_shared`: other servers write to the store too; `news` has what they wrote."""
        self._store, self._block_bytes = store, block_bytes
        self.host: HostBlocks | None = host  # None: no ticket is under way
        self._patience_s = patience_s
        self.news: deque[BlockHead] = deque(maxlen=store.num_places)
        self._is_over = threading.Event()
        self._open: dict[int, Move] = {}
        self._news = threading.Condition()  # guards what follows
        self._ended: list[Move] = []
        self._work = NO_STORE_WORK
        self._failures: deque[float] = deque(maxlen=FAILURES)
        self.is_off = False
        self._reads: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(jobs, carry_out), name="paceline store", daemon=True)
            for jobs, carry_out, count in (
                (self._reads, self._read, readers),
                (self._writes, self._write, writers),
            )
            for _ in range(count)
        ]
        if is_shared:
            self._threads.append(threading.Thread(target=self._look, name="paceline store", daemon=True))
        for thread in self._threads:
            thread.start()

    # -- the engine's thread ---------------------------------------------------------------------------------

    def submit(self, plan: StepPlan) -> None:
        """Begin the moves of a plan."""
        for moves, jobs in ((plan.store, self._writes), (plan.fetch, self._reads)):
            if len(moves.ticket):
                self._submit(moves, jobs)

    def _submit(self, moves: Moves, jobs: queue.SimpleQueue[Job | None]) -> None:
        numbers, counts = np.unique(moves.ticket, return_counts=True)
        begun = {
            int(number): Move(int(number), int(count)) for number, count in zip(numbers, counts, strict=True)
        }
        self._open.update(begun)
        columns = (moves.ticket.tolist(), moves.host.tolist(), moves.disk.tolist(), moves.heads())
        for number, host, place, head in zip(*columns, strict=True):
            jobs.put(Job(begun[number], host, place, head))

    def completed(self, *, wait: bool) -> Reported:
        """Tickets that have ended since; with `wait` it looks for a moment, if any is under way."""
        if not self._open:
            return NOTHING
        with self._news:
            if wait and not self._ended:
                self._news.wait(LOOK_S)
            ended, self._ended = self._ended, []
        late_s = time.monotonic() - self._patience_s
        for move in self._open.values():  # oldest first
            if move.started_s > late_s:
                break
            if move not in ended:
                _drop(move)
                move.has_failed = True
                self._failed(TimeoutError(f"a ticket took more than {self._patience_s:g} s"))
                ended.append(move)
        ended = [move for move in ended if self._open.pop(move.ticket, None) is move]
        return Reported(
            np.array([move.ticket for move in ended if not move.has_failed], np.int32),
            np.array([move.ticket for move in ended if move.has_failed], np.int32),
        )

    def forget(self) -> None:
        """No ticket is waited for any more; from now on no thread touches host memory for those under way."""
        for move in self._open.values():
            _drop(move)
        self._open.clear()
        with self._news:
            self._ended.clear()

    def work(self) -> StoreWork:
        """What was done since the start."""
        with self._news:
            return self._work._replace(is_off=self.is_off)

    def close(self) -> None:
        """End the threads. One that hangs in the store is left behind."""
        self.forget()
        self._is_over.set()
        for jobs in (self._reads, self._writes):
            for _ in self._threads:
                jobs.put(None)
        for thread in self._threads:
            thread.join(1.0)

    # -- the threads -----------------------------------------------------------------------------------------

    def _run(self, jobs: queue.SimpleQueue[Job | None], carry_out: Callable[[Job, memoryview], bool]) -> None:
        buffer = memoryview(mmap.mmap(-1, self._block_bytes))  # begins with a page, as some disks want it
        while (job := jobs.get()) is not None:
            move = job.move
            if self.is_off or move.is_dropped:
                self._end(move, is_good=False)
                continue
            started_s = time.perf_counter()
            try:
                is_good = carry_out(job, buffer)
            except Exception as error:
                self._failed(error)
                is_good = False
            self._count(time.perf_counter() - started_s, is_good, is_read=jobs is self._reads)
            self._end(move, is_good=is_good)

    def _write(self, job: Job, buffer: memoryview) -> bool:
        with job.move.lock:
            if job.move.is_dropped or self.host is None:
                return False
            self.host.pack(job.host, np.frombuffer(buffer, np.uint8))
        self._store.write(job.place, job.head, [buffer])
        return True

    def _read(self, job: Job, buffer: memoryview) -> bool:
        if not self._store.read(job.place, job.head, [buffer]):
            with self._news:
                self._work = self._work._replace(bad=self._work.bad + 1)
            return False
        with job.move.lock:
            if not job.move.is_dropped and self.host is not None:
                self.host.unpack(job.host, np.frombuffer(buffer, np.uint8))
        return True

    def _look(self) -> None:
        while not (self._is_over.wait(NEWS_S) or self.is_off):
            with suppress(Exception):  # whether a store is of use is said by reads and writes
                self.news.extend(head for _, head in self._store.entries())

    def _end(self, move: Move, *, is_good: bool) -> None:
        with self._news:
            move.has_failed |= not is_good
            move.left -= 1
            if not move.left and not move.is_dropped:
                self._ended.append(move)
                self._news.notify()

    def _count(self, seconds: float, is_good: bool, *, is_read: bool) -> None:
        with self._news:
            work, count = self._work, int(is_good)
            if is_read:
                self._work = work._replace(
                    blocks_read=work.blocks_read + count,
                    bytes_read=work.bytes_read + count * self._block_bytes,
                    read_s=work.read_s + seconds,
                )
            else:
                self._work = work._replace(
                    blocks_written=work.blocks_written + count,
                    bytes_written=work.bytes_written + count * self._block_bytes,
                    write_s=work.write_s + seconds,
                )

    def _failed(self, error: Exception) -> None:
        """A store that fails too often in a short time is not used any more."""
        now_s = time.monotonic()
        with self._news:
            self._work = self._work._replace(failed=self._work.failed + 1)
            self._failures.append(now_s)
            is_off = len(self._failures) == FAILURES and now_s - self._failures[0] < WITHIN_S
            was_off, self.is_off = self.is_off, self.is_off or is_off
        if not was_off:
            _logger.warning("KV below the device: a block could not be moved: %s", error)
        if is_off and not was_off:
            _logger.warning(
                "KV below the device: failed %d times in a minute and is off until the server is started again",
                FAILURES,
            )


class StoringRunner:
    """A runner whose plans may store and fetch blocks too: their tickets come back in the results of its steps."""

    def __init__(self, runner: Runner, threads: StoreThreads) -> None:
        self._runner, self._threads = runner, threads

    def reset(self, full: StepPlan) -> None:
        self._threads.forget()
        self._runner.reset(full)

    def hold(self, media: int, given: MediaInput) -> None:
        cast(MediaRunner, self._runner).hold(media, given)

    def drop(self, media: int) -> None:
        cast(MediaRunner, self._runner).drop(media)

    def submit(self, plan: StepPlan) -> StoringPending:
        pending = self._runner.submit(plan)  # first: if it raises, nothing has begun
        self._threads.submit(plan)
        return StoringPending(pending, self._threads)


class StoringPending:
    """A submitted step of such a runner."""

    __slots__ = ("_pending", "_threads")

    def __init__(self, pending: Pending, threads: StoreThreads) -> None:
        self._pending, self._threads = pending, threads

    def supply(self, guides: Mapping[int, Guide]) -> None:
        self._pending.supply(guides)

    def wait(self) -> StepResult:
        result = self._pending.wait()
        # A step without tokens has nothing to do but to wait for a copy.
        moved = self._threads.completed(wait=not (len(result.rows) or len(result.copies_done)))
        if not (moved.has_any or self._threads.is_off):
            return result
        return result._replace(
            copies_done=np.concatenate([result.copies_done, moved.done]),
            copies_failed=np.concatenate([result.copies_failed, moved.failed]),
            disk_is_off=self._threads.is_off,
        )


def _drop(move: Move) -> None:
    with move.lock:
        move.is_dropped = True
