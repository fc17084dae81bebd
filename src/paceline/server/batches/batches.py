"""Files and batches of one server: all batches that are not over, fed while there is room.

A batch is begun when it is made or the server starts. Owns the tasks, the look at the load a few times a second, and
the housekeeping: batches whose time is over, files whose time is over, figures. `drain` stops the feeding and leaves
everything as it is on the disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config.server import BatchConfig
from paceline.process.client import EngineState
from paceline.server.access.caller import Caller
from paceline.server.api.openai_fields import CHAT, COMPLETIONS
from paceline.server.api.pooled_forms import IN_BATCHES
from paceline.server.api.responses import RESPONSES
from paceline.server.api.route import Route
from paceline.server.batches.batch_records import CANCELLED, EXPIRED, STATES, Batch
from paceline.server.batches.batch_store import RETRY_S, ResultWriter, StorageFailed, Store, insist
from paceline.server.batches.line_run import Attempts, LineRunner
from paceline.server.batches.upload import Uploads
from paceline.server.batches.work import BatchContext, BatchWork, Gate
from paceline.server.generate.service import Service
from paceline.server.logs import log

ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES, *IN_BATCHES)
TICK_S = 0.25
HOUSEKEEPING_TICKS = 8
LAST_WORDS_S = 0.5  # for results to be written when the server stops


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """What files and batches have to know of the server around them."""

    config: BatchConfig
    max_line_bytes: int
    callers: Callable[[str], Caller | None]  # what a tenant's key allows now
    tick_s: float = TICK_S
    retry_s: float = RETRY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """What goes on at one moment."""

    rows: int  # requests the engine runs at once
    queue: int  # requests that may wait beside them
    waiting: int  # requests in the engine's queue, of batches and others
    own: int  # answers requested by lines under way
    others: int  # answers requested by other requests
    others_unstarted: int  # other requests that have no token yet

    @property
    def backlog(self) -> int:
        """Lines that may wait in the engine's queue. Half of the places to wait in are always left to others."""
        return min(max(1, self.rows // 8), self.queue // 2)

    @property
    def others_queued(self) -> int:
        """How many of the others may wait for a row: those without a token, while the queue is not empty."""
        return min(self.others_unstarted, self.waiting)


class LineLimit:
    """How many lines of batches may be under way: what others leave free, and one at least.

    Grows while no request waits, halves while one of a higher class does, and keeps a few lines waiting so that a free
    row is taken at once (`Attempts` withdraws those when another request comes to wait). One line always stays in the
    engine's queue, where the scheduler lets it age: batches step back and never starve. `observe` a few times a second,
    `allowed` at any moment.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self.limit = 1

    def observe(self, load: ServerLoad) -> None:
        if load.others_queued:
            self.limit = max(1, min(self.limit, load.own) // 2)
        elif load.waiting > load.backlog:  # no row or no memory is free: more lines would only wait
            self.limit = max(1, min(self.limit, load.own - (load.waiting - load.backlog)))
        else:
            self.limit += max(1, load.rows // 8)
        self.limit = min(self.limit, self._ceiling(load))

    def allowed(self, load: ServerLoad) -> int:
        """How many lines may be under way now."""
        return 1 if load.others_queued else min(self.limit, self._ceiling(load))

    def _ceiling(self, load: ServerLoad) -> int:
        free = load.rows + load.backlog - load.others
        return max(1, free if self._most is None else min(free, self._most))


class Batches:
    """`start` it on the event loop it belongs to."""

    def __init__(
        self,
        service: Service,
        routes: Sequence[Route],
        store: Store,
        settings: BatchSettings,
        further: Sequence[Service] = (),
    ) -> None:
        """`further`: services of other models, which lines may name too."""
        config = settings.config
        attempts = Attempts(service.observer)
        self._services = services = (service, *further)
        for each in services:
            each.observer = attempts
        handlers = {route.path: route.handler for route in routes if route.path in ENDPOINTS}
        self.store = store
        self.uploads = Uploads(store, max_bytes=config.max_file_bytes, quota_bytes=config.max_stored_bytes)
        self.model = service.model.names[0]
        self.pace = LineLimit(config.max_batch_rows)
        self._service = service
        self._tick_s = settings.tick_s
        self._context = BatchContext(
            store=store,
            writer=ResultWriter(store, retry_s=settings.retry_s),
            gate=Gate(self._has_room),
            lines=LineRunner(handlers, attempts),
            callers=settings.callers,
            models=lambda: tuple(
                name for each in services for name in (*each.model.names, *each.client.adapters)
            ),
            max_lines=config.max_batch_lines,
            max_line_bytes=settings.max_line_bytes,
            retry_s=settings.retry_s,
        )
        self._works: dict[str, tuple[BatchWork, asyncio.Task[None]]] = {}
        self._is_draining = False
        self._main: asyncio.Task[None] | None = None
        self._has_news = asyncio.Event()
        # Batches and lines by status, as of the last check.
        self._counts = (dict.fromkeys(STATES, 0), {"pending": 0, "completed": 0, "failed": 0})

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
        self.store.close()

    def figures(self) -> list[tuple[str, str, str, Mapping[str, float]]]:
        (batches, lines), under_way = self._counts, self.num_lines_under_way
        lines = {
            **lines,
            "pending": max(0, lines["pending"] - under_way),
            "in_progress": under_way,
        }
        return [
            ("batches", "Batches by status.", "status", batches),
            ("batch_lines", "Requests of batches that are not over.", "status", lines),
        ]

    @property
    def _is_ready(self) -> bool:
        return self._service.client.state is EngineState.READY

    def _has_room(self, num_inside: int) -> bool:
        if self._is_draining or not self._is_ready:
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
                if self._is_ready:
                    self._look_at_load()
                self._context.gate.admit_waiting()
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
        retry_s = self._context.retry_s
        batches = await insist(lambda: self.store.ask(lambda db: db.open_batches()), retry_s=retry_s)
        for batch in batches:
            self.begin(batch)
        if batches:
            log("batches go on", batches=len(batches))

    async def _keep_house(self) -> None:
        store = self.store
        try:
            now = store.now()
            for work, _ in list(self._works.values()):
                if now >= work.batch.expires_at:
                    work.end(EXPIRED)
            await store.expire_files()
            self._counts = await store.ask(lambda db: db.counts())
        except StorageFailed as error:
            log("files and batches were not looked after", level=logging.ERROR, reason=error.__cause__)

    def _load(self) -> ServerLoad:
        admissions = [each.admission for each in self._services]
        own = sum(each.batch_places for each in admissions)
        return ServerLoad(
            rows=sum(each.client.info.max_num_seqs for each in self._services),
            queue=self._service.settings.max_queue,
            waiting=sum(each.client.stats.waiting for each in self._services),
            own=own,
            others=sum(each.places_taken for each in admissions) - own,
            others_unstarted=sum(each.num_waiting for each in admissions),
        )


def open_batches(
    service: Service, routes: Sequence[Route], settings: BatchSettings, further: Sequence[Service] = ()
) -> Batches | None:
    """Files and batches, where the server has a folder for them. Raises ConfigError."""
    if settings.config.batch_dir is None:
        return None
    store = Store(Path(settings.config.batch_dir).expanduser())
    return Batches(service, routes, store, settings, further)
