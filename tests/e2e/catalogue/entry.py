"""One line of the catalogue of bad input: a number, bytes, and the answers it may get."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.e2e.catalogue.served import NAME, signed
from tests.e2e.http_server import Reply

CHAT, COMPLETIONS, MESSAGES, RESPONSES, COUNT, TOKENIZE, DETOKENIZE = (
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"),
    *("/v1/messages/count_tokens", "/tokenize", "/detokenize"),
)
EMBEDDINGS, EMBED, RERANK, SCORE = "/v1/embeddings", "/embed", "/v1/rerank", "/v1/score"
GENERATING = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
TURNS = [{"role": "user", "content": "hi"}]
# A good request to each route that takes a body; entries change what they are about.
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": NAME, "messages": TURNS, "max_tokens": 3},
    COMPLETIONS: {"model": NAME, "prompt": "hi", "max_tokens": 3},
    MESSAGES: {"model": NAME, "messages": TURNS, "max_tokens": 3},
    RESPONSES: {"model": NAME, "input": "hi", "max_output_tokens": 3},
    COUNT: {"model": NAME, "messages": TURNS},
    TOKENIZE: {"model": NAME, "prompt": "hi"},
    DETOKENIZE: {"model": NAME, "tokens": [5]},
    EMBEDDINGS: {"model": NAME, "input": "hi"},
    EMBED: {"inputs": "hi"},
    RERANK: {"model": NAME, "query": "hi", "documents": ["you", "hello"]},
    SCORE: {"model": NAME, "text_1": "hi", "text_2": ["you", "hello"]},
}
OK = (200, "")
VALUE, UNSUPPORTED = (400, "invalid_value"), (400, "unsupported_parameter")
TOO_COMPLEX = (400, "grammar_too_complex")
CONTEXT_LENGTH, MODALITY = (400, "context_length_exceeded"), (400, "unsupported_modality")
NO_MODEL, NO_ROUTE, BAD_KEY = (404, "model_not_found"), (404, "not_found"), (401, "invalid_api_key")
QUEUE_FULL = (429, "queue_full")

Answer = tuple[int, str]
Check = Callable[[Reply], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A request and what has to come back. `seconds` is ten times what the catalogue states.

    What is a JSON body for a route, and not only bytes, has both beside its bytes, and the fields it is about.
    """

    number: int
    name: str
    written: bytes | None  # None: `body` for `route`, signed when it is sent
    answers: tuple[Answer, ...]
    seconds: float = 2.0
    check: Check | None = None
    route: str = ""
    body: dict[str, Any] | None = None
    fields: tuple[str, ...] = ()
    key: str = "alpha"

    @property
    def data(self) -> bytes:
        if self.written is None:
            return signed("POST", self.route, self.body, key=self.key)
        return self.written

    @property
    def reaches_the_engine(self) -> bool:
        return OK in self.answers

    def __str__(self) -> str:
        return f"{self.number} {self.name}"


def entry(number: int, name: str, data: bytes, *answers: Answer, **more: Any) -> Entry:
    return Entry(number=number, name=name, written=data, answers=answers, **more)


def asking(
    number: int, route: str, changes: dict[str, Any], *answers: Answer, key: str = "alpha", **more: Any
) -> Entry:
    """A good request to a route with some fields changed; `...` takes a field away."""
    body = {name: value for name, value in (GOOD[route] | changes).items() if value is not ...}
    shown = json.dumps({name: None if value is ... else value for name, value in changes.items()})
    return Entry(
        number=number,
        name=f"{route} {shown:.100}",
        written=None,
        answers=answers,
        route=route,
        body=body,
        fields=tuple(changes),
        key=key,
        **more,
    )


def asking_each(number: int, route: str, field: str, values: list[Any], *answers: Answer) -> list[Entry]:
    return [asking(number, route, {field: value}, *answers) for value in values]


def posting(number: int, name: str, route: str, body: bytes, *answers: Answer, **more: Any) -> Entry:
    """Bytes as a body."""
    return Entry(
        number=number, name=f"{route} {name}", written=signed("POST", route, body), answers=answers, **more
    )


def answer_of(reply: Reply) -> Answer:
    """Status and code; the Anthropic API has no codes, so there the type stands for all codes of its status."""
    if reply.status < 400 or not reply.body:
        return reply.status, ""
    found = reply.json
    if found.get("type") == "error":
        assert set(found) == {"type", "error"} and set(found["error"]) == {"type", "message"}
        return reply.status, "*"
    assert set(found) == {"error"} and set(found["error"]) == {"message", "type", "param", "code"}
    assert 0 < len(found["error"]["message"]) <= 512
    return reply.status, found["error"]["code"]


def is_one_of(found: Answer, answers: tuple[Answer, ...]) -> bool:
    return found in answers or (found[1] == "*" and found[0] in {status for status, _ in answers})
