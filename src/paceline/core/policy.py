"""The policy seam: who goes first, who gives way, how much of a step a prompt may take.

A policy is a few pure functions over read-only columns. The same view type describes waiting and running
requests, so that one rule orders both. Lower priority numbers and lower scores go first.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from paceline.core.fast import value


@value
class RequestView:
    """Read-only columns, one entry per request. `row` is -1 for a request that waits."""

    now_s: float
    row: NDArray[np.int64]
    order: NDArray[np.int64]  # position in the order of arrival, unique
    arrival_s: NDArray[np.float64]
    priority: NDArray[np.int64]
    tenant: NDArray[np.int64]
    num_prompt: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    max_total: NDArray[np.int64]
    preemptions: NDArray[np.int64]
    deadline_s: NDArray[np.float64]  # absolute, as `now_s`; infinity for none
    first_due_s: NDArray[np.float64]  # when a first token is wanted; infinity for whenever
    num_computed: NDArray[np.int64]  # tokens whose KV is there: on the device, or kept on the host
    peak_computed: NDArray[np.int64]  # most tokens it ever had computed; computing them again adds nothing
    started: NDArray[np.int64]  # 1 once it has been admitted, though it may wait again

    @property
    def attained(self) -> NDArray[np.int64]:
        """The former name of `peak_computed`, for policies written for it."""
        return self.peak_computed

    @property
    def num_output(self) -> NDArray[np.int64]:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt

    def __len__(self) -> int:
        return len(self.order)


@dataclass(frozen=True, slots=True)
class Victim:
    """Entry `index` of the view gives way. `swap` None leaves the kind to the scheduler."""

    index: int
    swap: bool | None = None


class Policy(Protocol):
    """Order, victim and share. Pure: the same view gives the same answer."""

    def order(self, view: RequestView) -> NDArray[np.float64]:
        """A score per request; the lowest goes first, ties by arrival."""
        ...

    def victim(self, view: RequestView, need: int) -> Victim:
        """Which of the preemptible requests in `view` gives way, `need` blocks being short."""
        ...

    def share(self, view: RequestView, budget: int) -> int:
        """Most tokens one prompt may take of a step's `budget` while the requests in `view` wait."""
        ...


class Displacing(Protocol):
    """What a policy has besides if a waiting request may take the place of one that runs."""

    def yields(self, running: RequestView, waiting: RequestView) -> NDArray[np.bool_]:
        """Which of the requests that run give their place to the one in `waiting`, the first of those that wait.

        Only such as come after it in `order` and by a clear margin, so that two requests never take turns.
        """
        ...


class HoldingBack(Protocol):
    """What a policy has besides if rows may leave a step to a prompt that has too little room in it."""

    def holds_back(self, decoding: RequestView, prompt: RequestView) -> NDArray[np.bool_]:
        """Which of the requests that decode pause for a step, so that it computes more of the request in `prompt`.

        They lose that time and nothing else.
        """
        ...


def is_relative(policy: Policy) -> bool:
    """Whether a request's score depends on who else is in the view, as the policy's attribute `relative` says. If not,
    it is compared with scores from other views."""
    return bool(getattr(policy, "relative", False))


class Sparing(Protocol):
    """What a policy has besides if some tenants have to leave room for others that may come."""

    def spare(self, tenant: int) -> float:
        """The share of rows and blocks that must be left free beside a request of this tenant for it to be admitted.

        Who is kept waiting by that alone keeps nobody else waiting.
        """
        ...


@runtime_checkable
class Accounting(Protocol):
    """What a policy has besides if its order follows from what tenants were served. Both are told in a fixed order, so
    that a replay gives the same accounts, and neither while a plan is made, except the prompts it admits."""

    def began(self, tenant: int, name: str, waiting: Collection[int]) -> None:
        """A tenant that had nothing waiting waits again. `waiting` are the others that do; if nobody, who did last."""
        ...

    def served(
        self, tenant: NDArray[np.int64], prompt_tokens: NDArray[np.int64], output_tokens: NDArray[np.int64]
    ) -> None:
        """Tenants, each at most once, and the tokens of prompts admitted and of outputs delivered to each."""
        ...
