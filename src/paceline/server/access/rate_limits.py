"""How much a key may ask for in a minute: requests and tokens, counted by buckets that drain.

A bucket holds what was spent and drains at the limit's pace, so that a whole minute's worth may come at once and no
more than that on average. Tokens are charged when a request is let in, by its prompt and the longest answer it may
get, and corrected when it is over. Belongs to one event loop; the clock is given.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from paceline.errors import InvalidRequest
from paceline.server.access.caller import REQUESTS, TOKENS, Caller
from paceline.server.errors import RateLimited

MINUTE_S = 60.0
ROUNDING = 1e-6  # what sums of fractions may be off by


class LeakyBucket:
    """What was spent of one limit, as far as time has not made up for it."""

    __slots__ = ("_at_s", "_spent", "per_minute")

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._spent = 0.0
        self._at_s = now_s

    def change_limit(self, per_minute: int, now_s: float) -> None:
        """Another limit from now on; what was spent stays spent."""
        self.spent(now_s)
        self.per_minute = per_minute

    def spent(self, now_s: float) -> float:
        drained = max(0.0, now_s - self._at_s) * self.per_minute / MINUTE_S
        self._spent = max(0.0, self._spent - drained)
        self._at_s = max(self._at_s, now_s)
        return self._spent

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until so much more fits; 0 when it does now."""
        over = self.spent(now_s) + amount - self.per_minute
        return over * MINUTE_S / self.per_minute if over > ROUNDING else 0.0

    def add(self, amount: float, now_s: float) -> None:
        """Spend so much; less than nothing gives back."""
        self._spent = max(0.0, self.spent(now_s) + amount)

    def remaining(self, now_s: float) -> int:
        return max(0, math.floor(self.per_minute - self.spent(now_s) + ROUNDING))

    def reset_s(self, now_s: float) -> float:
        """Seconds until nothing is spent any more."""
        return self.spent(now_s) * MINUTE_S / self.per_minute


# The buckets of one tenant by the names of its limits; none where there is no limit.
Account = dict[str, LeakyBucket]


class Allowance:
    """What one request has taken of its key's limits. Outlives the key: a reload does not touch it."""

    __slots__ = ("_account", "_charged", "_charged_in", "_clock", "_counted_in")

    def __init__(self, account: Account, clock: Callable[[], float]) -> None:
        self._account = account
        self._clock = clock
        # The buckets that know of it: what another one has never taken it must not give back.
        self._counted_in: LeakyBucket | None = None
        self._charged_in: LeakyBucket | None = None
        self._charged = 0  # tokens

    def count_request(self) -> None:
        """Count the request itself. Raises RateLimited when it has to wait."""
        bucket = self._account.get(REQUESTS)
        if bucket is not None:
            now_s = self._clock()
            _check(bucket, 1, REQUESTS, now_s)
            bucket.add(1, now_s)
            self._counted_in = bucket

    def check_tokens(self, at_least: int, about: int) -> None:
        """Refuse what cannot fit now, before anything is tokenised for it; how long to wait is a guess by `about`."""
        bucket = self._account.get(TOKENS)
        if bucket is None:
            return
        now_s = self._clock()
        if bucket.wait_s(min(at_least, bucket.per_minute), now_s) > 0:
            _check(bucket, min(max(at_least, about), bucket.per_minute), TOKENS, now_s)

    def charge_tokens(self, num_prompt: int, num_answer: int) -> None:
        """Charge the prompt and the longest answer. Raises RateLimited when they have to wait.

        An answer that could be longer than a whole minute's worth is let in when nothing else is spent: its length
        is only a bound, which most requests leave to the model's context. What it does use is charged at its end.
        """
        bucket = self._account.get(TOKENS)
        if bucket is not None:
            charge = self.check_charge(num_prompt, num_answer)
            bucket.add(charge, self._clock())
            self._charged_in, self._charged = bucket, charge

    def check_charge(self, num_prompt: int, num_answer: int) -> int:
        """What `charge_tokens` would charge; raises what it would, and charges nothing."""
        bucket = self._account.get(TOKENS)
        if bucket is None:
            return 0
        if num_prompt > bucket.per_minute:  # would be refused for ever: nothing to try again
            raise InvalidRequest(
                f"the prompt has {num_prompt} tokens, and the limit {TOKENS} of this key is {bucket.per_minute}"
            )
        charge = min(num_prompt + num_answer, bucket.per_minute)
        _check(bucket, charge, TOKENS, self._clock())
        return charge

    def settle_tokens(self, used: int) -> None:
        """The request is over and has used this number of tokens. A second call does nothing."""
        bucket, self._charged_in = self._charged_in, None
        if bucket is not None:
            bucket.add(used - self._charged, self._clock())

    def take_back(self) -> None:
        """The request was answered with Retry-After: it does not count."""
        bucket, self._counted_in = self._counted_in, None
        if bucket is not None:
            bucket.add(-1, self._clock())

    def headers(self) -> dict[str, str]:
        """A client's limits as headers, under the names of the OpenAI API."""
        now_s = self._clock()
        found: dict[str, str] = {}
        for name, bucket in (
            ("requests", self._account.get(REQUESTS)),
            ("tokens", self._account.get(TOKENS)),
        ):
            if bucket is not None:
                found[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{name}"] = str(bucket.remaining(now_s))
                found[f"x-ratelimit-reset-{name}"] = duration(bucket.reset_s(now_s))
        return found


class RateLimits:
    """The accounts of all tenants that have a limit: never more of them than there are keys."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def open(self, caller: Caller) -> Allowance | None:
        """What a request of this caller counts against; None for one without limits."""
        if caller.requests_per_minute is None and caller.tokens_per_minute is None:
            return None
        account = self._accounts.setdefault(caller.tenant, {})
        for name in (REQUESTS, TOKENS):
            per_minute, bucket = getattr(caller, name), account.get(name)
            if per_minute is None:
                account.pop(name, None)
            elif bucket is None:
                account[name] = LeakyBucket(per_minute, self._clock())
            elif bucket.per_minute != per_minute:
                bucket.change_limit(per_minute, self._clock())
        return Allowance(account, self._clock)

    def keep_only(self, tenants: Iterable[str]) -> None:
        """The keys were replaced: forget the accounts of those that are gone."""
        names = set(tenants)
        self._accounts = {name: account for name, account in self._accounts.items() if name in names}


def duration(seconds: float) -> str:
    """A time as the headers have it: 250ms, 1.5s, 6m0s."""
    thousandths = math.ceil(seconds * 1000 - ROUNDING)
    if thousandths < 1000:
        return f"{thousandths}ms"
    minutes, rest = divmod(thousandths, 60_000)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{minutes}m{text}" if minutes else text


def _check(bucket: LeakyBucket, amount: int, limit: str, now_s: float) -> None:
    wait_s = bucket.wait_s(amount, now_s)
    if wait_s > 0:
        seconds = max(1, math.ceil(wait_s - ROUNDING))
        raise RateLimited(limit, bucket.per_minute, retry_after_s=seconds)
