"""Admitting requests: onto a row, with the blocks they need and the ones they can share.

A request is admitted when a row is free and its whole prompt fits beside what running prompts still need; if
not, it keeps its place and the reason is recorded. A swapped request comes back the same way, in its turn. A prefix
that a running request is about to publish is waited for, a running parent's blocks are shared. Reservations for
requests that were preempted often: docs/decisions/0020-preemption.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.events import NO_NUMBER, NO_REQUEST, DecisionKind, Rule
from paceline.core.fast import make_tuple
from paceline.core.request import NO_ROW, Blocked, BlockReason, Request, RequestId, RequestState
from paceline.core.stretch import Stretch
from paceline.kv.group import LayerGroup
from paceline.kv.manager import Needs, PrefixMatch
from paceline.scheduler.loading import WAITS, Load, Loading
from paceline.scheduler.modes import BatchShape
from paceline.scheduler.modules import bodies_of, name_of
from paceline.scheduler.state import Figures, SchedulerState

# The step that is being composed: what it has been given so far.
#
# `compose()` makes one, every part of the step adds to it, and the plan is built from it. It is never carried over to
# the next step; the last one stays readable for checks.


Mask = NDArray[np.bool_]
Index = NDArray[np.int64]
NO_MASK: Mask = np.zeros(0, np.bool_)
NO_ROWS: Index = np.zeros(0, np.int64)


Jumps = Mapping[int, list[tuple[int, int]]]  # by row, runs of tokens that are placed: the first, and how many
NO_JUMPS: Jumps = MappingProxyType({})


class StepDraft:
    """One step, from empty to complete."""

    # A step pays for what it sets: what most steps leave alone is a default of the class.
    num_sparing = 0  # requests that were deferred to leave room for other tenants
    num_decoding = 0  # rows in plain decode
    num_sampled = 0  # rows that are sampled
    products = 0  # sum over the tokens of prompts of the context each attends to
    at_length = False  # some row gets the last token its length allows
    advancing = NO_MASK  # decoding rows that get a token; padding does not
    held = NO_ROWS  # decoding rows that leave this step to prompts
    # Rows of which drafts are under way: how far they are is known only within bounds; None: there are none.
    unsure: Mask | None = None
    first: Index | None = None  # first position that each decoding row may write; None: no drafts are made
    bounds: Mapping[int, Rule] = MappingProxyType({})  # rows that stop at a stretch, and why
    draft_width = 0  # most guessed tokens of a row
    draft_tokens = 0  # of all rows

    # A request waits for a module that was evicted once: nothing but modules is admitted.
    only_modules = False
    jumps: Jumps = NO_JUMPS
    num_jumps = 0  # runs of tokens that are placed

    def __init__(self, budget: int) -> None:
        self.budget = budget  # most tokens it may carry
        self.left = budget  # of these, not given out yet
        self.for_long = budget  # most of these that long prompts may take; see `Pace.beside_long`
        self.spans: dict[int, int] = {}  # known tokens by row
        self.pads: dict[int, int] = {}  # padding tokens by row
        # Waiting requests that were passed over, and the request that computes what each waits for.
        self.passed: dict[RequestId, RequestId] = {}
        self.remarks: dict[RequestId, str] = {}  # why no row is preempted for a request

    def advances(self) -> dict[int, int]:
        """Known tokens by row that are computed or placed."""
        if not self.jumps:
            return self.spans
        return {
            row: count + sum([length for _, length in self.jumps.get(row, ())])
            for row, count in self.spans.items()
        }


# Rules that the composer and the tests name too.
NO_ROOM_ROWS, NO_BUDGET, BEHIND_PREFIX, BEHIND_SWAP = Rule.ROWS, Rule.BUDGET, Rule.PREFIX, Rule.SWAP
_ADMIT, _FITS, _RUNNING = DecisionKind.ADMIT, Rule.FITS, RequestState.RUNNING  # see core.fast
# A request that waits for a prefix, for its own copy, for the disk, for its adapter or for another branch of its tree
# waits for no room, and one that leaves room leaves it to others: requests behind it may be admitted. So does one whose
# module is not there; if that was evicted while it waited, those that compute modules may, and no others.
MODULES = frozenset((Rule.MODULE, Rule.MODULE_EVICTED))
PASSABLE = frozenset((BEHIND_PREFIX, BEHIND_SWAP, Rule.SPARE, Rule.TREE_ROWS, Rule.ADAPTER, *WAITS, *MODULES))
COMPUTED = frozenset((BEHIND_PREFIX, *MODULES))  # another request computes what is waited for
MOST_SPARING = 32  # requests of flooding tenants that are passed in one step: a queue may be long
NO_PLACE = frozenset((NO_ROOM_ROWS, Rule.BLOCKS))


@dataclass(slots=True, eq=False)
class CachedStart:
    """What a request can start from: cached blocks, or the blocks of a running parent. Never changed."""

    num_computed: int
    match: PrefixMatch
    parent_row: int = NO_ROW
    load: Load | None = None  # what the host has behind it


class Verdict(NamedTuple):
    """Whether a waiting request can be admitted now, and the figures that decided it."""

    rule: Rule | None  # why it has to wait; None: there is room for it
    compared_with: RequestId  # the request admitted last, or the one that computes the prefix it waits for
    needed: int = NO_NUMBER  # blocks, in the layer group that decided
    free: int = NO_NUMBER
    kept: int = 0  # of the free blocks, kept back for others
    start: CachedStart | None = None  # None: it has to wait, or its KV comes back from the host

    @property
    def waits_for(self) -> RequestId:
        """The request that computes what this one needs."""
        return self.compared_with if self.rule in COMPUTED else NO_REQUEST

    @property
    def lacking(self) -> int:
        """Blocks that are missing; negative when some would be left."""
        return self.needed + self.kept - self.free

    def figures(self, budget_left: int) -> Figures:
        return budget_left, self.free, self.needed, self.compared_with


class Admission:
    """Judges and admits single requests; the composer decides their order.

    `judge` changes nothing. `admit` judges, and takes row and blocks when the verdict allows it.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.loading = Loading(state)
        self._no_blocks = state.kv.match((), 1)
        self._from_nothing = CachedStart(0, self._no_blocks)
        self._deferred: dict[RequestId, Rule] = {}  # the rule each waiting request was last deferred by

    def may_be_passed(self, rule: Rule, num_sparing: int) -> bool:
        """Whether requests behind one that waits for this may be admitted in the same step."""
        if rule is Rule.SPARE:
            return num_sparing < MOST_SPARING and len(self._state.queue.tenants) > 1
        return rule in PASSABLE

    def rows_left(self) -> int:
        """Rows that may be given now: 0 where a dial or a lack of memory allows fewer than run."""
        rows = self._state.rows
        left, free = self._state.most_rows - rows.num_live, rows.num_free
        return 0 if left < 0 else left if left < free else free

    def judge(self, request: Request, has_row: bool = False) -> Verdict:
        """Whether a waiting request can be admitted now. `has_row`: whether it could if it had a row."""
        kv, ahead = self._state.kv, self._state.ahead_of(request)
        if request.adapter and not self._state.adapters.is_there(request.adapter):
            return Verdict(Rule.ADAPTER, ahead)
        no_row = None if has_row else self._no_row(request)
        if no_row is not None:
            return Verdict(no_row, ahead)
        if request.host_places:
            if kv.is_moving(request.id):
                return Verdict(BEHIND_SWAP, ahead)
            return self._judge_blocks(request, kv.cost(kv.match((), 1), request.num_tokens), ahead, None)
        start = self._cached_start(request)
        if not isinstance(start, CachedStart):
            return Verdict(BEHIND_PREFIX, compared_with=start)
        if self.loading.is_on and start.parent_row == NO_ROW:
            load = self.loading.judge(request, start.match.num_blocks)
            if load is not None:
                start = CachedStart(start.num_computed, start.match, NO_ROW, load)
                if load.rule in WAITS:
                    return Verdict(load.rule, ahead, start=start)
        return self._judge_blocks(request, self._cost(request, start), ahead, start)

    def defer(self, request: Request, verdict: Verdict, draft: StepDraft) -> None:
        """Record that a request has to wait, once for each rule in turn."""
        rule = verdict.rule
        assert rule is not None
        if rule in WAITS:
            assert verdict.start is not None and verdict.start.load is not None
            self.loading.waits(request, verdict.start.load)
        if rule in MODULES:
            assert verdict.start is not None
            if not self._state.modules.waited_for(request):
                self._want_modules(request, verdict.start.num_computed)
            if rule is Rule.MODULE and not request.adapter and not self.loading.is_on:
                self._state.queue.park(request)  # until a module that it waits for is there
        if request.adapter:
            adapters = self._state.adapters
            (adapters.want if rule is Rule.ADAPTER else adapters.claim)(request.adapter)
        if self._deferred.get(request.id) != rule:
            if len(self._deferred) > 4 * len(self._state.requests) + 1024:
                self._deferred = {}
            self._deferred[request.id] = rule
            detail = draft.remarks.get(request.id, "") if rule in NO_PLACE else ""
            figures = verdict.figures(draft.left)
            self._state.decide(DecisionKind.DEFER, request, rule, verdict.kept, figures, detail=detail)

    def admit(self, request: Request, budget_left: int) -> Verdict:
        """Give a waiting request a row and what it starts from, unless the verdict is that it has to wait."""
        verdict = self.judge(request)
        if verdict.rule is not None:
            return verdict
        if verdict.start is None:
            self._bring_back(request, verdict.figures(budget_left))
            return verdict
        state, start = self._state, verdict.start
        if start.load is not None:
            self.loading.record(request, start.load)
        if start.load is not None and start.load.rule is Rule.LOADS:
            self._load(request, start, start.load, verdict.figures(budget_left))
            return verdict
        if start.parent_row == NO_ROW:
            row = self._give_row(request, start.num_computed, NO_ROW)
            state.kv.adopt(row, start.match)
        else:
            # All its tokens are in the parent's row.
            fresh_branch = request.num_tokens == request.num_prompt == request.shares
            row = self._give_row(request, start.num_computed, start.parent_row if fresh_branch else NO_ROW)
            state.kv.share(start.parent_row, row, start.num_computed)
            # Copied now and not with its first write: it may wait at a picture until the parent has filled the block
            # it shares in part, has left, and the cache alone has the rest of that block.
            state.kv.copy_on_write(row, start.num_computed)
            state.rows.share([start.parent_row])
            state.counters.forked += 1
            assert request.parent is not None
            figures = (budget_left, verdict.free, verdict.needed, request.parent)
            state.decide(DecisionKind.FORK, request, Rule.SHARES, start.num_computed, figures)
        self._after_joining(request, start.num_computed, verdict.figures(budget_left))
        return verdict

    def admit_padded(self, request: Request, shape: BatchShape, budget_left: int) -> Verdict:
        """Give a request its row in a padded batch: all slots of the rectangle are taken at once."""
        state, kv, rows = self._state, self._state.kv, self._state.rows
        ahead, needed, free = state.ahead_of(request), kv.blocks_for(shape.slots), kv.free_for()
        row = self._give_row(request, 0, NO_ROW)
        rows.pad[row] = rows.pad_left[row] = shape.padded_len - request.num_tokens
        kv.extend(row, shape.slots)
        verdict = Verdict(None, ahead, needed, free)
        self._after_joining(request, 0, verdict.figures(budget_left))
        return verdict

    def _bring_back(self, request: Request, figures: Figures) -> None:
        """Start copying a swapped request's blocks back; it runs when the copy has completed."""
        state = self._state
        state.queue.remove(request)
        row = state.take_row(request, request.num_computed)
        ticket = state.kv.swap_in(row, request.host_places, request.num_computed, request.id)
        request.host_places = ()  # the ticket gives them back
        request.move(RequestState.BLOCKED)
        request.blocked = Blocked(reason=BlockReason.SWAP_IN, deadline_s=None, ticket=ticket)
        if self._protects(request):
            self._reserve(request)
        state.decide(DecisionKind.RESUME, request, Rule.SWAP, request.num_computed, figures)

    def _load(self, request: Request, start: CachedStart, load: Load, figures: Figures) -> None:
        """Start copying what the host has of a prompt; the request runs when the copy has completed."""
        state = self._state
        num_computed = start.num_computed + load.num_tokens
        row = self._give_row(request, num_computed, NO_ROW, RequestState.BLOCKED)
        state.kv.adopt(row, start.match)
        ticket = self.loading.starts(request, load, row, start.match.num_blocks)
        request.blocked = Blocked(reason=BlockReason.SWAP_IN, deadline_s=None, ticket=ticket)
        self._after_joining(request, num_computed, figures)
        del state.prefilling[request.id]
        if state.config.defer_shared_prefix:  # others wait for it as if it were computed
            size = state.kv.block_size
            for key in request.keys[start.num_computed // size : num_computed // size]:
                state.computing.setdefault(key.key, request.id)

    def _give_row(
        self, request: Request, num_computed: int, source: int, becomes: RequestState = _RUNNING
    ) -> int:
        state = self._state
        state.hooks.admit(request)  # may raise: nothing has been taken yet
        state.queue.remove(request)
        request.move(becomes)
        return state.take_row(request, num_computed, source)

    def _after_joining(self, request: Request, num_computed: int, figures: Figures) -> None:
        state = self._state
        state.prefilling[request.id] = request
        if self._protects(request):
            self._reserve(request)
        if request.admitted_s is None:
            if not request.started:
                state.accounting.admitted(state.rows.tenant.item(request.row), request.num_prompt)
            request.admitted_s = state.now_s
            request.num_cached = num_computed
            state.counters.prompt_tokens += request.num_tokens
            state.counters.cached_tokens += num_computed
            state.counters.found(num_computed, request.cost.from_host, request.cost.from_disk)
            waited_s = state.now_s - request.arrival_s
            state.decide(_ADMIT, request, _FITS, num_computed, figures, seconds=waited_s)
        else:
            state.decide(DecisionKind.RESUME, request, Rule.RECOMPUTE, num_computed, figures)
        if state.kv.caching and state.config.defer_shared_prefix:
            computing, owner = state.computing, request.id
            for key in request.keys[num_computed // state.kv.block_size :]:
                computing.setdefault(key.key, owner)

    def _cached_start(self, request: Request) -> CachedStart | RequestId:
        """Where a request starts, or the request that is computing a prefix it could share."""
        state = self._state
        sharable = request.num_sharable(state.kv.block_size)
        match = state.kv.match(request.keys, sharable)
        cached = match.num_blocks * state.kv.block_size
        parent = state.requests.get(request.parent) if request.parent is not None else None
        if parent is not None and parent.state is RequestState.RUNNING:
            done = int(state.rows.computed[parent.row])
            # From the fork on, parent and branch differ.
            common = min(request.shares, sharable - 1)
            shared = min(done, common)
            still = parent.id in state.prefilling or done < state.rows.scheduled[parent.row]
            if still and done < common:
                return parent.id  # more of what it can share is being computed
            if shared > cached and state.kv.can_share(parent.row, shared):
                return CachedStart(shared, match, parent.row)
        if state.config.defer_shared_prefix:
            owner = self._computes_next(request, match.num_blocks)
            if owner is not None:
                return owner
        return CachedStart(cached, match) if cached else self._from_nothing

    def _computes_next(self, request: Request, num_blocks: int) -> RequestId | None:
        """The request that is computing the block after the first `num_blocks`, if it could be shared."""
        state = self._state
        if not state.computing or num_blocks >= len(request.keys):
            return None
        if (num_blocks + 1) * state.kv.block_size >= request.num_sharable(state.kv.block_size):
            return None
        return state.computing.get(request.keys[num_blocks].key)

    def _cost(self, request: Request, start: CachedStart) -> Needs:
        kv = self._state.kv
        if start.parent_row != NO_ROW:
            fresh = kv.blocks_for(request.num_tokens) - kv.blocks_for(start.num_computed)
            return (fresh + 1,) * len(kv.groups)  # one more for the copy of the shared last block
        return kv.cost(start.match, request.num_tokens)

    def _spare(self, request: Request) -> float:
        """The share of rows and blocks to leave free beside a request; one that runs alone leaves nothing."""
        policy = self._state.policy
        if not policy.keeps_room or not self._state.rows.num_live:
            return 0.0
        return float(policy.spare(self._state.tenant_index(request.tenant)))

    def _no_row(self, request: Request) -> Rule | None:
        if request.tree is not None and not request.tree.has_rows:
            return Rule.TREE_ROWS  # whatever rows there are
        left = self.rows_left()
        if left < 1:
            return NO_ROOM_ROWS
        spare = self._spare(request)
        return Rule.SPARE if spare and left <= int(spare * self._state.most_rows) else None

    def _judge_blocks(
        self, request: Request, cost: Needs, ahead: RequestId, start: CachedStart | None
    ) -> Verdict:
        """Whether there is room for the whole prompt, beside what running prompts still need and what is reserved."""
        state = self._state
        rows, kv = state.rows, state.kv
        unheld: list[int] = []
        if request.modules:
            done = request.num_computed if start is None else start.num_computed
            found = None if state.modules.waited_for(request) else self._cost_of_modules(request, done)
            if found is None:
                return self._without_module(request, done)
            unheld = found
            cost = tuple([need + more for need, more in zip(cost, unheld, strict=True)])
        promised = self._promised() if state.prefilling else 0
        if self._protects(request):
            return self._judge_full_length(request, promised, ahead, start, unheld)
        kept_share = state.config.watermark if rows.num_live else 0.0
        spare = self._spare(request) if state.policy.keeps_room else 0.0
        if spare > kept_share:
            kept_share = spare
        least, shortest = 1 << 62, (NO_NUMBER, NO_NUMBER, 0)
        for group, need in zip(kv.groups, cost, strict=True):
            usable, free = group.pool.usable, group.free_for(None)
            kept = promised + int(usable * kept_share)
            if free - need - kept < least:
                least, shortest = free - need - kept, (need, free, kept)
            if rows.num_reserved:
                most, left = self._full_length_beside_reserved(request, group)
                if most > left:
                    return Verdict(Rule.RESERVE, ahead, most, left, 0)
            if need + kept > free:
                return Verdict(Rule.SPARE if spare else Rule.BLOCKS, ahead, *shortest)
        verdict: Verdict = make_tuple(Verdict, (None, ahead, *shortest, start))
        return verdict

    def _cost_of_modules(self, request: Request, num_computed: int) -> list[int] | None:
        """Free blocks, per group, that holding the modules it has to place takes; None: not all are in the cache."""
        needed = [request.modules[body.stretch.item] for body in bodies_of(request, num_computed)]
        sources = self._state.kv.sources
        found = [sources.find(module.keys) for module in needed]
        for module, blocks in zip(needed, found, strict=True):
            if any(len(each) < len(module.keys) for each in blocks):
                return None
        return sources.unheld(found) if found else [0] * len(self._state.kv.groups)

    def _without_module(self, request: Request, num_computed: int) -> Verdict:
        modules = self._state.modules
        lacking = modules.waited_for(request) or [
            name_of(request.modules[stretch.item]) for stretch in self._lacking(request, num_computed)
        ]
        rule = Rule.MODULE_EVICTED if modules.were_evicted(request, lacking) else Rule.MODULE
        computes = [modules.computing[key] for key in lacking if key in modules.computing]
        start = CachedStart(num_computed, self._no_blocks)
        return Verdict(rule, computes[0] if computes else NO_REQUEST, start=start)

    def ask_for_modules(self, request: Request) -> None:
        """A request comes: what it lacks is computed in its place, so that no row that it could have goes to others."""
        start = self._cached_start(request) if request.modules else None
        if isinstance(start, CachedStart):
            self._want_modules(request, start.num_computed)

    def _want_modules(self, request: Request, num_computed: int) -> None:
        for stretch in self._lacking(request, num_computed):
            self._state.modules.want(request, stretch)

    def _lacking(self, request: Request, num_computed: int) -> list[Stretch]:
        """What a request has to place, and whose modules are not in the cache."""
        sources, found = self._state.kv.sources, []
        for body in bodies_of(request, num_computed):
            module = request.modules[body.stretch.item]
            if any(len(each) < len(module.keys) for each in sources.find(module.keys)):
                found.append(body.stretch)
        return found

    def _full_length_beside_reserved(self, request: Request, group: LayerGroup) -> tuple[int, int]:
        """Blocks a request may come to need, and those left beside the full length of all that is reserved."""
        most = self._state.kv.full_need(request.max_total)[group.index] + request.num_source_blocks
        return most, group.unpinned - reserved_full(self._state)[group.index]

    def _judge_full_length(
        self,
        request: Request,
        promised: int,
        ahead: RequestId,
        start: CachedStart | None,
        unheld: Sequence[int],
    ) -> Verdict:
        """Whether there is room to reserve the full length, with enough left for another request to complete.

        Reservations take at most half the pool, unless there is only one.
        """
        kv, figures = self._state.kv, (NO_NUMBER, NO_NUMBER, 0)
        full, reserved = kv.full_need(request.max_total), reserved_full(self._state)
        for group, most, taken in zip(kv.groups, full, reserved, strict=True):
            usable = group.unpinned
            need = min(most + 1 + (unheld[group.index] if unheld else 0), usable)
            half = usable // 2 - taken if taken else usable
            beside = usable - taken - largest_unreserved(self._state, group.index)
            free = min(group.free_for(None) - promised, half, beside)
            figures = (need, free, promised)
            if need > free:
                return Verdict(Rule.RESERVE, ahead, *figures)
        return Verdict(None, ahead, *figures, start)

    def _promised(self) -> int:
        """Blocks the prompts under way still need."""
        return sum([self._prompt_rest(request.row) for request in self._state.prefilling.values()])

    def _prompt_rest(self, row: int) -> int:
        """Blocks a prompt under way still needs, those aside that are reserved for it."""
        kv = self._state.kv
        missing = kv.missing(row, self._state.rows.num_known.item(row))
        return max(0, missing - kv.reserved_for(row))

    def _protects(self, request: Request) -> bool:
        return request.preemptions >= self._state.config.max_preemptions > 0

    def _reserve(self, request: Request) -> None:
        state, kv = self._state, self._state.kv
        request.reserved = True
        state.rows.reserve(request.row)
        if state.mode.keeps_finished:
            return  # a row of a padded batch has all its blocks already
        full = kv.full_need(request.max_total)
        kv.reserve(
            request.row,
            tuple(min(need + 1, group.pool.usable) for need, group in zip(full, kv.groups, strict=True)),
        )


def reserved_full(state: SchedulerState) -> Needs:
    """Blocks the reserved rows may hold at most, per group."""
    rows, kv = state.rows, state.kv
    if not rows.num_reserved:
        return (0,) * len(kv.groups)
    totals = [0] * len(kv.groups)
    for row in rows.reserved[: rows.high].nonzero()[0].tolist():
        for index, need in enumerate(kv.full_need(int(rows.max_len[row]))):
            totals[index] += min(need + 1, kv.groups[index].pool.usable)
    return tuple(totals)


def largest_unreserved(state: SchedulerState, group: int) -> int:
    """Most blocks one of the running rows without a reservation may come to need."""
    rows = state.rows
    limits = rows.max_len[rows.live & ~rows.reserved]
    return state.kv.full_need(int(limits.max()))[group] if len(limits) else 0
