"""All batches that are not over: begun when they are made or the server starts, fed while there is room.

Owns the tasks, the look at the load a few times a second, and the housekeeping: batches whose time is over, files
whose time is over, figures. `drain` stops the feeding and leaves everything as it is on the disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from paceline.server.batches.line_limit import LineLimit, ServerLoad
from paceline.server.batches.records import CANCELLED, EXPIRED, STATES, Batch
from paceline.server.batches.store import StorageFailed, insist
from paceline.server.batches.work import BatchContext, BatchWork
from paceline.server.logs import log

TICK_S = 0.25
HOUSEKEEPING_TICKS = 8
LAST_WORDS_S = 0.5  # for results to be written when the server stops


@dataclass(slots=True)
class BatchFigures:
    """What the metrics show, as of the last look."""

    batches: dict[str, int]
    lines: dict[str, int]


class BatchRunner:
    """`start` it on the event loop it belongs to."""

    def __init__(
        self,
        context: Callable[[Callable[[int], bool]], BatchContext],
        load: Callable[[], ServerLoad],
        *,
        is_ready: Callable[[], bool],
        most_lines: int | None = None,
        tick_s: float = TICK_S,
    ) -> None:
        self._load = load
        self._is_ready = is_ready
        self._tick_s = tick_s
        self.pace = LineLimit(most_lines)
        self._context = context(self._has_room)
        self._works: dict[str, tuple[BatchWork, asyncio.Task[None]]] = {}
        self._is_draining = False
        self._main: asyncio.Task[None] | None = None
        self._has_news = asyncio.Event()
        self.figures = BatchFigures(dict.fromkeys(STATES, 0), {"pending": 0, "completed": 0, "failed": 0})

    @property
    def num_lines_under_way(self) -> int:
        return self._context.gate.num_inside

    def start(self) -> None:
        self._context.writer.start()
        self._main = asyncio.get_running_loop().create_task(self._run())

    def begin(self, batch: Batch) -> None:
        """Work on a batch from now on."""
        if self._is_draining or batch.id in self._works:
            return
        work = BatchWork(self._context, batch)
        task = asyncio.get_running_loop().create_task(work.run())
        self._works[batch.id] = (work, task)
        task.add_done_callback(lambda done: self._over(batch.id, done))
        self._has_news.set()

    def cancel(self, batch_id: str) -> None:
        """The batch was cancelled; what is under way of it ends now."""
        if batch_id in self._works:
            self._works[batch_id][0].end(CANCELLED)

    def drain(self) -> None:
        """Begin nothing more."""
        self._is_draining = True

    async def stop(self) -> None:
        """End everything that is under way, and leave it to the next server."""
        self.drain()
        tasks = [task for _, task in self._works.values()]
        if self._main is not None:
            tasks.append(self._main)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._context.writer.stop(LAST_WORDS_S)

    def _has_room(self, num_inside: int) -> bool:
        if self._is_draining or not self._is_ready():
            return False
        load = self._load()
        return max(num_inside, load.own) < self.pace.allowed(load)

    def _over(self, batch_id: str, task: asyncio.Task[None]) -> None:
        del self._works[batch_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log("the work on a batch ended", level=logging.ERROR, error=error, batch=batch_id)

    async def _run(self) -> None:
        await self._resume()
        ticks = 0
        while True:
            if not self._works:
                await self._sleep()
            else:
                await asyncio.sleep(self._tick_s)
                if self._is_ready():
                    self._look_at_load()
                self._context.gate.look()
            ticks += 1
            if ticks % HOUSEKEEPING_TICKS == 0 or not self._works:
                await self._keep_house()

    def _look_at_load(self) -> None:
        load = self._load()
        self.pace.observe(load)
        if load.others_queued:
            self._context.lines.attempts.withdraw(keep=1)

    async def _sleep(self) -> None:
        """Nothing to do: until something comes, or it is time to look after files."""
        self._has_news.clear()
        try:
            async with asyncio.timeout(self._tick_s * HOUSEKEEPING_TICKS):
                await self._has_news.wait()
        except TimeoutError:
            return

    async def _resume(self) -> None:
        """Go on with what an earlier server left."""
        batches = await insist(
            self._context.store, lambda db: db.open_batches(), retry_s=self._context.retry_s
        )
        for batch in batches:
            self.begin(batch)
        if batches:
            log("batches go on", batches=len(batches))

    async def _keep_house(self) -> None:
        store = self._context.store
        try:
            now = store.now()
            for work, _ in list(self._works.values()):
                if now >= work.batch.expires_at:
                    work.end(EXPIRED)
            await store.expire_files()
            self.figures = BatchFigures(*await store.ask(lambda db: db.counts()))
        except StorageFailed as error:
            log("files and batches were not looked after", level=logging.ERROR, reason=error.__cause__)
