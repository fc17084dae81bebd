"""The answer to one request, read as its bytes arrive: server-sent events of a chat or a completion.

Owns which events count as text and what the end of an answer means. It is fed decoded body bytes with the time at which
they came and writes into an `ObservedAnswer`; it knows no socket. An event is decoded for the few fields that matter
here, so that reading costs microseconds and one stream does not delay the clock of another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec


class EventKind(StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    REFUSED = "refused"  # 429, or 503 with a time to come back: the server is full
    REJECTED = "rejected"  # any other 4xx: the request is wrong
    SERVER_ERROR = "server error"  # any other 5xx
    STREAM_ERROR = "error in stream"  # an error event after the stream had begun
    BROKEN = "broken off"  # no whole answer, or none that can be read
    NO_CONNECTION = "no connection"
    TIMEOUT = "timeout"
    UNFINISHED = "unfinished"  # the run was ended before it


@dataclass(slots=True, kw_only=True)
class ObservedAnswer:
    """One request as its client saw it. Times are of `time.perf_counter`, taken when bytes arrived; what never happened
    is NaN, what the server did not tell is None."""

    index: int
    tenant: str = ""
    due_s: float  # when it should be sent
    sent_s: float = math.nan  # when it was sent, the last time if it was sent again
    piece_s: list[float] = field(default_factory=list)  # arrivals of text; several tokens may come in one
    ended_s: float = math.nan
    kind: EventKind = EventKind.UNFINISHED
    status: int = 0
    message: str = ""  # what the server, or the network, says about a failure
    retry_after_s: float | None = None  # of a refusal
    retries: int = 0
    wanted_tokens: int | None = None
    prompt_tokens: int | None = None  # these three as the server counted them
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None

    @property
    def is_finished(self) -> bool:
        return self.kind is EventKind.FINISHED

    @property
    def num_output(self) -> int:
        """Tokens of the answer; where the server does not count, a piece of text is taken for one."""
        return len(self.piece_s) if self.output_tokens is None else self.output_tokens


MAX_ERROR_BYTES = 65_536
MAX_MESSAGE = 500
MAX_LINE_BYTES = 16 * 2**20


class _Delta(msgspec.Struct):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: Any = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class ResponseReader:
    """Takes an answer in and settles how the request ended."""

    def __init__(self, seen: ObservedAnswer) -> None:
        self._seen = seen
        self._rest = b""
        self._error_body = b""
        self._is_stream = False
        self._is_done = False
        self.has_begun = False  # any byte of an answer
        self.headers: Mapping[bytes, bytes] = {}  # names in small letters

    def take_head(self, status: int, headers: Mapping[bytes, bytes], now_s: float) -> None:
        seen = self._seen
        seen.status, seen.ended_s, self.has_begun = status, now_s, True
        self.headers = headers
        self._is_stream = status == 200 and b"event-stream" in headers.get(b"content-type", b"")
        seen.retry_after_s = _seconds(headers.get(b"retry-after"))

    def take_body(self, data: bytes, now_s: float) -> None:
        self._seen.ended_s = now_s
        if not self._is_stream:
            self._error_body = (self._error_body + data)[:MAX_ERROR_BYTES]
            return
        *lines, rest = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = rest
        for line in lines:
            if line.startswith(b"data:") and not self._is_done:
                self._take_event(line[5:].strip(), now_s)
        if len(rest) > MAX_LINE_BYTES:
            self.fail(EventKind.BROKEN, "an event of the answer is longer than 16 MiB")

    def end(self, now_s: float) -> None:
        """The whole answer is here."""
        seen = self._seen
        if self._is_done and seen.kind is not EventKind.UNFINISHED:
            return
        if seen.status != 200:
            seen.kind, seen.message = _refusal(seen), error_text(self._error_body)
        elif not self._is_stream:
            self.fail(
                EventKind.BROKEN, "the server answered without streaming, so that no times can be taken"
            )
        elif not self._is_done and seen.finish_reason is None:
            self.fail(EventKind.BROKEN, "the stream ended before the answer did")
        else:
            if not seen.piece_s:  # tokens that make no text: all of them came with the end
                seen.piece_s.append(now_s)
            seen.kind = EventKind.FINISHED

    def fail(self, kind: EventKind, message: str) -> None:
        self._is_done = True
        self._seen.kind, self._seen.message = kind, message[:MAX_MESSAGE]

    def _take_event(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            event = _decode(data)
        except msgspec.MsgspecError as error:
            self.fail(EventKind.BROKEN, f"an event of the answer cannot be read ({error})")
            return
        if event.error is not None:
            self.fail(EventKind.STREAM_ERROR, _message(event.error))
            return
        seen = self._seen
        has_text = False
        for choice in event.choices or ():
            has_text = has_text or _has_text(choice)
            if choice.finish_reason is not None:
                seen.finish_reason = choice.finish_reason
        if has_text:
            seen.piece_s.append(now_s)
        if event.usage is not None:
            _take_usage(seen, event.usage)


def error_text(body: bytes) -> str:
    """What an error body says, in one line."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return " ".join(body.decode("utf-8", "replace").split())[:MAX_MESSAGE] or "no reason given"
    return _message(found.get("error", found) if isinstance(found, dict) else found)


def _has_text(choice: _Choice) -> bool:
    delta = choice.delta
    if delta is None:
        return bool(choice.text)
    return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


def _take_usage(seen: ObservedAnswer, usage: _Usage) -> None:
    if usage.prompt_tokens is not None:
        seen.prompt_tokens = usage.prompt_tokens
    if usage.completion_tokens is not None:
        seen.output_tokens = usage.completion_tokens
    if usage.prompt_tokens_details is not None:
        seen.cached_tokens = usage.prompt_tokens_details.cached_tokens


def _refusal(seen: ObservedAnswer) -> EventKind:
    if seen.status == 429 or (seen.status == 503 and seen.retry_after_s is not None):
        return EventKind.REFUSED
    if 400 <= seen.status < 500:
        return EventKind.REJECTED
    return EventKind.SERVER_ERROR if seen.status >= 500 else EventKind.BROKEN


def _message(error: Any) -> str:
    text = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return " ".join(str(text or "no reason given").split())[:MAX_MESSAGE]


def _seconds(value: bytes | None) -> float | None:
    """`Retry-After` in seconds; a date is as good as nothing for a run that lasts seconds."""
    try:
        return None if value is None else max(0.0, float(value))
    except ValueError:
        return None
