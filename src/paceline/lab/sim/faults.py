"""Things that go wrong on purpose, drawn from a seed.

Aborts and bursts are properties of the workload and drawn before the run; stalls, allocation failures and
forced preemptions are rolled per step of a replica, each from its own stream. What happens next is decided by
the engine under test.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from paceline.core.request import RequestId
from paceline.errors import InputError
from paceline.lab.workload.workload import Workload
from paceline.scheduler.scheduler import Scheduler

BURST_SIZE = 32
STALL_FACTORS = (2.0, 50.0)  # a stalled step takes a multiple between these
IMPATIENT_S = 2.0  # an abort by time comes within so long after arrival
BY_TIME_SHARE = 0.25  # of the aborts; the others come at a token of the output
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSpec:
    """How often each fault happens; 0 is never."""

    aborts: float = 0.0  # share of requests that are aborted at a random point of their life
    bursts: float = 0.0  # extra requests, as a share of the workload, in bursts of 32 at one moment
    stalls: float = 0.0  # share of steps that take 2 to 50 times as long
    alloc: float = 0.0  # share of steps in whose planning no block can be had
    preempt: float = 0.0  # share of steps before which a running request is preempted

    @property
    def any_per_step(self) -> bool:
        return bool(self.stalls or self.alloc or self.preempt)


def parse_faults(text: str) -> FaultSpec:
    """`aborts=0.1,stalls=0.01` as a value."""
    known = [spec.name for spec in fields(FaultSpec)]
    shares: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in known or name in shares:
            what = "given twice" if name in shares else "not a fault"
            form = ",".join(f"{fault}=SHARE" for fault in known)
            raise InputError(f"faults: '{name}' is {what}; write {form} with shares from 0 to 1")
        try:
            shares[name] = float(value)
        except ValueError:
            shares[name] = math.nan
        if not 0.0 <= shares[name] <= 1.0:
            raise InputError(f"faults: '{part}' needs a share from 0 to 1, as in {name}=0.01")
    return FaultSpec(**shares)


def with_bursts(workload: Workload, share: float, seed: int) -> Workload:
    """The workload and `share` times as many requests again, which come in bursts.

    An extra request is the copy of one of the others, lengths and tenant and prompt alike.
    """
    count = round(len(workload) * share)
    if not count:
        return workload
    generator = np.random.default_rng([seed, 0x62757273])
    moments = generator.uniform(0.0, workload.duration_s, -(-count // BURST_SIZE))
    extra_s = np.repeat(np.round(moments, 6), BURST_SIZE)[:count]
    copied = generator.integers(0, len(workload), count)
    source = np.concatenate([np.arange(len(workload)), copied])
    arrival_s = np.concatenate([workload.arrival_s, extra_s])
    order = np.argsort(arrival_s, kind="stable")
    return workload.take(source[order], arrival_s[order])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Aborts:
    """When each request is aborted: at a time, or when it has delivered a token. Most never are."""

    at_s: NDArray[np.float64]  # inf: not by time
    at_token: NDArray[np.int64]  # index of the last token delivered; NEVER: not by token


def draw_aborts(workload: Workload, share: float, seed: int) -> Aborts | None:
    """`share` of the requests, picked and timed at random; None when there are none."""
    if not share:
        return None
    count = len(workload)
    generator = np.random.default_rng([seed, 0x61626F72])
    chosen = generator.random(count) < share
    by_time = chosen & (generator.random(count) < BY_TIME_SHARE)
    life = generator.random(count)
    at_token = np.floor(life * workload.output_len).astype(np.int64)
    return Aborts(
        at_s=np.where(by_time, workload.arrival_s + life * IMPATIENT_S, np.inf),
        at_token=np.where(chosen & ~by_time, at_token, NEVER),
    )


class ReplicaFaults:
    """The faults of one replica, rolled step by step."""

    def __init__(self, spec: FaultSpec, seed: int, replica: int) -> None:
        self._spec = spec
        self._stalls = random.Random(f"stalls:{seed}:{replica}")
        self._alloc = random.Random(f"alloc:{seed}:{replica}")
        self._preempt = random.Random(f"preempt:{seed}:{replica}")

    def stretch(self) -> float:
        """The factor by which the next step takes longer."""
        if not self._spec.stalls or self._stalls.random() >= self._spec.stalls:
            return 1.0
        low, high = STALL_FACTORS
        return low * math.pow(high / low, self._stalls.random())

    def before_step(self, scheduler: Scheduler) -> None:
        """What goes wrong before a step is planned."""
        if self._spec.alloc:
            refuses = self._alloc.random() < self._spec.alloc
            for group in scheduler.state.kv.groups:
                group.pool.withheld = group.pool.num_blocks if refuses else 0
        if self._spec.preempt and self._preempt.random() < self._spec.preempt:
            self._force_preemption(scheduler)

    def _force_preemption(self, scheduler: Scheduler) -> None:
        rows = scheduler.state.rows
        running = np.flatnonzero(rows.live[: rows.high] & ~rows.done[: rows.high])
        if len(running):
            row = running[self._preempt.randrange(len(running))]
            swap = self._preempt.random() < 0.5  # without host places it is recomputed all the same
            scheduler.preempt(RequestId(int(rows.request_id[row])), swap=swap)
