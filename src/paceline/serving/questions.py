"""Questions to the engine that get an answer of their own: sent, waited for, told or given up.

A question has a number, and its answer comes back with it. Few are under way at a time, none is waited for longer than
a few seconds, and an engine that is lost answers all of them at once. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from paceline.errors import QueueFull
from paceline.serving import frames
from paceline.serving.client import EngineUnavailable, Told

MOST_QUESTIONS = 32  # under way at a time
PATIENCE_S = 10.0


class Sender(Protocol):
    """The way to an engine; see `link`."""

    def send(self, payload: bytes) -> None: ...

    @property
    def num_unsent_bytes(self) -> int: ...


class Questions:
    """Those that wait for an answer."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[Told]] = {}
        self._next = 1

    async def ask(self, sender: Sender, number: int) -> Told:
        """What was decided about a branch. Raises QueueFull, or EngineUnavailable when no answer comes."""
        if len(self._waiting) >= MOST_QUESTIONS:
            raise QueueFull("too many requests are being explained at once; try again later")
        question, self._next = self._next, (self._next + 1) % 2**31
        answer = self._waiting[question] = asyncio.get_running_loop().create_future()
        try:
            sender.send(frames.encode(frames.Explain(question, number)))
            return await asyncio.wait_for(answer, PATIENCE_S)
        except TimeoutError:
            raise EngineUnavailable("the engine does not answer at the moment; try again later") from None
        finally:
            del self._waiting[question]

    def answer(self, told: frames.Explained) -> None:
        """An answer has come; one that nobody waits for any more is passed over."""
        waiting = self._waiting.get(told.question)
        if waiting is not None and not waiting.done():
            waiting.set_result(Told([decision.decision() for decision in told.decisions], told.is_live))

    def give_up(self, message: str) -> None:
        """No answer will come."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EngineUnavailable(message))
