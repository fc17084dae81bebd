"""Lines under way, and which of them the engine has begun to answer: those that only wait can be taken back.

Listens to generations beside whoever did so before. A line that is taken back has lost nothing but its place in the
queue, and whoever waits behind it is next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.server.call import Observer, RequestRecord


class Withdrawn(Exception):
    """The line was taken back because somebody else waits; it has to be run again."""


class _Attempt:
    __slots__ = ("has_begun", "is_withdrawn", "task")

    def __init__(self, task: asyncio.Task[object]) -> None:
        self.task = task
        self.has_begun = False
        self.is_withdrawn = False


class Attempts:
    """An observer of generations that knows lines by the ids of their requests."""

    def __init__(self, inner: Observer) -> None:
        self._inner = inner
        self._under_way: dict[str, _Attempt] = {}
        # Every piece of news passes these; without a stop on the way.
        self.started = inner.started
        self.tokens = inner.tokens
        self.finished = inner.finished

    def first_token(self, record: RequestRecord) -> None:
        if record.batch_id and record.id in self._under_way:
            self._under_way[record.id].has_begun = True
        self._inner.first_token(record)

    @contextmanager
    def attempt(self, request_id: str) -> Iterator[None]:
        """A line under way in this task. Raises Withdrawn in it when it is taken back."""
        task = asyncio.current_task()
        assert task is not None
        own = self._under_way[request_id] = _Attempt(task)
        try:
            yield
        except asyncio.CancelledError:
            if own.is_withdrawn and task.uncancel() == 0:  # and nobody else has cancelled it
                raise Withdrawn from None
            raise
        finally:
            del self._under_way[request_id]

    def withdraw(self, *, keep: int) -> int:
        """Take back what has not begun, the newest first, until so many lines are left; returns how many."""
        left, withdrawn = len(self._under_way), 0
        for attempt in reversed(self._under_way.values()):
            if left - withdrawn <= keep:
                break
            if not attempt.has_begun and not attempt.is_withdrawn:
                attempt.is_withdrawn = True
                attempt.task.cancel()
                withdrawn += 1
        return withdrawn
