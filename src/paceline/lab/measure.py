"""Writes down what happens in a run, at a constant cost per step.

Owns the columns a `RunRecord` is made of while they grow: arrays indexed by request number, one packed line
per step, a buffer of gaps between tokens. It hears of tokens and steps as columns and never loops over
tokens. No measure is computed here; that is `report`'s business.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.events import Finished, TokenEvents
from paceline.core.plan import StepPlan
from paceline.core.request import FinishReason, Request
from paceline.lab.report.run_record import OUTCOMES, RunRecord
from paceline.lab.workload.workload import Workload
from paceline.scheduler.state import SchedulerState

_OUTCOME_OF = {
    FinishReason.STOP: OUTCOMES.index("finished"),
    FinishReason.LENGTH: OUTCOMES.index("finished"),
    FinishReason.ABORT: OUTCOMES.index("aborted"),
    FinishReason.ERROR: OUTCOMES.index("failed"),
}
_FINISHED = OUTCOMES.index("finished")
_REFUSED = OUTCOMES.index("refused")
_UNFINISHED = OUTCOMES.index("unfinished")

_COUNTS = ("output_len", "cached_tokens", "preemptions", "recomputed_tokens")
_STEP_COLUMNS = (
    "start_s",
    "end_s",
    "replica",
    "rows",
    "decode",
    "prefill",
    "padded",
    "waiting",
    "kv_used",
    "kv_filled",
    "preempted",
)
_STEP = struct.Struct("<2d9i")
_STEP_DTYPE = np.dtype([(name, "<f8" if name.endswith("_s") else "<i4") for name in _STEP_COLUMNS])

StepFigures = tuple[int, ...]  # the columns of a step from `rows` on


class Meter:
    """All measuring of one run, of all its replicas."""

    def __init__(
        self, workload: Workload, classes: tuple[tuple[str, ...], NDArray[np.int32]] | None = None
    ) -> None:
        """`classes` are the names of classes and which of them each request falls into; None: all are alike."""
        count = len(workload)
        self._classes, self._service_class = classes or ((), np.empty(0, np.int32))
        self.num_ended = 0
        self.last_s = 0.0  # when the last thing happened
        self._workload = workload
        self._last_token_s = np.full(count, np.nan)
        self._predicted_ttft_s = np.empty(0)
        self._outcome = np.full(count, _UNFINISHED, np.uint8)
        self._times = {name: np.full(count, np.nan) for name in ("admitted_s", "first_token_s", "finished_s")}
        self._counts = {name: np.zeros(count, np.int32) for name in _COUNTS}
        self._block_us = np.zeros(count, np.int64)
        self._gaps = bytearray()  # between tokens, as 32-bit floats
        self.steps = bytearray()  # where `StepMeter`s write

    def tokens(self, events: TokenEvents) -> None:
        """A step delivered tokens to some requests, those of a request one behind the other."""
        requests, time_s = events.requests, events.time_s
        gaps = time_s - self._last_token_s[requests]  # NaN for a first token
        # Drafts that were right come with the token before them.
        gaps[1:][requests[1:] == requests[:-1]] = 0.0
        self._gaps += gaps.astype(np.float32).tobytes()
        self._last_token_s[requests] = time_s

    def ended(self, finished: Finished, request: Request) -> None:
        """A request has come to its end, whichever it was."""
        index = finished.request
        self.num_ended += 1
        self.last_s = max(self.last_s, finished.time_s)
        outcome = _OUTCOME_OF[finished.reason]
        self._outcome[index] = outcome
        if outcome == _FINISHED:
            self._times["finished_s"][index] = finished.time_s
        if request.admitted_s is not None:
            self._times["admitted_s"][index] = request.admitted_s
        if request.first_token_s is not None:
            self._times["first_token_s"][index] = request.first_token_s
        counts = (finished.num_output, finished.num_cached, finished.preemptions, finished.cost.redone)
        for name, count in zip(_COUNTS, counts, strict=True):
            self._counts[name][index] = count
        self._block_us[index] = finished.cost.block_us

    def predicted(self, index: int, ttft_s: float) -> None:
        """When a request's first token would come, as was said at its arrival."""
        if not self._predicted_ttft_s.size:
            self._predicted_ttft_s = np.full(len(self._workload), np.nan)
        self._predicted_ttft_s[index] = ttft_s

    def refused(self, index: int, time_s: float) -> None:
        """A request was not accepted."""
        self.num_ended += 1
        self.last_s = max(self.last_s, time_s)
        self._outcome[index] = _REFUSED

    def record(
        self,
        label: str,
        config: Mapping[str, object],
        *,
        max_num_seqs: int,
        num_replicas: int,
        kv_total_slots: int,
        preempted_by: Mapping[str, int] | None = None,
        replica_s: float | None = None,
        origin_s: float = 0.0,
    ) -> RunRecord:
        """Everything so far as one value. `origin_s` is when the workload began, by the clock of the events."""
        gaps = np.frombuffer(bytes(self._gaps), np.float32)
        steps = np.frombuffer(bytes(self.steps), _STEP_DTYPE)
        columns: dict[str, Any] = {
            f"step_{name}": steps[name] - origin_s if name.endswith("_s") else steps[name]
            for name in _STEP_COLUMNS
        }
        columns |= {name: times - origin_s for name, times in self._times.items()} | self._counts
        return RunRecord(
            label=label,
            config=config,
            max_num_seqs=max_num_seqs,
            num_replicas=num_replicas,
            replica_s=replica_s,
            duration_s=max(0.0, self.last_s - origin_s),
            kv_total_slots=kv_total_slots,
            arrival_s=self._workload.arrival_s,
            predicted_ttft_s=self._predicted_ttft_s,
            prompt_len=self._workload.prompt_len,
            kv_block_us=self._block_us,
            tenant=self._workload.tenant,
            outcome=self._outcome,
            service_class=self._service_class,
            classes=self._classes,
            preempted_by=preempted_by or {},
            itl_s=gaps[~np.isnan(gaps)],
            **columns,
        )


