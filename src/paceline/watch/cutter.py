"""A film that cuts itself: one cut for every so many seconds of the watched engine's own time.

For runs that are watched afterwards: a simulation, or a log that is replayed. Where the engine had nothing to do for
longer than that, there is a cut at the beginning of its rest too: the step that ends the rest would tell only then who
had left. A run that turns out long is cut less often from then on, so that the number of cuts is bounded however long
it takes. What becomes of a cut is the owner's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.core.events import Decision
from paceline.core.plan import StepPlan
from paceline.scheduler.state import SchedulerState
from paceline.watch.film import Cut, Film, Glance


class Cutter:
    """Watches an engine whose clock may be any clock. `on_cut` gets every cut, in order."""

    def __init__(
        self,
        state: SchedulerState,
        on_cut: Callable[[Cut], None],
        *,
        interval_s: float,
        doubles_after: int,
    ) -> None:
        self._state = state
        self._film = Film(state)
        self._on_cut = on_cut
        self._interval_s = interval_s
        self._doubles_after = doubles_after
        self._num_cuts = 0
        self._num_noted = 0
        self._due_s: float | None = None
        self._rest: Glance | None = None  # how it stood when the engine came to rest

    def submitted(self, plan: StepPlan, decisions: Sequence[Decision], time_s: float) -> None:
        rest, self._rest = self._rest, None
        if rest is not None and time_s - rest.scene.time_s >= self._interval_s:
            self._take(self._film.cut(rest), rest.scene.time_s)
        self._film.submitted(plan, decisions, time_s)
        self._num_noted += 1
        if self._due_s is None or time_s >= self._due_s or self._num_noted >= self._film.most:
            self.cut(time_s)

    def completed(self, seq: int, time_s: float, *, failed: bool = False) -> None:
        self._film.completed(seq, time_s, failed=failed)
        self._rest = self._film.glance() if self._has_nothing_to_do() else None

    def cut(self, time_s: float) -> None:
        """Cut now, whenever the next one is due; for the beginning and the end of a run."""
        self._take(self._film.cut(), time_s)

    def _has_nothing_to_do(self) -> bool:
        state = self._state
        return not (state.rows.num_live or len(state.queue) or state.flights)

    def _take(self, cut: Cut, time_s: float) -> None:
        self._on_cut(cut)
        self._num_cuts += 1
        self._num_noted = 0
        if self._num_cuts % self._doubles_after == 0:
            self._interval_s *= 2
        self._due_s = time_s + self._interval_s
