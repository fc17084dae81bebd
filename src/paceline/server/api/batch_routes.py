"""/v1/files and /v1/batches, in the shapes of the OpenAI API: requests answered when no other request waits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from paceline.errors import InvalidRequest
from paceline.server.api.fields import (
    Choice,
    Field,
    FieldTable,
    MapOf,
    Shaped,
    Text,
    choice_of,
    ignored_header,
    operation,
    read_query,
    whole_of,
)
from paceline.server.api.limits import RequestLimits
from paceline.server.api.route import Route
from paceline.server.batches.batch_api import BatchApi, Wanted
from paceline.server.batches.records import PURPOSES, WINDOW, shown_list
from paceline.server.batches.upload import MAX_EXPIRY_S, MIN_EXPIRY_S
from paceline.server.call import Answer, Call, Download, Events
from paceline.server.errors import Refusal, UnsupportedRoute

BATCHES = "/v1/batches"
MAX_LISTED, DEFAULT_LISTED = 100, 20
EXPIRY = "output_expires_after"
EXPIRY_MUST = f"an object with anchor created_at and seconds from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}"
DISABLED = ("/v1/files", "/v1/files/{rest:path}", BATCHES, f"{BATCHES}/{{rest:path}}")


def batches_table(limits: RequestLimits, endpoints: tuple[str, ...]) -> FieldTable:
    metadata = MapOf(Text(0, limits.metadata_chars), limits.metadata_entries)
    return FieldTable(
        BATCHES,
        [
            Field(
                name="input_file_id",
                kind=Text(1, limits.name_chars),
                help="a file of the purpose batch",
                required=True,
            ),
            Field(name="endpoint", kind=Choice(endpoints), help="where its requests go", required=True),
            Field(
                name="completion_window",
                kind=Choice((WINDOW,)),
                help="after which what is left is not run any more",
                required=True,
            ),
            Field(name="metadata", kind=metadata, help="kept and given back"),
            Field(
                name=EXPIRY,
                kind=Shaped((dict,), EXPIRY_MUST),
                help="when the files it gives are removed",
            ),
        ],
    )


class BatchRoutes:
    def __init__(self, api: BatchApi, table: FieldTable, *, strict: bool) -> None:
        self._api = api
        self._table = table
        self._strict = strict

    async def create(self, call: Call) -> Answer:
        read = self._table.read(call.body, strict=self._strict)
        given = read.fields
        wanted = Wanted(
            input_file_id=given["input_file_id"],
            endpoint=given["endpoint"],
            metadata=msgspec.json.encode(given.get("metadata")).decode(),
            output_expires_s=_expiry(given.get(EXPIRY)),
        )
        batch = await self._api.begin(call.caller.tenant, wanted)
        return Answer(body=msgspec.json.encode(batch.shown()), headers=ignored_header(read.ignored))

    async def all(self, call: Call) -> Answer:
        query = read_query(call.query, ("after", "limit"))
        limit = whole_of(query, "limit", default=DEFAULT_LISTED, low=1, high=MAX_LISTED)
        batches, has_more = await self._api.batches(call.caller.tenant, after=query.get("after"), limit=limit)
        return Answer(body=msgspec.json.encode(shown_list(batches, has_more=has_more)))

    async def one(self, call: Call) -> Answer:
        batch = await self._api.batch(call.caller.tenant, call.path["id"])
        return Answer(body=msgspec.json.encode(batch.shown()))

    async def cancel(self, call: Call) -> Answer:
        batch = await self._api.cancel(call.caller.tenant, call.path["id"])
        return Answer(body=msgspec.json.encode(batch.shown()))


def batch_routes(
    api: BatchApi, limits: RequestLimits, endpoints: tuple[str, ...], *, strict: bool
) -> list[Route]:
    table = batches_table(limits, endpoints)
    routes = BatchRoutes(api, table, strict=strict)
    return [
        Route(
            methods=("POST",),
            path=BATCHES,
            handler=routes.create,
            takes_body=True,
            openapi=operation("Run a file of requests when no other request waits", table.schema()),
        ),
        Route(
            methods=("GET",),
            path=BATCHES,
            handler=routes.all,
            takes_body=False,
            openapi=operation("List your batches"),
        ),
        Route(
            methods=("GET",),
            path=f"{BATCHES}/{{id}}",
            handler=routes.one,
            takes_body=False,
            openapi=operation("Tell how a batch goes", parameters=("id",)),
        ),
        Route(
            methods=("POST",),
            path=f"{BATCHES}/{{id}}/cancel",
            handler=routes.cancel,
            takes_body=False,
            openapi=operation("Cancel a batch", parameters=("id",)),
        ),
    ]


async def _refuse(call: Call) -> Answer | Events:
    shown = call.route.partition("/{")[0]
    raise UnsupportedRoute(f"{shown} is off here; it needs a server that was started with --batch-dir FOLDER")


def disabled_routes() -> list[Route]:
    """What stands in for files and batches where they have no folder."""
    methods = ("GET", "POST", "DELETE")
    return [Route(methods=methods, path=path, handler=_refuse, takes_body=False) for path in DISABLED]


def _expiry(given: Mapping[str, Any] | None) -> int | None:
    if given is None:
        return None
    seconds = given.get("seconds")
    is_known = set(given) == {"anchor", "seconds"} and given["anchor"] == "created_at"
    if not is_known or type(seconds) is not int or not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
        raise InvalidRequest(f"{EXPIRY} must be {EXPIRY_MUST}", param=EXPIRY)
    return int(seconds)


# /v1/files: what batches are made of and what they give, in the shapes of the OpenAI API.


FILES = "/v1/files"
MAX_FILES_LISTED = 10_000
_UNSAFE = re.compile(r'[^\x20-\x7e]|["\\]')
_FORM = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "one request on each line (JSONL)"},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
    },
    "required": ["file", "purpose"],
}


def check_form(headers: Mapping[str, str]) -> None:
    """Refuse a body that is not a plain form."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if kind != "multipart/form-data" or encoding != "identity":
        raise Refusal("unsupported_media_type", "Send the file as multipart/form-data, not encoded.")


