"""Requests of a workload, made one by one at the moment they arrive.

Owns how lengths become a `Request` and how the block ids of a trace become prefix keys. Prompts are zeros:
every request looks at one and the same zero, so that nothing is stored. An output has exactly its recorded
length, as in the benchmarks: nothing ends it early.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.core.classes import CLASSES, DEFAULT_CLASS, Urgency
from paceline.core.request import BlockKey, Request, RequestId, sooner
from paceline.core.sampling import SamplingParams
from paceline.errors import InputError
from paceline.workload.model import Workload

PRIORITY_FORMS = "none, tenant, class, random:LEVELS"
MAX_LEVELS = 1000
MOST_CLASSES = 16  # that figures are kept apart for


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """What all requests of a run want of their times."""

    deadline_s: tuple[float, float] | None = None  # after arrival, and more for each token asked for
    ttft_slo_ms: int | None = None
    itl_slo_ms: int | None = None
    on_infeasible: str = "try"

    def of(self, output_len: int) -> tuple[int | None, ...]:
        """Deadline, first token and between tokens, of a request of so many tokens."""
        if self.deadline_s is None:
            return None, self.ttft_slo_ms, self.itl_slo_ms
        start_s, token_s = self.deadline_s
        return max(1, round(1e3 * (start_s + token_s * output_len))), self.ttft_slo_ms, self.itl_slo_ms


class RequestSource:
    """Makes request number `index` of a workload; its id is its number."""

    def __init__(
        self,
        workload: Workload,
        block_size: int,
        *,
        priorities: NDArray[np.int32],
        classes: Sequence[str] = (),
        wants: Wants | None = None,
    ) -> None:
        self._wants = wants or Wants()
        self.workload = workload
        self._block_size = block_size
        self._priority: list[int] = priorities.tolist()
        self._classes = classes or [DEFAULT_CLASS] * len(workload.tenants)  # of service, one for each tenant
        # A step of zero bytes from one entry to the next: as long as needed, and no memory.
        self._zeros = np.broadcast_to(np.int32(0), int(workload.prompt_len.max(initial=1)))
        self._sampling: dict[tuple[int | None, ...], SamplingParams] = {}

    def make(self, index: int) -> Request:
        workload = self.workload
        sampling, arrival_s = self._sampling_of(index), float(workload.arrival_s[index])
        tenant = int(workload.tenant[index])
        return Request(
            RequestId(index),
            self._zeros[: workload.prompt_len[index]],
            sampling,
            arrival_s=arrival_s,
            tenant=workload.tenants[tenant],
            urgency=Urgency(self._classes[tenant], self._priority[index]),
            deadline_s=sooner(None, arrival_s, sampling.deadline_ms),
            keys=self.keys(index),
        )

    def keys(self, index: int) -> list[BlockKey]:
        """The keys of the full blocks of a prompt, as far as the workload names their content."""
        prefix_ids = self.workload.prefix_ids
        if prefix_ids is None:
            return []
        ids, size, span = prefix_ids[index], self._block_size, self.workload.prefix_block
        tenant = int(self.workload.tenant[index])
        known = min(int(self.workload.prompt_len[index]), len(ids) * span)
        keys = []
        for start in range(0, known - size + 1, size):
            # A block is named by the ids it lies in and its place there. An id stands for all that is
            # before it too, so that equal keys mean equal beginnings.
            within = ids[start // span : (start + size - 1) // span + 1]
            name = struct.pack(f"<iq{len(within)}q", tenant, start % span, *within)
            keys.append(BlockKey(name, name))
        return keys

    def _sampling_of(self, index: int) -> SamplingParams:
        """One for all requests that are alike."""
        output_len = int(self.workload.output_len[index])
        wishes = self._wants.of(output_len)
        if self.workload.wishes is not None:  # what a trace says of a request goes before what all want
            own = self.workload.wishes[index].tolist()
            wishes = tuple(mine or other for mine, other in zip(own, wishes, strict=True))
        key = (output_len, *wishes)
        sampling = self._sampling.get(key)
        if sampling is None:
            deadline_ms, ttft_slo_ms, itl_slo_ms = wishes
            sampling = self._sampling[key] = SamplingParams(
                max_tokens=output_len,
                temperature=0.0,
                ignore_eos=True,
                deadline_ms=deadline_ms,
                ttft_slo_ms=ttft_slo_ms,
                itl_slo_ms=itl_slo_ms,
                on_infeasible=self._wants.on_infeasible,
            )
        return sampling


def draw_priorities(form: str, workload: Workload, seed: int) -> NDArray[np.int32]:
    """A priority per request: `none` (as the workload has it, else all 0), `tenant` (the tenant's number), `class` (0:
    the class that a tenant is named after says it) or `random:LEVELS`."""
    if form == "none" and workload.priority is not None:
        return workload.priority
    if form in ("none", "class"):
        return np.zeros(len(workload), np.int32)
    if form == "tenant":
        return workload.tenant
    kind, _, levels = form.partition(":")
    if kind != "random" or not levels.isascii() or not levels.isdigit():
        raise InputError(f"unknown priorities '{form}'; the forms are {PRIORITY_FORMS}")
    if not 1 <= int(levels) <= MAX_LEVELS:
        raise InputError(f"priorities '{form}': LEVELS must lie between 1 and {MAX_LEVELS}")
    random = np.random.default_rng([seed, 0x7072696F])
    return random.integers(0, int(levels), len(workload), dtype=np.int32)


def service_classes(form: str, workload: Workload) -> list[str]:
    """The class of service of each tenant: with `class` the one it is named after."""
    if form != "class":
        return [DEFAULT_CLASS] * len(workload.tenants)
    return [name if name in CLASSES else DEFAULT_CLASS for name in workload.tenants]


def kinds_of(
    form: str, workload: Workload, priorities: NDArray[np.int32]
) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """Names of what figures are kept apart for, classes or levels of priority, and which of them each request has;
    nothing where all are alike."""
    if form == "class":
        classes = service_classes(form, workload)
        names = sorted(set(classes), key=CLASSES.index)
        index = np.array([names.index(name) for name in classes])[workload.tenant]
    else:
        levels, index = np.unique(priorities, return_inverse=True)
        names = [f"priority {level}" for level in levels]
    if not 1 < len(names) <= MOST_CLASSES:
        return (), np.empty(0, np.int32)
    return tuple(names), index.astype(np.int32)
