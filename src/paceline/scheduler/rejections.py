"""Why a request is rejected: it can never fit, there is no place for it now, or its times cannot be met.

Only questions: nothing here changes the scheduler's state, so that an estimate and a real request
get the same answer. What to do with the answer is the business of `scheduler`.
Decision: docs/decisions/0023-honest-admission.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.events import Forecast, Rule
from paceline.core.request import (
    NO_ROW,
    OWN_REQUESTS,
    BlockReason,
    ModuleRef,
    Request,
    RequestState,
    RequestTree,
    TreeLimits,
)
from paceline.errors import (
    DeadlineImpossible,
    DeadlineInfeasible,
    InvalidRequest,
    InvalidTransition,
    NeverFits,
    PacelineError,
    QueueFull,
    TreeFull,
)
from paceline.scheduler.step import pinning
from paceline.scheduler.step.pinning import SPARE_BLOCKS

if TYPE_CHECKING:
    from paceline.scheduler.state import SchedulerState


class Rejection(NamedTuple):
    """Why requests are rejected."""

    requests: Sequence[Request]
    rule: Rule
    error: PacelineError


def rejection_of(state: SchedulerState, requests: Sequence[Request]) -> Rejection | None:
    """Why these requests cannot be taken; None: they can."""
    if requests[0].id >= OWN_REQUESTS:
        return None
    for request in requests:
        impossible = _impossible(state, request)
        if impossible is not None:
            return impossible
    return _no_place(state, requests) or _no_tree(state, requests) or _no_pin(state, requests[0])


def _impossible(state: SchedulerState, request: Request) -> Rejection | None:
    """Why a request can never be served; one that is known already is an error of the caller."""
    if request.id in state.requests or request.state is not RequestState.NEW:
        raise InvalidRequest(f"request {request.id} is already known")
    if request.sampling.kv_keep is not None:
        reason = _cannot_drop(state)
        if reason:
            return Rejection([request], Rule.KV_KEEP, InvalidRequest(f"kv_keep: {reason}", param="kv_keep"))
    if request.media:
        reason = _cannot_encode(state, request)
        if reason:
            return Rejection([request], Rule.MEDIA, NeverFits(reason, param="prompt"))
    if request.modules:
        reason = _cannot_place(state, request, request.max_total, request.modules)
        if reason:
            return Rejection([request], Rule.MODULES, NeverFits(reason, param="context_reuse"))
    if request.sampling.pooling is None and state.config.only_pools:
        error = InvalidRequest(
            "this model makes vectors, not text; use embed or /v1/embeddings", param="model"
        )
        return Rejection([request], Rule.POOLING, error)
    if request.sampling.pooling is not None:
        reason = _cannot_pool(state, request.sampling.pooling.kind)
        if reason:
            return Rejection([request], Rule.POOLING, InvalidRequest(f"pooling: {reason}", param="pooling"))
    longest = state.config.max_model_len
    if request.max_total > longest:
        more = request.max_total - request.num_prompt
        message = (
            f"This model's maximum context length is {longest} tokens; the prompt has {request.num_prompt}"
        )
        if more:
            message += f" and {more} more are asked for"
        return Rejection([request], Rule.CONTEXT_LENGTH, NeverFits(message, param="max_tokens"))
    if not state.kv.can_ever_hold(request.max_total):
        slots = min(state.kv.slabs.least_usable) * state.kv.block_size
        message = (
            f"{request.max_total} tokens do not fit into a KV cache of {slots} even when it is empty; "
            "ask for fewer tokens or give the cache more blocks"
        )
        return Rejection([request], Rule.KV_CAPACITY, NeverFits(message, param="max_tokens"))
    return None


def _cannot_drop(state: SchedulerState) -> str:
    """Why no request of this engine can drop KV; empty: they can."""
    if state.kv.windowed:
        return "this model has layers with sliding windows, which keep recent tokens only; leave it out"
    if state.drafts is not None:
        return (
            "this engine drafts tokens (--speculative-config), and a draft would see too much; leave it out"
        )
    if state.mode.keeps_finished:
        return "this engine runs padded batches (--mode), whose rows have all their blocks; leave it out"
    return ""


def _cannot_encode(state: SchedulerState, request: Request) -> str:
    """Why this engine can never encode the items of a request; empty: it can."""
    work = state.config.encoder
    if work is None:
        return "this model takes text only, no pictures"
    if state.mode.keeps_finished:
        return "this engine runs padded batches (--mode), which take text only; use --mode continuous"
    if request.sampling.kv_keep is not None:
        return "kv_keep: a prompt with pictures keeps all its KV; leave it out"
    most = work.num_pages * work.page_vectors
    for number, item in enumerate(request.media, 1):
        if work.pages_of(item.outputs) > work.num_pages:
            return f"picture {number} has {item.outputs} tokens, and there is room for the vectors of {most}"
    return ""


def _cannot_place(
    state: SchedulerState, request: Request, max_total: int, modules: Sequence[ModuleRef]
) -> str:
    """Why this engine can never place these texts in a request; empty: it can."""
    kv, wanted = state.kv, request.sampling
    if not kv.caching or state.mode.keeps_finished:
        return (
            "contexts are placed out of the prefix cache, and this engine keeps none; use context_reuse exact"
        )
    if kv.windowed:
        return "this model has layers with sliding windows, which contexts cannot be placed in; use context_reuse exact"
    pools_all = wanted.pooling is not None and not wanted.pooling.reads_last
    if wanted.kv_keep is not None or wanted.prompt_logprobs is not None or pools_all:
        return (
            "kv_keep, prompt_logprobs and vectors of all tokens need every token of a prompt computed where it stands; "
            "use context_reuse exact"
        )
    sources = sum([len(module.keys) for module in modules])
    need = max(kv.full_need(max_total)) + sources
    room = min(kv.slabs.least_usable) - kv.pins.most - SPARE_BLOCKS
    if need > room:
        return (
            f"the request needs {need} KV blocks beside one another, {sources} of them for contexts that are placed, "
            f"and has {room}; use context_reuse exact, or fewer contexts"
        )
    return ""


def _cannot_pool(state: SchedulerState, kind: str) -> str:
    """Why no request of this engine can end with such a vector; empty: they can."""
    if state.mode.keeps_finished:
        return (
            "this engine runs padded batches (--mode), whose rows all generate tokens; use --mode continuous"
        )
    if kind not in state.config.pools:
        known = ", ".join(state.config.pools) or "no vectors"
        return f"this engine makes {known}, not {kind}"
    return ""


def _no_pin(state: SchedulerState, request: Request) -> Rejection | None:
    """Why there is no room for the pin that a request comes for."""
    objection = pinning.objection_to(state, request)
    return None if objection is None else Rejection([request], Rule.PIN_LIMIT, objection)


def _no_tree(state: SchedulerState, requests: Sequence[Request]) -> Rejection | None:
    """Why the tree they belong to does not take them."""
    first = requests[0]
    parent = None if first.parent is None else state.requests.get(first.parent)
    if parent is None and first.tree_limits is None:
        return None  # fewer than any tree may have
    tree = None if parent is None else parent.tree
    if tree is None:
        tree = RequestTree(first.tree_limits or TreeLimits())
        if parent is not None:
            tree.members[parent.id] = parent.most_generated
    objection = tree.objection(len(requests), sum(request.most_generated for request in requests))
    return Rejection(requests, Rule.TREE_LIMIT, TreeFull(objection)) if objection else None


def _no_place(state: SchedulerState, requests: Sequence[Request]) -> Rejection | None:
    """Why the queue does not take them now. Those that come with output have waited elsewhere."""
    if any(request.has_output for request in requests):
        return None
    num_tokens = sum(request.num_tokens for request in requests)
    config, queue = state.config, state.queue
    if len(queue) + len(requests) > config.max_queue:
        message = f"{len(queue)} requests are waiting; the queue takes {config.max_queue}"
        return Rejection(requests, Rule.QUEUE_FULL, QueueFull(message))
    if queue.num_tokens + num_tokens > config.max_queue_tokens:
        message = (
            f"{queue.num_tokens} prompt tokens are waiting and {num_tokens} come; "
            f"the queue takes {config.max_queue_tokens}"
        )
        return Rejection(requests, Rule.QUEUE_FULL, QueueFull(message))
    return None


# Whether a request's objectives (deadline, TTFT, ITL) can be met: the rule by which it is rejected at once.
#
# An objective is impossible if the machine, empty, would need more than it by a margin; infeasible if that is so
# although the request went first, or if in its place in the order it would come more than twice as late as it
# wants. The margins are there because a forecast is one: a close case is admitted. Knows forecasts and objectives,
# nothing else.


CERTAIN = 0.8  # share of an estimate that will surely be needed
LATE = 2.0  # times an objective that the forecast may be
CHANCE = "; allow more time, or send on_infeasible: try"


class _Objective(NamedTuple):
    """Milliseconds asked for; seconds from now: wanted, needed without other requests, by going first, and by its
    place."""

    param: str
    what: str
    asked_ms: float
    wanted_s: float
    alone_s: float
    soonest_s: float
    expected_s: float


def late_rejection(request: Request, forecast: Forecast) -> Rejection | None:
    """Why a request cannot make its times; None: it can, or means to try."""
    if request.sampling.on_infeasible == "try":
        return None
    for objective in _objectives(request, forecast):
        wanted = f"{objective.param} is {objective.asked_ms:g}, but {objective.what}"
        if CERTAIN * objective.alone_s > objective.wanted_s:
            alone = f"would take about {1e3 * objective.alone_s:.0f} ms on this machine if it were empty"
            message = f"{wanted} {alone}{CHANCE}"
            error = DeadlineImpossible(message, param=objective.param)
            return Rejection([request], Rule.DEADLINE_IMPOSSIBLE, error)
        if (
            CERTAIN * objective.soonest_s > objective.wanted_s
            or objective.expected_s > LATE * objective.wanted_s
        ):
            message = f"{wanted} would take about {1e3 * objective.expected_s:.0f} ms as things stand{CHANCE}"
            retry_after_s = max(0.0, objective.expected_s - objective.wanted_s)
            late = DeadlineInfeasible(message, param=objective.param, retry_after_s=retry_after_s)
            return Rejection([request], Rule.DEADLINE_INFEASIBLE, late)
    return None


def _objectives(request: Request, forecast: Forecast) -> list[_Objective]:
    wanted, found = request.sampling, []
    if wanted.ttft_slo_ms is not None:
        times = (forecast.alone_first_s, forecast.soonest_first_s, forecast.first_token_s)
        first_s = wanted.ttft_slo_ms / 1e3 - forecast.waited_s
        found.append(_Objective("ttft_slo_ms", "the first token", wanted.ttft_slo_ms, first_s, *times))
    if wanted.itl_slo_ms is not None:
        between_s = forecast.between_s
        gap_s = wanted.itl_slo_ms / 1e3
        found.append(_Objective("itl_slo_ms", "a token", wanted.itl_slo_ms, gap_s, *(between_s,) * 3))
    if wanted.deadline_ms is not None:
        times = (forecast.alone_finish_s, forecast.soonest_finish_s, forecast.finish_s)
        finish_s = wanted.deadline_ms / 1e3 - forecast.waited_s
        what = f"an answer of {forecast.num_output:.0f} tokens"
        found.append(_Objective("deadline_ms", what, wanted.deadline_ms, finish_s, *times))
    return found


def check_extension(
    state: SchedulerState,
    request: Request,
    before: int,
    num_tokens: int,
    max_tokens: int,
    modules: tuple[ModuleRef, ...] = (),
) -> None:
    """Raise what keeps a request that has `before` tokens from having so many, with room for so many more, and with
    these modules beside those that it places already."""
    if request.sampling.pooling is not None:
        raise InvalidTransition(
            f"request {request.id} ends with a vector: nothing can be put behind its prompt"
        )
    if request.ends_with_prompt:
        raise InvalidTransition(f"request {request.id} ends with its prompt: nothing can be put behind it")
    number, is_done = request.id, request.row != NO_ROW and bool(state.rows.done[request.row])
    waits = request.blocked is not None and request.blocked.reason is not BlockReason.SWAP_IN
    if waits or is_done:
        raise InvalidTransition(f"request {number} cannot be extended while it is {request.state.value}")
    if max_tokens < 1:
        raise InvalidTransition(
            f"request {number} has all its tokens: say with max_tokens how many more it may have"
        )
    total = num_tokens + max_tokens
    if total > state.config.max_model_len or not state.kv.can_ever_hold(total):
        raise NeverFits(
            f"{num_tokens} tokens and {max_tokens} more do not fit: this model takes {state.config.max_model_len}, "
            "and the KV cache must hold them",
            param="max_tokens",
        )
    placed = (*request.modules, *modules)
    if placed and (reason := _cannot_place(state, request, total, placed)):
        raise NeverFits(reason, param="context_reuse" if modules else "max_tokens")
    if request.tree is not None:
        grows = max_tokens - (request.max_total - before)
        objection = request.tree.objection(0, grows)
        if objection:
            raise TreeFull(objection)
