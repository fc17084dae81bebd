"""The steps to come, as far as they can be known: prompts are read in order, rows end, others take their places.

A walk over what is there, prompt by prompt instead of step by step: between two events steps are alike. It knows rows,
blocks and tokens as plain numbers and nothing of requests; whoever walks says what comes next.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable

Cost = Callable[[float, float], float]  # seconds of a step, of its decoding rows and its tokens of prompts
Budget = Callable[[int], int]  # tokens of a step with prompts, of its decoding rows


class Outlook:
    """Seconds pass as prompts are read. Blocks are counted in fractions: on average that is what rows fill."""

    def __init__(
        self,
        cost: Cost,
        budget: Budget,
        *,
        endings: Iterable[tuple[float, float]],
        free_rows: int,
        free_blocks: float,
        block_size: int,
    ) -> None:
        """`endings`: of each decoding row, in how many steps it ends and how many blocks it holds then."""
        self.seconds = 0.0
        self._cost, self._budget = cost, budget
        self._ends = list(endings)
        heapq.heapify(self._ends)
        self.decoding = len(self._ends)
        self._rows, self._blocks = free_rows, free_blocks
        self._block_size = block_size
        self._step = 0.0
        self._filled = 0  # tokens of prompts in the step that is being filled

    def admit(self, blocks: float) -> None:
        """Wait until there is a row and so many blocks, and take them; anyway, if nobody is left to wait for."""
        while (self._rows < 1 or self._blocks < blocks) and self._ends:
            self._advance(max(1.0, self._ends[0][0] - self._step))
        self._rows -= 1
        self._blocks -= blocks

    def read(self, tokens: int) -> None:
        """Compute so many tokens of a prompt, in the step that has room and those after it."""
        self._filled += tokens
        while True:
            room = max(1, self._budget(self.decoding) - self.decoding)
            steps = self._filled // room
            if not steps:
                return
            if self._ends and self._ends[0][0] < self._step + steps:  # not alike beyond that
                steps = min(steps, max(1, math.ceil(self._ends[0][0] - self._step)))
            self._filled -= steps * room
            self.seconds += steps * self._cost(self.decoding, room)
            self._pass(steps)

    def decode(self, num_tokens: float, blocks: float) -> None:
        """Whose prompt has just been read generates so many tokens from the next step on; it holds `blocks` already."""
        heapq.heappush(self._ends, (self._step + num_tokens, blocks + num_tokens / self._block_size))
        self.decoding += 1

    def first_token_s(self) -> float:
        """When the prompt that was read last gives its token: with the step it ends in."""
        return self.seconds + (self._cost(self.decoding, self._filled) if self._filled else 0.0)

    def _advance(self, steps: float) -> None:
        """Steps in which no further prompt is read."""
        if self._filled:
            self.seconds += self._cost(self.decoding, self._filled)
            self._filled = 0
            self._pass(1.0)
            steps -= 1.0
        if steps > 0.0:
            self.seconds += steps * self._cost(self.decoding, 0)
            self._pass(steps)

    def _pass(self, steps: float) -> None:
        self._step += steps
        self._blocks -= steps * self.decoding / self._block_size
        while self._ends and self._ends[0][0] <= self._step:
            self._blocks += heapq.heappop(self._ends)[1]
            self._rows += 1
            self.decoding -= 1
