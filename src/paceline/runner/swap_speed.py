"""What preemption costs on this machine, measured when the engine starts: a token, a block, a step.

Copies are timed between blocks and host places that nobody uses yet. Where there are no host places nothing can be
swapped, and nothing is copied. Owns the measuring; what is made of the numbers is the scheduler's business.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from paceline.config import EngineConfig, PreemptionCosts

MOST_BLOCKS = 256  # copied at a time
TIMES = 3


def block_seconds(config: EngineConfig, copy: Callable[[int], None]) -> float:
    """Seconds to copy one block to the host or back; infinity without host places. `copy` copies so many out and back
    and returns when that is done."""
    count = min(config.kv.num_host_blocks, config.kv.num_blocks - 1, MOST_BLOCKS)
    if count < 1:
        return math.inf
    copy(count)  # the first touches memory that was never used
    taken = []
    for _ in range(TIMES):
        started_s = time.perf_counter()
        copy(count)
        taken.append(time.perf_counter() - started_s)
    return min(taken) / (2 * count)


def line_preemption_costs(fixed_s: float, token_s: float, rows: int, block_s: float) -> PreemptionCosts:
    """Where a step takes so long at least, and for each token more; `rows` decode together."""
    return PreemptionCosts(token_s=token_s, block_s=block_s, step_s=fixed_s + token_s * rows)
