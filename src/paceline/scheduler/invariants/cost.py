"""Invariants of what requests are charged for."""

from __future__ import annotations

import numpy as np

from paceline.scheduler.invariants.registry import Look, invariant


@invariant("B1")
def time_is_counted_for_the_blocks_rows_hold(look: Look) -> str | None:
    state = look.scheduler.state
    high, counted = state.rows.high, state.kv.block_time.held
    held = np.zeros(high, np.int64)
    for group in state.kv.groups:
        held += group.held[:high] - group.first[:high]
    wrong = (held != counted[:high]).nonzero()[0]
    if not len(wrong):
        return None
    row = int(wrong[0])
    return f"row {row} holds {held[row]} blocks, and time is counted for {counted[row]}"