class StepMeter:
    """Writes down the steps of one replica, as its runner is given them."""

    def __init__(self, meter: Meter, replica: int, state: SchedulerState) -> None:
        self._lines = meter.steps
        self._replica = replica
        self._state = state
        self._preempted = 0

    def __call__(self, plan: StepPlan, start_s: float, end_s: float) -> None:
        self.write(self.figures(plan), start_s, end_s)

    def write(self, figures: StepFigures, start_s: float, end_s: float) -> None:
        self._lines += _STEP.pack(start_s, end_s, self._replica, *figures)

    def figures(self, plan: StepPlan) -> StepFigures:
        """How things stand once a step has been planned, before its result is known."""
        state, work = self._state, plan.work
        preempted = state.counters.preempted - self._preempted
        self._preempted += preempted
        used, filled = kv_slots(state)
        return (
            state.rows.num_live,
            work.decode_rows - plan.padding_rows,
            work.prefill_tokens - plan.pad_tokens,
            plan.pad_tokens + plan.padding_rows,
            len(state.requests) - state.rows.num_live,
            used,
            filled,
            preempted,
        )


def kv_slots(state: SchedulerState) -> tuple[int, int]:
    """Slots that are allocated, and slots of these that hold a token once the step just planned is done.

    Only a row's own last blocks can be part-filled: what rows share is full. So the empty slots are counted
    row by row, and what is shared, or waits to be set free, counts once.
    """
    group, rows = state.kv.groups[0], state.rows
    high = rows.high
    used = (group.pool.usable - group.pool.num_free) * state.kv.block_size
    held = int(np.add.reduce(group.held[:high])) * state.kv.block_size
    tokens = rows.scheduled[:high]
    if state.mode.keeps_finished:
        # A padded batch goes on computing rows past their end; what it writes there is of no use to anyone.
        tokens = np.minimum(tokens, rows.max_len[:high])
    return used, used - held + int(np.dot(tokens, rows.live[:high]))
