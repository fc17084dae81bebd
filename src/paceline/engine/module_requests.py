"""Texts of prompts that are placed: which modules they come from, and modules that have to be computed first.

A module is computed by a request of its own, whose keys begin at the root of modules of its tenant, and which ends with
its prompt. One that a waiting request needs and that is not in the cache is added here, when the scheduler orders it;
like any other it is an input of the scheduler, so that a replay knows it. Decision: docs/decisions/0055-contexts.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from paceline.core.request import (
    NOTHING_PLACED,
    OWN_REQUESTS,
    BlockKey,
    ModuleRef,
    PlacedStretches,
    Request,
    RequestId,
)
from paceline.core.sampling import SamplingParams
from paceline.core.stretch import ModulePart, Stretch, StretchKind
from paceline.errors import InvalidRequest
from paceline.scheduler.scheduler import Scheduler

# Keys of the full blocks of a module of a request's tenant, by its tokens.
KeysOf = Callable[[Request, NDArray[np.int32]], list[BlockKey]]


class ModuleRequests:
    """Those of one engine."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.keys_of: KeysOf | None = None
        self.orders = scheduler.state.modules.orders
        self._scheduler = scheduler
        self._block_size = scheduler.state.kv.block_size
        self._next_id: int = OWN_REQUESTS

    def attach(self, request: Request, parts: Sequence[ModulePart]) -> None:
        """Give a new request its modules and where they are placed."""
        attach(request, parts, self._keys(), self._block_size)

    def placed_behind(
        self, request: Request, num_tokens: int, inserted: NDArray[np.int32], parts: Sequence[ModulePart]
    ) -> PlacedStretches:
        """What is placed of tokens that are put behind the first `num_tokens` of a request."""
        if not parts:
            return NOTHING_PLACED
        found = placed_in(request, inserted, parts, self._keys(), self._block_size)
        before = len(request.modules)
        stretches = [
            Stretch(num_tokens + start, num_tokens + end, kind, before + item)
            for start, end, kind, item in found.stretches
        ]
        return PlacedStretches(found.modules, tuple(stretches))

    def obey(self) -> None:
        """Add a request for each module that was ordered."""
        for request, stretch in list(self.orders.values()):
            keys = request.modules[stretch.item].keys
            end = stretch.start + len(keys) * self._block_size
            first_ms = request.sampling.ttft_slo_ms
            module = Request(
                RequestId(self._next_id),
                request.tokens[stretch.start : end].copy(),
                SamplingParams(max_tokens=1, temperature=0.0, ttft_slo_ms=first_ms, on_infeasible="try"),
                arrival_s=request.arrival_s,
                tenant=request.tenant,
                service_level=request.service_level,
                deadline_s=request.deadline_s,
                keys=keys,
            )
            module.model, module.adapter, module.is_module = request.model, request.adapter, True
            self._next_id += 1
            self._scheduler.add([module])

    def _keys(self) -> KeysOf:
        if self.keys_of is None:
            raise InvalidRequest("this engine makes no keys of blocks, and places no texts", param="prompt")
        return self.keys_of


def attach(request: Request, parts: Sequence[ModulePart], keys_of: KeysOf, block_size: int) -> None:
    """The same, with keys from anywhere."""
    found = placed_in(request, request.tokens, parts, keys_of, block_size)
    request.modules = found.modules
    request.stretches = tuple(sorted((*request.stretches, *found.stretches)))
    if any(one.end > other.start for one, other in pairwise(request.stretches)):
        raise InvalidRequest("a placed text has no pictures", param="prompt")


def placed_in(
    request: Request, tokens: NDArray[np.int32], parts: Sequence[ModulePart], keys_of: KeysOf, block_size: int
) -> PlacedStretches:
    """The modules of texts among tokens of a request, and their stretches, which count from the first token."""
    refs: list[ModuleRef] = []
    placed, end = [], 0
    for start, num_tokens, recompute, pin in parts:
        if start < end or num_tokens < 1 or start + num_tokens > len(tokens):
            raise InvalidRequest("the tokens of a placed text do not stand in the prompt", param="prompt")
        end = start + num_tokens
        keys = keys_of(request, tokens[start:end])
        # The last token of a prompt is always computed, and so is what is behind the module's full blocks.
        last = min(start + len(keys) * block_size, len(tokens) - 1)
        if last > start + recompute:
            placed.append(Stretch(start, last, StretchKind.PLACED, len(refs)))
            refs.append(ModuleRef(keys=tuple(keys), num_tokens=num_tokens, recompute=recompute, pin=pin))
    return PlacedStretches(tuple(refs), tuple(placed))
