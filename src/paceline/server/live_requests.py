"""Changing requests under way: whose they are, what their key allows, and what the engine made of it.

Keeps the newest requests of all callers, a bounded number. Who names a request of somebody else hears what they would
hear of one that never was, unless they have an admin key.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.core.changes import Change, ChangeOutcome
from paceline.core.classes import LEVELS
from paceline.errors import InvalidRequest
from paceline.server.call import Caller
from paceline.server.explanations import own_id
from paceline.server.failures import RequestBusy, RequestEnded, UnknownRequestId
from paceline.server.urgency import check_number
from paceline.serving.client import ChangingClient, EngineClient, EngineUnavailable

MOST_REQUESTS = 8192  # some 300 bytes each


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a caller asks for, as it stands in the body; None leaves it as it is."""

    priority: int | None = None
    deadline_ms: int | None = None  # from now; 0: none but the server's own
    paused: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    tenant: str
    service_class: str
    numbers: tuple[int, ...]
    until_s: float  # when the server ends it at the latest


class LiveRequests:
    """The requests that may still be changed."""

    def __init__(self, client: EngineClient, most: int = MOST_REQUESTS) -> None:
        self._client = client
        self._most = most
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def note(
        self,
        request_id: str,
        caller: Caller,
        service_class: str,
        numbers: Iterable[int],
        timeout_s: float | None = None,
    ) -> None:
        """A request has been handed to the engine under these numbers; it may take no longer than `timeout_s`."""
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._known[request_id] = _Known(
            tenant=caller.tenant, service_class=service_class, numbers=tuple(numbers), until_s=until_s
        )
        if len(self._known) > self._most:
            self._known.popitem(last=False)

    async def change(self, request_id: str, caller: Caller, wish: Wish) -> dict[str, Any]:
        """Change a request of this caller. Raises UnknownRequestId, RequestEnded, RequestBusy, NotPermitted."""
        if wish == Wish():
            raise InvalidRequest("nothing is to be changed; give priority, deadline_ms or paused")
        own = own_id(request_id)
        known = self._known.get(own)
        if known is None or not known.numbers or (known.tenant != caller.tenant and not caller.is_admin):
            raise UnknownRequestId("this key has sent no request of that id, or it was too long ago")
        if wish.priority is not None:
            check_number(caller, wish.priority)
        if not isinstance(self._client, ChangingClient):
            raise EngineUnavailable("this engine does not change its requests")
        outcomes = await self._client.change(known.numbers, _change(wish, known))
        if ChangeOutcome.BUSY in outcomes:
            raise RequestBusy("the request cannot be paused at this moment; try again", param="paused")
        if ChangeOutcome.CHANGED not in outcomes:
            raise RequestEnded("the request has ended; there is nothing left to change")
        told = {"priority": wish.priority, "deadline_ms": wish.deadline_ms, "paused": wish.paused}
        return {
            "id": own,
            "object": "request.change",
            "service_tier": known.service_class,
            **{name: value for name, value in told.items() if value is not None},
            "live": outcomes.count(ChangeOutcome.CHANGED),
        }


def _change(wish: Wish, known: _Known) -> Change:
    """The same in the engine's words: a number counts from the level of the class, no deadline is the server's own."""
    until_s = None
    if wish.deadline_ms is not None:
        wanted_s = time.monotonic() + wish.deadline_ms / 1e3 if wish.deadline_ms else math.inf
        until_s = min(wanted_s, known.until_s)
    priority = None if wish.priority is None else LEVELS[known.service_class] + wish.priority
    if priority is not None and not -(2**31) <= priority < 2**31:
        raise InvalidRequest(f"priority {wish.priority} is out of range", param="priority")
    return Change(priority=priority, until_s=until_s, paused=wish.paused)
