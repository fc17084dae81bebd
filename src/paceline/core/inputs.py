"""What the scheduler is given: one frozen value for each kind of input.

Every input is noted in the scheduler's journal with its time. A run is its config, its journal and the results of its
steps: a replay feeds the same values to the same scheduler. `kind` is the name of an input in the run log, and the
order of its fields is the order of its values there; see docs/reference/run-log.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, TypeVar, dataclass_transform

import numpy as np

from paceline.core.dial import DialKind
from paceline.core.parameters import KVKeep, Pin, PoolingParams
from paceline.core.request import (
    DEFAULT_TENANT,
    BlockReason,
    ModuleRef,
    PlacedStretches,
    Request,
    RequestId,
    TreeLimits,
    named_keys,
)
from paceline.core.sampling import DEFAULT_HOLD_S, SamplingParams
from paceline.core.service_class import DEFAULT_CLASS, ServiceLevel
from paceline.core.stretch import MediaItem, Stretch, StretchKind


class Input:
    """Base of all inputs."""

    __slots__ = ()
    kind: ClassVar[str] = ""


Journal = list[tuple[float, Input]]  # each with the time it came
INPUT_TYPES: dict[str, type[Input]] = {}  # by the name they have in the run log
Declared = TypeVar("Declared", bound=Input)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def _logged_as(name: str) -> Callable[[type[Declared]], type[Declared]]:
    def declare(declared: type[Declared]) -> type[Declared]:
        declared.kind = name
        # Frozen for the type checker alone, as a `core.fast.value` is: some are made in every step.
        made = dataclass(slots=True, kw_only=True)(declared)
        INPUT_TYPES[name] = made
        return made

    return declare


LoggedStretch = tuple[int, int, int, int]  # start, end, kind, place among items or modules
# The keys of its blocks, its tokens, how many of them are computed again, and its pin: seconds and a name.
LoggedModule = tuple[tuple[bytes, ...], int, int, tuple[int, str] | None]


def log_stretches(stretches: Iterable[Stretch]) -> tuple[LoggedStretch, ...]:
    return tuple([(start, end, int(kind), item) for start, end, kind, item in stretches])


def log_modules(modules: Iterable[ModuleRef]) -> tuple[LoggedModule, ...]:
    return tuple(
        [
            (
                tuple([key.key for key in module.keys]),
                module.num_tokens,
                module.recompute,
                None if module.pin is None else (module.pin.ttl_s, module.pin.name),
            )
            for module in modules
        ]
    )


def logged_placed(stretches: Iterable[LoggedStretch], modules: Iterable[LoggedModule]) -> PlacedStretches:
    """What was logged, with keys without what they were made from."""
    refs = [
        ModuleRef(
            keys=tuple(named_keys(keys)),
            num_tokens=num_tokens,
            recompute=recompute,
            pin=None if pin is None else Pin(ttl_s=pin[0], name=pin[1]),
        )
        for keys, num_tokens, recompute, pin in modules
    ]
    found = [Stretch(start, end, StretchKind(kind), item) for start, end, kind, item in stretches]
    return PlacedStretches(tuple(refs), tuple(found))


@_logged_as("add")
class AddRequest(Input):
    """A request was accepted or refused. In the log its values stand by name, without those that are the default."""

    id: RequestId
    num_prompt: int
    max_tokens: int
    arrival_s: float
    tenant: str = DEFAULT_TENANT
    priority: int = 0
    deadline_s: float | None = None
    parent: RequestId | None = None
    keys: tuple[bytes, ...] = ()
    model: int = 0
    adapter: int = 0
    num_tokens: int
    together: int = 1  # requests that this call accepted or refused as one
    # `wishes` in run logs: deadline_ms, ttft_slo_ms, itl_slo_ms, on_infeasible; None: the request has no objective
    wishes: tuple[int | None, int | None, int | None, str] | None = None
    service_class: str = DEFAULT_CLASS
    shares: int | None = None  # tokens it has in common with its parent; None: its prompt
    score: float = 0.0
    hold_s: float | None = None  # how long it is held at its end; None: it is not
    tree: tuple[int | None, int | None, int] | None = None  # limits of its tree: rows, tokens, branches
    # What of its prompt is to stay cached: seconds, the name of a context, tokens, whether it computes that alone.
    pin: tuple[int, str, int | None, bool] | None = None
    cache_share: float = 1.0  # of its tenant
    kv_keep: tuple[int, int] | None = None  # first and recent tokens whose KV is kept; None: all are
    # It ends with a vector: the kind, and the token ids of choice.
    pooling: tuple[str, tuple[int, ...]] | None = None
    media: tuple[tuple[bytes, int, int], ...] = ()  # of each item: its key, units, vectors
    stretches: tuple[LoggedStretch, ...] = ()
    modules: tuple[LoggedModule, ...] = ()
    is_module: bool = False

    @classmethod
    def of(cls, request: Request, together: int) -> AddRequest:
        wanted, limits = request.sampling, request.tree_limits
        kept, pooled, pin = wanted.kv_keep, wanted.pooling, wanted.pin
        wishes = (wanted.deadline_ms, wanted.ttft_slo_ms, wanted.itl_slo_ms, wanted.on_infeasible)
        return cls(
            id=request.id,
            num_prompt=request.num_prompt,
            max_tokens=wanted.max_tokens,
            arrival_s=request.arrival_s,
            tenant=request.tenant,
            priority=request.service_level.priority,
            deadline_s=request.deadline_s,
            parent=request.parent,
            keys=tuple([key.key for key in request.keys]),
            model=request.model,
            adapter=request.adapter,
            num_tokens=request.num_tokens,
            together=together,
            wishes=wishes if wanted.has_objectives else None,
            service_class=request.service_level.service_class,
            shares=None if request.shares == request.num_prompt else request.shares,
            score=request.score,
            hold_s=wanted.hold_s if wanted.on_stop == "hold" else None,
            tree=None if limits is None else (limits.max_rows, limits.max_tokens, limits.max_branches),
            pin=None if pin is None else (pin.ttl_s, pin.name, pin.num_tokens, pin.computes),
            cache_share=wanted.cache_share,
            kv_keep=None if kept is None else (kept.first, kept.recent),
            pooling=None if pooled is None else (pooled.kind, pooled.token_ids),
            media=tuple([(item.key, item.units, item.outputs) for item in request.media]),
            stretches=log_stretches(request.stretches),
            modules=log_modules(request.modules),
            is_module=request.is_module,
        )

    def make_request(self) -> Request:
        """The request again, with zeros for its tokens and keys without what they were made from."""
        deadline_ms, ttft_slo_ms, itl_slo_ms, on_infeasible = self.wishes or (None, None, None, "refuse")
        request = Request(
            self.id,
            np.zeros(self.num_tokens, np.int32),
            SamplingParams(
                max_tokens=self.max_tokens,
                deadline_ms=deadline_ms,
                ttft_slo_ms=ttft_slo_ms,
                itl_slo_ms=itl_slo_ms,
                on_infeasible=on_infeasible,
                on_stop="end" if self.hold_s is None else "hold",
                hold_s=DEFAULT_HOLD_S if self.hold_s is None else self.hold_s,
                pin=None
                if self.pin is None
                else Pin(ttl_s=self.pin[0], name=self.pin[1], num_tokens=self.pin[2], computes=self.pin[3]),
                cache_share=self.cache_share,
                kv_keep=None
                if self.kv_keep is None
                else KVKeep(first=self.kv_keep[0], recent=self.kv_keep[1]),
                pooling=None
                if self.pooling is None
                else PoolingParams(kind=self.pooling[0], token_ids=self.pooling[1]),
            ),
            arrival_s=self.arrival_s,
            tenant=self.tenant,
            service_level=ServiceLevel(self.service_class, self.priority),
            deadline_s=self.deadline_s,
            keys=named_keys(self.keys),
        )
        request.num_prompt, request.parent = self.num_prompt, self.parent
        request.model, request.adapter = self.model, self.adapter
        request.media = tuple([MediaItem(key=key, units=units, outputs=n) for key, units, n in self.media])
        request.modules, request.stretches = logged_placed(self.stretches, self.modules)
        request.is_module = self.is_module
        request.shares = self.num_prompt if self.shares is None else self.shares
        request.score = self.score
        if self.tree is not None:
            rows, tokens, branches = self.tree
            request.tree_limits = TreeLimits(max_rows=rows, max_tokens=tokens, max_branches=branches)
        return request


@_logged_as("abort")
class AbortRequest(Input):
    request: RequestId
    detail: str


@_logged_as("finish_at")
class FinishRequest(Input):
    """A stop was found outside the step loop."""

    request: RequestId
    num_output: int


@_logged_as("fail")
class FailRequest(Input):
    """Something outside the step loop that a request needs has failed."""

    request: RequestId
    detail: str


@_logged_as("extend")
class Extend(Input):
    """Tokens were put behind those of a request."""

    request: RequestId
    num_tokens: int
    max_tokens: int  # that it may generate behind them
    # What of them is placed, as in AddRequest; stretches count from the request's first token.
    stretches: tuple[LoggedStretch, ...] = ()
    modules: tuple[LoggedModule, ...] = ()


@_logged_as("score")
class SetScore(Input):
    request: RequestId
    score: float


@_logged_as("priority")
class SetPriority(Input):
    request: RequestId
    priority: int


@_logged_as("deadline")
class SetDeadline(Input):
    request: RequestId
    deadline_s: float | None


@_logged_as("policy")
class SetPolicy(Input):
    name: str
    options: tuple[tuple[str, float | str], ...]


@_logged_as("dial")
class SetDial(Input):
    target: DialKind
    value: float


@_logged_as("preempt")
class Preempt(Input):
    request: RequestId
    swap: bool | None  # None: what is cheaper


@_logged_as("pause")
class Pause(Input):
    request: RequestId
    swap: bool | None


@_logged_as("resume")
class Resume(Input):
    request: RequestId


@_logged_as("block")
class Block(Input):
    request: RequestId
    reason: BlockReason
    deadline_s: float | None


@_logged_as("unblock")
class Unblock(Input):
    request: RequestId


@_logged_as("reset_cache")
class ResetCache(Input):
    """Every cached prefix is dropped."""


@_logged_as("unpin")
class Unpin(Input):
    """A pin ends before its time."""

    tenant: str
    name: str


@_logged_as("adapter")
class SetAdapter(Input):
    """From now on a number stands for the adapter of this identity; without one, for none any more."""

    number: int
    identity: str


@_logged_as("restored")
class Restored(Input):
    """What earlier runs, or other servers, have left on the disk can be hit from now on."""

    places: tuple[int, ...]  # none: wherever there is room
    keys: tuple[bytes, ...]
    uses: tuple[int, ...]
    learned: tuple[tuple[float, ...], ...] = ()  # by their eviction, by level


@_logged_as("adapter_read")
class AdapterRead(Input):
    """An adapter that the scheduler asked for is in memory, or could not be read."""

    number: int
    failed: bool


@_logged_as("done")
class Done(Input):
    """The result of a step."""

    seq: int


@_logged_as("step_failed")
class StepFailed(Input):
    """No result will come for the steps under way."""


@_logged_as("sleep")
class Sleep(Input):
    """The runner's memory is let go of: rows, adapters and cached prefixes with it."""

    levels_lost: int  # whose prefixes go: 1 the device's, 2 those in host memory too, 3 all


@_logged_as("slab")
class MoveSlab(Input):
    """The blocks of a slab come from another model, or go to it; rows that hold any of them are preempted."""

    number: int
    gained: bool


@_logged_as("shrink")
class Shrink(Input):
    """A step ran out of memory."""


@_logged_as("fail_all")
class FailAll(Input):
    """The engine is lost."""


@_logged_as("withheld")
class Withheld(Input):
    """A fault injector keeps this number of free blocks back from now on."""

    blocks: tuple[int, ...]  # per layer group


# The rest follow from the clock and from other inputs. They are noted, so that a replay can be compared.


@_logged_as("expired")
class Expired(Input):
    """A deadline passed."""

    request: RequestId


@_logged_as("keys")
class Keys(Input):
    """What the hooks answered when asked for the keys of computed blocks."""

    request: RequestId
    keys: tuple[bytes, ...]


@_logged_as("idle")
class Idle(Input):
    """There was no plan to make. Repeated attempts that change nothing are left out."""
