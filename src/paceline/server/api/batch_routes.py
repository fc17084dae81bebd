"""/v1/files and /v1/batches, in the shapes of the OpenAI API: requests answered when no other request waits."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from paceline.config.server import BatchConfig
from paceline.errors import InvalidRequest
from paceline.server.api.fields import (
    Field,
    FieldTable,
    choice,
    choice_of,
    ignored_header,
    read_query,
    shaped,
    text,
    whole_of,
)
from paceline.server.api.openai_fields import metadata_kind
from paceline.server.api.route import RequestLimits, Route, described
from paceline.server.batches.batch_records import (
    CANCELLED,
    CANCELLING,
    IN_PROGRESS,
    INPUT_PURPOSE,
    PICTURE_PURPOSES,
    PURPOSES,
    VALIDATING,
    WINDOW,
    WINDOW_S,
    Batch,
    FileInUse,
    StoredFile,
    TooManyBatches,
    UnknownBatch,
    UnknownFile,
    new_batch_id,
    shown_list,
)
from paceline.server.batches.batches import ENDPOINTS, Batches
from paceline.server.batches.upload import MAX_EXPIRY_S, MIN_EXPIRY_S, Upload
from paceline.server.call import Answer, Call, Download
from paceline.server.errors import Refusal, UnsupportedRoute

FILES, BATCHES = "/v1/files", "/v1/batches"
DISABLED = (FILES, f"{FILES}/{{rest:path}}", BATCHES, f"{BATCHES}/{{rest:path}}")
FORM_BYTES = 64 * 1024  # of a form, beside its file
MAX_FILES_LISTED = 10_000
MAX_LISTED, DEFAULT_LISTED = 100, 20
MAX_OPEN_BATCHES = 64  # of one key, that are not over
EXPIRY = "output_expires_after"
EXPIRY_MUST = f"an object with anchor created_at and seconds from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}"
_UNSAFE = re.compile(r'[^\x20-\x7e]|["\\]')
_FORM = {
    "type": "object",
    "properties": {
        "file": {
            "type": "string",
            "format": "binary",
            "description": "requests, one on each line (JSONL), or a picture",
        },
        "purpose": {"type": "string", "enum": ["batch", *PICTURE_PURPOSES]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": MIN_EXPIRY_S, "maximum": MAX_EXPIRY_S},
    },
    "required": ["file", "purpose"],
}


class BatchApi:
    """What clients can do with files and batches, each with its own only: what is another's is not there."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._store = batches.store

    # -- files ---------------------------------------------------------------------------------------------

    async def upload(self, tenant: str, content_type: str, chunks: AsyncIterator[bytes]) -> Upload:
        return await self._batches.uploads.take(tenant, content_type, chunks)

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

    async def begin(
        self,
        tenant: str,
        *,
        input_file_id: str,
        endpoint: str,
        metadata: str = "null",
        output_expires_s: int | None = None,
    ) -> Batch:
        """`metadata` is JSON."""
        file = await self._store.ask(lambda db: db.file(tenant, input_file_id))
        if file is None:
            raise UnknownFile(param="input_file_id")
        if file.purpose != INPUT_PURPOSE:
            raise InvalidRequest(f"the input must have the purpose {INPUT_PURPOSE}", param="input_file_id")
        await self._batches.uploads.check_quota(tenant)
        if await self._store.ask(lambda db: db.num_open(tenant)) >= MAX_OPEN_BATCHES:
            raise TooManyBatches(
                f"this key has {MAX_OPEN_BATCHES} batches that are not over; wait, or cancel one"
            )
        now = self._store.now()
        batch = Batch(
            id=new_batch_id(),
            tenant=tenant,
            endpoint=endpoint,
            input_file_id=input_file_id,
            model=self._batches.model,
            metadata=metadata,
            status=VALIDATING,
            created_at=now,
            expires_at=now + WINDOW_S,
            output_expires_s=output_expires_s,
        )
        if not await self._store.ask(lambda db: db.add_batch(batch)):
            raise UnknownFile(param="input_file_id")
        self._batches.begin(batch)
        return batch

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        batch = await self.batch(tenant, batch_id)
        now = self._store.now()
        before = (VALIDATING, IN_PROGRESS)
        if await self._store.ask(lambda db: db.move(batch.id, CANCELLING, now, before=before)):
            self._batches.cancel(batch.id)
        batch = await self.batch(tenant, batch_id)
        if batch.status not in (CANCELLING, CANCELLED):
            raise InvalidRequest(f"the batch is {batch.status} and cannot be cancelled any more")
        return batch


def batches_table(limits: RequestLimits) -> FieldTable:
    window = "after which what is left is not run any more"
    return FieldTable(
        BATCHES,
        [
            Field("input_file_id", text(1, limits.name_chars), "a file of the purpose batch", required=True),
            Field("endpoint", choice(ENDPOINTS), "where its requests go", required=True),
            Field("completion_window", choice((WINDOW,)), window, required=True),
            Field("metadata", metadata_kind(limits), "kept and given back"),
            Field(EXPIRY, shaped((dict,), EXPIRY_MUST), "when the files it gives are removed"),
        ],
    )


