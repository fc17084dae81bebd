"""A change of a live request by its owner: priority, deadline, paused or not.

One function, the same for a server and for programs without one. Each part that is given becomes an input
of the scheduler, so that a replay has it too; to pause what is paused already, or to let go on what runs, is nothing.
"""

from __future__ import annotations

import math

from paceline.core.changes import Change, ChangeOutcome
from paceline.core.request import RequestId, RequestState
from paceline.errors import InvalidTransition
from paceline.scheduler.scheduler import Scheduler


def apply_change(scheduler: Scheduler, request_id: RequestId, change: Change) -> ChangeOutcome:
    """Change one request. Nothing is changed unless all of it can be."""
    request = scheduler.state.requests.get(request_id)
    if request is None:
        return ChangeOutcome.ENDED
    if change.priority is not None:
        request.urgency._replace(priority=change.priority).check()
    is_paused = request.state is RequestState.PAUSED
    if change.paused and not is_paused:
        try:
            scheduler.pause(request_id)
        except InvalidTransition:
            return ChangeOutcome.BUSY
        if request.is_terminal:  # it failed while it was put aside
            return ChangeOutcome.ENDED
    if change.priority is not None:
        scheduler.set_priority(request_id, change.priority)
    if change.until_s is not None:
        scheduler.set_deadline(request_id, change.until_s if change.until_s < math.inf else None)
    if change.paused is False and is_paused:
        scheduler.resume(request_id)
    return ChangeOutcome.CHANGED


def resume_all(scheduler: Scheduler) -> None:
    """Let everybody go on who is paused."""
    for request in list(scheduler.state.requests.values()):
        if request.state is RequestState.PAUSED:
            scheduler.resume(request.id)
