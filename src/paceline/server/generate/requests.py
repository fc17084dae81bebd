"""Whose requests the engine knows by which numbers: the newest of all callers, a bounded number of them.

What is explained, changed and shown on the live page is found here, by the id of an answer or by the engine's number. A
caller that names a request of another tenant gets the same answer as for one that never was. Knows nothing of what
became of a request.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from paceline.audit.story import story_values
from paceline.core.events import Decision, DecisionKind, Rule
from paceline.core.request import Change, ChangeOutcome
from paceline.core.service_class import DEFAULT_CLASS, Urgency, class_of, is_better
from paceline.errors import InvalidRequest
from paceline.process.client import EngineClient, Explanation
from paceline.server.access.caller import Caller
from paceline.server.errors import (
    NotPermitted,
    PriorityNotPermitted,
    RequestBusy,
    RequestEnded,
    UnknownRequestId,
)
from paceline.server.logs import SHORT_ID

MOST_REQUESTS = 8192  # some 300 bytes each
LONGEST_REFUSAL = 300  # characters
LONGEST_WORDS = 60
MOST_DIGITS = 18  # of a number
_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")


def own_id(request_id: str) -> str:
    """The id of a request without what the API it came by puts before it."""
    for prefix in _PREFIXES:
        request_id = request_id.removeprefix(prefix)
    return request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Recent:
    """A request that was handed to the engine, or refused before."""

    id: str
    tenant: str
    service_class: str
    numbers: tuple[int, ...]  # one for each of its branches
    until_s: float  # when the server ends it at the latest
    refusal: str = ""  # why it never reached the engine
    words: str = ""  # the beginning of its prompt, where prompts may be shown


class RecentRequests:
    """The requests that can still be found."""

    def __init__(self, most: int = MOST_REQUESTS) -> None:
        self.num_noted = 0  # since the start
        self.keeps_words: Callable[[], bool] = lambda: False  # whether prompts may be shown
        self._most = most
        self._known: OrderedDict[str, Recent] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def note(
        self,
        request_id: str,
        caller: Caller,
        numbers: Iterable[int],
        service_class: str = DEFAULT_CLASS,
        timeout_s: float | None = None,
        prompt: Callable[[], str] = str,
    ) -> None:
        """A request has been handed to the engine under these numbers; it may take no longer than `timeout_s`.

        `prompt` is asked for its text only where prompts may be shown.
        """
        self._keep(
            Recent(
                id=request_id,
                tenant=caller.tenant,
                service_class=service_class,
                numbers=tuple(numbers),
                until_s=math.inf if timeout_s is None else time.monotonic() + timeout_s,
                words=_beginning(prompt()) if self.keeps_words() else "",
            )
        )

    def refused(self, request_id: str, caller: Caller, why: str) -> None:
        """A request was refused on arrival."""
        self._keep(
            Recent(
                id=request_id,
                tenant=caller.tenant,
                service_class=DEFAULT_CLASS,
                numbers=(),
                until_s=0.0,
                refusal=why[:LONGEST_REFUSAL],
            )
        )

    def _keep(self, request: Recent) -> None:
        self._known[request.id] = request
        self.num_noted += 1
        if len(self._known) > self._most:
            self._known.popitem(last=False)

    def find(self, request_id: str, caller: Caller) -> Recent:
        """A request of this caller, or of anybody for an admin. Raises UnknownRequestId."""
        name = own_id(request_id)
        found = self._known.get(name) or self._numbered(name) or self._by_beginning(name, caller)
        may_know = found is not None and (found.tenant == caller.tenant or caller.is_admin)
        if found is None or not may_know or not (found.numbers or found.refusal):
            raise UnknownRequestId(
                "this key has sent no request of that id or number, or it was too long ago"
            )
        return found

    def _by_beginning(self, beginning: str, caller: Caller) -> Recent | None:
        """The one request of this caller whose id begins so, as lines of the log show it."""
        if len(beginning) < SHORT_ID:
            return None
        found = [each for each in self._known.values() if each.id.startswith(beginning)]
        own = [each for each in found if each.tenant == caller.tenant or caller.is_admin]
        return own[0] if len(own) == 1 else None

    def id_of(self, number: int) -> str:
        """The id of the request one of whose branches has this number, or nothing."""
        return next((each.id for each in reversed(self._known.values()) if number in each.numbers), "")

    def newest(self, count: int) -> list[Recent]:
        """The last requests, in the order they came."""
        return list(islice(reversed(self._known.values()), count))[::-1]

    def _numbered(self, text: str) -> Recent | None:
        """The request of a number, as the engine, its log and the live page show it."""
        number = number_of(text)
        return None if number is None else self._known.get(self.id_of(number))


def number_of(text: str) -> int | None:
    """The number a text names a request by, if it is one."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS else None


