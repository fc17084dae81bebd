"""Explaining requests to those who sent them: the decisions the engine remembers, as sentences and figures.

Whose a request is and by which numbers the engine knows it is `recent_requests`' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.audit.story import story_values
from paceline.core.events import Decision, DecisionKind, Rule
from paceline.server.call import Caller
from paceline.server.failures import UnknownRequestId
from paceline.server.recent_requests import RecentRequests, number_of
from paceline.serving.client import EngineClient, EngineUnavailable, ExplainingClient, Told

_NOW = {
    "waiting": "is waiting for its turn now",
    "running": "is running now",
    "paused": "is paused now",
}
# What a request does after a decision; after any other it goes on as before.
_AFTER = {
    DecisionKind.DEFER: "waiting",
    DecisionKind.PREEMPT: "waiting",
    DecisionKind.ADMIT: "running",
    DecisionKind.CHUNK: "running",
    DecisionKind.RESUME: "running",
    DecisionKind.FORK: "running",
}


class Explanations:
    """The requests that can still be explained."""

    def __init__(self, client: EngineClient | ExplainingClient, recent: RecentRequests) -> None:
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

    async def explain_any(self, request_id: str, caller: Caller) -> dict[str, Any]:
        """The same for an admin: by id, or by the engine's number of one branch, which may be of any request."""
        number = number_of(request_id)
        if number is None:
            return await self.explain(request_id, caller)
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
        was_refused = any(each.kind is DecisionKind.REFUSE for each in told.decisions)
        return {"state": "refused" if was_refused else "ended", **values}
    state = _state(told.decisions)
    values["sentences"].append(_NOW[state])
    return {"state": state, **values}


def _state(decisions: Sequence[Decision]) -> str:
    state = "waiting"
    for decision in decisions:
        if decision.kind is DecisionKind.CHANGE and decision.reason is Rule.PAUSED:
            state = "paused"
        elif decision.kind is DecisionKind.CHANGE and decision.reason is Rule.RESUMED:
            state = "waiting"
        elif (
            state != "paused" or decision.kind is not DecisionKind.PREEMPT
        ):  # a pause is carried out by giving way
            state = _AFTER.get(decision.kind, state)
    return state
