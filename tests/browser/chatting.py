"""The chat page in tests: opened and ready, asked, and with a model that says what it is told."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Page, Route

from tests.browser.viewing import View, Viewer
from tests.e2e.client_server import ADMIN, ClientServer

SHORT = 12  # tokens of an answer that is to end


@contextmanager
def chat(
    viewer: Viewer, server: ClientServer, *, key: str = ADMIN, max_tokens: int | None = SHORT, **how: Any
) -> Iterator[View]:
    """The page, ready for a message; answers end after a number of tokens."""
    with viewer.view(server.url, path="/", key=key, **how) as view:
        if key:
            view.wait("paceline.server.state === 'ready'")
            view.page.evaluate(f"() => {{ paceline.current().settings.sampling = {sampling(max_tokens)}; }}")
        yield view


def sampling(max_tokens: int | None) -> str:
    """As the page keeps it. The model is made up and ends anywhere; here it ends when it is told."""
    return json.dumps({"ignore_eos": True} | ({} if max_tokens is None else {"max_tokens": max_tokens}))


def send(page: Page, text: str) -> None:
    page.locator("#text").fill(text)
    page.locator("#text").press("Enter")


def ended(view: View) -> list[dict[str, Any]]:
    """The messages of the conversation, once no answer is under way."""
    view.wait("paceline.running.size === 0 && paceline.current().messages.length > 0")
    return messages(view)


def messages(view: View) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = view.value("paceline.current().messages")
    return found


def expect_status(view: View, status: int) -> None:
    """A browser notes every refused request as an error on the console; these were meant."""
    note = f"status of {status}"
    assert any(note in problem for problem in view.problems), view.problems
    view.problems[:] = [problem for problem in view.problems if note not in problem]


def scripted(
    page: Page, pieces: Sequence[str | dict[str, Any]], finish: str | None = "stop"
) -> list[dict[str, Any]]:
    """The model says this from now on: texts, or whole choices. Returns the bodies of the requests to come."""
    bodies: list[dict[str, Any]] = []

    def fulfil(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        choices = [{"delta": {"content": piece}} if isinstance(piece, str) else piece for piece in pieces]
        if finish is not None:
            choices.append({"delta": {}, "finish_reason": finish})
        chunks = [{"id": "chatcmpl-x", "choices": [choice]} for choice in choices]
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", fulfil)
    page.route(
        "**/v1/requests/**", lambda route: route.fulfill(status=200, json={"branches": [{"number": 1}]})
    )
    return bodies