def _beginning(prompt: str) -> str:
    """The first words of a prompt in one line."""
    words = " ".join(prompt[: 4 * LONGEST_WORDS].split())
    return words if len(words) <= LONGEST_WORDS else words[: LONGEST_WORDS - 1] + "…"


# Explaining requests to their senders: the decisions the engine remembers, as sentences and figures.
#
# `RecentRequests` knows whose a request is, and its numbers in the engine.


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


class Explaining(Protocol):
    """An engine, or the recording of one."""

    async def explain(self, number: int) -> Explanation: ...


class Explanations:
    """The requests that can still be explained."""

    def __init__(self, client: Explaining, recent: RecentRequests) -> None:
        self._client = client
        self._recent = recent

    async def explain(self, request_id: str, caller: Caller) -> dict[str, Any]:
        """The story of each branch. Raises UnknownRequestId."""
        found = self._recent.find(request_id, caller)
        if found.refusal:
            told = {
                "index": 0,
                "state": "refused",
                "sentences": [f"was refused on arrival: {found.refusal}"],
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
        branches = []
        for index, number in enumerate(numbers):
            known = await self._client.explain(number)
            if known.decisions or known.is_live:
                branches.append({"index": index, "number": number, **_branch(known)})
        if not branches:
            raise UnknownRequestId("nothing is known about this request any more")
        return _explanation(name, branches)


def _explanation(name: str, branches: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": name, "object": "request.explanation", "branches": branches}


def _branch(known: Explanation) -> dict[str, Any]:
    """What a branch does now, and how it came to that."""
    values = story_values(known.decisions)
    if not known.is_live:
        was_refused = any(each.kind is DecisionKind.REFUSE for each in known.decisions)
        return {"state": "refused" if was_refused else "ended", **values}
    state = _state(known.decisions)
    values["sentences"].append(_NOW[state])
    return {"state": state, **values}


def _state(decisions: Sequence[Decision]) -> str:
    state = "waiting"
    for decision in decisions:
        if decision.kind is DecisionKind.CHANGE and decision.reason is Rule.PAUSED:
            state = "paused"
        elif decision.kind is DecisionKind.CHANGE and decision.reason is Rule.RESUMED:
            state = "waiting"
        elif state != "paused" or decision.kind is not DecisionKind.PREEMPT:
            # A paused request is preempted; it stays paused.
            state = _AFTER.get(decision.kind, state)
    return state


# How urgent a request is: the class it runs in, and the number of priority the engine goes by.
#
# A request may name a class that is no better than its key's, and a number within what the key allows. Pure.


class ClassNotPermitted(NotPermitted):
    """A class of service above the key's."""


def urgency_of(caller: Caller, tier: str | None, priority: int | None) -> Urgency:
    """The urgency of a request of this caller, who may leave both open. Raises NotPermitted for what its key does not
    allow."""
    chosen = class_of(tier, caller.service_class)
    if is_better(chosen, caller.service_class) and not caller.is_admin:
        message = (
            f"this key has the class {caller.service_class} and may not ask for {chosen}; "
            f"leave service_tier out or name a class that is no better"
        )
        raise ClassNotPermitted(message, param="service_tier")
    number = max(0, caller.lowest_priority_number or 0) if priority is None else priority
    check_number(caller, number)
    return Urgency(service_class=chosen, priority=number)


def check_number(caller: Caller, priority: int) -> None:
    """Raises PriorityNotPermitted for a number that the key does not allow."""
    lowest = caller.lowest_priority_number
    if lowest is not None and priority < lowest:
        message = f"this key may ask for priority {lowest} and above, not for {priority}"
        raise PriorityNotPermitted(message, param="priority")


# Changing requests under way: whose they are, what their key allows, and what the engine made of it.
#
# `RecentRequests` knows whose a request is, and its numbers in the engine; an admin key may change those of all.


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
            raise RequestEnded("the request was refused on arrival; there is nothing to change")
        if wish.priority is not None:
            check_number(caller, wish.priority)
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
