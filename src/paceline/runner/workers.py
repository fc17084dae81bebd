"""Doing parts of a step beside each other.

torch runs a batch of small matrix products and a gather on one core, however many there are. Where a step is made of
parts that do not touch each other, they are given to threads: torch lets go of the interpreter while it computes.

Meanwhile no part may start threads itself. Each thread that computes has a team of them, which wait for each other
by spinning: two teams on the same cores take turns at waiting, and a step takes twice as long. The caller's thread
computes too: to hand all parts over takes 5 % longer. What is set in torch for one thread is also what threads that
begin meanwhile start with; a program with other threads beside an engine sets their number in each.

How many threads compute a step follows from how many cores other processes leave (`machine_load`). What a token gets
does not depend on it. Between two steps torch has the number it had before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from paceline.runner.machine_load import FreeCores

Part = TypeVar("Part")


class Workers:
    """As many parts at a time as torch has threads, or as cores are free; the caller's thread is one of them."""

    def __init__(self, free: FreeCores | None = None) -> None:
        self._most = self.count = torch.get_num_threads()
        self._free = free
        self._pool: ThreadPoolExecutor | None = None
        if self.count > 1:
            self._pool = ThreadPoolExecutor(self.count - 1, "paceline-part", initializer=_compute_alone)

    @contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        """One step of `tokens` tokens, on as many threads as there are cores for."""
        if self._free is not None:
            self.count = min(self._free.refresh(tokens), self._most)
        before = torch.get_num_threads()
        if self.count == before:
            yield
            return
        torch.set_num_threads(self.count)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def run(self, work: Callable[[Part], None], parts: Sequence[Part], *, beside: bool = True) -> None:
        """Do `work` for each part; an error of any of them is raised here, after all have ended.

        Without `beside` one after the other, each on all threads.
        """
        if self._pool is None or self.count < 2 or len(parts) < 2 or not beside:
            for part in parts:
                work(part)
            return
        waiting = deque(parts)

        def take() -> None:
            with torch.inference_mode():  # a setting of each thread
                while waiting:
                    try:
                        part = waiting.popleft()
                    except IndexError:  # another thread took the last one
                        return
                    work(part)

        others = [self._pool.submit(take) for _ in range(min(self.count, len(parts)) - 1)]
        torch.set_num_threads(1)
        try:
            take()
        finally:
            for other in others:
                other.exception()  # waits
            torch.set_num_threads(self.count)
        for other in others:
            other.result()


def _compute_alone() -> None:
    torch.get_num_threads()  # a number set before the thread has taken its own over is overwritten
    torch.set_num_threads(1)
