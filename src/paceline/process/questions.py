"""Questions to the engine with a separate answer: sent, waited for, answered or cancelled; and the ways to an engine.

A question has a number, and its answer comes back with it. Few are under way at a time, none is waited for longer
than a few seconds, and an engine that is lost answers all of them at once. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from paceline.errors import PacelineError, QueueFull
from paceline.process import frames
from paceline.process.client import EngineUnavailable

MOST_QUESTIONS = 32  # under way at a time
PATIENCE_S = 10.0


class Sender(Protocol):
    """The way to an engine; see `supervisor.Link`."""

    def send(self, payload: bytes) -> None: ...

    @property
    def num_unsent_bytes(self) -> int: ...


class Numbers:
    """Numbers of requests, which no two requests of a process share."""

    def __init__(self) -> None:
        self.next = 1


class ModelSender:
    """The way to another model than the first of a process."""

    def __init__(self, number: int, sender: Sender) -> None:
        self._number = number
        self._sender = sender

    def send(self, payload: bytes) -> None:
        self._sender.send(frames.for_model(self._number, payload))

    @property
    def num_unsent_bytes(self) -> int:
        return self._sender.num_unsent_bytes


Value = TypeVar("Value")


class Questions(Generic[Value]):
    """Those of one kind that wait for an answer, by number."""

    def __init__(self, too_many: str) -> None:
        self._too_many = too_many
        self._waiting: dict[int, asyncio.Future[Value]] = {}

    async def ask(self, number: int, sender: Sender, make: Callable[[], bytes]) -> Value:
        """The answer to the frame that `make` makes. Raises QueueFull, or EngineUnavailable when no answer comes."""
        if len(self._waiting) >= MOST_QUESTIONS:
            raise QueueFull(f"too many {self._too_many} at once; try again later")
        payload = make()
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            sender.send(payload)
            return await asyncio.wait_for(answer, PATIENCE_S)
        except TimeoutError:
            raise EngineUnavailable("the engine does not answer at the moment; try again later") from None
        finally:
            del self._waiting[number]

    def answer(self, number: int, value: Value) -> None:
        """An answer has come; one that is too late is dropped."""
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(value)

    def fail(self, number: int, error: PacelineError) -> bool:
        """No answer will come; False if none is waited for."""
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)
        return waiting is not None

    def fail_all(self, message: str, code: str = "engine_unavailable") -> None:
        for number in self._waiting:
            self.fail(number, EngineUnavailable(message, code=code))
