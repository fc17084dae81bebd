"""The policy seam: which request goes first, which is preempted, how much of a step a prompt may take.

Public: a user's policy is a subclass of `Policy`, named by `--scheduling-policy module:Class`; see
docs/guides/write-a-policy.md.
A policy is a few pure functions over read-only columns. The same view type describes waiting and running
requests, so that one rule orders both. Lower priority numbers and lower scores go first. The policies that come with
the engine are one file each in `scheduler/policy`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import SchedulerConfig
from paceline.core.fast import value


@value
class RequestView:
    """Read-only columns, one entry per request. `row` is -1 for a request that waits."""

    now_s: float
    row: NDArray[np.int64]
    # Position in the order of arrival; unique, but a request that computes a context for another has that of the other.
    order: NDArray[np.int64]
    arrival_s: NDArray[np.float64]
    priority: NDArray[np.int64]
    tenant: NDArray[np.int64]
    num_prompt: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    max_total: NDArray[np.int64]
    preemptions: NDArray[np.int64]
    deadline_s: NDArray[np.float64]  # absolute, as `now_s`; infinity for none
    first_due_s: NDArray[np.float64]  # when a first token is due; infinity for any time
    num_computed: NDArray[np.int64]  # tokens whose KV is there: on the device, or kept on the host
    peak_computed: NDArray[np.int64]  # most tokens it ever had computed; computing them again adds nothing
    # 1 once it has been admitted, though it may wait again; and where it computes a context for another, which pays.
    started: NDArray[np.int64]

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
    """Entry `index` of the view is preempted. `swap` None leaves the kind to the scheduler."""

    index: int
    swap: bool | None = None


class Policy:
    """First come, first served. A policy is a subclass that overrides what it does differently.

    Methods are pure: the same view gives the same answer, without a clock or random numbers. Only `began`, `served` and
    `take_over` may change the policy.
    """

    # Fields of SchedulerConfig that it reads; they can be changed together with the policy while serving.
    options: ClassVar[tuple[str, ...]] = ()
    # What requests have to state for its order to differ from the order of arrival: a priority, a tenant, ...
    needs: ClassVar[str] = ""
    # Whether a score depends on the other requests in the view. If not, scores of different views are compared.
    relative: ClassVar[bool] = False
    # Which of the optional methods a class has. They are looked up in every step, and most policies have none.
    displaces: ClassVar[bool] = False
    pauses_rows: ClassVar[bool] = False
    keeps_room: ClassVar[bool] = False
    keeps_accounts: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.displaces = cls.yields is not Policy.yields
        cls.pauses_rows = cls.holds_back is not Policy.holds_back
        cls.keeps_room = cls.spare is not Policy.spare
        cls.keeps_accounts = cls.served is not Policy.served

    def __init__(self, config: SchedulerConfig) -> None:
        self.long_prefill_share = config.long_prefill_share

    def order(self, view: RequestView) -> NDArray[np.float64]:
        """A score per request; the lowest goes first, ties by arrival."""
        return view.arrival_s

    def victim(self, view: RequestView, need: int) -> Victim:
        """Which of the preemptible requests in `view` is preempted, `need` blocks being short: the last in order."""
        scores = self.order(view)
        return Victim(int(np.lexsort((view.order, scores))[-1]))

    def share(self, view: RequestView, budget: int) -> int:
        """Most tokens one prompt may take of a step's `budget` while the requests in `view` wait."""
        return max(1, int(budget * self.long_prefill_share))

    def yields(self, running: RequestView, waiting: RequestView) -> NDArray[np.bool_]:
        """Which running requests give their place to the one in `waiting`, the first of those that wait.

        Only requests that come after it in `order`, by a clear margin, so that two requests never take turns.
        """
        return np.zeros(len(running), np.bool_)

    def holds_back(self, decoding: RequestView, prompt: RequestView) -> NDArray[np.bool_]:
        """Which decoding requests pause for a step, so that it computes more of the request in `prompt`.

        They lose that time and nothing else.
        """
        return np.zeros(len(decoding), np.bool_)

    def spare(self, tenant: int) -> float:
        """The share of rows and blocks that must stay free beside a request of this tenant for it to be admitted.

        A request that is deferred for this reason alone may be passed by others.
        """
        return 0.0

    def began(self, tenant: int, name: str, waiting: Collection[int]) -> None:
        """A tenant that had no request waiting has one again. `waiting` are the other tenants that wait; if there are
        none, those that waited last."""

    def served(
        self, tenant: NDArray[np.int64], prompt_tokens: NDArray[np.int64], output_tokens: NDArray[np.int64]
    ) -> None:
        """Tenants, each at most once, and the tokens of prompts admitted and of outputs delivered to each.

        `began` and `served` are called in a fixed order, so that a replay gives the same accounts, and not while a plan
        is made, except for the prompts it admits.
        """

    def take_over(self, before: Policy) -> None:
        """This policy replaces `before` while serving."""
