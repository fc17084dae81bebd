"""Which replica a request goes to.

Small classes behind one protocol: they see the load of each replica (tokens queued and running) and, for
prefixes, the block ids of the request's prompt. They know no engine and no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Loads = NDArray[np.int64]  # tokens queued and running, per replica
PrefixIds = Sequence[int]  # block ids of a prompt, the first block first; empty when not known


class Router(Protocol):
    """Chooses for one request at a time, in order of arrival."""

    def choose(self, loads: Loads, tenant: int, prefix_ids: PrefixIds) -> int: ...


class ByModel:
    """The model that a request is for: one for each tenant, else each in turn."""

    def __init__(self, num_tenants: int) -> None:
        self._has_tenants = num_tenants > 1
        self._next = 0

    def choose(self, loads: Loads, tenant: int, prefix_ids: PrefixIds) -> int:
        self._next += 1
        return (tenant if self._has_tenants else self._next - 1) % len(loads)


class RoundRobin:
    """Each in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, loads: Loads, tenant: int, prefix_ids: PrefixIds) -> int:
        chosen = self._next % len(loads)
        self._next = chosen + 1
        return chosen


class LeastLoaded:
    """The replica with the fewest tokens queued and running; the lowest number of several."""

    def choose(self, loads: Loads, tenant: int, prefix_ids: PrefixIds) -> int:
        return int(loads.argmin())


class PrefixAware:
    """The replica that last served the longest known beginning of the prompt, unless it is overloaded.

    Overloaded is a replica with more than `imbalance` times the least load and `slack_tokens` on top of it;
    then, and when nothing of the prompt is known, the least loaded one is taken. Remembers the `capacity`
    blocks it has seen last.
    """

    def __init__(
        self, *, imbalance: float = 1.5, slack_tokens: int = 16_384, capacity: int = 1_000_000
    ) -> None:
        self._imbalance = imbalance
        self._slack_tokens = slack_tokens
        self._capacity = capacity
        self._served_by: dict[tuple[int, int], int] = {}  # (tenant, block id), the one used longest ago first

    def choose(self, loads: Loads, tenant: int, prefix_ids: PrefixIds) -> int:
        least = int(loads.argmin())
        chosen = self._last_server(tenant, prefix_ids)
        if chosen is None or loads[chosen] > loads[least] * self._imbalance + self._slack_tokens:
            chosen = least
        self._remember(tenant, prefix_ids, chosen)
        return chosen

    def _last_server(self, tenant: int, prefix_ids: PrefixIds) -> int | None:
        for block_id in reversed(prefix_ids):
            replica = self._served_by.get((tenant, block_id))
            if replica is not None:
                return replica
        return None

    def _remember(self, tenant: int, prefix_ids: PrefixIds, replica: int) -> None:
        served_by = self._served_by
        for block_id in reversed(prefix_ids):  # beginnings are kept longest: they are used again most
            served_by.pop((tenant, block_id), None)
            served_by[tenant, block_id] = replica
        while len(served_by) > self._capacity:
            del served_by[next(iter(served_by))]


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
}
