"""One request under way, as its reader sees it: news pile up in place, one wake-up for all of a frame.

The dispatcher (`async_engine`) appends to branches and calls `touch`; that is all a token costs. Everything belongs to
one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from paceline.core.plan import RowLogprobs
from paceline.errors import PacelineError
from paceline.serving.client import BranchNews, Ending


class Branch:
    """One branch and what its reader has not taken yet."""

    __slots__ = ("ending", "id", "index", "is_touched", "logprobs", "stream", "time_s", "tokens")

    def __init__(self, stream: Stream, branch_id: int, index: int) -> None:
        self.stream = stream
        self.id = branch_id
        self.index = index
        self.tokens: list[int] = []
        self.logprobs: list[RowLogprobs] = []
        self.time_s = 0.0
        self.ending: Ending | None = None
        self.is_touched = False

    def touch(self) -> None:
        """There is news. Called for the first of them only."""
        self.is_touched = True
        self.stream.touched.append(self)
        self.stream.wake()

    def take(self) -> BranchNews:
        news = BranchNews(
            branch=self.index,
            tokens=self.tokens,
            logprobs=self.logprobs,
            time_s=self.time_s,
            ending=self.ending,
        )
        self.tokens = []
        if self.logprobs:
            self.logprobs = []
        self.is_touched = False
        return news


class Stream:
    """Implements `EngineStream`."""

    __slots__ = ("_close", "_finish_at", "_waiter", "branches", "error", "first", "num_open", "touched")

    def __init__(
        self,
        first: int,
        count: int,
        *,
        close: Callable[[Stream], None],
        finish_at: Callable[[int, int], None],
    ) -> None:
        self.first = first
        self.branches = [Branch(self, first + index, index) for index in range(count)]
        self.num_open = count  # branches that have not ended
        self.touched: list[Branch] = []
        self.error: PacelineError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._close = close
        self._finish_at = finish_at

    async def take(self) -> list[BranchNews]:
        while not self.touched:
            if self.error is not None:
                raise self.error
            assert self.num_open, "every branch has ended: nothing more will come"
            assert self._waiter is None, "a stream has one reader"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        touched, self.touched = self.touched, []
        return [branch.take() for branch in touched]

    def finish_at(self, branch: int, num_output: int) -> None:
        if self.error is None and self.branches[branch].ending is None:
            self._finish_at(self.first + branch, num_output)

    def close(self) -> None:
        self._close(self)

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, error: PacelineError) -> None:
        """Nothing more will come; what has come may still be taken first."""
        if self.error is None:
            self.error = error
        self.wake()
