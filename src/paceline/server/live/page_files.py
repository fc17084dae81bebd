"""The pages: plain files that come with the package. The chat is at /, the live page at /ui, the API at /docs.

The files hold no data and need no key; the pages ask for data with the key their user types in. A page loads nothing
from another host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from paceline.server.api.route import Route
from paceline.server.call import Answer, Call, Events, Handler

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
INDEX = "index.html"
LIVE = INDEX
CHAT = f"chat/{INDEX}"
DOCS = f"docs/{INDEX}"


@cache
def page_files() -> Mapping[str, bytes]:
    """Every file of the pages by its path below the folder of the pages."""
    return dict(_files_in(files("paceline.server.live") / "ui", ""))


def _files_in(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files_in(entry, f"{prefix}{entry.name}/")
        elif entry.name.rpartition(".")[2] in _TYPES:
            yield prefix + entry.name, entry.read_bytes()


def _templates(name: str) -> tuple[str, ...]:
    """Where a file is served. An index is served as its folder; those of the chat and of the API are at / and /docs."""
    if name in (CHAT, DOCS):
        return ()
    folder, _, file = f"/ui/{name}".rpartition("/")
    return (folder, f"{folder}/") if file == INDEX else (f"/ui/{name}",)


PAGE = frozenset(("/", "/docs", *(template for name in page_files() for template in _templates(name))))


def page_routes(*, home: str = CHAT) -> list[Route]:
    """The routes of every page; `home` is the file served at /."""
    found = [_route(template, name) for name in page_files() for template in _templates(name)]
    return [_route("/", home), *found]


def _route(path: str, name: str) -> Route:
    return Route(methods=("GET",), path=path, handler=file_handler(name))


def file_handler(name: str) -> Handler:
    """Answers with one file of the pages."""
    body = page_files()[name]
    tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    headers = {**_HEADERS, "etag": tag}

    async def file(call: Call) -> Answer | Events:
        if call.headers.get("if-none-match") == tag:
            return Answer(body=b"", status=304, headers=headers, media_type=_TYPES[name.rpartition(".")[2]])
        return Answer(body=body, headers=headers, media_type=_TYPES[name.rpartition(".")[2]])

    return file
