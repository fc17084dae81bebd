"""How many lines of batches may be under way: what others leave free, and one at least.

Grows while no request waits, halves while one of a higher class does, and keeps a few lines waiting so that a free row
is taken at once (`Attempts` withdraws those when another request comes to wait). Pure: it is given the load and knows
neither time nor engine. One line always stays in the engine's queue, where the scheduler lets it age:
batches step back and never starve.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """What goes on at one moment."""

    rows: int  # requests the engine runs at once
    queue: int  # requests that may wait beside them
    waiting: int  # requests in the engine's queue, of batches and others
    own: int  # answers requested by lines under way
    others: int  # answers requested by other requests
    others_unstarted: int  # other requests that have no token yet

    @property
    def backlog(self) -> int:
        """Lines that may wait in the engine's queue. Half of the places to wait in are always left to others."""
        return min(max(1, self.rows // 8), self.queue // 2)

    @property
    def others_queued(self) -> int:
        """How many of the others may wait for a row: those without a token, while the queue is not empty."""
        return min(self.others_unstarted, self.waiting)


class LineLimit:
    """The bound that grows and halves. `observe` a few times a second, `allowed` at any moment."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self.limit = 1

    def observe(self, load: ServerLoad) -> None:
        if load.others_queued:
            self.limit = max(1, min(self.limit, load.own) // 2)
        elif load.waiting > load.backlog:  # no row or no memory is free: more lines would only wait
            self.limit = max(1, min(self.limit, load.own - (load.waiting - load.backlog)))
        else:
            self.limit += max(1, load.rows // 8)
        self.limit = min(self.limit, self._ceiling(load))

    def allowed(self, load: ServerLoad) -> int:
        """How many lines may be under way now."""
        return 1 if load.others_queued else min(self.limit, self._ceiling(load))

    def _ceiling(self, load: ServerLoad) -> int:
        free = load.rows + load.backlog - load.others
        return max(1, free if self._most is None else min(free, self._most))


# Lets lines through one by one while there is room, the tenants in turn; some of them only alone.
#
# A line that was under way when the engine was lost may be what it was lost by. Such a line goes when no other is
# under way, and none goes beside it, so that a line that ends engines ends no other line. Belongs to one event
# loop.


class Gate:
    """`enter` before a line is run, `leave` after it."""

    def __init__(self, has_room: Callable[[int], bool]) -> None:
        self._has_room = has_room  # whether one more may go, by how many are inside
        self._waiting: OrderedDict[str, deque[tuple[asyncio.Future[None], bool]]] = OrderedDict()
        self._has_loner = False
        self.num_inside = 0

    async def enter(self, tenant: str = "", *, alone: bool = False) -> None:
        """Wait for a turn. A task that is cancelled here has not entered."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((turn, alone))
        self.look()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            else:
                self.look()  # the next one may go now
            raise

    def leave(self) -> None:
        self.num_inside -= 1
        self._has_loner = False
        self.look()

    def look(self) -> None:
        """Let waiting lines in; to be called when there may be more room than before."""
        while self._waiting:
            tenant, queue = next(iter(self._waiting.items()))
            while queue and queue[0][0].done():  # given up
                queue.popleft()
            if not queue:
                del self._waiting[tenant]
                continue
            turn, alone = queue[0]
            if self._has_loner or (alone and self.num_inside) or not self._has_room(self.num_inside):
                return
            queue.popleft()
            self._waiting.move_to_end(tenant)
            self.num_inside += 1
            self._has_loner = alone
            turn.set_result(None)
