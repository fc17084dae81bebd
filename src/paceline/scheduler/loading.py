"""Whether what lower levels hold of a prompt is loaded, waited for, or computed again.

By the costs that preemption uses. A request waits for copies only where that is sooner than computing, and never longer
than computing takes, behind what the device has to do. Moves nothing but what it decided.
Decision: docs/decisions/0045-levels.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.core.events import DecisionKind, Rule
from paceline.core.request import BlockKey, Request, RequestId
from paceline.kv.tiers import HOST
from paceline.scheduler.state import SchedulerState

# Of the waiting requests, for which the disk is asked: what comes too early is evicted before its turn.
FIRST = 8
FEW = 64  # waiting requests of which each is looked at in less time than their order takes
HOST_SHARE = 4  # blocks on their way from the disk fill at most this part of the host's
# A load may take this many times as long as computing, which keeps others waiting; a copy leaves them the device.
FREES_DEVICE = 1.25
WAITS = (Rule.LOADING, Rule.MAKING_ROOM)


class Load(NamedTuple):
    """What becomes of the blocks below that a waiting request can use."""

    rule: Rule  # LOADS, COMPUTES or one of WAITS
    num_tokens: int
    load_s: float
    compute_s: float
    busy_s: float  # that the device has to do before and beside

    @property
    def is_sooner(self) -> bool:
        """Whether to load is, or nearly so. Each is behind its queue: what the link has to do first is in `load_s`."""
        return self.load_s < FREES_DEVICE * self.compute_s + self.busy_s

    @property
    def is_worth_waiting(self) -> bool:
        """Whether it should be here before computing would be done. Until then a request waits for it, no longer."""
        return self.load_s < self.patience_s

    @property
    def patience_s(self) -> float:
        """How long a request may wait for copies before it is computed: what computing would take."""
        return self.compute_s + self.busy_s

    def __str__(self) -> str:
        behind = f" behind {1e3 * self.busy_s:.1f} ms of others" if self.busy_s else ""
        return f"load {1e3 * self.load_s:.1f} ms, compute {1e3 * self.compute_s:.1f} ms{behind}"


class Loading:
    """Judges waiting requests, and asks the disk for what they will need."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        config = state.config
        self._costs = config.preemption_costs
        self.tiers = state.tiers
        self.is_on = self.tiers.is_on
        # Since when each request that waits for copies does, and for how long it may.
        self.patience: dict[RequestId, tuple[float, Load]] = {}
        self.waiting: list[RequestId] = []  # in the step that is planned
        self.started: list[tuple[RequestId, Load]] = []  # the same, and to load
        self._asked: set[RequestId] = set()  # for which the disk was looked at
        self._queue: tuple[RequestId, int, int] | None = None  # by which a change of the queue is seen

    def begin_step(self) -> None:
        if self.is_on:
            self.waiting.clear()
            self.started.clear()

    def compute_s(self, start: int, count: int) -> float:
        """Seconds to compute `count` tokens behind `start` others."""
        assert self._costs is not None
        pairs = count * (start + 0.5 * count)
        return self._costs.token_s * count + self._costs.product_s * pairs

    def judge(self, request: Request, num_device: int) -> Load | None:
        """For a request of whose blocks the device has the first `num_device`; None: there is nothing below."""
        state, costs = self._state, self._costs
        kv = state.kv
        if costs is None or num_device >= len(request.keys) or not self.tiers.has(request.keys[num_device]):
            return None
        limit = min(len(request.keys), (request.num_sharable(kv.block_size) - 1) // kv.block_size)
        if num_device >= limit:
            return None
        below = self.tiers.look(request.keys, num_device, limit)
        size, start = kv.block_size, num_device * kv.block_size
        if below.num_coming:
            count = below.num_host + below.num_coming
            left_s = max(0.0, below.due_s - state.now_s)
            load = self._load(request, Rule.LOADING, start, count * size, left_s + self._host_s(count))
            if load.is_worth_waiting and self._may_wait(request, load):
                return load
        if not below.num_host:
            return None
        host_s = self._host_s(below.num_host)
        load = self._load(request, Rule.LOADS, start, below.num_host * size, host_s)
        if not load.is_sooner:
            return load._replace(rule=Rule.COMPUTES)
        if self.tiers.makes_room(below.num_host) and self._may_wait(request, load):
            return load._replace(rule=Rule.MAKING_ROOM)
        return load

    def _may_wait(self, request: Request, load: Load) -> bool:
        """Whether a request has waited for less time than computing takes."""
        since_s, first = self.patience.get(request.id, (self._state.now_s, load))
        return self._state.now_s < since_s + first.patience_s

    def waits(self, request: Request, load: Load) -> None:
        """A request waits for a copy in this step."""
        if request.id not in self.patience:
            self._forget_ended()
            self.patience[request.id] = self._state.now_s, load
            self.record(request, load)
        self.waiting.append(request.id)

    def starts(self, request: Request, load: Load, row: int, num_device: int) -> int:
        """Load for a request that has its row; returns the ticket."""
        self.started.append((request.id, load))
        count = load.num_tokens // self._state.kv.block_size
        keys = request.keys[num_device : num_device + count]
        ticket, from_disk = self.tiers.load(row, keys, request.id)
        self._state.kv.tickets.open[ticket].compute_s = load.compute_s
        if request.admitted_s is None:
            size = self._state.kv.block_size
            request.cost = request.cost._replace(
                from_host=(count - from_disk) * size, from_disk=from_disk * size
            )
        return ticket

    def record(self, request: Request, load: Load) -> None:
        self._state.counters.judged(load.rule)
        self._state.decide(
            DecisionKind.LOAD, request, load.rule, load.num_tokens, seconds=load.load_s, detail=str(load)
        )

    def ask(self) -> None:
        """Before requests are admitted: ask the disk for what the first of them need."""
        state = self._state
        queue = (state.last_admitted, state.counters.added, len(state.queue))
        if not self.tiers.has_disk or queue == self._queue or not self._may_fetch():
            return
        self._queue = queue
        if len(state.queue) <= FEW and not self._may_find():
            return
        ahead = 0
        for request in state.waiting_in_order(FIRST):
            if request.id not in self._asked:
                self._forget_ended()
                self._asked.add(request.id)
                self._fetch(request, ahead)
            ahead += request.num_tokens

    def _may_find(self) -> bool:
        """Whether any level holds the beginning of a waiting request for which the disk was not looked at. The others
        are not looked at again."""
        device, asked, found = self._state.kv.groups[0].cache.by_name, self._asked, False
        for request in self._state.queue:
            if request.id not in asked:
                first = request.keys[0] if request.keys else None
                if first is not None and (first.key in device or self.tiers.has(first)):
                    found = True
                else:
                    asked.add(request.id)
        self._forget_ended()
        return found

    def _may_fetch(self) -> bool:
        host = self._state.kv.levels[HOST][0]
        return HOST_SHARE * len(self._state.kv.fetching) < host.num_places

    def _fetch(self, request: Request, ahead: int) -> None:
        """Ask for what the disk has of a prompt, if it should be here before the request's turn has come and gone.

        `ahead`: tokens of the requests before it.
        """
        state, costs = self._state, self._costs
        assert costs is not None
        kv = state.kv
        num_sharable = request.num_sharable(kv.block_size)
        num_device = kv.match(request.keys, num_sharable).num_blocks
        limit = min(len(request.keys), (num_sharable - 1) // kv.block_size)
        if num_device >= limit or not self.tiers.has(request.keys[num_device]):
            return
        below = self.tiers.look(request.keys, num_device, limit)
        if not below.num_disk:
            return
        first = num_device + below.num_host
        keys: Sequence[BlockKey] = request.keys[first : first + below.num_disk]
        compute_s = self.compute_s(first * kv.block_size, len(keys) * kv.block_size)
        if self.tiers.fetch_s(len(keys)) < costs.token_s * ahead + compute_s:
            self.tiers.fetch(keys)

    def _load(self, request: Request, rule: Rule, start: int, num_tokens: int, load_s: float) -> Load:
        return Load(rule, num_tokens, load_s, self.compute_s(start, num_tokens), self._busy_s(request))

    def _busy_s(self, request: Request) -> float:
        """Seconds that the device needs for the prompts of others, started and waiting: what one computes, they wait
        for."""
        assert self._costs is not None
        state = self._state
        rows = [other.row for other in state.prefilling.values()]
        left = int((state.rows.num_known[rows] - state.rows.scheduled[rows]).sum()) if rows else 0
        return self._costs.token_s * (left + state.queue.num_tokens - request.num_tokens)

    def _host_s(self, num_blocks: int) -> float:
        """Behind the loads that are under way; the row runs with the step after."""
        assert self._costs is not None
        ahead = sum(
            len(ticket.blocks[0])
            for ticket in self._state.kv.tickets.open.values()
            if ticket.incoming and not ticket.level
        )
        return self._costs.block_s * (ahead + num_blocks) + self._costs.step_s

    def _forget_ended(self) -> None:
        requests = self._state.requests
        most = 4 * len(requests) + 1024
        if len(self._asked) > most:
            self._asked &= requests.keys()
        if (
            len(self.patience) > most
        ):  # without a disk none is asked for, and requests wait for room all the same
            self.patience = {number: kept for number, kept in self.patience.items() if number in requests}
