"""Modules: texts computed alone, whose KV rows copy to the places where their prompts have them.

A request that places a text is admitted when all modules it still needs are in the cache; its row holds their blocks
until they are copied. One that lacks a module waits, others pass it, and the module is computed by a request of its
own, which goes where the first that waits for it goes. Requests that wait hold nothing: a module may be evicted before
its turn comes. From then on nothing but modules passes a request, so that what it waits for can not be pushed out for
ever by those behind it. Until a module is there, those that wait for it cost a step nothing; where its computing ends
for any other reason, the next of them has it computed. Decision: docs/decisions/0055-contexts.md.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from paceline.core.request import OWN_REQUESTS, FinishReason, ModuleRef, Request, RequestId
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
        # By the last key of a module that is computed or ordered: what those that wait for it would order.
        self._waiting: dict[bytes, dict[RequestId, ModuleOrder]] = {}
        # By request that has waited: the modules it is waiting for, and those that were computed meanwhile.
        self._lacks: dict[RequestId, set[bytes]] = {}
        self._had: dict[RequestId, set[bytes]] = {}
        # Modules that no request waits for any more, since this was last asked.
        self._deserted: list[bytes] = []

    def next_body(self, row: int, position: int) -> Body | None:
        """The first of a row that ends behind a position."""
        return next((body for body in self.rows[row] if body.end > position), None)

    def waited_for(self, request: Request) -> Collection[bytes]:
        """The modules of a request that others compute, or will."""
        return self._lacks.get(request.id, ())

    def were_evicted(self, request: Request, keys: Collection[bytes]) -> bool:
        """Whether some of these that it lacks were computed while it waited."""
        had = self._had.get(request.id, ())
        lost = [key for key in keys if key in had and key not in self.computing and key not in self.orders]
        return bool(lost) or request.id in self.overtaken

    def want(self, request: Request, stretch: Stretch) -> None:
        """A waiting request lacks a module."""
        key = name_of(request.modules[stretch.item])
        waiting = self._waiting.setdefault(key, {})
        if request.id in waiting:
            return
        waiting[request.id] = order = ModuleOrder(request, stretch)
        self._lacks.setdefault(request.id, set()).add(key)
        if key not in self.computing and key not in self.orders:
            self.orders[key] = order
            if key in self._had.get(request.id, ()):
                self.overtaken.add(request.id)

    def comes(self, request: Request, places: dict[RequestId, int]) -> None:
        """A request that computes a module. It goes where the first that waits for it goes in the order of arrival."""
        if not request.keys:
            return
        key = request.keys[-1].key
        self.computing.setdefault(key, request.id)
        order = self.orders.pop(key, None)
        if order is not None:
            places[request.id] = places[order.request.id]

    def stops(self, request: Request) -> None:
        """A request will not compute its module, or not now: the next that waits for that has it computed."""
        key = self._module_of(request)
        if key is not None:
            del self.computing[key]
            self._order_again(key)

    def ends(self, request: Request, reason: FinishReason) -> list[RequestId]:
        """A request that computes a module has ended. Returns those that wait for it no longer: it is there, or it
        failed."""
        if reason not in (FinishReason.STOP, FinishReason.ERROR):
            self.stops(request)
            return []
        key = self._module_of(request)
        if key is None:
            return []
        del self.computing[key]
        waiting = list(self._waiting.pop(key, ()))
        for number in waiting:
            self._lacks[number].discard(key)
            if reason is FinishReason.STOP:
                self._had.setdefault(number, set()).add(key)
        return waiting

    def forget(self, request: Request) -> None:
        """A request waits for no module any more."""
        self._had.pop(request.id, None)
        self.overtaken.discard(request.id)
        for key in self._lacks.pop(request.id, ()):
            del self._waiting[key][request.id]
            order = self.orders.get(key)
            if order is not None and order.request is request:
                del self.orders[key]
                self._order_again(key)
            elif not self._waiting[key]:
                del self._waiting[key]
                self._deserted.append(key)

    def take_deserted(self) -> list[RequestId]:
        """The engine's own requests that compute what no other waits for any more."""
        keys, self._deserted = self._deserted, []
        found = [self.computing[key] for key in keys if key in self.computing and key not in self._waiting]
        return [number for number in found if number >= OWN_REQUESTS]

    def _module_of(self, request: Request) -> bytes | None:
        """The module that a request computes, if it is the one that does."""
        key = request.keys[-1].key if request.is_module and request.keys else None
        return key if key is not None and self.computing.get(key) == request.id else None

    def _order_again(self, key: bytes) -> None:
        """The first of those that wait for a module orders it."""
        order = next(iter(self._waiting.get(key, {}).values()), None)
        if order is not None:
            self.orders[key] = order
        else:
            self._waiting.pop(key, None)


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
