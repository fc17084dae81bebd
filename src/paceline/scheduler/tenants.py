"""What the scheduler keeps by tenant: service that a policy with accounts was not yet told, and output statistics."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.core.request import FinishReason, Request
from paceline.policy import Policy
from paceline.scheduler.waiting_queue import WaitingQueue


class TenantAccounting:
    """What was served and not yet charged, for the policy in use.

    A prompt is charged once, when its request is first admitted: the next choice knows of it. Output is charged as it
    is delivered, taken together before the next plan is made. For a policy without accounts nothing is noted.
    """

    def __init__(self, policy: Policy, queue: WaitingQueue) -> None:
        self._queue = queue
        self._delivered: list[NDArray[np.int64]] = []  # tenants, once for each token
        self._returned: dict[int, str] = {}
        self.accounts = policy if policy.keeps_accounts else None

    def comes(self, tenant: int, name: str, *, back: bool) -> None:
        """A request of the tenant is about to wait. `back`: it ran, and was preempted in the plan being made."""
        if self.accounts is None or tenant in self._queue.tenants:
            return
        if back:  # the accounts stay as they are while a plan is made
            self._returned[tenant] = name
            return
        self.settle()
        self.accounts.began(tenant, name, self._queue.backlog((tenant,)))

    def admitted(self, tenant: int, num_prompt: int) -> None:
        """A request was admitted for the first time."""
        if self.accounts is not None:
            self.accounts.served(np.array([tenant]), np.array([num_prompt]), np.array([0]))

    def delivered(self, tenants: NDArray[np.int64]) -> None:
        """One token each."""
        self._delivered.append(tenants)

    def settle(self) -> None:
        """Bring the accounts up to date."""
        if self.accounts is None:
            return
        if self._delivered:
            tenants, counts = np.unique(np.concatenate(self._delivered), return_counts=True)
            self._delivered = []
            self.accounts.served(tenants, np.zeros_like(counts), counts)
        if self._returned:
            returned, self._returned = self._returned, {}
            waiting = set(self._queue.backlog(returned.keys()))
            for tenant, name in returned.items():  # one after another: the first waits when the second comes
                if tenant in self._queue.tenants:
                    self.accounts.began(tenant, name, waiting)
                    waiting.add(tenant)

    def gap(self) -> float | None:
        """The most that tenants that wait are apart in their accounts; None: the policy keeps none."""
        counter = getattr(self.accounts, "counter", None)
        if counter is None:
            return None
        counts = [float(counter(tenant)) for tenant in self._queue.tenants]
        return max(counts) - min(counts) if len(counts) > 1 else 0.0

    def is_unsettled(self, tenant: int) -> bool:
        """Whether the tenant waits again since the plan that was just made. For checks."""
        return tenant in self._returned


MOST_TENANTS = 1024
_STOP, _LENGTH = FinishReason.STOP, FinishReason.LENGTH  # see core.fast
LEARNING = 0.05  # weight of the last ending among those before it
FAMILIAR = 8.0  # endings after which a tenant's own averages count as much as those of all

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class _Averages:
    __slots__ = ("at_length", "cached", "count", "stopped_at")

    def __init__(self) -> None:
        self.count = 0.0
        self.at_length = 1.0  # share of endings that were at the allowed length
        self.stopped_at = 0.0  # mean tokens of those that were not; 0: none yet
        self.cached = 0.0  # share of prompts that was found in the cache

    def learn(self, num_output: int, stopped: bool, cached: float) -> None:
        self.count += 1.0
        rate = LEARNING if self.count > 1.0 / LEARNING else 1.0 / self.count
        self.at_length += rate * ((not stopped) - self.at_length)
        self.cached += rate * (cached - self.cached)
        if stopped:
            rate = rate if self.stopped_at else 1.0
            self.stopped_at += rate * (num_output - self.stopped_at)


class OutputStats:
    """How much of what requests may generate they do, and how much of a prompt is cached, by tenant.

    Learnt from endings. An answer either runs to the length it was allowed or stops before it; how often the first
    happens and how long the second takes is all that is kept. A new tenant is taken to be like the average of all.
    Never looks at a clock.
    """

    def __init__(self) -> None:
        self._all = _Averages()
        self._by_tenant: dict[int, _Averages] = {}

    def ended(self, tenant: int, request: Request, num_output: int, reason: FinishReason) -> None:
        """A request has ended with `num_output` tokens. Only answers that ran to their end teach anything."""
        if (reason is not _STOP and reason is not _LENGTH) or request.sampling.pooling is not None:
            return
        own = self._by_tenant.pop(tenant, None) or _Averages()
        self._by_tenant[tenant] = own  # the most recent tenant is the last to be dropped
        if len(self._by_tenant) > MOST_TENANTS:
            del self._by_tenant[next(iter(self._by_tenant))]
        cached = min(1.0, request.num_cached / request.num_prompt)
        for averages in (self._all, own):
            averages.learn(num_output, reason is _STOP, cached)

    def outputs_left(self, tenant: Ints, allowed: Ints) -> Floats:
        """Tokens still to come of requests that may have `allowed` more, at least one of each.

        How long an answer has been going says nothing about its end, unless it runs to its length.
        """
        at_length, stopped_at, _ = self._columns(tenant)
        left: Floats = at_length * allowed + (1.0 - at_length) * np.minimum(stopped_at, allowed)
        return np.maximum(left, 1.0)

    def cached_share(self, tenant: Ints) -> Floats:
        """Of prompts that come, found in the cache."""
        shares: Floats = np.broadcast_to(self._columns(tenant)[2], tenant.shape)
        return shares

    def _columns(self, tenant: Ints) -> tuple[Floats, Floats, Floats]:
        """See `_of`, for each of them; one number for all where there is one tenant."""
        if len(tenant) and tenant.min() == tenant.max():
            return tuple(np.array(part) for part in self._of(int(tenant[0])))  # type: ignore[return-value]
        tenants, which = np.unique(tenant, return_inverse=True)
        known = np.array([self._of(int(each)) for each in tenants]).reshape(-1, 3)[which]
        return known[:, 0], known[:, 1], known[:, 2]

    def _of(self, tenant: int) -> tuple[float, float, float]:
        """The share of answers that run to their length, the tokens of the others, and what of prompts is cached."""
        overall, own = self._all, self._by_tenant.get(tenant)
        if own is None:
            return overall.at_length, overall.stopped_at, overall.cached
        weight = own.count / (own.count + FAMILIAR)
        stopped_at = overall.stopped_at
        if own.stopped_at:
            stopped_at += weight * (own.stopped_at - stopped_at)
        return (
            overall.at_length + weight * (own.at_length - overall.at_length),
            stopped_at,
            overall.cached + weight * (own.cached - overall.cached),
        )
