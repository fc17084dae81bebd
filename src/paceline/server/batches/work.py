"""One batch on its way: its input is checked, its lines are run, its files are written.

Can be stopped at any moment and begun again by another server: what it has done is in the store. Cancelling and
expiring end what is under way at once and keep every result there is.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from paceline.errors import PacelineError
from paceline.server.access.caller import Caller
from paceline.server.batches.batch_records import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    OUTPUT_PURPOSE,
    VALIDATING,
    Batch,
    BatchLine,
    LineError,
    LineResult,
    StoredFile,
    errors_json,
    new_file_id,
)
from paceline.server.batches.batch_store import RETRY_S, NewFile, ResultWriter, Store, insist
from paceline.server.batches.database import Database
from paceline.server.batches.line_run import (
    Findings,
    LineRules,
    LineRunner,
    RunAgain,
    Withdrawn,
    not_run,
    read_body,
    read_input,
    refused,
)
from paceline.server.errors import GenerationFailed, problem_of
from paceline.server.http.request_headers import new_id
from paceline.server.logs import log

# The end of a batch: results become files, and the batch gets its last status, both at one moment.
#
# Until that moment the results are in the database and the files belong to no batch: a server killed here begins
# again and leaves one output file and one error file at most.


PAGE_RESULTS = 16  # a result can be large
FINISH_PAGE_LINES = 512


class _Output:
    """One file of a batch; made when there is something to write."""

    def __init__(self, store: Store, batch: Batch, kind: str) -> None:
        self._store = store
        self._batch = batch
        self._kind = kind
        self._id = new_file_id()
        self._new: NewFile | None = None

    async def write(self, data: bytes) -> None:
        if data:
            await self._store.file_work(lambda: self._append(data))

    def _append(self, data: bytes) -> None:
        if self._new is None:
            self._new = self._store.folder.create(self._id)
        self._new.write(data)

    async def keep(self) -> StoredFile | None:
        new, batch = self._new, self._batch
        if new is None:
            return None
        await self._store.file_work(new.keep)
        now = self._store.now()
        return StoredFile(
            id=self._id,
            tenant=batch.tenant,
            filename=f"{batch.id}_{self._kind}.jsonl",
            purpose=OUTPUT_PURPOSE,
            bytes=new.size,
            created_at=now,
            expires_at=None if batch.output_expires_s is None else now + batch.output_expires_s,
        )

    def close(self, *, is_wanted: bool) -> None:
        if self._new is not None:
            self._new.close()
            if not is_wanted:
                self._store.folder.remove(self._id)


async def finish_batch(store: Store, batch: Batch, status: str, errors: Sequence[LineError] = ()) -> None:
    """Write the files of a batch and end it. Raises StorageFailed, and can then be tried again."""
    output, error = _Output(store, batch, "output"), _Output(store, batch, "error")
    is_done = False
    try:
        await _write_results(store, batch, output, error)
        await _write_missing(store, batch, status, error)
        files = (await output.keep(), await error.keep())
        now = store.now()
        await store.ask(lambda db: db.finish(batch.id, status, now, files, errors_json(errors)))
        is_done = True
    finally:
        for file in (output, error):
            file.close(is_wanted=is_done)


async def _write_results(store: Store, batch: Batch, output: _Output, error: _Output) -> None:
    after = 0
    while page := await store.ask(
        partial(Database.results, batch_id=batch.id, after=after, limit=PAGE_RESULTS)
    ):
        await output.write(b"".join(data for _, is_ok, data in page if is_ok))
        await error.write(b"".join(data for _, is_ok, data in page if not is_ok))
        after = page[-1][0]


async def _write_missing(store: Store, batch: Batch, status: str, error: _Output) -> None:
    """A line for every request that has no result."""
    after = 0
    while page := await store.ask(
        partial(Database.pending, batch_id=batch.id, after=after, limit=FINISH_PAGE_LINES)
    ):
        await error.write(b"".join(not_run(batch.id, line, status) for line in page))
        after = page[-1].number


PAGE_LINES = 64
Value = TypeVar("Value")
MAX_LOSSES = 3  # engines that may be lost over one line
LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchContext:
    """What all batches share."""

    store: Store
    writer: ResultWriter
    gate: Gate
    lines: LineRunner
    callers: Callable[[str], Caller | None]  # what a tenant's key allows now; None when it is not let in
    models: Callable[[], tuple[str, ...]]  # that lines may name at the moment
    max_lines: int
    max_line_bytes: int
    retry_s: float = RETRY_S  # before something is tried a second time


class Gate:
    """Lets lines through one by one while there is room, the tenants in turn; some of them only alone.

    A line that was under way when the engine was lost may be what it was lost by. Such a line goes when no other is
    under way, and none goes beside it, so that a line that ends engines ends no other line. `enter` before a line is
    run, `leave` after it. Belongs to one event loop.
    """

    def __init__(self, has_room: Callable[[int], bool]) -> None:
        self._has_room = has_room  # whether one more may go, by how many are inside
        self._waiting: OrderedDict[str, deque[tuple[asyncio.Future[None], bool]]] = OrderedDict()
        self._has_loner = False
        self.num_inside = 0

    async def enter(self, tenant: str = "", *, alone: bool = False) -> None:
        """Wait for a turn. A task that is cancelled here has not entered."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((turn, alone))
        self.admit_waiting()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            else:
                self.admit_waiting()  # the next one may go now
            raise

    def leave(self) -> None:
        self.num_inside -= 1
        self._has_loner = False
        self.admit_waiting()

    def admit_waiting(self) -> None:
        """Admit waiting lines; to be called when there may be more room than before."""
        while self._waiting:
            tenant, queue = next(iter(self._waiting.items()))
            while queue and queue[0][0].done():  # cancelled
                queue.popleft()
            if not queue:
                del self._waiting[tenant]
                continue
            turn, alone = queue[0]
            if self._has_loner or (alone and self.num_inside) or not self._has_room(self.num_inside):
                return
            queue.popleft()
            self._waiting.move_to_end(tenant)
            self.num_inside += 1
            self._has_loner = alone
            turn.set_result(None)


