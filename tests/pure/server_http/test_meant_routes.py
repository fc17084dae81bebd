"""A path that does not exist is answered with the route that was meant, a wrong method with those that are taken."""

from __future__ import annotations

import pytest

from paceline.server.api.route import Route, described
from paceline.server.call import Answer, Call
from paceline.server.http.asgi import RouteTable

CHAT, MODELS = "/v1/chat/completions", "/v1/models"


async def answer(call: Call) -> Answer:
    return Answer(body=b"")


TABLE = RouteTable(
    [
        described("POST", CHAT, answer, "Chat"),
        described("POST", "/v1/completions", answer, "Complete"),
        described("GET", MODELS, answer, "List"),
        Route(methods=("GET",), path="/v1/hidden", handler=answer),
    ]
)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", CHAT),  # a base URL without /v1
        ("/v1/v1/chat/completions", CHAT),  # a base URL with it, twice
        ("/v1/chat/completions/chat/completions", CHAT),  # the whole route as base URL
        ("/v1/chat/completions/", CHAT),
        ("//v1//chat/completions", CHAT),
        ("/openai/v1/models", MODELS),
        ("/api/chat", CHAT),
        ("/completion", "/v1/completions"),
        ("/api/embed", None),  # which is not offered
        ("/hidden", None),
        ("/v1/nothing", None),
        ("/", None),
    ],
)
def test_the_route_that_a_wrong_path_means_is_named(path: str, meant: str | None) -> None:
    assert TABLE.match(path.encode(), "POST") is None
    assert TABLE.meant(path.encode()) == meant
