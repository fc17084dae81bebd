"""Everything the scheduler knows, and the few moves that keep it consistent.

The moves here change several structures at once (row table, KV, queue, families) and leave them agreeing.
Deciding when to make a move is the business of `compose`, `admission`, `preemption` and `update`.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import SchedulerConfig
from paceline.core.clock import Clock
from paceline.core.counters import Counters
from paceline.core.events import (
    NO_NUMBER,
    NO_REQUEST,
    Decision,
    DecisionKind,
    EventBuffer,
    Finished,
    Held,
    Rule,
)
from paceline.core.fast import make_tuple, raw_value
from paceline.core.inputs import Journal, Keys
from paceline.core.plan import StepWork
from paceline.core.request import (
    NO_ROW,
    OWN_REQUESTS,
    Cost,
    FinishReason,
    Hold,
    Request,
    RequestHooks,
    RequestId,
    RequestState,
    RequestTree,
    TreeLimits,
    account_of,
    cut_stretches,
)
from paceline.core.standing import ALL_LOST
from paceline.kv.manager import KVManager
from paceline.kv.tiers import Tiers
from paceline.kv.wishes import Wishes
from paceline.policy import Policy, RequestView
from paceline.scheduler.adapters import AdapterPlaces
from paceline.scheduler.dial.engine_dial import Dial
from paceline.scheduler.draft_budget import make_budget
from paceline.scheduler.encodings import Encodings, Group
from paceline.scheduler.modes import Mode
from paceline.scheduler.modules import Modules, bodies_of
from paceline.scheduler.rows import Rows
from paceline.scheduler.step_sizes import StepSizes
from paceline.scheduler.tenants import OutputStats, TenantAccounting
from paceline.scheduler.view_columns import row_view
from paceline.scheduler.waiting_queue import WaitingQueue, first

# What a request has cost so far, brought up to date when it leaves a row and when it has caught up with itself.
#
# A preempted request computes again what it had: those tokens, and the blocks held meanwhile, are counted apart,
# so that no request pays for them. Nothing here runs in a steady step.


def settle_cost(request: Request, computed: int, block_us: int) -> None:
    """A request is about to leave its row, where it has held blocks for `block_us`."""
    blocks_us, redone_us, redone, *others = request.cost
    peak_computed = request.peak_computed
    if peak_computed > request.joined_at:  # it had lost some of what it had
        if computed < peak_computed:
            redone_us += block_us
        redone += max(0, min(computed, peak_computed) - request.joined_at)
    request.cost = make_tuple(Cost, (blocks_us + block_us, redone_us, redone, *others))


def caught_up(request: Request, block_us: int) -> None:
    """A request has computed again all that it once had; until here it has held blocks for `block_us` on its row."""
    request.cost = request.cost._replace(redone_block_us=request.cost.redone_block_us + block_us)


def note_kind(request: Request) -> None:
    """A request has just been preempted: its KV is on the host, or gone."""
    if request.host_places:
        request.cost = request.cost._replace(swaps=request.cost.swaps + 1)


SPARE_DEADLINES = 1024  # entries of requests that have ended
MAX_TENANTS = 4096  # tenants remembered after their last request

# See core.fast.
_FINISH, _PREEMPT, _FINISHED = DecisionKind.FINISH, DecisionKind.PREEMPT, RequestState.FINISHED
# Of a decision: tokens left, blocks free, blocks needed, the request it was compared against.
Figures = tuple[int, int, int, RequestId]
NO_FIGURES: Figures = (NO_NUMBER, NO_NUMBER, NO_NUMBER, NO_REQUEST)
_USUAL_ENDINGS = (
    *(Rule.STOP, Rule.LENGTH, Rule.ABORT, Rule.ERROR, Rule.DEADLINE, Rule.PRUNED),
    Rule.HOLD_OVER,
)
_FAILURES = (Rule.NUMERICAL_ERROR, Rule.INTERNAL_ERROR, Rule.ENGINE_FAILED)
_OF_GUIDES = (Rule.GRAMMAR_ERROR, Rule.GRAMMAR_TOO_COMPLEX)
_ENDINGS = {rule.value: rule for rule in (*_USUAL_ENDINGS, *_FAILURES, *_OF_GUIDES)}
FEWER_ROWS_S = 60.0  # how long there are fewer rows after memory ran out


@dataclass(slots=True, eq=False)
class Flight:
    """A submitted step whose result is still to come. Never changed."""

    seq: int
    mask: NDArray[np.bool_]  # rows that decode one token more; padding does not
    spans: tuple[tuple[int, int, int], ...]  # row, generation, tokens computed and placed
    group: Group | None  # of which it computes a part: `work.encode_positions`
    at_length: bool  # some row gets the last token its length allows
    budget: int  # most tokens it was to carry
    work: StepWork
    # Static and dynamic batches only: prompt padding as (row, tokens), and rows that decode past their end.
    pads: tuple[tuple[int, int], ...] = ()
    filling: NDArray[np.bool_] | None = None
    # Drafts: most tokens of a row beside its first, of all rows, and the first position that each row may write.
    width: int = 0
    room: int = 0
    first: NDArray[np.int64] | None = None
    sources: tuple[NDArray[np.int64], ...] = ()  # by group, blocks that placed tokens are copied from


@dataclass(slots=True)
class Join:
    """A row that starts in the plan being made."""

    row: int
    request: Request
    source: int  # row it is copied from, or NO_ROW


class SchedulerState:
    """All structures of one scheduler."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        rows: Rows,
        *,
        policy: Policy,
        mode: Mode,
        clock: Clock,
        hooks: RequestHooks,
        encodings: Encodings | None = None,
    ) -> None:
        self.config = config
        self.kv = kv
        self.rows = rows
        self.policy = policy
        self.mode = mode
        self.clock = clock
        self.hooks = hooks
        self.requests: dict[RequestId, Request] = {}  # every live request
        self.orders: dict[RequestId, int] = {}  # place in the order of arrival
        self.wishes = Wishes(kv)
        self.queue = WaitingQueue(self.wishes)
        self.tiers = Tiers(kv, config.preemption_costs, config.max_num_batched_tokens)
        self.accounting = TenantAccounting(policy, self.queue)
        self.adapters = AdapterPlaces(config.max_loras)
        self.encodings = encodings if encodings is not None else Encodings(None)
        self.modules = Modules()
        self.sizes = StepSizes(config)
        self.dial = Dial(config, rows.num_rows, self.sizes)
        self.drafts = make_budget(config, kv.block_size, mode)
        self.pools = [group.pool for group in kv.groups]  # all that give out memory
        if config.encoder is not None:
            self.pools.append(self.encodings.pool)
        self.prefilling: dict[RequestId, Request] = {}  # running, with known tokens still to compute
        self.promoted: list[tuple[int, int]] = []  # row and generation: decode from the next plan on
        self.children: dict[RequestId, set[RequestId]] = {}  # live branches by the request they came from
        self.computing: dict[bytes, RequestId] = {}  # prefix keys that running prompts will publish
        self.leaves: list[int] = []
        self.levels_lost = ALL_LOST  # with the last sleep
        self.num_sleeps = 0  # after each of them all rows are empty, without a plan that says so
        self.joins: list[Join] = []
        self.flights: deque[Flight] = deque()
        self.deadlines: list[tuple[float, RequestId]] = []
        self.counters = Counters()
        self.cache_resets = 0  # times that what earlier requests left was to be forgotten
        self.output_stats = OutputStats()
        self.events = EventBuffer()
        self.decisions: list[Decision] = []
        self.last_admitted: RequestId = NO_REQUEST  # the request that was given a row last
        self.admitted_before: RequestId = NO_REQUEST  # the last other one before it
        self.journal: Journal = []
        self.now_s = -math.inf
        self.ignores_next_failure = False  # the next failed step is held against no request
        self._fewer_rows, self._fewer_until_s = config.max_num_seqs, -math.inf
        self._tenants: dict[str, int] = {}
        self._next_tenant = 0
        self._next_order = 0

    # -- small questions -----------------------------------------------------------------------------------

    def decide(
        self,
        kind: DecisionKind,
        request: Request,
        reason: Rule,
        value: int = 0,
        figures: Figures = NO_FIGURES,
        *,
        seconds: float = 0.0,
        detail: str = "",
    ) -> None:
        """Put a decision on record, with the step it belongs to and what explains it."""
        step = self.kv.submitted + 1
        if kind is _PREEMPT:
            self.counters.preempted_by[reason] = self.counters.preempted_by.get(reason, 0) + 1
        fields = (kind, request.id, reason, value, step, self.now_s, *figures, seconds, detail)
        self.decisions.append(make_tuple(Decision, fields))

    def ahead_of(self, request: Request) -> RequestId:
        """The request that was given a row last, other than this one."""
        return self.last_admitted if self.last_admitted != request.id else self.admitted_before

    def tenant_index(self, name: str) -> int:
        """A number for a tenant, the same as long as one of its requests lives."""
        name = account_of(name)
        index = self._tenants.get(name)
        if index is None:
            if len(self._tenants) >= MAX_TENANTS:  # names may be made up by clients: they must not pile up
                kept = {account_of(request.tenant) for request in self.requests.values()}
                self._tenants = {name: index for name, index in self._tenants.items() if name in kept}
            index = self._tenants[name] = self._next_tenant
            self._next_tenant += 1
        return index

    def known_tenant(self, name: str) -> int:
        """The number of a tenant, or the one it would get."""
        return self._tenants.get(account_of(name), self._next_tenant)

    def row_view(self, rows: NDArray[np.int64]) -> RequestView:
        """Running requests as a policy sees them."""
        return row_view(self.rows, rows, self.now_s)

    def in_order(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """`rows` with the one that goes first in front."""
        if len(rows) < 2:
            return rows
        view = self.row_view(rows)
        ordered: NDArray[np.int64] = rows[np.lexsort((view.order, self.policy.order(view)))]
        return ordered

    def waiting_in_order(self, count: int, at: NDArray[np.intp] | None = None) -> list[Request]:
        """The first `count` waiting requests in the order of admission, of all or of those at some places."""
        view = self.queue.view(self.now_s)
        scores = self.mode.rank(view, self.policy.order(view))
        return [self.queue.get(index) for index in first(view, scores, count, at).tolist()]

    def unsure_rows(self) -> NDArray[np.bool_] | None:
        """Rows of which steps under way may verify drafts: how far they are is known only within bounds. None: none."""
        drafted = [flight.mask for flight in self.flights if flight.width]
        if not drafted:
            return None
        unsure = np.zeros(self.rows.high, np.bool_)
        for mask in drafted:
            unsure[: len(mask)] |= mask
        return unsure

    def least_computed(self) -> NDArray[np.int64]:
        """Tokens each row has computed at least when the steps under way are done: those without their drafts."""
        rows = self.rows
        least = rows.computed[: rows.high].copy()
        for flight in self.flights:
            least[: len(flight.mask)] += flight.mask
            for row, generation, count in flight.spans:
                least[row] += count if rows.generation[row] == generation else 0
        return np.minimum(least, rows.max_len[: rows.high] - 1)

    # -- moves ---------------------------------------------------------------------------------------------

    def enqueue(self, request: Request) -> None:
        """Into the queue, with the place in the order of arrival it already has, or a new one.

        Requests whose KV lies on the host wait in the same queue: the same rule orders them all.
        """
        if request.id not in self.orders:
            self.orders[request.id] = self._next_order
            self._next_order += 1
        tenant = self.tenant_index(request.tenant)
        self.accounting.comes(tenant, account_of(request.tenant), back=request.state is RequestState.RUNNING)
        request.move(RequestState.SWAPPED if request.host_places else RequestState.WAITING)
        self.queue.push(request, self.orders[request.id], tenant)

    def use_policy(self, config: SchedulerConfig, policy: Policy) -> None:
        """Another policy from now on; one that keeps accounts gets every known tenant."""
        self.config = self.dial.config = config
        if policy is self.policy:
            return
        self.accounting.settle()
        self.policy = policy
        self.accounting = TenantAccounting(policy, self.queue)
        if self.accounting.accounts is not None:
            for name in dict.fromkeys(account_of(request.tenant) for request in self.requests.values()):
                self.accounting.accounts.began(self.tenant_index(name), name, ())

    def watch_deadline(self, request: Request) -> None:
        if request.deadline_s is not None:
            heapq.heappush(self.deadlines, (request.deadline_s, request.id))
        if request.blocked is not None and request.blocked.deadline_s is not None:
            heapq.heappush(self.deadlines, (request.blocked.deadline_s, request.id))
        if request.held is not None:
            heapq.heappush(self.deadlines, (request.held.until_s, request.id))
        # A request that has ended leaves its entry behind; those may not pile up until their time has come.
        if len(self.deadlines) > SPARE_DEADLINES + 4 * len(self.requests):
            self.deadlines = sorted({entry for entry in self.deadlines if self.is_due(*entry)})

    def is_due(self, due_s: float, request_id: RequestId) -> bool:
        """Whether an entry of the deadlines still stands."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        blocked, held = request.blocked, request.held
        waits = (blocked is not None and blocked.deadline_s == due_s) or (
            held is not None and held.until_s == due_s
        )
        return request.deadline_s == due_s or waits

    def take_row(self, request: Request, num_computed: int, source: int = NO_ROW) -> int:
        """Give a request a row and note that it joins in the plan being made."""
        tenant = self.tenant_index(request.tenant)
        row = self.rows.take(request, self.orders[request.id], tenant, num_computed)
        if request.sampling.kv_keep is not None:
            self.kv.keep(row, request.sampling.kv_keep, request.num_prompt)
        self.joins.append(Join(row, request, source))
        if request.stretches:
            self._take_stretches(request, row, num_computed)
        if request.adapter:
            self.adapters.take_row(request.adapter)
        if request.tree is not None:
            request.tree.num_rows += 1
        if request.id != self.last_admitted:
            self.admitted_before, self.last_admitted = self.last_admitted, request.id
        return row

    def _take_stretches(self, request: Request, row: int, num_computed: int) -> None:
        if request.media:
            self.encodings.take_row(request, row, num_computed)
        bodies = bodies_of(request, num_computed)
        if bodies:
            self.modules.rows[row] = bodies
        for body in bodies:
            self.kv.sources.hold(row, body.stretch.item, request.modules[body.stretch.item].keys)

    def leave_row(self, request: Request) -> None:
        """Take a request off its row: tokens go back into the request, the row rests behind a fence."""
        row = request.row
        settle_cost(request, self.rows.computed.item(row), self.kv.block_time.take(row))
        self.rows.leave(request, self.kv.submitted, self.kv.completed)
        if request.media:
            self.encodings.leave_row(row, self.kv.submitted, self.kv.completed)
        self.modules.rows.pop(row, None)
        if request.adapter:
            self.adapters.leave_row(request.adapter, self.kv.submitted)
        if request.tree is not None:
            request.tree.num_rows -= 1
        self.prefilling.pop(request.id, None)
        self.forget_computing(request)
        joins = [join for join in self.joins if join.row != row]
        if len(joins) == len(self.joins):
            self.leaves.append(row)
        else:  # in this very plan: the runner never learns of it, nor of what was to be copied for it
            self.joins = joins
            self.kv.delta.forget(row)

    @property
    def most_rows(self) -> int:
        """How many rows there may be now."""
        most = self._fewer_rows if self.now_s < self._fewer_until_s else self.config.max_num_seqs
        return most if self.dial.limits is None else min(most, self.dial.limits.rows)

    @property
    def most_decoding(self) -> int:
        """How many rows may decode in one step."""
        return self.config.max_num_batched_tokens if self.keeps_pace else self.sizes.rows

    @property
    def keeps_pace(self) -> bool:
        """Whether the tokens of a step with prompts follow from anything but the config's constant."""
        return self.config.keeps_pace or self.dial.limits is not None

    def share(self, view: RequestView, budget: int) -> int:
        """Most tokens one prompt may take of a step while others could use them."""
        limits = self.dial.limits
        return self.policy.share(view, budget) if limits is None else max(1, int(budget * limits.share))

    def halve_rows(self) -> bool:
        """Fewer rows for a minute; the step that failed for their number is held against no request."""
        before = self.most_rows
        self._fewer_rows, self._fewer_until_s = max(1, before // 2), self.now_s + FEWER_ROWS_S
        self.ignores_next_failure = before > 1
        return before > 1

    def forget_computing(self, request: Request) -> None:
        """No request may wait any longer for the prefix this request was computing."""
        if self.computing:
            self.computed_keys(request, 0, len(request.keys))

    def computed_keys(self, request: Request, start: int, end: int) -> None:
        """The blocks `start` to `end` of a request are computed, or will not be: no request waits for them."""
        computing, owner = self.computing, request.id
        for key in request.keys[start:end]:
            if computing.get(key.key) == owner:
                del computing[key.key]

    def publish(self, request: Request) -> None:
        """Offer what a request that is about to leave has computed to the prefix cache, its output included."""
        row = request.row
        kv = self.kv
        # Blocks that are still being copied in, and those of a row that has dropped some, are not offered.
        if not kv.caching or request.blocked is not None or kv.dropped.item(row):
            return
        computed = self.rows.computed.item(row)
        if computed // kv.block_size > len(request.keys) and self.rows.collect(request):
            self.learn_keys(request)
        kv.publish(row, request.keys, computed)

    def learn_keys(self, request: Request) -> None:
        """Ask the hooks for the keys of new full blocks, and note the answer: it is an input like any other."""
        made = list(self.hooks.new_keys(request))
        if made:
            request.keys.extend(made)
            keys = tuple([key.key for key in made])
            self.journal.append((self.now_s, Keys(request=request.id, keys=keys)))

    def end(self, request: Request, reason: FinishReason, detail: str = "") -> None:
        """The one way a live request becomes terminal: let go of everything it holds, then say so."""
        self._let_go(request)
        self.let_on(request)
        request.move(_FINISHED)
        request.finished_s = self.now_s
        del self.requests[request.id]
        if request.adapter:
            self.adapters.drop_request(request.adapter)
        if request.media:
            self.encodings.drop_request(request, self.kv.submitted, self.kv.completed)
        if request.modules:
            self.modules.forget(request)
        for each in self.modules.ends(request, reason) if request.is_module else ():
            if each in self.queue:
                self.queue.unpark(self.requests[each])
                if reason is FinishReason.ERROR:  # what it waits for would fail again
                    self.end(self.requests[each], reason, detail)
        del self.orders[request.id]
        if request.parent is not None:
            self._leave_family(request, request.parent)
        self.counters.finished += 1
        try:
            self.hooks.finish(request)
        except Exception as error:
            self.decide(DecisionKind.FAIL, request, Rule.FINISH_HOOK, detail=type(error).__name__)
        num_output = request.num_tokens - request.num_prompt
        if request.tree is not None:
            self._leave_tree(request, num_output)
        self.output_stats.ended(self.known_tenant(request.tenant), request, num_output, reason)
        rule = _ENDINGS.get(detail or raw_value(reason))
        if reason is FinishReason.STOP and request.sampling.pooling is not None:
            rule = Rule.VECTOR
        if reason is FinishReason.STOP and request.ends_with_prompt:
            rule = Rule.CONTEXT
        if rule is None:  # what a caller says of an abort may be anything
            self.decide(DecisionKind.FINISH, request, Rule(reason.value), num_output, detail=detail)
        elif rule is Rule.PRUNED and request.score:
            self.decide(_FINISH, request, rule, num_output, detail=f"score {request.score:g}")
        else:
            self.decide(_FINISH, request, rule, num_output)
        started_s = self.now_s if request.admitted_s is None else request.admitted_s
        queue_s = started_s - request.arrival_s
        if request.id >= OWN_REQUESTS:
            return
        self.events.finished.append(
            Finished(
                request=request.id,
                reason=reason,
                detail=detail,
                time_s=self.now_s,
                num_prompt=request.num_prompt,
                num_output=num_output,
                num_cached=min(request.num_cached, request.num_prompt),  # it may have come with output
                preemptions=request.preemptions,
                queue_s=queue_s if queue_s > 0.0 else 0.0,  # arrivals come from outside
                cost=request.cost,
                vector=request.vector if reason is FinishReason.STOP else b"",
            )
        )

    def close(self, request: Request, reason: FinishReason, detail: str = "") -> None:
        """A request has come to its end: it ends, or is held if that is what it wants."""
        if request.sampling.on_stop == "hold":
            self.hold(request, reason)
        else:
            self.end(request, reason, detail)

    def hold(self, request: Request, reason: FinishReason) -> None:
        """Keep a request that has come to its end: its tokens are known, what it computed stays in the cache."""
        self._let_go(request)
        request.reserved, request.num_computed = False, 0
        self.forget_beyond(request)
        until_s = self.now_s + request.sampling.hold_s
        if request.held is None:
            request.move(RequestState.HELD)
            self.counters.held += 1
            self.counters.holding += 1
        request.held = Hold(reason=reason, until_s=until_s)
        self.watch_deadline(request)
        num_output = request.num_tokens - request.num_prompt
        self.decide(
            DecisionKind.HOLD, request, Rule(reason.value), num_output, seconds=request.sampling.hold_s
        )
        self.events.held.append(Held(request.id, reason, num_output, until_s))

    def let_on(self, request: Request) -> None:
        """A request is held no longer, if it was."""
        if request.held is not None:
            request.held = None
            self.counters.holding -= 1

    def forget_beyond(self, request: Request) -> None:
        """What was known of tokens behind its last one is of tokens it no longer has."""
        before = request.stretches
        same = cut_stretches(request, request.num_tokens, self.kv.block_size)
        if request.stretches is not before:  # what it places is another text, or none
            self.modules.forget(request)
        del request.keys[same // self.kv.block_size :]
        request.peak_computed = min(request.peak_computed, request.num_tokens)
        for child in self.children.get(request.id, ()):
            branch = self.requests[child]
            branch.shares = min(branch.shares, same)

    def _let_go(self, request: Request) -> None:
        """Off its row or out of the queue, with nothing left that it owns."""
        if request.row != NO_ROW:
            self.kv.release(request.row)
            self.leave_row(request)  # takes its tokens along
        elif request.id in self.queue:
            self.queue.remove(request)
        if request.host_places:
            self.kv.drop_places(request.host_places, request.id)
            request.host_places = ()
        request.blocked = None

    def join_tree(self, request: Request) -> None:
        """A branch belongs to the tree of its parent, the first of a tree with limits to its own."""
        parent = None if request.parent is None else self.requests.get(request.parent)
        if parent is not None and parent.tree is None:
            parent.tree = RequestTree(parent.tree_limits or TreeLimits())
            parent.tree.members[parent.id] = parent.most_generated
            parent.tree.num_rows = int(parent.row != NO_ROW)
        if parent is not None:
            request.tree = parent.tree
        elif request.tree_limits is not None:
            request.tree = RequestTree(request.tree_limits)
        if request.tree is not None:
            request.tree.members[request.id] = request.most_generated
            if request.score or request.tree.is_scored or (parent is not None and parent.score):
                self.deal_places(request.tree)

    def deal_places(self, tree: RequestTree) -> None:
        """Give the places that the branches of a tree have in the order of arrival to them by their scores."""
        tree.is_scored = True
        branches = [self.requests[RequestId(number)] for number in tree.members]
        places = sorted(self.orders[branch.id] for branch in branches)
        branches.sort(key=lambda branch: (-branch.score, self.orders[branch.id]))
        for place, branch in zip(places, branches, strict=True):
            self.orders[branch.id] = place
            if branch.row != NO_ROW:
                self.rows.order[branch.row] = place
            elif branch.id in self.queue:
                self.queue.set_order(branch, place)

    def _leave_tree(self, request: Request, num_output: int) -> None:
        tree = request.tree
        assert tree is not None
        del tree.members[request.id]
        tree.num_spent += num_output - request.cost.injected

    def fail(self, request: Request, error: Exception) -> None:
        """The request-scoped error boundary: whatever a per-request hook raised ends this request alone."""
        self.decide(DecisionKind.FAIL, request, Rule.REQUEST_FAILED, detail=type(error).__name__)
        if request.row != NO_ROW:
            self.kv.quarantine(request.row)
        self.end(request, FinishReason.ERROR, "internal_error")

    def _leave_family(self, request: Request, parent: RequestId) -> None:
        siblings = self.children.get(parent)
        if siblings is not None:
            siblings.discard(request.id)
            if not siblings:
                del self.children[parent]
