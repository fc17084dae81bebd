"""Which adapters are in memory: places that rows hold, the order of eviction, and which request gets one next.

An adapter is a number. Any number of them may be known; `most` of them are in memory. One that rows have stays; one
that rows had leaves when every step that could touch it is complete, as blocks do. What a waiting request lacks is read
while others pass it. What is to be read and let go of is told in `orders`; reading is the business of the engine.

Requests are judged in the order of the policy, so that a place goes to the first that lacks one: from those without
rows that no request before it needs, else one is closed: it takes no new rows until those it has are gone. So no
adapter waits behind a popular one for longer than its rows take. Decision: docs/decisions/0046-adapters.md.
"""

from __future__ import annotations

from typing import NamedTuple

from paceline.core.counters import AdapterStats


class AdapterOrder(NamedTuple):
    """What the engine is to do."""

    number: int
    comes: bool  # read it; else let go of its matrices


class AdapterPlaces:
    """The adapters of one scheduler."""

    def __init__(self, most: int) -> None:
        self.most = most  # 0: as many as there are
        self.identities: dict[int, str] = {}  # of all that requests have, or may have
        self.resident: dict[int, None] = {}  # in memory, those first whose last row left longest ago
        self.coming: set[int] = set()  # being read
        self.leaving: dict[int, int] = {}  # evicted: the last plan that may have a row of it
        self.rows: dict[int, int] = {}  # how many rows have it
        self.users: dict[int, int] = {}  # how many live requests have it
        self.last_plan: dict[int, int] = {}  # of those that rows had: the last plan with one
        self.orders: list[AdapterOrder] = []
        self.evicted = self.read = 0
        self._completed = 0  # plans
        # Of the step that is planned: in memory for a request that waits for something else, closed for new rows, and
        # places on their way that no request has counted on.
        self._claimed: set[int] = set()
        self._closed: set[int] = set()
        self._promised = 0
        self._served: set[int] = set()
        self._is_short = False  # some request lacks a place

    # -- what there is -------------------------------------------------------------------------------------

    def register(self, number: int, identity: str) -> None:
        """A number stands for an adapter, which has been read: it is in memory if there is a place for it."""
        self.identities[number] = identity
        if number not in self.coming and self._has_place():
            self.resident[number] = None

    def forget(self, number: int) -> None:
        """A number stands for nothing any more; no request has it, and no step under way."""
        del self.identities[number]
        self.resident.pop(number, None)
        self.leaving.pop(number, None)
        self.coming.discard(number)
        self.last_plan.pop(number, None)
        self.orders = [order for order in self.orders if order.number != number]

    def is_there(self, number: int) -> bool:
        """Whether rows may have it now."""
        return number in self.resident and number not in self._closed

    def arrived(self, number: int, *, failed: bool) -> None:
        """It has been read, or could not be."""
        if number in self.coming:
            self.coming.remove(number)
            if not failed:
                self.resident[number] = None
                self.read += 1

    def stats(self) -> AdapterStats:
        waiting = [number for number, users in self.users.items() if users > self.rows.get(number, 0)]
        return AdapterStats(
            tuple(self.rows), tuple(waiting), len(self.resident), self.most, self.read, self.evicted
        )

    # -- requests and rows ---------------------------------------------------------------------------------

    def add_request(self, number: int) -> None:
        self.users[number] = self.users.get(number, 0) + 1
        # Ahead of its turn, but not of a request that waits for a place.
        if not self._is_short and not self._is_known_place(number):
            self._fetch(number, only_unwanted=True)

    def drop_request(self, number: int) -> None:
        self.users[number] -= 1
        if not self.users[number]:
            del self.users[number]

    def take_row(self, number: int) -> None:
        self.rows[number] = self.rows.get(number, 0) + 1

    def leave_row(self, number: int, submitted: int) -> None:
        """`submitted`: the last plan that may have the row."""
        self.rows[number] -= 1
        self.last_plan[number] = submitted
        if not self.rows[number]:
            del self.rows[number]
            self.resident[number] = self.resident.pop(number)  # to the end

    # -- places, while a step is planned -------------------------------------------------------------------

    def begin_step(self, completed: int) -> None:
        """Every plan up to this one is complete."""
        self._completed = completed
        for number in [number for number, last in self.leaving.items() if last <= completed]:
            self._let_go(number)
        self._claimed.clear()
        self._closed.clear()
        self._served.clear()
        self._promised = len(self.leaving)
        self._is_short = False
        if self.last_plan:
            self.last_plan = {
                number: last
                for number, last in self.last_plan.items()
                if last > completed or number in self.rows
            }

    def claim(self, number: int) -> None:
        """A request waits for something else: its adapter stays for it."""
        self._claimed.add(number)

    def want(self, number: int) -> None:
        """The next request in order lacks it: make a place, and have it read."""
        if number in self.coming or number in self._served or number in self._closed:
            return
        self._served.add(number)
        if not self._has_place() and self._promised:  # one is on its way
            self._promised -= 1
        elif number not in self.leaving and not self._fetch(number) and not self._closed:
            self._close_one()
        self._is_short |= number not in self.coming

    def _is_known_place(self, number: int) -> bool:
        return number in self.resident or number in self.coming or number in self.leaving

    def _has_place(self) -> bool:
        return not self.most or len(self.resident) + len(self.coming) + len(self.leaving) < self.most

    def _fetch(self, number: int, *, only_unwanted: bool = False) -> bool:
        """Have it read if there is a place, or begin to make one; False: all places are in use."""
        if not self._has_place():
            free = [each for each in self.resident if each not in self.rows and each not in self._claimed]
            unwanted = [each for each in free if each not in self.users]
            if not unwanted and (only_unwanted or not free):
                return False
            self._evict((unwanted or free)[0])
        if self._has_place():
            self.coming.add(number)
            self.orders.append(AdapterOrder(number, comes=True))
        return True

    def _close_one(self) -> None:
        """The one with the fewest rows takes no more of them, unless a request before this one needs it."""
        others = [each for each in self.resident if each not in self._claimed]
        if others:
            self._closed.add(min(others, key=lambda each: (self.rows.get(each, 0), each)))

    def _evict(self, number: int) -> None:
        del self.resident[number]
        self.evicted += 1
        self.leaving[number] = self.last_plan.get(number, 0)
        if self.leaving[number] <= self._completed:
            self._let_go(number)

    def let_go_of_all(self) -> None:
        """Their memory goes; no row has one and no step is under way. They are read again when a request asks."""
        for number in list(self.leaving):
            self._let_go(number)
        self.last_plan.clear()
        for number in list(self.resident):
            self._evict(number)

    def _let_go(self, number: int) -> None:
        del self.leaving[number]
        self.orders.append(AdapterOrder(number, comes=False))
