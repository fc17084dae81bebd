"""A recorded run as the simulator sees it: its workload, its measures as columns, and how far a repetition is off.

The log is replayed, so that tokens and endings come from the scheduler itself and are measured by the same `Meter` as
a simulation. Owns what of a recorded request is repeated (when it came, how long it was and became, whose it was,
which beginning it shared) and what is not, what is compared, and how far off a measure may be. The requests come again
at their times, with the lengths they had, to an engine of the recorded config; only the clock is a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.audit.codec import Json, decode_add, decode_time
from paceline.audit.runlog import LoggedEnd, LoggedStep, RunLog, read_run_log
from paceline.config.engine import EngineConfig
from paceline.core.events import Decision, StepEvents
from paceline.core.plan import StepPlan
from paceline.core.request import Request, RequestId
from paceline.errors import InputError
from paceline.lab.measure import Meter, StepMeter
from paceline.lab.report.run_record import RunRecord
from paceline.lab.report.summary import Distribution, Summary, summarize
from paceline.lab.sim.replayer import replay
from paceline.lab.sim.run import simulate
from paceline.lab.sim.settings import Machine, SimConfig, host_costs
from paceline.lab.workload.workload import WISHES, Workload
from paceline.scheduler.policy import load_policy
from paceline.scheduler.state import SchedulerState

# By step: when it began and ended, by the runner's clock if that was recorded.
Times = dict[int, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedRun:
    """A run that was, seen from its engine; times count from the first arrival."""

    workload: Workload
    record: RunRecord
    config: EngineConfig
    num_left_out: int  # requests that ended without a token, and are not repeated


def read_recorded(path: str, *, own_policy: str = "") -> RecordedRun:
    """Read and replay a run log. Raises InputError where it cannot be replayed: then nothing can be compared.

    `own_policy` is the module:Class of a run that had one: a log never chooses what is imported.
    """
    log = read_run_log(path, allow_cut=True)
    policy = load_policy(own_policy, log.config.scheduler) if own_policy else None
    requests, ends, refused, times = _read(log)
    kept = [request for request in requests if ends.get(request.id, 0) > 0 or request.id in refused]
    if not kept:
        raise InputError(f"{path}: no request of the run got a token; record a longer run")
    kept.sort(key=lambda request: request.arrival_s)
    origin_s = kept[0].arrival_s
    workload = _workload(log, kept, ends, origin_s)
    watcher = _Watcher(workload, [request.id for request in kept], times)
    report = replay(log, policy=policy, watch=watcher.begin)
    if report.difference is not None:
        raise InputError(
            f"{path} does not replay, so its run cannot be told: {report.difference}; record it again with this version"
        )
    for request in kept:
        if request.id in refused:
            watcher.meter.refused(watcher.number[request.id], 0.0)
    return RecordedRun(
        workload=workload,
        record=watcher.record(log.config, origin_s),
        config=_repeated(log.config, own_policy),
        num_left_out=len(requests) - len(kept),
    )


def _repeated(config: EngineConfig, own_policy: str) -> EngineConfig:
    """The recorded config, less what would write files."""
    named = own_policy or config.scheduler.scheduling_policy
    scheduler = replace(config.scheduler, scheduling_policy=named)
    return replace(config, scheduler=scheduler, run_log="", decision_log="")


class _Watcher:
    """Looks on while the log is replayed and hands everything to a meter."""

    def __init__(self, workload: Workload, ids: Sequence[RequestId], times: Times) -> None:
        self.meter = Meter(workload)
        self.number = {request_id: RequestId(number) for number, request_id in enumerate(ids)}
        self._times = times
        self._live: dict[RequestId, Request] = {}

    def begin(self, state: SchedulerState) -> _Watcher:
        self._state, self._steps = state, StepMeter(self.meter, 0, state)
        return self

    def submitted(self, plan: StepPlan, decisions: Sequence[Decision], time_s: float) -> None:
        for row in plan.joins.row.tolist():
            request = self._state.rows.requests[row]
            assert request is not None
            self._live[request.id] = request
        if plan.seq in self._times:  # else the log has grown since it was read
            start_s, end_s = map(decode_time, self._times[plan.seq])
            self._steps(plan, start_s, end_s)

    def completed(self, seq: int, time_s: float, *, failed: bool = False) -> None:
        """Its times are those of the log."""

    def told(self, events: StepEvents) -> None:
        for tokens in events.tokens:
            known = np.array([request in self.number for request in tokens.requests.tolist()], np.bool_)
            numbers = [self.number[RequestId(each)] for each in tokens.requests[known].tolist()]
            self.meter.tokens(replace(tokens, requests=np.array(numbers, np.int64)))
        for finished in events.finished:
            request = self._live.pop(finished.request, None)
            if request is not None and finished.request in self.number:
                self.meter.ended(finished._replace(request=self.number[finished.request]), request)

    def close(self, decisions: Sequence[Decision], time_s: float) -> None:
        """What came after the last plan is no step."""

    def record(self, config: EngineConfig, origin_s: float) -> RunRecord:
        """What was measured, with times that count from the first arrival."""
        kv = self._state.kv
        return self.meter.record(
            "recorded",
            {},
            max_num_seqs=config.scheduler.max_num_seqs,
            num_replicas=1,
            kv_total_slots=kv.num_slots,
            origin_s=origin_s,
        )


def _read(log: RunLog) -> tuple[list[Request], dict[RequestId, int], set[RequestId], Times]:
    """Every request that was added, how many tokens those got that ended, who was refused, and the times of steps."""
    requests: list[Request] = []
    ends: dict[RequestId, int] = {}
    refused: set[RequestId] = set()
    times: Times = {}

    def read(logged: LoggedStep | LoggedEnd) -> None:
        requests.extend(decode_add(entry[2]).make_request() for entry in logged.inputs if entry[0] == "add")
        decided: list[Json] = logged.decisions
        ends.update((RequestId(each[1]), int(each[3])) for each in decided if each[0] == "finish")
        refused.update(RequestId(each[1]) for each in decided if each[0] == "refuse")

    for step in log:
        read(step)
        recorded = (step.result or {}).get("times")
        times[step.seq] = (step.t_plan, step.t_done) if recorded is None else recorded
    if log.end is not None:
        read(log.end)
    return requests, ends, refused, times


def _workload(
    log: RunLog, requests: Sequence[Request], ends: dict[RequestId, int], origin_s: float
) -> Workload:
    tenants = tuple(dict.fromkeys(request.tenant for request in requests))
    wishes = np.array([_wishes(request) for request in requests], np.int32).reshape(-1, len(WISHES))
    priority = np.array([request.priority for request in requests], np.int32)
    has_keys = any(request.keys for request in requests)
    return Workload(
        name=log.path.name,
        arrival_s=np.array([request.arrival_s - origin_s for request in requests], np.float64),
        prompt_len=np.array([request.num_prompt for request in requests], np.int32),
        output_len=np.array([_output(request, ends) for request in requests], np.int32),
        tenant=np.array([tenants.index(request.tenant) for request in requests], np.int32),
        tenants=tenants,
        prefix_ids=_prefix_ids(requests) if has_keys else None,
        prefix_block=log.config.kv.block_size if has_keys else 0,
        wishes=wishes if wishes.any() else None,
        priority=priority if priority.any() else None,
    )


def _output(request: Request, ends: dict[RequestId, int]) -> int:
    """Tokens it got; of one that was refused, those it asked for."""
    return ends.get(request.id) or request.sampling.max_tokens or 1


def _wishes(request: Request) -> tuple[int, ...]:
    return tuple(getattr(request.sampling, name) or 0 for name in WISHES)


def _prefix_ids(requests: Sequence[Request]) -> tuple[tuple[int, ...], ...]:
    """A number for each different key: who has the same number has the same beginning up to there."""
    numbers: dict[bytes, int] = {}
    return tuple(
        tuple(numbers.setdefault(key.key, len(numbers)) for key in request.keys) for request in requests
    )


# -- the run and its repetition in the simulator, measure by measure -----------------------------------------

CLOSE, CLOSE_TAIL = 0.10, 0.20  # how far off a measure may be, and a p99


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """One measure of both."""

    name: str
    unit: str
    seen: float | None
    simulated: float | None
    bound: float

    @property
    def error(self) -> float | None:
        """How much larger the simulated value is, as a share of the seen one; None where one of them is missing."""
        if self.seen is None or self.simulated is None or self.seen <= 0.0:
            return None
        return self.simulated / self.seen - 1.0

    @property
    def holds(self) -> bool | None:
        return None if self.error is None else abs(self.error) <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """All measures of a recorded run and of its repetition."""

    seen: Summary
    simulated: Summary
    deviations: tuple[Deviation, ...]

    @property
    def holds(self) -> bool:
        return all(each.holds is not False for each in self.deviations)


def sim_config(
    recorded: RecordedRun, machine: Machine, *, host_step_s: float | None = None, seed: int = 0
) -> SimConfig:
    """The recorded engine on a modelled machine."""
    known = host_costs(machine.cost, host_step_s)
    return SimConfig(machine=machine, engine=recorded.config, seed=seed, **known)


def compare(record: RunRecord, workload: Workload, config: SimConfig) -> RunComparison:
    """What was seen of a run beside the same requests run again on the model."""
    seen = summarize(record)
    simulated = summarize(simulate(config, workload, label="simulated"))
    return RunComparison(seen=seen, simulated=simulated, deviations=deviations(seen, simulated))


def deviations(seen: Summary, simulated: Summary) -> tuple[Deviation, ...]:
    found = [
        Deviation(
            name="throughput",
            unit="tok/s",
            seen=seen.output_tokens_per_s,
            simulated=simulated.output_tokens_per_s,
            bound=CLOSE,
        )
    ]
    for name, of in _TIMES.items():
        for share in ("p50", "p90", "p99"):
            deviation = Deviation(
                name=f"{name} {share}",
                unit="ms",
                seen=_milliseconds(getattr(of(seen), share)),
                simulated=_milliseconds(getattr(of(simulated), share)),
                bound=CLOSE_TAIL if share == "p99" else CLOSE,
            )
            found.append(deviation)
    return tuple(found)


_TIMES: dict[str, Callable[[Summary], Distribution]] = {
    "TTFT": lambda summary: summary.ttft_s,
    "ITL": lambda summary: summary.itl_s,
    "end to end": lambda summary: summary.e2e_s,
}


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
