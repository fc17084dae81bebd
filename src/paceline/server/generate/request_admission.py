"""Limits on requests under way: places, tokens that wait, and how many a key may have at once.

A permit is taken before anything expensive is done for a request and given back when it is over, in whatever way.
All or nothing: a request with several branches gets all its places or none. Belongs to one event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import InvalidRequest
from paceline.server.access.caller import Caller
from paceline.server.access.rate_limits import Allowance
from paceline.server.errors import ConcurrencyExceeded, TooBusy


@dataclass(slots=True, kw_only=True)
class ServerCapacity:
    """How much there is. Written again when an engine turns out to be of another size."""

    places: int  # requests running and waiting, a branch each
    queued_tokens: int  # prompt tokens of requests that have no answer yet


class Permit:
    """The right of one request to be here. `release` as often as you like."""

    __slots__ = (
        "_admission",
        "_is_open",
        "_is_waiting",
        "_tenant",
        "allowance",
        "is_batch",
        "places",
        "tokens",
    )

    def __init__(self, admission: RequestAdmission, caller: Caller, places: int, tokens: int) -> None:
        self._admission = admission
        self._tenant = caller.tenant
        self.is_batch = bool(caller.batch_id)
        self.places = places
        self.tokens = tokens
        self.allowance: Allowance | None = None  # where the key has limits by the minute
        self._is_open = True
        self._is_waiting = True

    def settle(self, tokens: int) -> None:
        """Say how many tokens there are, now that they are counted. Raises TooBusy when they are too many."""
        assert self._is_open and self._is_waiting, "settled before it waits"
        if not self.is_batch:
            self._admission.recount(self, tokens)

    def next_place_s(self) -> float | None:
        """Until a request under way is thought to end, if that is known."""
        return self._admission.next_place_s()

    def leave_queue(self) -> None:
        """The first token is here: the prompt waits no longer."""
        if self._is_waiting:
            self._is_waiting = False
            self._admission.give_back_tokens(self)

    def release(self, *, used_tokens: int = 0) -> None:
        """The request is over, and has used `used_tokens` of its prompt and its answers."""
        if self.allowance is not None:
            self.allowance.settle_tokens(used_tokens)
        if self._is_open:
            self._is_open = False
            self.leave_queue()
            self._admission.give_back_places(self, self._tenant)


class RequestAdmission:
    """Counts what is under way against what there is."""

    def __init__(
        self,
        capacity: ServerCapacity,
        next_place_s: Callable[[], float | None] = lambda: None,
        by_tenant: dict[str, int] | None = None,
    ) -> None:
        """`next_place_s` says when a request under way is thought to end, if that is known. `by_tenant`: places that
        tenants have taken, where several models count them together."""
        self.capacity = capacity
        self.next_place_s = next_place_s
        self.places_taken = 0
        self.tokens_waiting = 0
        self.batch_places = 0  # those of the places that lines of batches have taken
        self.num_waiting = 0  # requests without a first token, lines of batches left out
        self._by_tenant: dict[str, int] = {} if by_tenant is None else by_tenant

    @property
    def is_full(self) -> bool:
        return self.places_taken >= self.capacity.places

    def under_way(self, tenant: str) -> int:
        """Places one tenant has taken."""
        return self._by_tenant.get(tenant, 0)

    def check_arrival(self, caller: Caller) -> None:
        """Refuse at once what has no place, before its body is looked at."""
        self._check(caller, places=1, tokens=0)

    def reserve(self, caller: Caller, places: int, tokens: int) -> Permit:
        """Take places for a request, and room for its prompt by a guess at its tokens."""
        self.check_places(caller, places, tokens)
        self.places_taken += places
        if caller.batch_id:
            # Its lines take nothing of what the key may have at once, and no room from prompts.
            self.batch_places += places
            return Permit(self, caller, places, 0)
        self.num_waiting += 1
        self.tokens_waiting += tokens
        self._by_tenant[caller.tenant] = self.under_way(caller.tenant) + places
        return Permit(self, caller, places, tokens)

    def check_places(self, caller: Caller, places: int, tokens: int) -> None:
        """Raise what `reserve` would, and take nothing."""
        possible = min(self.capacity.places, caller.max_concurrency or places)
        if places > possible:  # would be refused for ever: nothing to try again
            message = f"the request asks for {places} answers at once; at most {possible} are possible"
            raise InvalidRequest(message, param="n")
        self._check(caller, places, tokens)

    def recount(self, permit: Permit, tokens: int) -> None:
        others = self.tokens_waiting - permit.tokens
        if others and others + tokens > self.capacity.queued_tokens:
            raise self._too_busy("the queue holds as many tokens as it may")
        self.tokens_waiting = others + tokens
        permit.tokens = tokens

    def give_back_tokens(self, permit: Permit) -> None:
        self.tokens_waiting -= permit.tokens
        self.num_waiting -= not permit.is_batch

    def give_back_places(self, permit: Permit, tenant: str) -> None:
        places = permit.places
        self.places_taken -= places
        if permit.is_batch:
            self.batch_places -= places
            return
        left = self._by_tenant[tenant] - places
        if left:
            self._by_tenant[tenant] = left
        else:
            del self._by_tenant[tenant]

    def _check(self, caller: Caller, places: int, tokens: int) -> None:
        if self.places_taken + places > self.capacity.places:
            raise self._too_busy("the queue is full")
        # A prompt that waits alone is let in whatever its length: another limit says what is too long.
        is_crowded = self.tokens_waiting + tokens > self.capacity.queued_tokens
        if tokens and self.tokens_waiting and not caller.batch_id and is_crowded:
            raise self._too_busy("the queue holds as many tokens as it may")
        most = caller.max_concurrency
        if most is not None and self.under_way(caller.tenant) + places > most:
            requests = "request" if most == 1 else "requests"
            message = f"this key may have {most} {requests} under way; wait until one is over"
            raise ConcurrencyExceeded(message, retry_after_s=self.next_place_s())

    def _too_busy(self, what: str) -> TooBusy:
        return TooBusy(f"{what}; try again in a moment", retry_after_s=self.next_place_s())
