"""Requests by caller and by the engine's numbers: the newest of all callers, a bounded number of them.

What is explained, changed and shown on the live page is found here, by the id of an answer or by the engine's number. A
caller that names a request of another tenant gets the same answer as for one that never was. Knows nothing of what
became of a request.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

from paceline.audit.story import story_values
from paceline.core.events import Decision, DecisionKind, Rule
from paceline.core.request import Change, ChangeOutcome
from paceline.core.service_class import DEFAULT_CLASS, ServiceLevel, class_of, is_better
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
        numbers: Iterable[int] = (),
        service_class: str = DEFAULT_CLASS,
        timeout_s: float | None = None,
        *,
        prompt: Callable[[], str] = str,
        refusal: str = "",
    ) -> None:
        """A request has been handed to the engine under these numbers, or was refused on arrival.

        It may take no longer than `timeout_s`. `prompt` is asked for its text only where prompts may be shown.
        """
        self._known[request_id] = Recent(
            id=request_id,
            tenant=caller.tenant,
            service_class=service_class,
            numbers=tuple(numbers),
            until_s=math.inf if timeout_s is None else time.monotonic() + timeout_s,
            refusal=refusal[:LONGEST_REFUSAL],
            words=_beginning(prompt()) if self.keeps_words() else "",
        )
        self.num_noted += 1
        if len(self._known) > self._most:
            self._known.popitem(last=False)

    def found_number(self, request_id: str, number: int) -> None:
        """A part of a request has its number only now; the request may be forgotten by then."""
        if request_id in self._known:
            self.add_branches(request_id, [number])

    def add_branches(self, request_id: str, numbers: Sequence[int]) -> int:
        """Branches were forked from a request; returns the index of the first."""
        known = self._known[request_id]
        self._known[request_id] = replace(known, numbers=(*known.numbers, *numbers))
        return len(known.numbers)

    def branch_of(self, number: int) -> tuple[str, int] | None:
        """The id of the request and the index of the branch that has this number."""
        known = self._known.get(self.id_of(number))
        return None if known is None else (known.id, known.numbers.index(number))

    def find(self, request_id: str, caller: Caller) -> Recent:
        """A request of this caller, or of any caller for an admin. Raises UnknownRequestId."""
        name = own_id(request_id)
        number = number_of(name)  # as the engine, its log and the live page show it
        by_number = None if number is None else self._known.get(self.id_of(number))
        found = self._known.get(name) or by_number or self._by_beginning(name, caller)
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
    "held": "is held at its end now",
}
# What a request does after a decision; after any other it goes on as before.
_AFTER = {
    DecisionKind.DEFER: "waiting",
    DecisionKind.PREEMPT: "waiting",
    DecisionKind.ADMIT: "running",
    DecisionKind.CHUNK: "running",
    DecisionKind.RESUME: "running",
    DecisionKind.FORK: "running",
    DecisionKind.HOLD: "held",
    DecisionKind.EXTEND: "waiting",
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
            refused = {
                "index": 0,
                "state": "refused",
                "sentences": [f"was refused on arrival: {found.refusal}"],
            }
            return _explanation(found.id, [{**refused, "decisions": []}])
        return await self._explain(found.id, found.numbers)

    async def explain_any(self, request_id: str, caller: Caller) -> dict[str, Any]:
        """The same for an admin: by id, or by the engine's number of one branch, which may be of any request."""
        number = number_of(request_id)
        if number is None:
            return await self.explain(request_id, caller)
        return await self._explain(self._recent.id_of(number), (number,))

    async def _explain(self, name: str, numbers: tuple[int, ...]) -> dict[str, Any]:
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


# The service level of a request: the class it runs in, and its priority.
#
# A request may name a class that is no better than its key's, and a number within what the key allows. Pure.


def service_level_of(caller: Caller, tier: str | None, priority: int | None) -> ServiceLevel:
    """The service level of a request of this caller; both may be left open. Raises NotPermitted."""
    chosen = class_of(tier, caller.service_class)
    if is_better(chosen, caller.service_class) and not caller.is_admin:
        message = (
            f"this key has the class {caller.service_class} and may not ask for {chosen}; "
            f"leave service_tier out or name a class that is no better"
        )
        raise NotPermitted(message, param="service_tier")
    number = max(0, caller.lowest_priority_number or 0) if priority is None else priority
    check_number(caller, number)
    return ServiceLevel(service_class=chosen, priority=number)


def check_number(caller: Caller, priority: int) -> None:
    """Raises PriorityNotPermitted for a number that the key does not allow."""
    lowest = caller.lowest_priority_number
    if lowest is not None and priority < lowest:
        message = f"this key may ask for priority {lowest} and above, not for {priority}"
        raise PriorityNotPermitted(message, param="priority")


# Changing requests under way: their caller, what its key allows, and what the engine made of it.
#
# `RecentRequests` knows whose a request is, and its numbers in the engine; an admin key may change those of all.


async def change_request(
    client: EngineClient,
    known: Recent,
    caller: Caller,
    *,
    priority: int | None = None,
    deadline_ms: int | None = None,
    paused: bool | None = None,
    end_reasoning: bool | None = None,
    score: float | None = None,
) -> dict[str, Any]:
    """Change a request of this caller; `deadline_ms` from now, 0 for none but the server's own.

    Raises RequestEnded, RequestBusy, NotPermitted.
    """
    if known.refusal:
        raise RequestEnded("the request was refused on arrival; there is nothing to change")
    if priority is not None:
        check_number(caller, priority)
    until_s = None
    if deadline_ms is not None:
        wanted_s = time.monotonic() + deadline_ms / 1e3 if deadline_ms else math.inf
        until_s = min(wanted_s, known.until_s)
    if priority is not None:
        ServiceLevel(known.service_class, priority).check()
    change = Change(
        priority=priority, until_s=until_s, paused=paused, end_reasoning=end_reasoning, score=score
    )
    outcomes = await client.change(known.numbers, change)
    if ChangeOutcome.BUSY in outcomes:
        raise RequestBusy("the request cannot be paused at this moment; try again", param="paused")
    if ChangeOutcome.NOT_REASONING in outcomes and ChangeOutcome.CHANGED not in outcomes:
        raise RequestBusy(
            "the request has no reasoning that could be ended: it is over, or the request has neither a budget of "
            "reasoning (thinking_token_budget) nor a structure",
            param="end_reasoning",
        )
    if ChangeOutcome.CHANGED not in outcomes:
        raise RequestEnded("the request has ended; there is nothing left to change")
    changed = {
        "priority": priority,
        "deadline_ms": deadline_ms,
        "paused": paused,
        "end_reasoning": end_reasoning,
        "score": score,
    }
    return {
        "id": known.id,
        "object": "request.change",
        "service_tier": known.service_class,
        **{name: value for name, value in changed.items() if value is not None},
        "live": outcomes.count(ChangeOutcome.CHANGED),
    }
