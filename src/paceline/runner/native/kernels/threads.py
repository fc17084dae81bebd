"""How the threads of a step share its work: pieces from a counter, and meetings between phases."""

from __future__ import annotations

from paceline.runner.native import layout as at
from paceline.runner.native.kernels.emit import kernel
from paceline.runner.native.kernels.scalars import (
    fetch_add,
    get_int,
    nanoseconds,
    pause,
    peek,
    poke,
    put_int,
    yield_processor,
)

LOOKS = 2000  # at a meeting, before the processor is offered to others
# Phases whose time is counted, as `layout.PHASES` names them, and when the last one ended.
(
    LAP_ROWS,
    LAP_HEADS,
    LAP_ATTENTION,
    LAP_PRODUCTS,
    LAP_GATED,
    LAP_LOGITS,
    LAP_DRAW,
    LAP_WAITING,
    LAP_STARTED,
) = range(9)


@kernel
def take(sync, count):
    """The next `count` pieces of this phase; the number of the first."""
    pause()
    return fetch_add(sync + at.Y_PIECE, count)


@kernel
def meet(p, laps, phase):
    """All threads have ended the phase; the last one to come opens the next."""
    lap(laps, phase)
    pause()
    sync, threads = get_int(p + at.S_SYNC), get_int(p + at.S_THREADS)
    meeting = peek(sync)
    if fetch_add(sync + at.Y_ARRIVED, 1) == threads - 1:
        poke(sync + at.Y_ARRIVED, 0)
        poke(sync + at.Y_PIECE, get_int(sync + at.Y_FIRST_PIECE))
        fetch_add(p + at.S_PHASE, 1)
        pause()
        poke(sync, meeting + 1)
    else:
        looks = 0
        while peek(sync) == meeting:
            looks += 1
            if looks > LOOKS:
                yield_processor()
    lap(laps, LAP_WAITING)


@kernel
def lap(laps, phase):
    """Count the time since the last lap to this phase; an address of 0: times are not wanted in this step."""
    if laps != 0:
        now = nanoseconds()
        put_int(laps + 8 * phase, get_int(laps + 8 * phase) + now - get_int(laps + 8 * LAP_STARTED))
        put_int(laps + 8 * LAP_STARTED, now)
