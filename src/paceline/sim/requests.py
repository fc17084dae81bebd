"""Requests of a workload, made one by one at the moment they arrive.

Owns how lengths become a `Request` and how the block ids of a trace become prefix keys. Prompts are zeros:
every request looks at one and the same zero, so that nothing is stored. An output has exactly its recorded
length, as in the benchmarks: nothing ends it early.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from paceline.core.classes import DEFAULT_CLASS, LEVELS, SPOT
from paceline.core.request import BlockKey, Request, RequestId
from paceline.core.sampling import SamplingParams
from paceline.errors import InputError
from paceline.workload.model import Workload

PRIORITY_FORMS = "none, tenant, class, random:LEVELS"
MAX_LEVELS = 1000


class RequestSource:
    """Makes request number `index` of a workload; its id is its number."""

    def __init__(
        self,
        workload: Workload,
        block_size: int,
        *,
        priorities: NDArray[np.int32],
        spot: NDArray[np.bool_] | None = None,
        deadline_s: tuple[float, float] | None = None,
    ) -> None:
        self._deadline_s = deadline_s
        self.workload = workload
        self._block_size = block_size
        self._priority: list[int] = priorities.tolist()
        self._spot = spot  # which requests are spot work; None: none
        # A step of zero bytes from one entry to the next: as long as needed, and no memory.
        self._zeros = np.broadcast_to(np.int32(0), int(workload.prompt_len.max(initial=1)))
        self._sampling: dict[int, SamplingParams] = {}

    def make(self, index: int) -> Request:
        workload = self.workload
        request = Request(
            RequestId(index),
            self._zeros[: workload.prompt_len[index]],
            self._sampling_of(int(workload.output_len[index])),
            arrival_s=float(workload.arrival_s[index]),
            tenant=workload.tenants[workload.tenant[index]],
            priority=self._priority[index],
            deadline_s=self._deadline(index),
            keys=self.keys(index),
        )
        request.is_spot = self._spot is not None and bool(self._spot[index])
        return request

    def _deadline(self, index: int) -> float | None:
        if self._deadline_s is None:
            return None
        start_s, token_s = self._deadline_s
        return (
            float(self.workload.arrival_s[index]) + start_s + token_s * int(self.workload.output_len[index])
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

    def _sampling_of(self, output_len: int) -> SamplingParams:
        sampling = self._sampling.get(output_len)
        if sampling is None:
            sampling = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
            self._sampling[output_len] = sampling
        return sampling


def draw_priorities(form: str, workload: Workload, seed: int) -> NDArray[np.int32]:
    """A priority per request: `none` (all 0), `tenant` (the tenant's number), `class` (the level of the class that the
    tenant is named after) or `random:LEVELS`."""
    if form == "none":
        return np.zeros(len(workload), np.int32)
    if form == "tenant":
        return workload.tenant
    if form == "class":
        by_tenant = [LEVELS.get(name, LEVELS[DEFAULT_CLASS]) for name in workload.tenants]
        return np.array(by_tenant, np.int32)[workload.tenant]
    kind, _, levels = form.partition(":")
    if kind != "random" or not levels.isascii() or not levels.isdigit():
        raise InputError(f"unknown priorities '{form}'; the forms are {PRIORITY_FORMS}")
    if not 1 <= int(levels) <= MAX_LEVELS:
        raise InputError(f"priorities '{form}': LEVELS must lie between 1 and {MAX_LEVELS}")
    random = np.random.default_rng([seed, 0x7072696F])
    return random.integers(0, int(levels), len(workload), dtype=np.int32)


def draw_spot(form: str, workload: Workload) -> NDArray[np.bool_] | None:
    """Which requests are spot work: with `class`, those of the tenant of that name."""
    if form != "class" or SPOT not in workload.tenants:
        return None
    found: NDArray[np.bool_] = workload.tenant == workload.tenants.index(SPOT)
    return found
