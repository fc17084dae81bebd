"""Prefix keys of long prompts, made beside the steps of an engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from paceline.core.request import BlockKey

LONG_PROMPT = 8192  # tokens whose keys are made ahead: those of fewer take no longer than a step's own work
KEYS_LOOK_S = 0.001  # from one look at whether they are made to the next

First = TypeVar("First")
Message = TypeVar("Message")
Parts = Iterable[list[BlockKey]]


class KeysAhead(Generic[First, Message]):
    """Prefix keys of long prompts, made beside steps: one prompt at a time, and the messages behind it.

    8,192 blocks take some 20 ms of a processor, which every stream would wait for. So a thread makes them, and what the
    other side asks for meanwhile waits behind the prompt, in order.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="paceline-keys")
        self._first: tuple[First, Future[list[BlockKey]]] | None = None
        self._behind: deque[Message] = deque()

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return self._first is not None

    def start(self, message: First, parts: Parts) -> None:
        """Make the keys of a message's prompt; what comes until it is taken goes to `put`."""
        assert self._first is None
        self._first = message, self._threads.submit(_made, parts)

    def put(self, message: Message) -> None:
        self._behind.append(message)

    def take(
        self,
        add: Callable[[First, list[BlockKey]], None],
        apply: Callable[[Message], None],
        *,
        wait: bool = False,
    ) -> None:
        """Hand on what need not wait any more: a prompt with its keys to `add`, what was behind it to `apply`, which
        may start another. `wait`: for all of it."""
        while self._first is not None and (wait or self._first[1].done()):
            message, keys = self._first
            self._first = None
            add(message, keys.result())
            while self._behind and self._first is None:
                apply(self._behind.popleft())

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _made(parts: Parts) -> list[BlockKey]:
    made: list[BlockKey] = []
    for part in parts:
        made += part
        time.sleep(0)  # the engine's thread waits no longer for its turn than one part takes
    return made
