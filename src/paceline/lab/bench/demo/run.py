"""One mode of the demonstration: an engine of this mode, requests at their times, and what became of them.

Owns the loop that adds requests when they are due and steps the engine in between, on the real clock and in this
thread. What is shown while it runs is the caller's business: it is called after every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import ModelConfig
from paceline.core.clock import Clock, MonotonicClock
from paceline.core.events import Decision, StepEvents
from paceline.core.plan import StepPlan
from paceline.core.recorder import RunWatcher, StepWatcher
from paceline.core.request import Request, RequestId
from paceline.core.sampling import SamplingParams
from paceline.engine.stepper import Stepper
from paceline.factory import LoadedModel, load_model
from paceline.lab.measure import Meter, StepFigures, StepMeter
from paceline.lab.report.lanes import DECODE, EMPTY, HELD, PADDING, PROMPT, Codes, Lanes
from paceline.lab.report.run_record import RunRecord
from paceline.lab.workload import Workload
from paceline.llm.offline import Interrupts
from paceline.scheduler.state import SchedulerState
from paceline.watch.trace import Watch

# What every row of a batch did in every step, in a word: nothing, prompt, decode, padding, or held and not
# computed.
#
# Attached to an engine as its watcher, it keeps one byte per row and step, and the figures of a step for the meter.
# It draws nothing; `Lanes` is what a picture is made from.


class LaneWatcher:
    """Looks on while an engine works; see `StepWatcher`."""

    def __init__(self, state: SchedulerState, meter: Meter, clock: Clock) -> None:
        self._state = state
        self._clock = clock
        self._steps = StepMeter(meter, 0, state)
        self._underway: dict[int, tuple[float, StepFigures, Codes]] = {}
        self._times: list[tuple[float, float]] = []
        self._codes: list[Codes] = []

    def submitted(self, plan: StepPlan, decisions: Sequence[Decision], time_s: float) -> None:
        self._underway[plan.seq] = (self._clock.now(), self._steps.figures(plan), self._codes_of(plan))

    def completed(self, seq: int, time_s: float, *, failed: bool = False) -> None:
        start_s, figures, codes = self._underway.pop(seq)
        if self._times:  # one that was planned ahead waited for the one before it
            start_s = max(start_s, self._times[-1][1])
        end_s = self._clock.now()
        self._steps.write(figures, start_s, end_s)
        self._times.append((start_s, end_s))
        self._codes.append(codes)

    def lanes(self, origin_s: float = 0.0) -> Lanes:
        """Everything so far; times count from `origin_s`."""
        times = np.array(self._times, np.float64).reshape(-1, 2) - origin_s
        codes, num_slots = self.latest(len(self._codes)), self._state.config.max_num_seqs
        used = max([num_slots, *(np.flatnonzero((codes != EMPTY).any(axis=0)) + 1).tolist()])
        return Lanes(start_s=times[:, 0], end_s=times[:, 1], codes=codes[:, :used], num_slots=num_slots)

    def latest(self, count: int) -> Codes:
        """The rows in the last steps, a step per line."""
        return np.array(self._codes[-count:], np.uint8).reshape(-1, len(self._state.rows.live))

    def _codes_of(self, plan: StepPlan) -> Codes:
        rows = self._state.rows
        codes = np.where(rows.live, np.uint8(HELD), np.uint8(EMPTY))
        codes[rows.live & rows.decoding] = DECODE
        codes[plan.spans.row] = PROMPT
        codes[(rows.done | rows.padding) & rows.live] = PADDING
        return codes


SHORT_NAP_S = 0.02  # so that a picture moves while nothing arrives


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModeRun:
    """What one mode did with the traffic."""

    mode: str
    record: RunRecord
    lanes: Lanes
    origin_s: float  # when it began, on the clock of its run log


def load_mode(model: ModelConfig, mode: str, sizes: Mapping[str, Any]) -> LoadedModel:
    """An engine of one mode; nothing else differs between modes."""
    return load_model(model, {**sizes, "mode": mode})


class Driver:
    """Sends a workload to one engine and measures it. Not to be used twice."""

    def __init__(
        self,
        loaded: LoadedModel,
        workload: Workload,
        prompts: Sequence[NDArray[np.int32]],
        watch: Watch | None = None,
    ) -> None:
        """`watch` makes a further watcher of the run, such as one that a page reads."""
        self.workload = workload
        self.meter = Meter(workload)
        self.num_tokens = 0  # delivered
        self._engine = loaded.engine
        self._config = loaded.config
        self._prompts = prompts
        self._clock = MonotonicClock()
        self.watcher = LaneWatcher(self._engine.scheduler.state, self.meter, self._clock)
        self._stepper = Stepper(self._engine, self._collect)
        self._live: dict[RequestId, tuple[int, Request]] = {}
        self._num_sent = 0
        self._watch = watch
        self._further: RunWatcher | None = None
        self._origin_s = self._clock.now()

    @property
    def now_s(self) -> float:
        """Since the start."""
        return self._clock.now() - self._origin_s

    @property
    def num_waiting(self) -> int:
        return len(self._engine.scheduler.state.requests) - self._engine.scheduler.state.rows.num_live

    def run(self, on_step: Callable[[Driver], None]) -> ModeRun:
        """Send everything at its time and wait for the last token. Ctrl-C acts between two steps."""
        state = self._engine.scheduler.state
        self._engine.watcher = self.watcher
        self._origin_s = self._clock.now()
        if self._watch is not None:
            self._further = self._watch(state)
            self._engine.watcher = _Together((self.watcher, self._further))
        try:
            with Interrupts() as interrupts:
                while self.meter.num_ended < len(self.workload):
                    interrupts.check()
                    self._send_due()
                    self._step_or_nap()
                    on_step(self)
        finally:
            self._engine.watcher = None
        if self._further is not None:
            self._further.close(state.decisions, self._clock.now())
        return self.result()

    def result(self) -> ModeRun:
        """What there is."""
        return ModeRun(
            mode=self._config.scheduler.mode,
            record=self.record(),
            lanes=self.watcher.lanes(self._origin_s),
            origin_s=self._origin_s,
        )

    def record(self) -> RunRecord:
        """The measures so far."""
        kv = self._engine.scheduler.state.kv
        mode = self._config.scheduler.mode
        return self.meter.record(
            mode,
            {"mode": mode},
            max_num_seqs=self._config.scheduler.max_num_seqs,
            num_replicas=1,
            kv_total_slots=kv.num_slots,
            origin_s=self._origin_s,
        )

    def _send_due(self) -> None:
        arrivals = self.workload.arrival_s
        while self._num_sent < len(self.workload) and arrivals[self._num_sent] <= self.now_s:
            index = self._num_sent
            sampling = SamplingParams(
                temperature=0.0, max_tokens=int(self.workload.output_len[index]), ignore_eos=True
            )
            arrival_s = self._origin_s + float(arrivals[index])
            (request_id,) = self._engine.add(self._prompts[index], sampling, arrival_s=arrival_s)
            self._live[request_id] = (index, self._engine.scheduler.state.requests[request_id])
            self._num_sent += 1
            self._stepper.wake()

    def _step_or_nap(self) -> None:
        """A step if there is anything to do; else sleep until something may be."""
        nap_s = self._stepper.wait_s()
        if nap_s == 0:
            self._stepper.step()
            return
        time.sleep(min(nap_s if nap_s is not None else SHORT_NAP_S, SHORT_NAP_S))
        self._stepper.wake()

    def _collect(self, events: StepEvents) -> None:
        if self._further is not None:
            self._further.told(events)
        for tokens in events.tokens:
            numbers = [self._live[RequestId(each)][0] for each in tokens.requests.tolist()]
            self.meter.tokens(replace(tokens, requests=np.array(numbers, np.int64)))
            self.num_tokens += len(numbers)
        for finished in events.finished:
            number, request = self._live.pop(finished.request)
            self.meter.ended(finished._replace(request=RequestId(number)), request)


class _Together:
    """Several watchers of one engine."""

    def __init__(self, watchers: Sequence[StepWatcher]) -> None:
        self._watchers = watchers

    def submitted(self, plan: StepPlan, decisions: Sequence[Decision], time_s: float) -> None:
        for watcher in self._watchers:
            watcher.submitted(plan, decisions, time_s)

    def completed(self, seq: int, time_s: float, *, failed: bool = False) -> None:
        for watcher in self._watchers:
            watcher.completed(seq, time_s, failed=failed)
