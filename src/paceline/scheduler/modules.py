"""Modules: texts computed alone, whose KV rows copy to the places where their prompts have them.

A request that places a text is admitted when all modules it still needs are in the cache; its row holds their blocks
until they are copied. One that lacks a module waits, others pass it, and the module is computed by a request of its
own, which goes where the first that waits for it goes. Requests that wait hold nothing: a module may be evicted before
its turn comes. From then on nothing but modules passes a request, so that what it waits for can not be pushed out for
ever by those behind it. Decision: docs/decisions/0055-contexts.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.core.request import ModuleRef, Request, RequestId
from paceline.core.stretch import Stretch, StretchKind


class Body(NamedTuple):
    """Tokens of a prompt that are placed."""

    start: int
    end: int
    stretch: Stretch


class ModuleOrder(NamedTuple):
    """A module that is to be computed, for a request that waits."""

    request: Request
    stretch: Stretch


class Modules:
    """Those of one scheduler."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[Body, ...]] = {}  # of rows that place texts
        # By the last key of a module: the request that computes it, and what no request computes yet.
        self.computing: dict[bytes, RequestId] = {}
        self.orders: dict[bytes, ModuleOrder] = {}
        self.overtaken: set[RequestId] = set()  # a module was evicted while they waited
        self._asked: dict[RequestId, set[bytes]] = {}  # what was computed for them, or is

    def next_body(self, row: int, position: int) -> Body | None:
        """The first of a row that ends behind a position."""
        return next((body for body in self.rows[row] if body.end > position), None)

    def were_evicted(self, request: Request, keys: Sequence[bytes]) -> bool:
        """Whether some of these that it lacks were computed while it waited."""
        asked = self._asked.get(request.id, ())
        lost = [key for key in keys if key in asked and key not in self.computing and key not in self.orders]
        return bool(lost) or request.id in self.overtaken

    def want(self, request: Request, stretch: Stretch) -> None:
        """A waiting request lacks a module."""
        key = name_of(request.modules[stretch.item])
        if key in self.computing or key in self.orders:
            self._asked.setdefault(request.id, set()).add(key)
            return
        self.orders[key] = ModuleOrder(request, stretch)
        asked = self._asked.setdefault(request.id, set())
        if key in asked:
            self.overtaken.add(request.id)
        asked.add(key)

    def comes(self, request: Request, places: dict[RequestId, int]) -> None:
        """A request that computes a module. It goes where the first that waits for it goes in the order of arrival."""
        if not request.keys:
            return
        key = request.keys[-1].key
        self.computing.setdefault(key, request.id)
        order = self.orders.pop(key, None)
        if order is not None:
            places[request.id] = places[order.request.id]

    def rests(self, request: Request) -> None:
        """A request is put aside by its owner: the module that it computes is asked of another."""
        if request.is_module and request.keys and self.computing.get(request.keys[-1].key) == request.id:
            del self.computing[request.keys[-1].key]

    def ends(self, request: Request) -> list[RequestId]:
        """A request has ended; if it computed a module, returns those that have waited for that."""
        self._asked.pop(request.id, None)
        self.overtaken.discard(request.id)
        for key in [key for key, order in self.orders.items() if order.request is request]:
            del self.orders[key]
        key = request.keys[-1].key if request.is_module and request.keys else b""
        if self.computing.get(key) != request.id:
            return []
        del self.computing[key]
        return [number for number, asked in self._asked.items() if key in asked]


def bodies_of(request: Request, num_computed: int = 0) -> tuple[Body, ...]:
    """What of a prompt is placed, and not computed yet."""
    return tuple(
        [
            Body(stretch.start + request.modules[stretch.item].recompute, stretch.end, stretch)
            for stretch in request.stretches
            if stretch.kind is StretchKind.PLACED and stretch.end > num_computed
        ]
    )


def name_of(module: ModuleRef) -> bytes:
    """What a module is known by."""
    return module.keys[-1].key
