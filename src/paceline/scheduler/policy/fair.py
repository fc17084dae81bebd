"""A fair share for every tenant: the tenant served least goes first, and the tenant served most is preempted first.

Virtual token counters: a tenant's counter grows by what it was served, divided by its weight. A tenant that waits again
starts at the least counter among those that wait, so that no tenant saves up service by staying away. A tenant that has
had requests waiting for long floods: if it has much more running than another, it yields rows to it, and it leaves
some room for tenants that come and go.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import SchedulerConfig
from paceline.errors import ConfigError
from paceline.policy import Policy, RequestView

MAX_COUNTERS = 8192
SPARE = 0.2  # of rows and blocks, that a flood leaves free
RECENT = 8.0  # times `flood_tokens`: a tenant that stayed away longer than that is not expected back
TIMES_MORE = 4.0  # tokens a tenant has running, by weight and relative to others, before its requests yield


class FairShare(Policy):
    """The tenant first that was served least for its weight."""

    options = ("tenant_weights", "output_token_cost", "flood_tokens")
    needs = "tenant"
    relative = True

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._by_name = parse_weights(config.tenant_weights)
        self._output_cost = config.output_token_cost
        # A tenant that was served this many tokens by weight while it always had more waiting exceeds its share.
        self._flood_tokens = config.flood_tokens
        self._weights: dict[int, float] = {}
        self.counters: dict[int, float] = {}
        self._began: dict[int, float] = {}  # a tenant's counter when it began to wait
        self._newest: tuple[int, ...] = ()  # the two tenants that began to wait last

    def take_over(self, before: Policy) -> None:
        if isinstance(before, FairShare):
            self._weights, self.counters = before._weights.copy(), before.counters.copy()

    def order(self, view: RequestView) -> NDArray[np.float64]:
        """The tenant's counter as it will be once its earlier requests have been admitted."""
        if not len(view):
            return np.zeros(0)
        tenants, which = np.unique(view.tenant, return_inverse=True)
        counters, weights = np.array([(self.counter(t), self.weight(t)) for t in tenants.tolist()]).T
        # One that computes a context has the place of the request it is for, and goes before it.
        by = np.lexsort((-view.started, view.order, which))
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
        if len(self.counters) > MAX_COUNTERS:  # a counter below all that wait would be lifted anyway
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
