"""The end of a batch: results become files, and the batch gets its last status, both at one moment.

Until that moment the results are in the database and the files belong to nobody: whoever is killed here begins again
and leaves one output file and one error file at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from paceline.server.batches.database import Database
from paceline.server.batches.folder import NewFile
from paceline.server.batches.records import (
    OUTPUT_PURPOSE,
    Batch,
    LineError,
    StoredFile,
    errors_json,
    new_file_id,
)
from paceline.server.batches.results import not_run
from paceline.server.batches.store import Store

PAGE_RESULTS = 16  # a result can be large
PAGE_LINES = 512


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
        partial(Database.pending, batch_id=batch.id, after=after, limit=PAGE_LINES)
    ):
        await error.write(b"".join(not_run(batch.id, line, status) for line in page))
        after = page[-1].number
