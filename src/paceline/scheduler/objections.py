"""Why a request is refused: it can never fit, or there is no place for it now.

Only questions: nothing here changes the scheduler's state, so that who asks what would become of a request and who
sends it are told the same. What to do with the answer is the business of `scheduler`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.events import Rule
from paceline.core.request import Request, RequestState
from paceline.errors import InvalidRequest, NeverFits, PacelineError, QueueFull

if TYPE_CHECKING:
    from paceline.scheduler.state import SchedulerState


class Objection(NamedTuple):
    """Why requests are refused."""

    requests: Sequence[Request]
    rule: Rule
    error: PacelineError


def objection_to(state: SchedulerState, requests: Sequence[Request]) -> Objection | None:
    """Why these requests cannot be taken; None: they can."""
    for request in requests:
        impossible = _impossible(state, request)
        if impossible is not None:
            return impossible
    return _no_place(state, requests)


def _impossible(state: SchedulerState, request: Request) -> Objection | None:
    """Why a request can never be served; one that is known already is not refused but an error of the caller."""
    if request.id in state.requests or request.state is not RequestState.NEW:
        raise InvalidRequest(f"request {request.id} is already known")
    longest = state.config.max_model_len
    if request.max_total > longest:
        message = (
            f"This model's maximum context length is {longest} tokens; the prompt has {request.num_prompt} "
            f"and {request.sampling.max_tokens} more are asked for"
        )
        return Objection([request], Rule.CONTEXT_LENGTH, NeverFits(message, param="max_tokens"))
    if not state.kv.can_ever_hold(request.max_total):
        slots = min(group.pool.usable for group in state.kv.groups) * state.kv.block_size
        message = (
            f"{request.max_total} tokens do not fit into a KV cache of {slots} even when it is empty; "
            "ask for fewer tokens or give the cache more blocks"
        )
        return Objection([request], Rule.KV_CAPACITY, NeverFits(message, param="max_tokens"))
    return None


def _no_place(state: SchedulerState, requests: Sequence[Request]) -> Objection | None:
    """Why the queue does not take them now."""
    num_tokens = sum(request.num_tokens for request in requests)
    config, queue = state.config, state.queue
    if len(queue) + len(requests) > config.max_queue:
        message = f"{len(queue)} requests are waiting; the queue takes {config.max_queue}"
        return Objection(requests, Rule.QUEUE_FULL, QueueFull(message))
    if queue.num_tokens + num_tokens > config.max_queue_tokens:
        message = (
            f"{queue.num_tokens} prompt tokens are waiting and {num_tokens} come; "
            f"the queue takes {config.max_queue_tokens}"
        )
        return Objection(requests, Rule.QUEUE_FULL, QueueFull(message))
    return None
