"""The description of the API: /openapi.json, /docs as one plain page without scripts, /version.

Both are made from the routes themselves; routes that only say that they do not exist are not described. The page
loads nothing from anywhere, so that it works without a network and has nothing in it that could run.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from paceline import __version__
from paceline.server.api.route import Route
from paceline.server.call import Answer, Call

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h1{font-size:1.6rem}h2{font-size:1.1rem;margin-top:2rem}code,pre{font-family:ui-monospace,monospace;font-size:.9rem}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #ddd;
vertical-align:top}pre{background:#f4f4f4;padding:.7rem 1rem;overflow:auto}a{color:inherit}
td:first-child{white-space:nowrap}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#161616}td,th{border-color:#333}pre{background:#222}}
"""
_HELLO = [{"role": "user", "content": "Hello!"}]
_EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "MODEL", "messages": _HELLO, "stream": True},
    "/v1/completions": {"model": "MODEL", "prompt": "Once upon a time", "max_tokens": 32},
    "/v1/responses": {"model": "MODEL", "input": "Hello!"},
    "/v1/messages": {"model": "MODEL", "messages": _HELLO, "max_tokens": 64},
    "/v1/messages/count_tokens": {"model": "MODEL", "messages": _HELLO},
    "/tokenize": {"model": "MODEL", "prompt": "Hello!"},
    "/detokenize": {"model": "MODEL", "tokens": [1, 2, 3]},
}
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
    "x-content-type-options": "nosniff",
}


def docs_routes(routes: Callable[[], Sequence[Route]]) -> list[Route]:
    """The routes that describe what `routes` gives at the moment they are asked."""

    async def openapi(call: Call) -> Answer:
        return Answer(body=msgspec.json.encode(openapi_document(routes())))

    async def page(call: Call) -> Answer:
        body = docs_page(openapi_document(routes())).encode()
        return Answer(body=body, media_type="text/html; charset=utf-8", headers=_PAGE_HEADERS)

    async def version(call: Call) -> Answer:
        return Answer(body=msgspec.json.encode({"version": __version__}))

    return [
        _describing("/openapi.json", openapi, "The API as an OpenAPI document"),
        _describing("/docs", page, "This page"),
        _describing("/version", version, "The version of the server"),
    ]


def openapi_document(routes: Sequence[Route]) -> dict[str, Any]:
    """The routes as an OpenAPI 3.1 document."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if not route.openapi:
            continue
        operations = paths.setdefault(route.path.replace(":path}", "}"), {})
        for method in route.methods:
            operations[method.lower()] = {"responses": {"200": {"description": "ok"}}} | dict(route.openapi)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Paceline", "version": __version__},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def docs_page(document: dict[str, Any]) -> str:
    """The document as a page to read: a list of the routes, then the fields of each."""
    operations = [
        (f"{method.upper()} {path}", path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if method != "head"
    ]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width,initial-scale=1'><title>Paceline API</title>",
        f"<style>{_STYLE}</style><h1>Paceline {html.escape(__version__)}</h1>",
        "<p>An OpenAI-compatible server. For tools: <a href=/openapi.json>/openapi.json</a>.</p>",
        "<table><tr><th>Route<th>What it does</tr>",
    ]
    for name, _, operation in operations:
        shown = f"<code>{html.escape(name)}</code>"
        if fields_of(operation):
            shown = f"<a href='#{_anchor(name)}'>{shown}</a>"
        parts.append(f"<tr><td>{shown}<td>{html.escape(operation.get('summary', ''))}</tr>")
    parts.append("</table>")
    for name, path, operation in operations:
        if fields_of(operation):
            parts += _section(name, path, operation)
    return "\n".join(parts)


def _section(name: str, path: str, operation: dict[str, Any]) -> list[str]:
    parts = [f"<h2 id='{_anchor(name)}'><code>{html.escape(name)}</code></h2>"]
    example = _EXAMPLES.get(path)
    if example is not None:
        body = msgspec.json.encode(example).decode()
        line = f"curl $URL{path} -H 'Content-Type: application/json' -d '{body}'"
        parts.append(f"<pre>{html.escape(line)}</pre>")
    parts.append("<table><tr><th>Field<th>Type<th>Meaning</tr>")
    parts += [
        f"<tr><td><code>{html.escape(field)}</code><td>{html.escape(kind)}<td>{html.escape(text)}</tr>"
        for field, kind, text in fields_of(operation)
    ]
    parts.append("</table>")
    return parts


def _anchor(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def fields_of(operation: dict[str, Any]) -> list[tuple[str, str, str]]:
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    return [
        (name, _kind_of(entry), str(entry.get("description", "")))
        for name, entry in schema.get("properties", {}).items()
    ]


def _kind_of(entry: dict[str, Any]) -> str:
    alternatives = entry.get("anyOf") or entry.get("oneOf")
    if alternatives:
        return " or ".join(dict.fromkeys(_kind_of(alternative) for alternative in alternatives))
    kind = entry.get("type", "any")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _describing(path: str, handler: Any, summary: str) -> Route:
    return Route(
        methods=("GET",),
        path=path,
        handler=handler,
        takes_body=False,
        openapi={"summary": summary, "tags": ["server"], "responses": {"200": {"description": "ok"}}},
    )