def batch_routes(api: BatchApi, limits: RequestLimits, *, strict: bool) -> list[Route]:
    table = batches_table(limits)

    async def create(call: Call) -> Answer:
        read = table.read(call.body, strict=strict)
        given = read.fields
        batch = await api.begin(
            call.caller.tenant,
            input_file_id=given["input_file_id"],
            endpoint=given["endpoint"],
            metadata=msgspec.json.encode(given.get("metadata")).decode(),
            output_expires_s=_expiry(given.get(EXPIRY)),
        )
        return Answer(body=msgspec.json.encode(batch.shown()), headers=ignored_header(read.ignored))

    async def list_all(call: Call) -> Answer:
        query = read_query(call.query, ("after", "limit"))
        limit = whole_of(query, "limit", default=DEFAULT_LISTED, low=1, high=MAX_LISTED)
        batches, has_more = await api.batches(call.caller.tenant, after=query.get("after"), limit=limit)
        return Answer(body=msgspec.json.encode(shown_list(batches, has_more=has_more)))

    async def show(call: Call) -> Answer:
        return Answer(
            body=msgspec.json.encode((await api.batch(call.caller.tenant, call.path["id"])).shown())
        )

    async def cancel(call: Call) -> Answer:
        batch = await api.cancel(call.caller.tenant, call.path["id"])
        return Answer(body=msgspec.json.encode(batch.shown()))

    summary = "Run a file of requests when no other request waits"
    return [
        described("POST", BATCHES, create, summary, table),
        described("GET", BATCHES, list_all, "List your batches"),
        described("GET", f"{BATCHES}/{{id}}", show, "Tell how a batch goes"),
        described("POST", f"{BATCHES}/{{id}}/cancel", cancel, "Cancel a batch"),
    ]


def _expiry(given: Mapping[str, Any] | None) -> int | None:
    if given is None:
        return None
    seconds = given.get("seconds")
    is_known = set(given) == {"anchor", "seconds"} and given["anchor"] == "created_at"
    if not is_known or type(seconds) is not int or not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
        raise InvalidRequest(f"{EXPIRY} must be {EXPIRY_MUST}", param=EXPIRY)
    return int(seconds)


def file_routes(api: BatchApi) -> list[Route]:
    async def create(call: Call) -> Answer:
        assert call.chunks is not None
        check_form(call.headers)
        kind = call.headers.get("content-type", "")
        taken = await api.upload(call.caller.tenant, kind, call.chunks)
        return Answer(body=msgspec.json.encode(taken.file.shown()), headers=ignored_header(taken.ignored))

    async def list_all(call: Call) -> Answer:
        query = read_query(call.query, ("after", "limit", "order", "purpose"))
        files, has_more = await api.files(
            call.caller.tenant,
            after=query.get("after"),
            limit=whole_of(query, "limit", default=MAX_FILES_LISTED, low=1, high=MAX_FILES_LISTED),
            newest_first=choice_of(query, "order", ("asc", "desc")) != "asc",
            purpose=choice_of(query, "purpose", PURPOSES),
        )
        return Answer(body=msgspec.json.encode(shown_list(files, has_more=has_more)))

    async def show(call: Call) -> Answer:
        return Answer(body=msgspec.json.encode((await api.file(call.caller.tenant, call.path["id"])).shown()))

    async def content(call: Call) -> Download:
        file, path = await api.content(call.caller.tenant, call.path["id"])
        name = _UNSAFE.sub("_", file.filename)
        headers = {
            "content-disposition": f'attachment; filename="{name}"',
            "x-content-type-options": "nosniff",
        }
        return Download(path=path, size=file.bytes, headers=headers)

    async def remove(call: Call) -> Answer:
        file_id = call.path["id"]
        await api.remove_file(call.caller.tenant, file_id)
        return Answer(body=msgspec.json.encode({"id": file_id, "object": "file", "deleted": True}))

    upload = described("POST", FILES, create, "Leave a file of requests here", takes_stream=True)
    form = {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}
    return [
        replace(upload, openapi={**upload.openapi, "requestBody": form}),
        described("GET", FILES, list_all, "List your files"),
        described("GET", f"{FILES}/{{id}}", show, "Tell about a file"),
        described("DELETE", f"{FILES}/{{id}}", remove, "Remove a file"),
        described("GET", f"{FILES}/{{id}}/content", content, "Give a file back"),
    ]


def check_form(headers: Mapping[str, str]) -> None:
    """Refuse a body that is not a plain form."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if kind != "multipart/form-data" or encoding != "identity":
        raise Refusal("unsupported_media_type", "Send the file as multipart/form-data, not encoded.")


def large_bodies(config: BatchConfig) -> dict[bytes, int]:
    """Where more bytes may be posted than elsewhere."""
    return {} if config.batch_dir is None else {FILES.encode(): config.max_file_bytes + FORM_BYTES}


def disabled_routes() -> list[Route]:
    """What stands in for files and batches where they have no folder."""

    async def refuse(call: Call) -> Answer:
        shown = call.route.partition("/{")[0]
        raise UnsupportedRoute(
            f"{shown} is off here; it needs a server that was started with --batch-dir FOLDER"
        )

    return [Route(methods=("GET", "POST", "DELETE"), path=path, handler=refuse) for path in DISABLED]
