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
    sleep_on,
    wake,
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
    join(p, laps, phase, False)


@kernel
def join(p, laps, phase, alone):
    """All threads have ended the phase. Whether this one computes what follows: each of them does, or `alone` the last
    one to come, while the others wait until it leaves (`leave`).

    A thread that waits long lets others have its processor. Where other processes use the processors too, it sleeps
    until it is woken: one that yields loses its turn to them, and gets no other before they have had theirs.
    """
    lap(laps, phase)
    pause()
    # Read now: the others may go on as soon as this thread is here, to the next step too.
    sync, threads, sleeps = get_int(p + at.S_SYNC), get_int(p + at.S_THREADS), get_int(p + at.S_SLEEPS)
    meeting = peek(sync)
    asleep = sync + at.Y_ASLEEP + meeting % 2 * at.LINE
    computes = True
    if fetch_add(sync + at.Y_ARRIVED, 1) == threads - 1:
        poke(sync + at.Y_ARRIVED, 0)
        if alone:
            poke(sync + at.Y_PIECE, get_int(sync + at.Y_FIRST_PIECE))
        else:
            _open(p, sync, meeting)
    else:
        computes = not alone
        looks = 0
        while peek(sync) == meeting:
            looks += 1
            if looks > LOOKS:
                if sleeps:
                    _sleep(sync, meeting, asleep)
                else:
                    yield_processor()
    lap(laps, LAP_WAITING)
    return computes


@kernel
def leave(p, laps, phase, computed):
    """Behind what one thread has computed alone: it opens the next phase."""
    if computed:
        lap(laps, phase)
        sync = get_int(p + at.S_SYNC)
        _open(p, sync, peek(sync))


# A thread is counted before it looks at the meeting for the last time, and the meeting is over before it is asked how
# many are counted: one of the two sees the other. Both are added, not stored, so that no look comes before them. A
# thread that was counted and did not sleep is taken off again; where a wake-up was made for it by then, the count is
# one below nought, and the next thread to be counted takes that wake-up before it sleeps: none are left to add up. No
# thread can come to the meeting after the next while another sleeps at this one: two lines are enough. A step with
# other threads than the last one waits until all have left that (`enter`), or one of them could lose its wake-up to a
# thread of this one.


@kernel
def _open(p, sync, meeting):
    """The next phase begins, with all of its pieces."""
    poke(sync + at.Y_PIECE, get_int(sync + at.Y_FIRST_PIECE))
    fetch_add(p + at.S_PHASE, 1)
    pause()
    if get_int(p + at.S_SLEEPS):
        _wake_sleepers(sync, sync + at.Y_ASLEEP + meeting % 2 * at.LINE)
    else:
        poke(sync, meeting + 1)


@kernel
def _wake_sleepers(sync, asleep):
    fetch_add(sync, 1)
    pause()
    count = peek(asleep)
    if count > 0:
        fetch_add(asleep, -count)
        for _ in range(count):
            wake(asleep + at.SEMAPHORE)


@kernel
def _sleep(sync, meeting, asleep):
    fetch_add(asleep, 1)
    pause()
    if peek(sync) == meeting:
        pause()
        sleep_on(asleep + at.SEMAPHORE)
    else:
        fetch_add(asleep, -1)


@kernel
def lap(laps, phase):
    """Count the time since the last lap to this phase; an address of 0: times are not wanted in this step."""
    if laps != 0:
        now = nanoseconds()
        put_int(laps + 8 * phase, get_int(laps + 8 * phase) + now - get_int(laps + 8 * LAP_STARTED))
        put_int(laps + 8 * LAP_STARTED, now)
