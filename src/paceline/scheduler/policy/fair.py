"""A fair share for every tenant: whoever was served least goes first, and whoever was served most gives way.

Virtual token counters: a tenant's counter grows by what it was served, divided by its weight. Who comes back to wait
starts at the least counter among those that wait: nobody saves up service by staying away. A tenant that has had
requests waiting for long floods: if it has much more running than another it gives up places to it, and it leaves some
room for those that come and go.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from paceline.core.policy import RequestView
from paceline.errors import ConfigError
from paceline.scheduler.policy.fcfs import FirstComeFirstServed

MAX_COUNTERS = 8192
SPARE = 0.2  # of rows and blocks, that a flood leaves free
RECENT = 8.0  # times what makes a flood: after so many tokens it expects nobody back who has stayed away
TIMES_MORE = 4.0  # what a tenant has running, by weight, before its requests give their places to another's


class FairShare(FirstComeFirstServed):
    relative = True

    def __init__(
        self,
        long_prefill_share: float,
        weights: Mapping[str, float],
        output_cost: float,
        flood_tokens: float = 8192.0,
        before: FairShare | None = None,
    ) -> None:
        super().__init__(long_prefill_share)
        self._by_name = weights
        self._output_cost = output_cost
        # Who was served so many by weight while it always had more waiting asks for more than its share.
        self._flood_tokens = flood_tokens
        self._weights: dict[int, float] = {} if before is None else before._weights.copy()
        self.counters: dict[int, float] = {} if before is None else before.counters.copy()
        self._began: dict[int, float] = {}  # what its counter was when a tenant came to wait
        self._newest: tuple[int, ...] = ()  # the two tenants that came to wait last

    def order(self, view: RequestView) -> NDArray[np.float64]:
        """The tenant's counter as it will be when those of its requests that come before have been admitted."""
        if not len(view):
            return np.zeros(0)
        tenants, which = np.unique(view.tenant, return_inverse=True)
        counters, weights = np.array([(self.counter(t), self.weight(t)) for t in tenants.tolist()]).T
        by = np.lexsort((view.order, which))
        owner = which[by]
        prompts = np.where(view.started[by], 0, view.num_prompt[by])
        before = np.cumsum(prompts) - prompts
        before -= before[np.searchsorted(owner, np.arange(len(tenants)))][owner]
        scores = np.empty(len(view))
        scores[by] = counters[owner] + before / weights[owner]
        return scores

    def yields(self, running: RequestView, waiting: RequestView) -> NDArray[np.bool_]:
        """Of tenants that have much more running, by weight, than the others have and than this one would have."""
        mine = waiting.tenant.item(0)
        tenants, which = np.unique(running.tenant, return_inverse=True)
        weights = np.array([self.weight(tenant) for tenant in tenants.tolist()])
        tokens = np.bincount(which, running.num_tokens, len(tenants))
        wanted = waiting.num_tokens.item(0) + float(tokens[tenants == mine].sum())
        others = float(tokens[tenants != mine].sum()) + wanted - tokens
        weight_of_others = float(weights[tenants != mine].sum()) + self.weight(mine) - weights
        most = np.maximum(wanted / self.weight(mine), others / np.maximum(weight_of_others, 1e-9))
        floods = np.array([self._floods(tenant, mine) for tenant in tenants.tolist()], np.bool_)
        given: NDArray[np.bool_] = (floods & (tokens / weights > TIMES_MORE * most))[which]
        return given

    def spare(self, tenant: int) -> float:
        """A flood leaves room where others have lately come and gone."""
        if not self._has_waited_long(tenant):
            return 0.0
        since = self.counter(tenant) - RECENT * self._flood_tokens
        others = (other for other in self._newest if other != tenant)
        come_and_go = any(
            self.counter(other) > since and not self._has_waited_long(other) for other in others
        )
        return SPARE if come_and_go else 0.0

    def began(self, tenant: int, name: str, waiting: Collection[int]) -> None:
        if tenant not in self._newest[:1]:
            self._newest = (tenant, *self._newest[:1])
        self._weights[tenant] = self._by_name.get(name, 1.0)
        self._began[tenant] = self.counter(tenant)
        if not waiting:
            return
        least = min(self.counter(other) for other in waiting)
        self.counters[tenant] = self._began[tenant] = max(self.counter(tenant), least)
        if len(self.counters) > MAX_COUNTERS:  # who is behind all that wait would be lifted anyway
            self.counters = {key: value for key, value in self.counters.items() if value >= least}
            self._weights = {key: self.weight(key) for key in self.counters}
            self._began = {key: value for key, value in self._began.items() if key in self.counters}

    def served(
        self, tenant: NDArray[np.int64], prompt_tokens: NDArray[np.int64], output_tokens: NDArray[np.int64]
    ) -> None:
        costs = prompt_tokens + self._output_cost * output_tokens
        for key, cost in zip(tenant.tolist(), costs.tolist(), strict=True):
            self.counters[key] = self.counter(key) + cost / self.weight(key)

    def _floods(self, tenant: int, other: int) -> bool:
        """Whether a tenant has long had more waiting than it was served, and was served more than another."""
        return self.counter(tenant) > self.counter(other) and self._has_waited_long(tenant)

    def _has_waited_long(self, tenant: int) -> bool:
        """Whether it was served much while it always had more waiting."""
        counter = self.counter(tenant)
        return counter - self._began.get(tenant, counter) > self._flood_tokens

    def counter(self, tenant: int) -> float:
        return self.counters.get(tenant, 0.0)

    def weight(self, tenant: int) -> float:
        return self._weights.get(tenant, 1.0)


def parse_weights(text: str) -> dict[str, float]:
    """`alice=2,bob=0.5` as numbers by name."""
    weights: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = part.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not name or not 1e-6 <= weight <= 1e6:
            raise ConfigError(
                f"--tenant-weights: {part!r} must be a tenant's name, = and a number from 1e-6 to 1e6"
            )
        weights[name] = weight
    return weights
