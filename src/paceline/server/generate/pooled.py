"""Inputs of a call that become vectors: their tokens, and how they are handed to the engine, a window at a time.

A call with thousands of inputs takes one place at the door. Its requests reach the engine only as earlier ones end, so
that they neither fill the engine's queue nor keep others waiting behind all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from paceline.core.events import Forecast
from paceline.errors import InvalidRequest
from paceline.llm.prompts import MAX_CHARS_PER_TOKEN, PreparedRequest, PromptReader
from paceline.models.files.pooling import EmbeddingDefaults
from paceline.process.client import BranchUpdate, EngineStream, OnUpdates
from paceline.server.api.openai_requests import ParsedBody
from paceline.server.errors import ContextTooLong
from paceline.text.tokenizer import Tokenizer


def prepare_inputs(
    body: ParsedBody,
    reader: PromptReader,
    tokenizer: Tokenizer,
    max_model_len: int,
    defaults: EmbeddingDefaults | None,
) -> list[PreparedRequest]:
    """Inputs as token ids. What is wrong with one is said with its place."""
    most = max_model_len
    if body.is_cut and defaults is not None:
        most = min(most, defaults.max_length or most)
    prepared = []
    for index, given in enumerate(body.prompts):
        name = f"input[{index}]" if len(body.prompts) > 1 else "input"
        try:
            ids = _input_ids(tokenizer, given, most if body.is_cut else None)
            if len(ids) > most:
                raise ContextTooLong(
                    f"This model's maximum context length is {most} tokens; the input has {len(ids)}; shorten it, "
                    "or send truncate: true"
                )
            prepared.append(reader.prepare(None, ids, body.sampling))
        except InvalidRequest as error:
            raise type(error)(f"{name}: {error}", param=name) from None
    return prepared


def _input_ids(tokenizer: Tokenizer, given: str | list[int], longest: int | None) -> list[int]:
    """The tokens of an input, no more of them than `longest`; what the tokenizer puts behind a text stays there."""
    if not isinstance(given, str):
        return given[:longest]
    if longest is None:
        return tokenizer.encode(given)
    ids = tokenizer.encode(given[: longest * MAX_CHARS_PER_TOKEN])
    behind = tokenizer.suffix_ids
    return ids if len(ids) <= longest else [*ids[: longest - len(behind)], *behind]


def feed(
    prepared: Sequence[PreparedRequest],
    submit: Callable[[PreparedRequest], EngineStream],
    on_number: Callable[[int], None],
) -> list[tuple[PreparedRequest, EngineStream]]:
    """Streams that are submitted when they are first asked; `on_number` then gets the engine's number of each."""

    def start(prompt: PreparedRequest) -> EngineStream:
        stream = submit(prompt)
        on_number(stream.first)
        return stream

    return [(prompt, FedStream(partial(start, prompt))) for prompt in prepared]


class FedStream:
    """An `EngineStream` that is submitted when its first updates are wanted."""

    first = 0  # its number is not known before it is submitted

    def __init__(self, submit: Callable[[], EngineStream]) -> None:
        self._submit = submit
        self._stream: EngineStream | None = None

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
