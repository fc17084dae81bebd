"""Doing parts of a step beside each other.

torch runs a batch of small matrix products and a gather on one core, however many there are. Where a step is made of
parts that do not touch each other, they are given to threads: torch lets go of the interpreter while it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Part = TypeVar("Part")


class Workers:
    """As many parts at a time as torch has threads; the caller's thread is one of them."""

    def __init__(self) -> None:
        self.count = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self.count - 1, "paceline-part") if self.count > 1 else None

    def run(self, work: Callable[[Part], None], parts: Sequence[Part]) -> None:
        """Do `work` for each part; an error of any of them is raised here, after all have ended."""
        if self._pool is None or len(parts) < 2:
            for part in parts:
                work(part)
            return

        def shared(part: Part) -> None:
            with torch.inference_mode():  # a setting of each thread
                work(part)

        others = [self._pool.submit(shared, part) for part in parts[1:]]
        try:
            work(parts[0])
        finally:
            for other in others:
                other.exception()  # waits
        for other in others:
            other.result()
