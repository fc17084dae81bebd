"""Invariants of what requests are charged for."""

from __future__ import annotations

import numpy as np

from paceline.scheduler.invariants.registry import Look, invariant


@invariant("B1")
def time_is_counted_for_the_blocks_rows_hold(look: Look) -> str | None:
    kv, live = look.scheduler.state.kv, look.live
    held = np.zeros(len(live), np.int64)
    for group in kv.groups:
        held += group.held[live] - group.first[live]
    counted = kv.block_time.held[live]
    wrong = (held != counted).nonzero()[0]
    if not len(wrong):
        return None
    at = int(wrong[0])
    return f"row {live[at]} holds {held[at]} blocks, and time is counted for {counted[at]}"
