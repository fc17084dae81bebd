"""Taking a running request off its row: which one is preempted, and what happens to its KV.

Spot work is preempted first, then the last in order, never the first in order. A request that was preempted
`max_preemptions` times gets its full length reserved and is not preempted again. A victim's KV is recomputed
later, or swapped to host places when these are configured and free, whichever is cheaper unless the config says one.
Decision: docs/decisions/0020-preemption.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from paceline.config.engine import PreemptionCosts
from paceline.core.events import DecisionKind, Rule
from paceline.core.request import Request, RequestState
from paceline.scheduler.state import NO_FIGURES, Figures, SchedulerState, note_kind

# What it costs to take a running request off its row, and to leave it there: recompute, swap, or wait.
#
# From the costs that were measured at start-up and are part of the config, so that a run log has them. Everything
# is seconds of the machine but for waiting, which is how long until rows that end give back what is short. Decides
# nothing but which of two kinds is the cheaper; never looks at a clock.


# Where nothing was measured.
UNKNOWN = PreemptionCosts(token_s=1e-4, product_s=0.0, block_s=math.inf, step_s=0.02)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostEstimate:
    """Seconds of each way to go; infinity where there is none."""

    recompute_s: float
    swap_s: float
    wait_s: float = math.inf

    @property
    def preempt_s(self) -> float:
        return min(self.recompute_s, self.swap_s)

    def __str__(self) -> str:
        ways = (("recompute", self.recompute_s), ("swap", self.swap_s), ("wait", self.wait_s))
        return ", ".join(f"{name} {1e3 * cost:.1f} ms" for name, cost in ways if cost < math.inf)


def estimate(state: SchedulerState, rows: list[int], wait_s: float = math.inf) -> CostEstimate:
    """For `rows` together, to be computed again or to be copied out and back."""
    costs = state.config.preemption_costs or UNKNOWN
    # What others hold with it would stay cached, but it is not known for how long.
    computed = state.rows.computed[rows]
    recompute_s = costs.token_s * float(computed.sum()) + costs.product_s * 0.5 * float((computed**2).sum())
    return CostEstimate(recompute_s=recompute_s, swap_s=_swap_s(state, rows, costs), wait_s=wait_s)


def swaps(state: SchedulerState, cost: CostEstimate) -> bool:
    """Whether KV goes to the host: as the config says, or as is cheaper."""
    if state.config.preemption != "auto":
        return state.config.preemption == "swap"
    return cost.swap_s < cost.recompute_s


def seconds_until(state: SchedulerState, num_blocks: int, num_rows: int, *, certain: bool = False) -> float:
    """Seconds until rows that reach their length have given back these numbers of blocks and rows.

    An output may end earlier than at its length: it is the longest wait, not the likeliest. `certain`: count only rows
    that need no further block for it.
    """
    rows, kv, costs = state.rows, state.kv, state.config.preemption_costs
    if costs is None:  # nothing is known of how long a step takes
        return math.inf
    live = (rows.live[: rows.high] & ~rows.done[: rows.high]).nonzero()[0]
    if certain:
        live = live[kv.table_len[live] * kv.block_size >= rows.max_len[live] - 1]
    left = rows.max_len[live] - rows.scheduled[live]
    by = np.argsort(left, kind="stable")
    blocks = np.cumsum(kv.num_live_blocks(live)[by])
    enough = (blocks >= num_blocks) & (np.arange(1, len(by) + 1) >= num_rows)
    if not enough.any():
        return math.inf
    return costs.step_s * float(left[by][int(np.argmax(enough))])


def _swap_s(state: SchedulerState, rows: list[int], costs: PreemptionCosts) -> float:
    """Out and back; infinity when the host has no places for all of them."""
    kv = state.kv
    total = 0
    for group, host in zip(kv.groups, kv.places, strict=True):
        until = -(-state.rows.computed[rows] // kv.block_size)
        count = int(np.maximum(until - group.first[rows] - group.dropped[rows], 0).sum())
        if count > host.num_free - kv.num_staging:
            return math.inf
        total += count
    return 2.0 * total * costs.block_s if total else math.inf


def preempt(
    state: SchedulerState,
    request: Request,
    *,
    reason: str,
    swap: bool | None = None,
    figures: Figures = NO_FIGURES,
) -> None:
    """Preempt a running request; it comes back at its old place in the order. `swap` None: what is cheaper."""
    put_aside(state, request, swap=swap, reason=reason, figures=figures)
    state.kv.settle()
    if not request.is_terminal:
        request.preemptions += 1
        note_kind(request)
        state.counters.preempted += 1


def put_aside(
    state: SchedulerState,
    request: Request,
    *,
    reason: str,
    swap: bool | None = None,
    figures: Figures = NO_FIGURES,
) -> None:
    """Free a request's row and blocks: SWAPPED when its KV went to host places, else WAITING to recompute."""
    row = request.row
    computed = int(state.rows.computed[row])
    try:
        state.publish(request)
    except Exception as error:
        state.fail(request, error)
        return
    cost = estimate(state, [row])
    swap = swaps(state, cost) if swap is None else swap
    pooled = request.sampling.pooling
    # A padded batch starts over together, and so does what is summed over all tokens of a prompt.
    swap = swap and not state.mode.keeps_finished and (pooled is None or pooled.reads_last)
    # Of a row that joins in this very plan, blocks may still have to be copied, and swaps go before copies.
    swap = swap and not any(join.row == row for join in state.joins)
    swapped = swap and computed > 0 and state.kv.can_swap_out(row, computed)
    rule = Rule(f"{reason}:{'swap' if swapped else 'recompute'}")
    seconds = cost.swap_s if swapped else cost.recompute_s
    seconds = seconds if seconds < math.inf else 0.0
    state.decide(DecisionKind.PREEMPT, request, rule, computed, figures, seconds=seconds, detail=str(cost))
    request.reserved = False
    if swapped:
        request.host_places = state.kv.swap_out(row, computed, request.id)
        request.num_computed = computed
        state.counters.swapped += 1
    else:
        state.kv.release(row)
        request.num_computed = 0
    state.leave_row(request)
    state.enqueue(request)


def pick_victim(state: SchedulerState, need: int) -> tuple[Request, bool | None] | None:
    """The request the policy gives up for `need` blocks, and whether it wants it swapped; None when none may be."""
    rows = state.rows
    live = np.flatnonzero(rows.live[: rows.high])
    oldest = first_in_order(state)
    candidates = [
        row
        for row in live[~rows.reserved[live] & ~rows.done[live]].tolist()
        if row != oldest and _request(state, row).state is RequestState.RUNNING
    ]
    if not candidates:
        return None
    candidates = [row for row in candidates if _request(state, row).is_spot] or candidates
    view = state.row_view(np.array(candidates, np.int64))
    victim = state.policy.victim(view, need)
    return _request(state, candidates[victim.index]), victim.swap


def first_in_order(state: SchedulerState) -> int | None:
    """The running row that goes before all others: it always makes progress."""
    rows = state.rows
    live = (rows.live[: rows.high] & ~rows.done[: rows.high]).nonzero()[0]
    return int(state.in_order(live)[0]) if len(live) else None


def _request(state: SchedulerState, row: int) -> Request:
    request = state.rows.requests[row]
    assert request is not None
    return request
