"""Letting requests in: onto a row, with the blocks they need and the ones they can share.

A request is admitted when a row is free and its whole prompt fits beside what running prompts still need; if
not, it keeps its place and the reason is on record. A swapped request comes back the same way, in its turn. A
prefix that a running request is about to publish is waited for, a running parent's blocks are shared.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.events import NO_NUMBER, DecisionKind, Rule
from paceline.core.request import NO_ROW, Blocked, BlockReason, Request, RequestId, RequestState
from paceline.kv.group import LayerGroup
from paceline.kv.manager import Needs, PrefixMatch
from paceline.scheduler.modes import BatchShape
from paceline.scheduler.state import Figures, SchedulerState

# Reasons for which a request is not admitted, in the order they are looked at.
NO_ROOM_ROWS, NO_BUDGET, BEHIND_PREFIX, BEHIND_SWAP = Rule.ROWS, Rule.BUDGET, Rule.PREFIX, Rule.SWAP
_ADMIT, _FITS = DecisionKind.ADMIT, Rule.FITS  # members of an enum are looked up slowly
# Who waits for a prefix or for its own copy waits for no room, and who leaves room leaves it to others: they may pass.
PASSABLE = frozenset((BEHIND_PREFIX, BEHIND_SWAP, Rule.SPARE))
MOST_SPARING = 32  # requests of floods that are passed in one plan: a queue may be long
NO_PLACE = frozenset((NO_ROOM_ROWS, Rule.BLOCKS))


@dataclass(slots=True, eq=False)
class CachedStart:
    """What a request can start from: cached blocks, or the blocks of a running parent. Never changed."""

    num_computed: int
    match: PrefixMatch
    parent_row: int = NO_ROW


class Admission:
    """Decides about single requests; the order they are asked in is the composer's."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._deferred: dict[RequestId, Rule] = {}  # reason each passed-over request was last given
        # What the last question was answered from, for the record.
        self.budget_left = self.needed = self.free = NO_NUMBER
        self._kept = 0  # blocks that are free and kept back for others
        self.remarks: dict[RequestId, str] = {}  # of this plan: why nobody gives its place to a request
        self.against = state.last_admitted
        self._sparing = 0  # requests of this plan that leave room for others

    def begin(self) -> None:
        """A plan begins."""
        self.remarks.clear()
        self._sparing = 0

    def may_be_passed(self, reason: Rule) -> bool:
        """Whether those behind a request that waits for this may be asked in the same plan."""
        if reason is Rule.SPARE:
            self._sparing += 1
            return self._sparing < MOST_SPARING and len(self._state.queue.tenants) > 1
        return reason in PASSABLE

    def rows_left(self) -> int:
        """More may run than there should be by now: a dial or a lack of memory takes nobody's row away."""
        rows = self._state.rows
        left, free = self._state.most_rows - rows.num_live, rows.num_free
        return 0 if left < 0 else left if left < free else free

    def refusal(self, request: Request) -> Rule | None:
        """Why a waiting request cannot be admitted now, or None. Changes nothing but what is said of it."""
        return self._no_row(request) or self._refusal_on_a_row(request)

    def lacking(self, request: Request) -> tuple[Rule | None, int]:
        """Why a waiting request could not be admitted if it had a row, and how many blocks more it would need."""
        reason = self._refusal_on_a_row(request)
        return reason, self.needed + self._kept - self.free

    def _refusal_on_a_row(self, request: Request) -> Rule | None:
        if request.host_places:
            return self._swap_refusal(request)
        beginning = self._cached_start(request)
        if beginning is None:
            return BEHIND_PREFIX
        return self._lacks(request, self._cost(request, beginning))

    def ask(self, budget_left: int, against: RequestId) -> None:
        """A question begins: so many tokens are left, and this is the request to compare with."""
        self.budget_left, self.against = budget_left, against
        self.needed = self.free = NO_NUMBER
        self._kept = 0

    def defer(self, request: Request, reason: Rule) -> None:
        """Put on record that a request has to wait, once for each reason in turn."""
        if self._deferred.get(request.id) != reason:
            if len(self._deferred) > 4 * len(self._state.requests) + 1024:
                self._deferred = {}
            self._deferred[request.id] = reason
            detail = self.remarks.get(request.id, "") if reason in NO_PLACE else ""
            self._state.decide(
                DecisionKind.DEFER, request, reason, self._kept, self._figures(), detail=detail
            )

    def _figures(self) -> Figures:
        return self.budget_left, self.free, self.needed, self.against

    def admit(self, request: Request) -> Rule | None:
        """Give a waiting request a row and its beginning; returns the reason when it has to wait."""
        state = self._state
        no_row = self._no_row(request)
        if no_row is not None:
            return no_row
        if request.host_places:
            return self._bring_back(request)
        beginning = self._cached_start(request)
        if beginning is None:
            return BEHIND_PREFIX
        reason = self._lacks(request, self._cost(request, beginning))
        if reason is not None:
            return reason
        fresh_branch = request.num_tokens == request.num_prompt  # all its tokens are in the parent's row
        source = beginning.parent_row if fresh_branch else NO_ROW
        row = self._give_row(request, beginning.num_computed, source)
        if beginning.parent_row != NO_ROW:
            state.kv.share(beginning.parent_row, row, beginning.num_computed)
            state.rows.share([row, beginning.parent_row])
            state.counters.forked += 1
            assert request.parent is not None
            figures = (self.budget_left, self.free, self.needed, request.parent)
            state.decide(DecisionKind.FORK, request, Rule.SHARES, beginning.num_computed, figures)
        else:
            state.kv.adopt(row, beginning.match)
        self._after_joining(request, beginning.num_computed)
        return None

    def admit_padded(self, request: Request, shape: BatchShape) -> Rule | None:
        """Give a request its row in a padded batch: all slots of the rectangle are taken at once."""
        kv = self._state.kv
        self.free, self.needed = kv.room(), kv.blocks_for(shape.slots)
        row = self._give_row(request, 0, NO_ROW)
        rows = self._state.rows
        rows.pad[row] = rows.pad_left[row] = shape.padded_len - request.num_tokens
        kv.extend(row, shape.slots)
        self._after_joining(request, 0)
        return None

    def _swap_refusal(self, request: Request) -> Rule | None:
        """Why a swapped request cannot come back now, or None."""
        kv = self._state.kv
        if kv.is_moving(request.id):
            return BEHIND_SWAP
        cost = kv.cost(kv.match((), 1), request.num_tokens)
        return self._lacks(request, cost)

    def _bring_back(self, request: Request) -> Rule | None:
        """Start copying a swapped request's blocks back; it runs when the copy has completed."""
        reason = self._swap_refusal(request)
        if reason is not None:
            return reason
        state = self._state
        state.queue.remove(request)
        row = state.take_row(request, request.num_computed)
        state.kv.swap_in(row, request.host_places, request.num_computed, request.id)
        request.host_places = ()  # the ticket gives them back
        request.move(RequestState.BLOCKED)
        request.blocked = Blocked(reason=BlockReason.SWAP_IN, deadline_s=None)
        if self._protects(request):
            self._reserve(request)
        state.decide(DecisionKind.RESUME, request, Rule.SWAP, request.num_computed, self._figures())
        return None

    def _give_row(self, request: Request, num_computed: int, source: int) -> int:
        state = self._state
        state.hooks.admit(request)  # may raise: nothing has been taken yet
        state.queue.remove(request)
        request.move(RequestState.RUNNING)
        return state.take_row(request, num_computed, source)

    def _after_joining(self, request: Request, num_computed: int) -> None:
        state = self._state
        state.prefilling[request.id] = request
        if self._protects(request):
            self._reserve(request)
        if request.admitted_s is None:
            request.admitted_s = state.now_s
            request.num_cached = num_computed
            state.accounting.admitted(state.rows.tenant.item(request.row), request.num_prompt)
            state.counters.prompt_tokens += request.num_tokens
            state.counters.cached_tokens += num_computed
            waited_s = state.now_s - request.arrival_s
            figures = (self.budget_left, self.free, self.needed, self.against)
            state.decide(_ADMIT, request, _FITS, num_computed, figures, seconds=waited_s)
        else:
            state.decide(DecisionKind.RESUME, request, Rule.RECOMPUTE, num_computed, self._figures())
        if state.kv.caching and state.config.defer_shared_prefix:
            computing, owner = state.computing, request.id
            for key in request.keys[num_computed // state.kv.block_size :]:
                computing.setdefault(key.key, owner)

    def _cached_start(self, request: Request) -> CachedStart | None:
        """Where a request starts; None while another is computing the prefix it could share."""
        state = self._state
        match = state.kv.match(request.keys, request.num_tokens)
        cached = match.num_blocks * state.kv.block_size
        parent = state.requests.get(request.parent) if request.parent is not None else None
        if parent is not None and parent.state is RequestState.RUNNING:
            done = int(state.rows.computed[parent.row])
            # From the fork on, each goes its own way.
            common = min(request.num_prompt, request.num_tokens - 1)
            shared = min(done, common)
            still = parent.id in state.prefilling or done < state.rows.scheduled[parent.row]
            if still and done < common:
                self.against = parent.id
                return None  # more of what it can share is being computed
            if shared > cached and state.kv.can_share(parent.row, shared):
                return CachedStart(shared, match, parent.row)
        if state.config.defer_shared_prefix and self._next_is_computed(request, match.num_blocks):
            return None
        return CachedStart(cached, match)

    def _next_is_computed(self, request: Request, num_blocks: int) -> bool:
        """Whether another request is computing the block after the first `num_blocks`, and it could be shared."""
        kv = self._state.kv
        if not self._state.computing or num_blocks >= len(request.keys):
            return False
        shareable = (num_blocks + 1) * kv.block_size < request.num_tokens
        if not shareable or request.keys[num_blocks].key not in self._state.computing:
            return False
        self.against = self._state.computing[request.keys[num_blocks].key]
        return True

    def _cost(self, request: Request, beginning: CachedStart) -> Needs:
        kv = self._state.kv
        if beginning.parent_row != NO_ROW:
            fresh = kv.blocks_for(request.num_tokens) - kv.blocks_for(beginning.num_computed)
            return (fresh + 1,) * len(kv.groups)  # one more for the copy of the shared last block
        return kv.cost(beginning.match, request.num_tokens)

    def _spare(self, request: Request) -> float:
        """The share of rows and blocks that is to be left free beside a request; who runs alone leaves nothing."""
        policy = self._state.policy
        if not policy.keeps_room or not self._state.rows.num_live:
            return 0.0
        return float(policy.spare(self._state.tenant_index(request.tenant)))

    def _no_row(self, request: Request) -> Rule | None:
        left = self.rows_left()
        if left < 1:
            return NO_ROOM_ROWS
        spare = self._spare(request)
        return Rule.SPARE if spare and left <= int(spare * self._state.most_rows) else None

    def _lacks(self, request: Request, cost: Needs) -> Rule | None:
        """None: room for the whole prompt, beside what running prompts still need and what is reserved."""
        state = self._state
        rows, kv = state.rows, state.kv
        promised = self._promised() if state.prefilling else 0
        if self._protects(request):
            return self._lacks_for_good(kv.full_need(request.max_total), self._reserved_full(), promised)
        kept_share = state.config.watermark if rows.num_live else 0.0
        spare = self._spare(request)
        if spare > kept_share:
            kept_share = spare
        least = 1 << 62
        for group, need in zip(kv.groups, cost, strict=True):
            usable, free = group.pool.usable, group.free_for(None)
            kept = promised + int(usable * kept_share)
            if free - need - kept < least:
                least = free - need - kept
                self.needed, self.free, self._kept = need, free, kept
            if rows.num_reserved and self._is_crowded(request, group):
                return Rule.RESERVE
            if need + kept > free:
                return Rule.SPARE if spare else Rule.BLOCKS
        return None

    def _is_crowded(self, request: Request, group: LayerGroup) -> bool:
        """Whether a request could not complete beside the full length of all that is reserved."""
        usable = group.pool.usable
        most, taken = (
            needs[group.index]
            for needs in (self._state.kv.full_need(request.max_total), self._reserved_full())
        )
        if most + taken <= usable:
            return False
        self.needed, self.free, self._kept = most, usable - taken, 0
        return True

    def _lacks_for_good(self, full: Needs, reserved: Needs, promised: int) -> Rule | None:
        """None: room to set its full length aside, with enough left that somebody else can complete beside it."""
        for group, most, taken in zip(self._state.kv.groups, full, reserved, strict=True):
            usable = group.pool.usable
            need = min(most + 1, usable)
            free = group.free_for(None) - promised
            half = usable // 2 - taken if taken else usable
            beside = usable - taken - self._largest_unreserved(group.index)
            self.needed, self.free, self._kept = need, min(free, half, beside), promised
            if need > self.free:
                return Rule.RESERVE
        return None

    def _promised(self) -> int:
        """Blocks the prompts under way still need."""
        return sum([self._prompt_rest(request.row) for request in self._state.prefilling.values()])

    def _prompt_rest(self, row: int) -> int:
        """Blocks a prompt under way still needs, those aside that are reserved for it."""
        kv = self._state.kv
        missing = kv.missing(row, self._state.rows.num_known.item(row))
        return max(0, missing - kv.groups[0].reserved_for.item(row))

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

    def _reserved_full(self) -> Needs:
        """Blocks the reserved rows may hold at most, per group."""
        rows, kv = self._state.rows, self._state.kv
        if not rows.num_reserved:
            return (0,) * len(kv.groups)
        totals = [0] * len(kv.groups)
        for row in rows.reserved[: rows.high].nonzero()[0].tolist():
            for index, need in enumerate(kv.full_need(int(rows.max_len[row]))):
                totals[index] += min(need + 1, kv.groups[index].pool.usable)
        return tuple(totals)

    def _largest_unreserved(self, group: int) -> int:
        """Most blocks one of the running rows without a reservation may come to need."""
        rows = self._state.rows
        limits = rows.max_len[rows.live & ~rows.reserved]
        return self._state.kv.full_need(int(limits.max()))[group] if len(limits) else 0
