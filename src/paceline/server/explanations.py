"""Whose requests the engine knows by which numbers, so that they can be explained to those who sent them.

Keeps the newest requests of all callers, a bounded number, and asks the engine for the rest. Who asks for a request of
somebody else hears what they would hear of one that never was.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from paceline.audit.story import story_values
from paceline.core.events import DecisionKind
from paceline.server.call import Caller
from paceline.server.failures import UnknownRequestId
from paceline.serving.client import EngineClient, EngineUnavailable, ExplainingClient, Told

MOST_REQUESTS = 8192  # some 200 bytes each
_WAITING = (None, DecisionKind.DEFER, DecisionKind.PREEMPT)  # what was decided last about who is not running
_NOW = {"waiting": "is waiting for its turn now", "running": "is running now"}
_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")


def own_id(request_id: str) -> str:
    """The id of a request without what the API it came by puts before it."""
    for prefix in _PREFIXES:
        request_id = request_id.removeprefix(prefix)
    return request_id


class Explanations:
    """The requests that can still be explained."""

    def __init__(self, client: EngineClient | ExplainingClient, most: int = MOST_REQUESTS) -> None:
        self._client = client
        self._most = most
        self._known: OrderedDict[str, tuple[str, tuple[int, ...]]] = OrderedDict()

    def note(self, request_id: str, caller: Caller, numbers: Iterable[int]) -> None:
        """A request has been handed to the engine under these numbers, one for each of its branches."""
        self._known[request_id] = (caller.tenant, tuple(numbers))
        if len(self._known) > self._most:
            self._known.popitem(last=False)

    async def explain(self, request_id: str, caller: Caller) -> dict[str, Any]:
        """The story of each branch. Raises UnknownRequestId."""
        own = own_id(request_id)
        tenant, numbers = self._known.get(own, ("", ()))
        if not numbers or tenant != caller.tenant:
            raise UnknownRequestId(
                "this key has sent no request of that id that reached the engine, or it was too long ago"
            )
        return await self._tell(own, numbers)

    async def explain_number(self, number: int) -> dict[str, Any]:
        """The same by the engine's own number of a branch, for those who may see everybody's requests."""
        known = ((name, numbers) for name, (_, numbers) in reversed(self._known.items()) if number in numbers)
        name, _ = next(known, ("", ()))
        return await self._tell(name, (number,))

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
