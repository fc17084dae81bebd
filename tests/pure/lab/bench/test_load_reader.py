"""An answer is read the same whatever pieces its bytes come in, and every ending has its kind."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.lab.bench.load.reader import EventKind, ObservedAnswer, ResponseReader, error_text

STREAM = {b"content-type": b"text/event-stream; charset=utf-8"}


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def text(content: str) -> bytes:
    return event({"choices": [{"delta": {"content": content}}]})


ROLE = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
FINISH = event({"choices": [{"delta": {}, "finish_reason": "length"}], "usage": None})
USAGE = event(
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
)
DONE = b"data: [DONE]\n\n"
WHOLE = ROLE + text("a") + b": a comment\n\n" + text("b") + FINISH + USAGE + DONE


def read(*parts: bytes, status: int = 200, headers: dict[bytes, bytes] = STREAM) -> ObservedAnswer:
    """An answer whose parts come a second apart."""
    seen = ObservedAnswer(index=0, due_s=0.0)
    reader = ResponseReader(seen)
    reader.take_head(status, headers, 0.0)
    for number, part in enumerate(parts, start=1):
        reader.take_body(part, float(number))
    reader.end(float(len(parts)))
    return seen


def test_text_is_timed_when_it_comes() -> None:
    seen = read(ROLE, text("a"), text("b"), FINISH, USAGE, DONE)
    assert (seen.kind, seen.finish_reason) == (EventKind.FINISHED, "length")
    assert seen.piece_s == [2.0, 3.0]  # the event that names the speaker has no text
    assert (seen.prompt_tokens, seen.output_tokens, seen.cached_tokens) == (7, 2, 4)
    assert seen.ended_s == 6.0


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_pieces_of_any_size_read_the_same(size: int, newline: bytes) -> None:
    whole = WHOLE.replace(b"\n", newline)
    seen = read(*(whole[start : start + size] for start in range(0, len(whole), size)))
    assert (seen.kind, len(seen.piece_s), seen.output_tokens) == (EventKind.FINISHED, 2, 2)


@pytest.mark.parametrize("name", ["content", "reasoning_content", "reasoning"])
def test_thoughts_are_text_too(name: str) -> None:
    assert len(read(event({"choices": [{"delta": {name: "hm"}}]}), FINISH, DONE).piece_s) == 1


def test_a_completion_has_text() -> None:
    seen = read(event({"choices": [{"text": "a"}]}), event({"choices": [{"text": ""}]}), DONE)
    assert seen.piece_s == [1.0]
    assert (seen.kind, seen.output_tokens, seen.num_output) == (EventKind.FINISHED, None, 1)


def test_tokens_without_text_came_with_the_end() -> None:
    assert read(ROLE, FINISH, USAGE, DONE).piece_s == [4.0]


@pytest.mark.parametrize(
    ("parts", "kind", "says"),
    [
        ((text("a"),), EventKind.BROKEN, "ended before"),
        ((text("a"), b"data: {nonsense\n\n", FINISH, DONE), EventKind.BROKEN, "cannot be read"),
        (
            (text("a"), event({"error": {"message": "out of luck"}}), DONE),
            EventKind.STREAM_ERROR,
            "out of luck",
        ),
    ],
)
def test_what_is_no_answer_is_told(parts: tuple[bytes, ...], kind: EventKind, says: str) -> None:
    seen = read(*parts)
    assert seen.kind is kind and says in seen.message


def test_an_answer_may_end_without_the_last_word() -> None:
    assert read(text("a"), FINISH).kind is EventKind.FINISHED


@pytest.mark.parametrize(
    ("status", "headers", "kind"),
    [
        (429, {}, EventKind.REFUSED),
        (429, {b"retry-after": b"2"}, EventKind.REFUSED),
        (503, {b"retry-after": b"2"}, EventKind.REFUSED),
        (503, {}, EventKind.SERVER_ERROR),
        (500, {}, EventKind.SERVER_ERROR),
        (400, {}, EventKind.REJECTED),
        (302, {}, EventKind.BROKEN),
    ],
)
def test_statuses_have_kinds(status: int, headers: dict[bytes, bytes], kind: EventKind) -> None:
    seen = read(b'{"error": {"message"', b': "too much"}}', status=status, headers=headers)
    assert (seen.kind, seen.message) == (kind, "too much")
    assert seen.retry_after_s == (2.0 if headers else None)


def test_an_answer_that_is_no_stream_has_no_times() -> None:
    seen = read(b"{}", headers={b"content-type": b"application/json"})
    assert seen.kind is EventKind.BROKEN and "without streaming" in seen.message


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"error": {"message": "a\\nb"}}', "a b"),
        (b'{"error": "plain"}', "plain"),
        (b'{"detail": "elsewhere"}', "elsewhere"),
        (b"<h1>Bad\nGateway</h1>", "<h1>Bad Gateway</h1>"),
        (b"", "no reason given"),
    ],
)
def test_errors_are_one_line(body: bytes, says: str) -> None:
    assert error_text(body) == says
