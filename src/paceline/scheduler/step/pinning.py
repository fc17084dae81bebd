"""When prompts are pinned, for how long, and what is said of it.

A request that wants it pins what it has computed of its prompt when it comes to its end. One that is there for nothing
else ends as soon as its prompt is computed; it is refused where there is no room for the whole pin. Pins leave room for
the longest request there may be, so that no pin keeps a request from completing.
Decision: docs/decisions/0055-contexts.md.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.core.events import NO_NUMBER, NO_REQUEST, Decision, DecisionKind, Rule
from paceline.core.parameters import MAX_PIN_S, Pin
from paceline.core.request import ModuleRef, Request, RequestId, account_of
from paceline.errors import InvalidRequest, PacelineError, PinsFull
from paceline.kv.block_time import MICROSECONDS
from paceline.kv.pins import NO_LIMIT, Bought, Pins
from paceline.scheduler.state import SchedulerState
from paceline.scheduler.step.admission import largest_unreserved, reserved_full

SPARE_BLOCKS = 2  # beside the longest request: for a copy on write, and its next token


def limit_pins(state: SchedulerState) -> None:
    """What pins may take, from the config: nothing where no prefix is found again."""
    kv, config = state.kv, state.config
    if not kv.caching or state.mode.keeps_finished:
        return
    longest = kv.full_need(config.max_model_len)
    least = min(kv.slabs.least_usable)
    beside = [
        usable - need - SPARE_BLOCKS for usable, need in zip(kv.slabs.least_usable, longest, strict=True)
    ]
    kv.pins.most = max(0, min(int(config.max_pinned_fraction * least), *beside))
    kv.pins.most_of_tenant = min(kv.pins.most, int(config.max_pinned_fraction_per_key * least))


def objection_to(state: SchedulerState, request: Request) -> PacelineError | None:
    """Why a request that is there to compute a pin cannot have it; None: it can."""
    wanted, pins = request.sampling.pin, state.kv.pins
    if wanted is None or not wanted.computes:
        return None
    if not state.kv.caching or state.mode.keeps_finished:
        return InvalidRequest(
            "pin: this engine keeps no prefixes (--no-enable-prefix-caching, or padded batches by --mode)",
            param="pin",
        )
    tenant = account_of(request.tenant)
    lacking, room = pins.lacking(tenant, request.keys), pins.room_for(tenant)
    if lacking <= room:
        return None
    return PinsFull(
        f"{lacking} KV blocks more would be pinned and {room} may be: this key may pin {pins.most_of_tenant} and has "
        f"{pins.of_tenant(tenant)}, all keys together {pins.most} and have {pins.num_blocks}; delete a context, or "
        "make one without pin"
    )


def keep(state: SchedulerState, request: Request) -> None:
    """A request on a row has come to its end: what it has computed of its prompt is pinned, if it wants that."""
    wanted, kv = _left_of(state, request, request.sampling.pin), state.kv
    if wanted is None or not kv.pins.most:
        return
    num_tokens = min(request.num_prompt, wanted.num_tokens or request.num_prompt)
    keys = request.keys[: num_tokens // kv.block_size]
    tenant = account_of(request.tenant)
    bought = kv.pins.pin(request.id, tenant, wanted.name, keys, wanted.ttl_s, _beside_reserved(state))
    _note(state, request, wanted, bought)


def keep_module(state: SchedulerState, request: Request, module: ModuleRef) -> None:
    """A request has placed a text whose module is to be pinned: that is made up for where it was lost. All of it or
    nothing, because a part of a module cannot be placed."""
    wanted, pins = _left_of(state, request, module.pin), state.kv.pins
    tenant = account_of(request.tenant)
    if wanted is None or pins.is_pinned(tenant, wanted.name, module.keys):
        return
    beside = _beside_reserved(state)
    if pins.lacking(tenant, module.keys) <= min(pins.room_for(tenant), beside):
        bought = pins.pin(request.id, tenant, wanted.name, module.keys, wanted.ttl_s, beside)
        _note(state, request, wanted, bought)


def price_of(state: SchedulerState, request: Request) -> tuple[int, int]:
    """Block-microseconds that the pins of a request would take if it came to its end now, and where none of it is paid
    for."""
    kv, tenant = state.kv, account_of(request.tenant)
    wanted = request.sampling.pin
    parts = [(each.pin, each.keys) for each in request.modules]
    if wanted is not None:
        num_tokens = min(request.num_prompt, wanted.num_tokens or request.num_prompt)
        parts.append((wanted, tuple(request.keys[: num_tokens // kv.block_size])))
    bought = most = 0
    for pin, keys in parts:
        if pin is not None and kv.pins.most:
            found = kv.pins.price(tenant, keys, pin.ttl_s)
            bought += found.block_us
            most += min(len(keys), kv.pins.most_of_tenant) * len(kv.groups) * pin.ttl_s * MICROSECONDS
    return bought, most


def count_from_arrival(
    state: SchedulerState, request: Request, modules: tuple[ModuleRef, ...]
) -> tuple[ModuleRef, ...]:
    """Modules of what is put into a request now, with pins that count from when the request came, as all of its do."""
    gone_s = _waited_s(state, request)
    return tuple(
        [
            replace(each, pin=replace(each.pin, ttl_s=min(MAX_PIN_S, each.pin.ttl_s + gone_s)))
            if each.pin is not None
            else each
            for each in modules
        ]
    )


def unpin(state: SchedulerState, tenant: str, name: str) -> bool:
    """A pin ends now, and no request under way makes it again."""
    for request in state.requests.values():
        if account_of(request.tenant) != tenant:
            continue
        request.modules = tuple(
            [
                replace(each, pin=None) if each.pin is not None and each.pin.name == name else each
                for each in request.modules
            ]
        )
        wanted = request.sampling.pin
        if wanted is not None and wanted.name == name:
            request.sampling = replace(request.sampling, pin=None if not wanted.computes else wanted)
    return state.kv.pins.unpin(tenant, name) is not None


def settle(state: SchedulerState) -> None:
    """Pins whose time is over end; what has become of pins since the last look goes on record."""
    pins = state.kv.pins
    pins.expire()
    if pins.ended:
        _record(state, pins)


def _left_of(state: SchedulerState, request: Request, wanted: Pin | None) -> Pin | None:
    """What is left of a pin. That of a context ends with it: its time was counted when the request came."""
    if wanted is None or not wanted.name or wanted.computes:
        return wanted
    left_s = wanted.ttl_s - _waited_s(state, request)
    return replace(wanted, ttl_s=left_s) if left_s > 0 else None


def _waited_s(state: SchedulerState, request: Request) -> int:
    return max(0, int(state.now_s - request.arrival_s))


def _note(state: SchedulerState, request: Request, wanted: Pin, bought: Bought) -> None:
    """What a request has got is on its receipt, and on record."""
    if not bought.num_blocks:
        return
    cost = request.cost
    request.cost = cost._replace(
        pinned=cost.pinned + bought.num_blocks, pinned_block_us=cost.pinned_block_us + bought.block_us
    )
    if bought.block_us:  # else all of it was pinned as long
        state.counters.pinned += 1
        figures = (NO_NUMBER, NO_NUMBER, bought.num_blocks, NO_REQUEST)
        rule = Rule.CONTEXT if wanted.name else Rule.PROMPT
        tokens = bought.num_blocks * state.kv.block_size
        state.decide(DecisionKind.PIN, request, rule, tokens, figures, seconds=float(wanted.ttl_s))


def _record(state: SchedulerState, pins: Pins) -> None:
    ended, pins.ended = pins.ended, []
    for pin, is_lost in ended:
        rule = (
            Rule.LOST
            if is_lost
            else Rule.OVER
            if pin.until_us <= state.kv.block_time.now_us
            else Rule.DELETED
        )
        tokens = len(pin.names) * state.kv.block_size
        state.counters.pins_lost += is_lost
        state.decisions.append(
            Decision(
                DecisionKind.UNPIN,
                RequestId(pin.owner),
                rule,
                tokens,
                state.kv.submitted + 1,
                state.now_s,
                blocks_needed=len(pin.names),
            )
        )


def _beside_reserved(state: SchedulerState) -> int:
    """Blocks that may be pinned beside the full lengths that were promised and the longest other request."""
    if not state.rows.num_reserved:
        return NO_LIMIT
    taken = reserved_full(state)
    return max(
        0,
        min(
            group.unpinned - taken[group.index] - largest_unreserved(state, group.index)
            for group in state.kv.groups
        ),
    )