class FileRoutes:
    def __init__(self, api: BatchApi) -> None:
        self._api = api

    async def create(self, call: Call) -> Answer:
        assert call.chunks is not None
        check_form(call.headers)
        taken = await self._api.uploads.take(
            call.caller.tenant, call.headers.get("content-type", ""), call.chunks
        )
        return Answer(body=msgspec.json.encode(taken.file.shown()), headers=ignored_header(taken.ignored))

    async def all(self, call: Call) -> Answer:
        query = read_query(call.query, ("after", "limit", "order", "purpose"))
        files, has_more = await self._api.files(
            call.caller.tenant,
            after=query.get("after"),
            limit=whole_of(query, "limit", default=MAX_FILES_LISTED, low=1, high=MAX_FILES_LISTED),
            newest_first=choice_of(query, "order", ("asc", "desc")) != "asc",
            purpose=choice_of(query, "purpose", PURPOSES),
        )
        return Answer(body=msgspec.json.encode(shown_list(files, has_more=has_more)))

    async def one(self, call: Call) -> Answer:
        file = await self._api.file(call.caller.tenant, call.path["id"])
        return Answer(body=msgspec.json.encode(file.shown()))

    async def content(self, call: Call) -> Download:
        file, path = await self._api.content(call.caller.tenant, call.path["id"])
        name = _UNSAFE.sub("_", file.filename)
        headers = {
            "content-disposition": f'attachment; filename="{name}"',
            "x-content-type-options": "nosniff",
        }
        return Download(path=path, size=file.bytes, headers=headers)

    async def remove(self, call: Call) -> Answer:
        file_id = call.path["id"]
        await self._api.remove_file(call.caller.tenant, file_id)
        return Answer(body=msgspec.json.encode({"id": file_id, "object": "file", "deleted": True}))


def file_routes(api: BatchApi) -> list[Route]:
    routes = FileRoutes(api)
    upload = operation("Leave a file of requests here")
    upload["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}
    one = f"{FILES}/{{id}}"
    return [
        Route(
            methods=("POST",),
            path=FILES,
            handler=routes.create,
            takes_body=False,
            takes_stream=True,
            openapi=upload,
        ),
        Route(
            methods=("GET",),
            path=FILES,
            handler=routes.all,
            takes_body=False,
            openapi=operation("List your files"),
        ),
        Route(
            methods=("GET",),
            path=one,
            handler=routes.one,
            takes_body=False,
            openapi=operation("Tell about a file", parameters=("id",)),
        ),
        Route(
            methods=("DELETE",),
            path=one,
            handler=routes.remove,
            takes_body=False,
            openapi=operation("Remove a file", parameters=("id",)),
        ),
        Route(
            methods=("GET",),
            path=f"{one}/content",
            handler=routes.content,
            takes_body=False,
            openapi=operation("Give a file back", parameters=("id",)),
        ),
    ]
