"""Writes results to the database: many at once when many have come, and again when the disk did not take them.

A result that was handed over is kept until it is on the disk, whatever becomes of the task that handed it over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from paceline.server.batches.database import Database
from paceline.server.batches.records import LineResult
from paceline.server.batches.store import StorageFailed, Store
from paceline.server.logs import log

RETRY_S = 1.0
LONGEST_RETRY_S = 30.0
LOOK_S = 0.005
Value = TypeVar("Value")


async def insist(
    store: Store, do: Callable[[Database], Value], *, retry_s: float = RETRY_S, batch_id: str | None = None
) -> Value:
    """Ask the database until it answers: a full disk stops a batch, and does not end it."""
    while True:
        try:
            return await store.ask(do)
        except StorageFailed as error:
            log("batches wait for their disk", level=logging.ERROR, batch=batch_id, reason=error.__cause__)
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LONGEST_RETRY_S)


class Recorder:
    """One writer for all batches. `start` it, and `stop` it last."""

    def __init__(self, store: Store, *, retry_s: float = RETRY_S) -> None:
        self._store = store
        self._retry_s = retry_s
        self._waiting: list[tuple[LineResult, asyncio.Future[None]]] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._write())

    async def record(self, result: LineResult) -> None:
        """Returns when the result is on the disk."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((result, done))
        self._wake.set()
        await done

    async def flush(self) -> None:
        """Returns when everything that was handed over is on the disk."""
        while self._waiting:
            await asyncio.sleep(LOOK_S)

    async def stop(self, patience_s: float) -> None:
        try:
            async with asyncio.timeout(patience_s):
                await self.flush()
        except TimeoutError:
            log("results were not written; their lines will run again", level=logging.ERROR)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch = list(self._waiting)
            if not batch:
                continue
            results = [result for result, _ in batch]
            await insist(self._store, lambda db: db.record(results), retry_s=self._retry_s)  # noqa: B023
            del self._waiting[: len(batch)]
            for _, done in batch:
                if not done.done():
                    done.set_result(None)
            if self._waiting:
                self._wake.set()
