"""Changing requests under way: whose they are, what their key allows, and what the engine made of it.

Whose a request is and by which numbers the engine knows it is `recent_requests`' business; an admin key may change
everybody's.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from paceline.core.changes import Change, ChangeOutcome
from paceline.core.classes import Urgency
from paceline.errors import InvalidRequest
from paceline.server.call import Caller
from paceline.server.failures import RequestBusy, RequestEnded
from paceline.server.recent_requests import Recent, RecentRequests
from paceline.server.urgency import check_number
from paceline.serving.client import ChangingClient, EngineClient, EngineUnavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a caller asks for, as it stands in the body; None leaves it as it is."""

    priority: int | None = None
    deadline_ms: int | None = None  # from now; 0: none but the server's own
    paused: bool | None = None


class LiveRequests:
    """The requests that may still be changed."""

    def __init__(self, client: EngineClient, recent: RecentRequests) -> None:
        self._client = client
        self._recent = recent

    async def change(self, request_id: str, caller: Caller, wish: Wish) -> dict[str, Any]:
        """Change a request of this caller. Raises UnknownRequestId, RequestEnded, RequestBusy, NotPermitted."""
        if wish == Wish():
            raise InvalidRequest("nothing is to be changed; give priority, deadline_ms or paused")
        known = self._recent.find(request_id, caller)
        if known.refusal:
            raise RequestEnded("the request was refused at the door; there is nothing to change")
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
            "id": known.id,
            "object": "request.change",
            "service_tier": known.service_class,
            **{name: value for name, value in told.items() if value is not None},
            "live": outcomes.count(ChangeOutcome.CHANGED),
        }


def _change(wish: Wish, known: Recent) -> Change:
    """The same in the engine's words: no deadline is the server's own."""
    until_s = None
    if wish.deadline_ms is not None:
        wanted_s = time.monotonic() + wish.deadline_ms / 1e3 if wish.deadline_ms else math.inf
        until_s = min(wanted_s, known.until_s)
    if wish.priority is not None:
        Urgency(known.service_class, wish.priority).check()
    return Change(priority=wish.priority, until_s=until_s, paused=wish.paused)
