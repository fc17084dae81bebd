"""Explaining requests to those who sent them: the decisions the engine remembers, as sentences and figures.

Whose a request is and by which numbers the engine knows it is `recent_requests`' business.
"""

from __future__ import annotations

from typing import Any

from paceline.audit.story import story_values
from paceline.core.events import DecisionKind
from paceline.server.call import Caller
from paceline.server.failures import UnknownRequestId
from paceline.server.recent_requests import RecentRequests
from paceline.serving.client import EngineClient, EngineUnavailable, ExplainingClient, Told

_WAITING = (None, DecisionKind.DEFER, DecisionKind.PREEMPT)  # what was decided last about who is not running
_NOW = {"waiting": "is waiting for its turn now", "running": "is running now"}


class Explanations:
    """The requests that can still be explained."""

    def __init__(self, client: EngineClient, recent: RecentRequests) -> None:
        self._client = client
        self._recent = recent

    async def explain(self, request_id: str, caller: Caller) -> dict[str, Any]:
        """The story of each branch. Raises UnknownRequestId."""
        found = self._recent.find(request_id, caller)
        if found.refusal:
            told = {
                "index": 0,
                "state": "refused",
                "sentences": [f"was refused at the door: {found.refusal}"],
            }
            return _explanation(found.id, [{**told, "decisions": []}])
        return await self._tell(found.id, found.numbers)

    async def explain_number(self, number: int) -> dict[str, Any]:
        """The same by the engine's own number of a branch, for those who may see everybody's requests."""
        return await self._tell(self._recent.id_of(number), (number,))

    async def _tell(self, name: str, numbers: tuple[int, ...]) -> dict[str, Any]:
        if not isinstance(self._client, ExplainingClient):
            raise EngineUnavailable("this engine does not explain its requests")
        branches = []
        for index, number in enumerate(numbers):
            told = await self._client.explain(number)
            if told.decisions or told.is_live:
                branches.append({"index": index, "number": number, **_branch(told)})
        if not branches:
            raise UnknownRequestId("nothing is known about this request any more")
        return _explanation(name, branches)


def _explanation(name: str, branches: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": name, "object": "request.explanation", "branches": branches}


def _branch(told: Told) -> dict[str, Any]:
    """What a branch does now, and how it came to that."""
    values = story_values(told.decisions)
    if not told.is_live:
        return {"state": "ended", **values}
    last = next((each.kind for each in reversed(told.decisions) if each.kind is not DecisionKind.FAIL), None)
    state = "waiting" if last in _WAITING else "running"
    values["sentences"].append(_NOW[state])
    return {"state": state, **values}
