"""What an engine says of its load, for the choice between engines: from its rows, its queue and its step times."""

from __future__ import annotations

import numpy as np

from paceline.routing.view import Gauges
from paceline.scheduler.scheduler import Scheduler

PROMPT_TOKENS = 256  # of a step by which prompts are priced
UNKNOWN = 0.0  # speed of an engine that has not made steps yet


def gauges_of(scheduler: Scheduler) -> Gauges:
    state, seconds = scheduler.state, scheduler.forecaster.speed.now()
    rows = state.rows
    live = rows.live[: rows.high]
    known, scheduled = rows.num_known[: rows.high][live], rows.scheduled[: rows.high][live]
    decoding = len(known)
    step_s = seconds(decoding, 0, 0.0)
    prompt_s = seconds(decoding, PROMPT_TOKENS, 0.0) - step_s
    return Gauges(
        waiting_tokens=state.queue.num_tokens + int(np.maximum(known - scheduled, 0).sum()),
        running_tokens=int(rows.num_tokens[: rows.high][live].sum()),
        rows=decoding,
        free_blocks=min(group.pool.num_free for group in state.kv.groups),
        prefill_per_s=PROMPT_TOKENS / prompt_s if prompt_s > 0 else UNKNOWN,
        decode_s=max(0.0, step_s) if decoding else 0.0,
        row_s=max(0.0, seconds(decoding + 1, 0, 0.0) - step_s),
    )
