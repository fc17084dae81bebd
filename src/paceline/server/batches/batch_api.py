"""What clients can do with files and batches, each with its own only: what is another's is not there.

Between the routes and the store; knows neither HTTP nor how batches are run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.errors import InvalidRequest
from paceline.server.batches.records import (
    CANCELLED,
    CANCELLING,
    IN_PROGRESS,
    INPUT_PURPOSE,
    VALIDATING,
    WINDOW_S,
    Batch,
    FileInUse,
    StoredFile,
    TooManyBatches,
    UnknownBatch,
    UnknownFile,
    new_batch_id,
)
from paceline.server.batches.runner import BatchRunner
from paceline.server.batches.store import Store
from paceline.server.batches.upload import Uploads

MAX_OPEN_BATCHES = 64  # of one key, that are not over


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A batch as it was asked for."""

    input_file_id: str
    endpoint: str
    metadata: str  # JSON
    output_expires_s: int | None


class BatchApi:
    """All that the routes ask for."""

    def __init__(self, store: Store, uploads: Uploads, runner: BatchRunner, *, model: str) -> None:
        self._store = store
        self.uploads = uploads
        self._runner = runner
        self._model = model

    # -- files ---------------------------------------------------------------------------------------------

    async def file(self, tenant: str, file_id: str) -> StoredFile:
        found = await self._store.ask(lambda db: db.file(tenant, file_id))
        if found is None:
            raise UnknownFile
        return found

    async def content(self, tenant: str, file_id: str) -> tuple[StoredFile, Path]:
        file = await self.file(tenant, file_id)
        return file, self._store.folder.path_of(file.id)

    async def files(
        self, tenant: str, *, after: str | None, limit: int, newest_first: bool, purpose: str | None
    ) -> tuple[list[StoredFile], bool]:
        """A page, and whether there is more."""
        found = await self._store.ask(
            lambda db: db.files(
                tenant, after=after, limit=limit + 1, newest_first=newest_first, purpose=purpose
            )
        )
        if found is None:
            raise UnknownFile(param="after")
        return found[:limit], len(found) > limit

    async def remove_file(self, tenant: str, file_id: str) -> None:
        if not await self._store.remove(await self.file(tenant, file_id)):
            raise FileInUse

    # -- batches -------------------------------------------------------------------------------------------

    async def batch(self, tenant: str, batch_id: str) -> Batch:
        found = await self._store.ask(lambda db: db.batch(batch_id, tenant))
        if found is None:
            raise UnknownBatch
        return found

    async def batches(self, tenant: str, *, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        found = await self._store.ask(lambda db: db.batches(tenant, after=after, limit=limit + 1))
        if found is None:
            raise UnknownBatch(param="after")
        return found[:limit], len(found) > limit

    async def begin(self, tenant: str, wanted: Wanted) -> Batch:
        file = await self._store.ask(lambda db: db.file(tenant, wanted.input_file_id))
        if file is None:
            raise UnknownFile(param="input_file_id")
        if file.purpose != INPUT_PURPOSE:
            raise InvalidRequest(f"the input must have the purpose {INPUT_PURPOSE}", param="input_file_id")
        await self.uploads.check_quota(tenant)
        if await self._store.ask(lambda db: db.num_open(tenant)) >= MAX_OPEN_BATCHES:
            raise TooManyBatches(
                f"this key has {MAX_OPEN_BATCHES} batches that are not over; wait, or cancel one"
            )
        now = self._store.now()
        batch = Batch(
            id=new_batch_id(),
            tenant=tenant,
            endpoint=wanted.endpoint,
            input_file_id=wanted.input_file_id,
            model=self._model,
            metadata=wanted.metadata,
            status=VALIDATING,
            created_at=now,
            expires_at=now + WINDOW_S,
            output_expires_s=wanted.output_expires_s,
        )
        if not await self._store.ask(lambda db: db.add_batch(batch)):
            raise UnknownFile(param="input_file_id")
        self._runner.begin(batch)
        return batch

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        batch = await self.batch(tenant, batch_id)
        now = self._store.now()
        before = (VALIDATING, IN_PROGRESS)
        if await self._store.ask(lambda db: db.move(batch.id, CANCELLING, now, before=before)):
            self._runner.cancel(batch.id)
        batch = await self.batch(tenant, batch_id)
        if batch.status not in (CANCELLING, CANCELLED):
            raise InvalidRequest(f"the batch is {batch.status} and cannot be cancelled any more")
        return batch
