"""Pieces of a stream that reach the connection without waking the request's task: order, refusals, failures, ends."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from paceline.config.server import ProcessConfig
from paceline.process import frames
from paceline.process.async_engine import AsyncEngine
from paceline.process.client import EngineUnavailable
from paceline.server.call import Events
from paceline.server.errors import GenerationFailed
from tests.fake_engine import finished
from tests.pure.server_api.api_helpers import INFO, Api, chunks, ids

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
WAIT_S = 10


class Silent:
    """A channel to an engine that no process reads."""

    num_unsent_bytes = 0

    def __init__(self) -> None:
        self.sent: list[frames.ToEngine] = []

    def send(self, payload: bytes) -> None:
        self.sent.append(frames.decode_to_engine(payload))


class Reader:
    """Reads one stream as a connection does; `takes` is whether it can be written to at once."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.engine, self.sender = AsyncEngine(ProcessConfig()), Silent()
        self.engine.attach(self.sender)
        self.engine.ready(INFO)
        self.api = Api()
        self.api.service.client = self.engine
        self.takes = True
        self.written: list[bytes] = []
        self.num_woken = 0
        self._body = body

    async def read(self) -> None:
        events = await self.api.open(CHAT, self._body)
        assert isinstance(events, Events) and events.divert is not None
        self.stream = weakref.ref(events.frames)
        try:
            async for frame in events.frames:
                self.num_woken += 1
                self.written.append(frame)
                await asyncio.sleep(0)  # a connection may have to wait for its reader here
                events.divert(self._write)
        except Exception as error:
            self.written.append(events.error_frame(error))
            raise
        finally:
            await events.frames.aclose()

    def say(self, text: str, *, branch: int = 1, reason: str = "") -> None:
        numbers = ids(text)
        ends = []
        if reason:
            ends.append(finished(branch, reason, 99))
        self.engine.on_update(
            frames.Update(
                1.0,
                np.full(len(numbers), branch, frames.ID).tobytes(),
                np.array(numbers, frames.TOKEN).tobytes(),
                endings=ends,
            )
        )

    def _write(self, frame: bytes) -> bool:
        if self.takes:
            self.written.append(frame)
        return self.takes

    @property
    def text(self) -> str:
        found = chunks(b"".join(self.written))
        return "".join(choice["delta"].get("content", "") for chunk in found for choice in chunk["choices"])


def drive(test: Callable[[Reader, Callable[[], Awaitable[None]]], Awaitable[None]], **body: Any) -> Reader:
    reader = Reader({**BODY, **body})

    async def run() -> None:
        reading = asyncio.create_task(reader.read())

        async def settle() -> None:
            for _ in range(10):
                await asyncio.sleep(0)

        await settle()
        try:
            await test(reader, settle)
            await asyncio.wait_for(reading, WAIT_S)
        finally:
            reading.cancel()

    asyncio.run(run())
    return reader


def is_clean(reader: Reader) -> bool:
    admission = reader.api.service.admission
    return (admission.places_taken, admission.tokens_waiting, reader.engine.num_open) == (0, 0, 0)


def test_a_waiting_reader_is_spared() -> None:
    async def test(reader: Reader, settle: Callable[[], Awaitable[None]]) -> None:
        reader.say("a")
        await settle()
        for letter in "bcdef":
            reader.say(letter)
        assert reader.text == "abcdef", "at once, without a turn of the loop"
        assert reader.num_woken == 1
        reader.say("g", reason="length")

    reader = drive(test)
    assert reader.text == "abcdefg"
    assert reader.num_woken == 2, "for the first piece and for the end"
    assert reader.written[-1].endswith(b"data: [DONE]\n\n")
    assert is_clean(reader)


def test_a_stream_leaves_with_its_last_reference() -> None:
    """The collector comes by seldom: what waited for it would pile up by megabytes."""

    async def test(reader: Reader, settle: Callable[[], Awaitable[None]]) -> None:
        reader.say("a")
        await settle()
        reader.say("b")
        reader.say("c", reason="length")

    gc.disable()
    try:
        assert drive(test).stream() is None
    finally:
        gc.enable()


def test_nothing_overtakes_what_could_not_be_written() -> None:
    async def test(reader: Reader, settle: Callable[[], Awaitable[None]]) -> None:
        reader.say("a")
        await settle()
        reader.takes = False
        reader.say("b")
        reader.takes = True
        reader.say("c")  # the reader is awake, and has `b` in hand
        reader.say("d")
        await settle()
        reader.say("e")
        assert reader.text == "abcde"
        reader.takes = False
        reader.say("f", reason="length")

    reader = drive(test)
    assert reader.text == "abcdef"
    assert is_clean(reader)


def test_a_stop_string_is_told_to_the_engine_from_there() -> None:
    async def test(reader: Reader, settle: Callable[[], Awaitable[None]]) -> None:
        reader.say("a")
        await settle()
        reader.say("bxyz")
        reader.say("never seen", reason="stop")

    reader = drive(test, stop=["xy"])
    assert reader.text == "ab"
    assert any(isinstance(sent, frames.FinishAt) and sent.num_output == 4 for sent in reader.sender.sent)
    assert chunks(b"".join(reader.written))[-1]["choices"][0]["finish_reason"] == "stop"
    assert is_clean(reader)


@pytest.mark.parametrize(
    "how, code", [("branch", "internal_error"), ("ours", "internal_error"), ("lost", "engine_unavailable")]
)
def test_what_goes_wrong_is_its_readers_alone(how: str, code: str) -> None:
    readers: list[Reader] = []

    async def test(reader: Reader, settle: Callable[[], Awaitable[None]]) -> None:
        readers.append(reader)
        reader.say("a")
        await settle()
        if how == "branch":
            reader.say("b", reason="error")
        elif how == "ours":
            columns = np.array([1], frames.ID).tobytes(), np.array([10**6], frames.TOKEN).tobytes()
            reader.engine.on_update(frames.Update(1.0, *columns))  # an id that is not in the vocabulary
        else:
            reader.engine.detach("it is gone")

    with pytest.raises((GenerationFailed, EngineUnavailable)):
        drive(test)
    (reader,) = readers
    assert chunks(reader.written[-1])[0]["error"]["code"] == code
    assert is_clean(reader)
