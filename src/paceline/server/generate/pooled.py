"""Inputs of a call that become vectors: their tokens, and how they are handed to the engine, a window at a time.

A call with thousands of inputs is one accepted call. Its requests reach the engine only as earlier ones end, so
that they neither fill the engine's queue nor keep others waiting behind all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from paceline.core.events import Forecast
from paceline.llm.pairs import InputReader
from paceline.llm.prompts import PreparedRequest
from paceline.process.client import BranchUpdate, EngineStream, OnUpdates
from paceline.server.api.openai_requests import ParsedBody


def prepare_inputs(body: ParsedBody, inputs: InputReader) -> list[PreparedRequest]:
    """Inputs as token ids. What is wrong with one is said with its place."""
    assert body.pooled is not None
    num_first = 0 if body.pooled.plan is None else body.pooled.plan.num_first
    return inputs.read(body.prompts, body.sampling, body.pooled.name, body.pooled.cut, num_first)


def feed(
    prepared: Sequence[PreparedRequest],
    submit: Callable[[PreparedRequest], EngineStream],
    on_number: Callable[[int], None],
) -> list[tuple[PreparedRequest, EngineStream]]:
    """Streams that reach the engine when they are first read; `on_number` gets the engine's number of each."""

    def start(prompt: PreparedRequest) -> EngineStream:
        stream = submit(prompt)
        on_number(stream.first)
        return stream

    return [(prompt, FedStream(partial(start, prompt))) for prompt in prepared]


class FedStream:
    """An `EngineStream` that is submitted when it is first read. Its reader keeps the window: it reads so many of them
    at a time."""

    first = 0  # its number is not known before it is submitted

    def __init__(self, submit: Callable[[], EngineStream]) -> None:
        self._submit = submit
        self._stream: EngineStream | None = None

    @property
    def failovers(self) -> int:
        return 0 if self._stream is None else self._stream.failovers

    @property
    def forecast(self) -> Forecast | None:
        return None if self._stream is None else self._stream.forecast

    async def take(self) -> list[BranchUpdate]:
        if self._stream is None:
            self._stream = self._submit()
        return await self._stream.take()

    def divert(self, on_updates: OnUpdates) -> None:
        """Readers of many streams are woken."""

    def finish_at(self, branch: int, num_output: int) -> None:
        """There is no output that could be ended."""

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
