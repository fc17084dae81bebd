"""Lets lines through one by one while there is room, the tenants in turn; some of them only alone.

A line that was under way when the engine was lost may be what it was lost by. Such a line goes when no other is under
way, and none goes beside it, so that a line that ends engines ends no other line. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable


class Gate:
    """`enter` before a line is run, `leave` after it."""

    def __init__(self, has_room: Callable[[int], bool]) -> None:
        self._has_room = has_room  # whether one more may go, while so many are inside
        self._waiting: OrderedDict[str, deque[tuple[asyncio.Future[None], bool]]] = OrderedDict()
        self._has_loner = False
        self.num_inside = 0

    async def enter(self, tenant: str = "", *, alone: bool = False) -> None:
        """Wait for a turn. Who is cancelled here has not entered."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((turn, alone))
        self.look()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            else:
                self.look()  # somebody behind may go now
            raise

    def leave(self) -> None:
        self.num_inside -= 1
        self._has_loner = False
        self.look()

    def look(self) -> None:
        """See who may go; to be called when there may be more room than before."""
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
