"""The invariant of the dial: plans keep to where it stands."""

from __future__ import annotations

from paceline.scheduler.invariants.registry import CONTINUOUS_ONLY, PLANNED, Look, invariant


@invariant("D1", moment=PLANNED, modes=CONTINUOUS_ONLY)
def plans_keep_the_limits_of_the_dial(look: Look) -> str | None:
    """Nobody joins beyond its rows, and no step with prompts has more tokens than it allows beside the rows."""
    state, plan = look.scheduler.state, look.plan
    limits = state.dial.limits
    if limits is None or plan is None:
        return None
    if len(plan.joins.row) and state.rows.num_live > limits.rows:
        return f"{state.rows.num_live} rows are taken and somebody joins; the dial allows {limits.rows}"
    work = plan.work
    if limits.target_s is not None or not work.prefill_tokens:
        return None  # S14 judges budgets that follow from durations
    allowed = max(limits.tokens, work.decode_rows + state.dial.fewest)
    if work.decode_rows + work.prefill_tokens > allowed:
        return f"a step has {work.decode_rows + work.prefill_tokens} tokens; the dial allows {allowed}"
    return None
