"""Telling a policy that keeps accounts what each tenant was served.

A prompt is charged once, when its request is first admitted: the next choice knows of it. Output is charged as it is
delivered, taken together before the next plan is made. For a policy without accounts nothing is noted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.policy import Policy
from paceline.scheduler.waiting_queue import WaitingQueue


class TenantAccounting:
    """What was served and not yet charged, for the policy in use."""

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
