"""What it costs to take a running request off its row, and to leave it there: recompute, swap, or wait.

From the costs that were measured at start-up and are part of the config, so that a run log has them. Everything is
seconds of the machine but for waiting, which is how long until rows that end give back what is short. Decides nothing
but which of two kinds is the cheaper; never looks at a clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from paceline.config import PreemptionCosts
from paceline.scheduler.state import SchedulerState

# Where nothing was measured.
UNKNOWN = PreemptionCosts(token_s=1e-4, product_s=0.0, block_s=math.inf, step_s=0.02)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds of each way to go; infinity where there is none."""

    recompute_s: float
    swap_s: float
    wait_s: float = math.inf

    @property
    def give_way_s(self) -> float:
        return min(self.recompute_s, self.swap_s)

    def __str__(self) -> str:
        ways = (("recompute", self.recompute_s), ("swap", self.swap_s), ("wait", self.wait_s))
        return ", ".join(f"{name} {1e3 * cost:.1f} ms" for name, cost in ways if cost < math.inf)


def estimate(state: SchedulerState, rows: list[int], wait_s: float = math.inf) -> Estimate:
    """For `rows` together, to be computed again or to be copied out and back."""
    costs = state.config.preemption_costs or UNKNOWN
    # What others hold with it would stay cached, but nobody can say for how long.
    computed = state.rows.computed[rows]
    recompute_s = costs.token_s * float(computed.sum()) + costs.product_s * 0.5 * float((computed**2).sum())
    return Estimate(recompute_s=recompute_s, swap_s=_swap_s(state, rows, costs), wait_s=wait_s)


def swaps(state: SchedulerState, cost: Estimate) -> bool:
    """Whether KV goes to the host: as the config says, or as is cheaper."""
    if state.config.preemption != "auto":
        return state.config.preemption == "swap"
    return cost.swap_s < cost.recompute_s


def seconds_until(state: SchedulerState, num_blocks: int, num_rows: int, *, certain: bool = False) -> float:
    """How long until rows that reach their length have given back so many blocks and rows.

    An output may end earlier than at its length: it is the longest wait, not the likeliest. `certain`: count only rows
    that need no further block for it.
    """
    rows, kv, costs = state.rows, state.kv, state.config.preemption_costs
    if costs is None:  # nothing is known of how long a step takes
        return math.inf
    live = (rows.live[: rows.high] & ~rows.done[: rows.high]).nonzero()[0]
    held = kv.groups[0].held[live]
    if certain:
        live = live[held * kv.block_size >= rows.limit[live] - 1]
        held = kv.groups[0].held[live]
    left = rows.limit[live] - rows.upper[live]
    by = np.argsort(left, kind="stable")
    blocks = np.cumsum((held - kv.groups[0].first[live])[by])
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
        count = int(np.maximum(until - group.first[rows], 0).sum())
        if count > host.num_free:
            return math.inf
        total += count
    return 2.0 * total * costs.block_s if total else math.inf