class _GateTurn:
    """Whether a line is inside the gate."""

    __slots__ = ("_gate", "_is_inside", "_tenant")

    def __init__(self, gate: Gate, tenant: str) -> None:
        self._gate = gate
        self._tenant = tenant
        self._is_inside = True

    def leave(self) -> None:
        if self._is_inside:
            self._is_inside = False
            self._gate.leave()

    async def again(self, *, alone: bool) -> None:
        """Leave, and wait for the next turn."""
        self.leave()
        await self._gate.enter(self._tenant, alone=alone)
        self._is_inside = True


class BatchWork:
    """The work on one batch that is not over."""

    def __init__(self, context: BatchContext, batch: Batch) -> None:
        self._context = context
        self.batch = batch
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def end(self, status: str) -> None:
        """Run no more lines: the batch was cancelled, or its time is over."""
        if not self._ended.done():
            self._ended.set_result(status)

    async def run(self) -> None:
        """Bring the batch to its end. If cancelled, the next server goes on with it."""
        batch = self.batch
        try:
            if batch.status == CANCELLING:
                self.end(CANCELLED)
            is_valid = batch.status != VALIDATING or await self._validate()
            if not is_valid:
                return
            status = COMPLETED
            if batch.status in (VALIDATING, IN_PROGRESS):
                status = await self._run_lines()
            elif batch.status == CANCELLING:
                status = CANCELLED
            await self._finish(status)
        except Exception as error:
            log("a batch failed", level=logging.ERROR, error=error, batch=batch.id)
            line_error = LineError(
                code="internal_error", message="the batch failed inside the server; send it again"
            )
            await self._finish(FAILED, line_error)

    # -- checking ------------------------------------------------------------------------------------------

    async def _validate(self) -> bool:
        """Check the input and note where its lines are. False when that was all."""
        context, batch = self._context, self.batch
        rules = LineRules(
            endpoint=batch.endpoint,
            models=context.models(),
            max_lines=context.max_lines,
            max_line_bytes=context.max_line_bytes,
        )
        findings, path = Findings(), context.store.folder.path_of(batch.input_file_id)
        is_stopped = False
        pages = read_input(path, rules, findings, lambda: is_stopped or self._ended.done())
        try:
            await self._ask(lambda db: db.forget_lines(batch.id))
            while page := await context.store.file_work(lambda: next(pages, None)):
                await self._ask(lambda db: db.add_lines(batch.id, page))
        finally:
            is_stopped = True
        now = context.store.now()
        if findings.errors and not self._ended.done():
            await self._ask(lambda db: db.forget_lines(batch.id))
            errors = errors_json(findings.errors)
            return not await self._ask(
                lambda db: db.move(batch.id, FAILED, now, before=(VALIDATING,), errors=errors)
            )
        await self._ask(lambda db: db.begin(batch.id, now, findings.total))
        return True

    # -- running -------------------------------------------------------------------------------------------

    async def _run_lines(self) -> str:
        """Run what has no result yet; how the batch ends."""
        feeding = asyncio.get_running_loop().create_task(self._feed())
        try:
            await asyncio.wait((feeding, self._ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            feeding.cancel()
            done = await asyncio.gather(feeding, return_exceptions=True)
        if self._ended.done():
            await self._context.writer.flush()
            return self._ended.result()
        if isinstance(done[0], BaseException):
            raise done[0]
        return COMPLETED

    async def _feed(self) -> None:
        batch, gate = self.batch, self._context.gate
        loop, running = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        after = 0
        try:
            while page := await self._ask(
                partial(Database.pending, batch_id=batch.id, after=after, limit=PAGE_LINES)
            ):
                for line in page:
                    await self._wait_for_key()
                    await gate.enter(batch.tenant, alone=line.losses > 0)
                    turn = _GateTurn(gate, batch.tenant)
                    task = loop.create_task(self._run_line(line, turn))
                    running.add(task)
                    # Not in the task itself: one that is cancelled before it begins never gets there.
                    task.add_done_callback(partial(self._line_over, turn, running))
                after = page[-1].number
            while running:
                await asyncio.wait(running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _line_over(self, turn: _GateTurn, running: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
        running.discard(task)
        turn.leave()
        if not task.cancelled() and (error := task.exception()) is not None:
            log("a line of a batch was not run", level=logging.ERROR, error=error, batch=self.batch.id)

    async def _run_line(self, line: BatchLine, turn: _GateTurn) -> None:
        """Run a line until it has a result. While it cannot be run for long, it leaves its turn to others."""
        context, is_suspect = self._context, line.losses > 0
        pause_s = context.retry_s
        while True:
            caller = context.callers(self.batch.tenant)
            if caller is None:
                turn.leave()
                await self._wait_for_key()
                await turn.again(alone=is_suspect)
                continue
            try:
                result = await self._attempt(line, caller)
                break
            except Withdrawn:
                await turn.again(alone=is_suspect)
            except RunAgain as again:
                is_suspect = is_suspect or again.is_loss
                if again.is_loss:
                    turn.leave()
                    # From now on it runs alone, and not for ever.
                    losses = await self._ask(lambda db: db.note_loss(self.batch.id, line.number))
                    if losses >= MAX_LOSSES:
                        result = self._given_up(line)
                        break
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                if again.is_loss:
                    await turn.again(alone=True)
        await context.writer.record(result)

    async def _attempt(self, line: BatchLine, caller: Caller) -> LineResult:
        context, batch = self._context, self.batch
        path = context.store.folder.path_of(batch.input_file_id)
        try:
            body = await context.store.file_work(lambda: read_body(path, line))
        except PacelineError as error:  # the input is not what it was when it was checked
            log("a line cannot be read", level=logging.ERROR, error=error, batch=batch.id, line=line.number)
            return refused(batch.id, line, new_id(), problem_of(error))
        return await context.lines.run(batch, line, body, caller)

    def _given_up(self, line: BatchLine) -> LineResult:
        error = GenerationFailed("the engine was lost each time it worked on this request")
        return refused(self.batch.id, line, new_id(), problem_of(error))

    async def _wait_for_key(self) -> None:
        while self._context.callers(self.batch.tenant) is None:
            await asyncio.sleep(self._context.retry_s)

    # -- ending --------------------------------------------------------------------------------------------

    async def _finish(self, status: str, *errors: LineError) -> None:
        store, batch_id = self._context.store, self.batch.id
        if status == COMPLETED:
            now = store.now()
            is_last = await self._ask(
                lambda db: db.move(batch_id, FINALIZING, now, before=(IN_PROGRESS, FINALIZING))
            )
            status = COMPLETED if is_last else CANCELLED  # in the last moment

        async def finish() -> None:
            batch = await store.ask(lambda db: db.batch(batch_id))
            assert batch is not None
            await finish_batch(store, batch, status, errors)

        what = "a batch waits for its disk"
        await insist(finish, retry_s=self._context.retry_s, batch_id=batch_id, what=what)

    async def _ask(self, do: Callable[[Database], Value]) -> Value:
        store, retry_s = self._context.store, self._context.retry_s
        return await insist(lambda: store.ask(do), retry_s=retry_s, batch_id=self.batch.id)
