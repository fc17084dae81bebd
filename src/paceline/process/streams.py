"""One request under way, as its reader sees it: updates collect in place, and are delivered once for each frame.

The dispatcher (`async_engine`) appends to branches and calls `touch`, and `deliver` when it is through with a frame. A
reader that waits is woken, or is spared that: `divert`. Everything belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.core.events import Finished, Forecast, Held
from paceline.core.plan import RowLogprobs
from paceline.errors import PacelineError
from paceline.process.client import BranchUpdate, OnUpdates


@dataclass(slots=True, eq=False)
class StreamBranch:
    """One branch and what its reader has not taken yet."""

    stream: Stream
    id: int
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)
    time_s: float = 0.0
    ending: Finished | None = None
    is_touched: bool = False
    # Complete, up to an event that has a place among tokens.
    sealed: list[BranchUpdate] = field(default_factory=list)

    def touch(self) -> None:
        """There is an update. Called for the first of them only."""
        self.is_touched = True
        stream = self.stream
        if not stream.touched:
            stream.undelivered.append(stream)
        stream.touched.append(self)

    def take(self) -> list[BranchUpdate]:
        self.is_touched = False
        sealed, self.sealed = self.sealed, []
        return [*sealed, self._newest()] if not sealed or self._has_news else sealed

    def seal(self, *, held: Held | None = None, is_injected: bool = False) -> None:
        """What has come so far is an update of its own."""
        update = self._newest()
        update.held, update.is_injected = held, is_injected
        self.sealed.append(update)

    @property
    def _has_news(self) -> bool:
        return bool(self.tokens or self.logprobs) or self.ending is not None

    def _newest(self) -> BranchUpdate:
        update = BranchUpdate(
            branch=self.index,
            tokens=self.tokens,
            logprobs=self.logprobs,
            time_s=self.time_s,
            ending=self.ending,
        )
        self.tokens = []
        if self.logprobs:
            self.logprobs = []
        return update


class Stream:
    """Implements `EngineStream`."""

    __slots__ = (
        *("_close", "_finish_at", "_on_updates", "_waiter", "branches", "error", "first", "num_open"),
        *("forecast", "is_known", "touched", "undelivered"),
    )
    failovers = 0

    def __init__(
        self,
        first: int,
        count: int,
        undelivered: list[Stream],
        *,
        close: Callable[[Stream], None],
        finish_at: Callable[[int, int], None],
    ) -> None:
        self.first = first
        self.branches = [StreamBranch(self, first + index, index) for index in range(count)]
        self.num_open = count  # branches that have not ended
        self.touched: list[StreamBranch] = []
        self.undelivered = undelivered  # the dispatcher's: streams that were touched by the frame at hand
        self._on_updates: OnUpdates | None = None
        self.error: PacelineError | None = None
        self.forecast: Forecast | None = None
        self.is_known = False  # the engine has told something of it, so that it has read it
        self._waiter: asyncio.Future[None] | None = None
        self._close = close
        self._finish_at = finish_at

    async def take(self) -> list[BranchUpdate]:
        if not self.touched:
            if self.error is None:
                await self._wait()
            if self.error is not None and not self.touched:
                raise self.error
        return self._take_touched()

    def divert(self, on_updates: OnUpdates) -> None:
        self._on_updates = on_updates

    def finish_at(self, branch: int, num_output: int) -> None:
        if self.error is None and self.branches and self.branches[branch].ending is None:
            self._finish_at(self.first + branch, num_output)

    def close(self) -> None:
        self._close(self)
        # Branches and reader refer back to here: without this, every request would wait for the collector.
        self.branches, self.touched, self._on_updates = [], [], None

    def deliver(self) -> None:
        """A frame was read to its end and had updates; a reader that does not wait finds them in its next `take`."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if self._on_updates is None or not self._on_updates(self._take_touched()):
            waiter.set_result(None)

    async def _wait(self) -> None:
        assert self.num_open, "every branch has ended: nothing more will come"
        assert self._waiter is None, "a stream has one reader"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _take_touched(self) -> list[BranchUpdate]:
        touched, self.touched = self.touched, []
        return [update for branch in touched for update in branch.take()]

    def fail(self, error: PacelineError) -> None:
        """Nothing more will come; what has come may still be taken first."""
        if self.error is None:
            self.error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
