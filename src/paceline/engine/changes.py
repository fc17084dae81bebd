"""A change of a live request by its owner: priority, deadline, score, paused or not, the end of its reasoning.

The same for a server and for programs without one. Each part that is given becomes an input of the scheduler, so that a
replay has it too, but for reasoning, of which it has the tokens; pausing what is paused, or resuming what runs, does
nothing.
"""

from __future__ import annotations

import math

from paceline.core.request import Change, ChangeOutcome, RequestId, RequestState
from paceline.engine.engine import Engine
from paceline.errors import InvalidRequest, InvalidTransition
from paceline.scheduler.scheduler import Scheduler


def apply_change(engine: Engine, request_id: RequestId, change: Change) -> ChangeOutcome:
    """Change one request. Nothing is changed unless all of it can be."""
    scheduler = engine.scheduler
    request = scheduler.state.requests.get(request_id)
    if request is None:
        return ChangeOutcome.ENDED
    if change.end_reasoning and not engine.guides.end_reasoning(request_id):
        return ChangeOutcome.NOT_REASONING
    if change.priority is not None:
        request.service_level._replace(priority=change.priority).check()
    if change.score is not None and not math.isfinite(change.score):
        raise InvalidRequest("score must be a finite number", param="score")
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
    if change.score is not None:
        engine.set_score(request_id, change.score)
    if change.until_s is not None:
        scheduler.set_deadline(request_id, change.until_s if change.until_s < math.inf else None)
    if change.paused is False and is_paused:
        scheduler.resume(request_id)
    return ChangeOutcome.CHANGED


def resume_all(scheduler: Scheduler) -> None:
    """Resume every paused request."""
    for request in list(scheduler.state.requests.values()):
        if request.state is RequestState.PAUSED:
            scheduler.resume(request.id)
