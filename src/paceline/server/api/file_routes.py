"""/v1/files: what batches are made of and what they give, in the shapes of the OpenAI API."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from paceline.server.api.describe import operation
from paceline.server.api.fields import ignored_header
from paceline.server.api.query import choice_of, read_query, whole_of
from paceline.server.api.route import Route
from paceline.server.batches.desk import Desk
from paceline.server.batches.records import PURPOSES, shown_list
from paceline.server.call import Answer, Call, Download
from paceline.server.errors import Refusal

FILES = "/v1/files"
MAX_LISTED = 10_000
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
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def create(self, call: Call) -> Answer:
        assert call.chunks is not None
        check_form(call.headers)
        taken = await self._desk.uploads.take(
            call.caller.tenant, call.headers.get("content-type", ""), call.chunks
        )
        return Answer(body=msgspec.json.encode(taken.file.shown()), headers=ignored_header(taken.ignored))

    async def all(self, call: Call) -> Answer:
        query = read_query(call.query, ("after", "limit", "order", "purpose"))
        files, has_more = await self._desk.files(
            call.caller.tenant,
            after=query.get("after"),
            limit=whole_of(query, "limit", default=MAX_LISTED, low=1, high=MAX_LISTED),
            newest_first=choice_of(query, "order", ("asc", "desc")) != "asc",
            purpose=choice_of(query, "purpose", PURPOSES),
        )
        return Answer(body=msgspec.json.encode(shown_list(files, has_more=has_more)))

    async def one(self, call: Call) -> Answer:
        file = await self._desk.file(call.caller.tenant, call.path["id"])
        return Answer(body=msgspec.json.encode(file.shown()))

    async def content(self, call: Call) -> Download:
        file, path = await self._desk.content(call.caller.tenant, call.path["id"])
        name = _UNSAFE.sub("_", file.filename)
        headers = {
            "content-disposition": f'attachment; filename="{name}"',
            "x-content-type-options": "nosniff",
        }
        return Download(path=path, size=file.bytes, headers=headers)

    async def remove(self, call: Call) -> Answer:
        file_id = call.path["id"]
        await self._desk.remove_file(call.caller.tenant, file_id)
        return Answer(body=msgspec.json.encode({"id": file_id, "object": "file", "deleted": True}))


def file_routes(desk: Desk) -> list[Route]:
    routes = FileRoutes(desk)
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
