"""Whose requests the engine knows by which numbers: the newest of all callers, a bounded number of them.

What is explained, changed and shown on the live page is found here, by the id of an answer or by the engine's number. A
caller that names a request of another tenant gets the same answer as for one that never was. Knows nothing of what
became of a request.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from paceline.core.classes import DEFAULT_CLASS
from paceline.server.call import Caller
from paceline.server.failures import UnknownRequestId
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
        """A request was turned away at the door."""
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
