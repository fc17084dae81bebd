"""The live page: plain files that come with the package, at /ui.

They hold no data and need no key; what they show they ask for with the key their user types in. Nothing on the page is
loaded from anywhere else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

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


@cache
def page_files() -> Mapping[str, bytes]:
    """Every file of the page by its name."""
    folder = files("paceline.server") / "ui"
    return {
        entry.name: entry.read_bytes()
        for entry in folder.iterdir()
        if entry.name.rpartition(".")[2] in _TYPES
    }


def _template(name: str) -> str:
    return "/ui" if name == INDEX else f"/ui/{name}"


PAGE = frozenset(("/ui", "/ui/")) | {_template(name) for name in page_files()}


def page_routes() -> list[Route]:
    found = [_route(_template(name), name) for name in page_files()]
    return [*found, _route("/ui/", INDEX)]


def _route(path: str, name: str) -> Route:
    return Route(methods=("GET",), path=path, handler=_handler(name), takes_body=False)


def _handler(name: str) -> Handler:
    body = page_files()[name]
    tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    headers = {**_HEADERS, "etag": tag}

    async def file(call: Call) -> Answer | Events:
        if call.headers.get("if-none-match") == tag:
            return Answer(body=b"", status=304, headers=headers, media_type=_TYPES[name.rpartition(".")[2]])
        return Answer(body=body, headers=headers, media_type=_TYPES[name.rpartition(".")[2]])

    return file
