"""A run that was, as the simulator sees it: its workload, its measures as columns, and how far a repetition is off.

A run log is replayed, so that tokens and endings come from the scheduler itself and are measured by the same `Meter` as
a simulation. Owns what of a recorded request is repeated (when it came, how long it was and became, whose it was,
which beginning it shared) and what is not, what is compared, and how far off a measure may be. The requests come again
at their times, with the lengths they had, to an engine of the recorded config; only the clock is a model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.audit.codec import Json, decode_add, decode_time
from paceline.audit.runlog import LoggedStep, RunLog, read_run_log
from paceline.config.engine import EngineConfig
from paceline.core.events import Decision, StepEvents
from paceline.core.plan import StepPlan
from paceline.core.request import Request, RequestId
from paceline.errors import InputError
from paceline.lab.measure import Meter, StepMeter
from paceline.lab.report.run_record import OUTCOMES, RunRecord
from paceline.lab.report.summary import Summary, summarize
from paceline.lab.sim.replayer import replay
from paceline.lab.sim.run import simulate
from paceline.lab.sim.settings import Machine, SimConfig, host_costs
from paceline.lab.workload.workload import OBJECTIVES, Floats, Workload
from paceline.scheduler.policy import load_policy
from paceline.scheduler.state import SchedulerState

# By step: when it began and ended, by the runner's clock if that was recorded.
Times = dict[int, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObservedRun:
    """A run that was; times count from the first arrival."""

    workload: Workload
    record: RunRecord
    num_left_out: int  # requests that ended without a token, and are not repeated


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedRun(ObservedRun):
    """The same, recorded by its engine."""

    config: EngineConfig


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
            f"{path} does not replay, so it cannot be repeated: {report.difference}; record it again with this version"
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

    def on_events(self, events: StepEvents) -> None:
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
    """Every request that was added, the tokens of those that ended, those rejected, and the times of steps."""
    requests: list[Request] = []
    ends: dict[RequestId, int] = {}
    refused: set[RequestId] = set()
    times: Times = {}
    for line in log.lines():
        requests.extend(decode_add(entry[2]).make_request() for entry in line.inputs if entry[0] == "add")
        decided: list[Json] = line.decisions
        ends.update((RequestId(each[1]), int(each[3])) for each in decided if each[0] == "finish")
        refused.update(RequestId(each[1]) for each in decided if each[0] == "refuse")
        if isinstance(line, LoggedStep):
            recorded = (line.result or {}).get("times")
            times[line.seq] = (line.t_plan, line.t_done) if recorded is None else recorded
    return requests, ends, refused, times


def _workload(
    log: RunLog, requests: Sequence[Request], ends: dict[RequestId, int], origin_s: float
) -> Workload:
    tenants = tuple(dict.fromkeys(request.tenant for request in requests))
    objectives = np.array([_objectives(request) for request in requests], np.int32).reshape(
        -1, len(OBJECTIVES)
    )
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
        objectives=objectives if objectives.any() else None,
        priority=priority if priority.any() else None,
    )


def _output(request: Request, ends: dict[RequestId, int]) -> int:
    """Tokens it got; of one that was refused, those it asked for."""
    return ends.get(request.id) or request.sampling.max_tokens or 1


def _objectives(request: Request) -> tuple[int, ...]:
    return tuple(getattr(request.sampling, name) or 0 for name in OBJECTIVES)


def _prefix_ids(requests: Sequence[Request]) -> tuple[tuple[int, ...], ...]:
    """A number for each different key: requests with the same number share their beginning up to there."""
    numbers: dict[bytes, int] = {}
    return tuple(
        tuple(numbers.setdefault(key.key, len(numbers)) for key in request.keys) for request in requests
    )


# -- a run as a client measured it: the result file of `paceline bench serve`, or of any tool with vLLM's field names --
#
# A client sees nothing of the engine, so that the engine it is compared with is the one the caller describes.

ARRIVALS = ("due_times", "start_times")  # the first that is there
NEEDED = ("input_lens", "output_lens", "ttfts", "itls")


def read_client_run(path: str | Path) -> ObservedRun:
    fields = _fields(Path(path))
    name = next((name for name in ARRIVALS if name in fields), None)
    missing = [each for each in NEEDED if each not in fields]
    if name is None or missing:
        raise InputError(
            f"{path} is no run log, and no result with a sample of each request "
            f"({', '.join(missing or ARRIVALS[:1])} missing): save it with all samples"
        )
    arrival_s, prompt, output = (_column(fields, each, path) for each in (name, "input_lens", "output_lens"))
    ttft_s = _column(fields, "ttfts", path)
    gaps = fields["itls"]
    if len({len(arrival_s), len(prompt), len(output), len(ttft_s), len(gaps)}) != 1:
        raise InputError(f"{path}: the lists of its requests differ in length; save it again")
    answered = np.isfinite(arrival_s) & np.isfinite(ttft_s) & (output >= 1) & (prompt >= 1)
    order = [int(i) for i in np.argsort(arrival_s, kind="stable") if answered[i]]
    if not order:
        raise InputError(f"{path}: none of its requests was answered")
    origin_s = float(arrival_s[order[0]])
    workload = Workload.of_one_tenant(
        Path(path).name,
        arrival_s[order] - origin_s,
        prompt[order].astype(np.int32),
        output[order].astype(np.int32),
    )
    first_s = workload.arrival_s + ttft_s[order]
    last_s = first_s + np.array([math.fsum(gaps[i]) for i in order])
    return ObservedRun(
        workload=workload,
        record=_client_record(workload, first_s, last_s, [gap for i in order for gap in gaps[i]]),
        num_left_out=len(arrival_s) - len(order),
    )


def _client_record(workload: Workload, first_s: Floats, last_s: Floats, gaps: list[float]) -> RunRecord:
    zeros = np.zeros(len(workload), np.int32)
    return RunRecord(
        label="client",
        config={},
        max_num_seqs=1,
        duration_s=float(last_s.max()),
        arrival_s=workload.arrival_s,
        admitted_s=first_s,  # a client cannot see it
        first_token_s=first_s,
        finished_s=last_s,
        prompt_len=workload.prompt_len,
        output_len=workload.output_len,
        cached_tokens=zeros,
        preemptions=zeros,
        tenant=workload.tenant,
        outcome=np.full(len(workload), OUTCOMES.index("finished"), np.uint8),
        itl_s=np.array(gaps, np.float32),
    )


def _fields(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not text"
        raise InputError(f"cannot read {path}: {reason}") from problem
    except (ValueError, RecursionError) as problem:
        raise InputError(f"{path} is neither a run log nor JSON") from problem
    if not isinstance(value, dict) or "ttfts" not in value:
        raise InputError(f"{path} holds no times of requests: give a run log, or a result with all samples")
    return value


def _column(fields: Mapping[str, Any], name: str, path: str | Path) -> Floats:
    values = fields[name]
    if not isinstance(values, list) or not all(
        value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values
    ):
        raise InputError(f"{path}: '{name}' is not a list of numbers; save it again")
    return np.array([math.nan if value is None else value for value in values], np.float64)


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


def sim_config(
    recorded: RecordedRun, machine: Machine, *, host_step_s: float | None = None, seed: int = 0
) -> SimConfig:
    """The recorded engine on a modelled machine."""
    known = host_costs(machine.cost, host_step_s)
    return SimConfig(machine=machine, engine=recorded.config, seed=seed, **known)


def compare(record: RunRecord, workload: Workload, config: SimConfig) -> tuple[Deviation, ...]:
    """What was seen of a run beside the same requests run again on the model."""
    return deviations(summarize(record), summarize(simulate(config, workload, label="simulated")))


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
    for name, times in (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("end to end", "e2e_s")):
        for share in ("p50", "p90", "p99"):
            deviation = Deviation(
                name=f"{name} {share}",
                unit="ms",
                seen=_milliseconds(getattr(getattr(seen, times), share)),
                simulated=_milliseconds(getattr(getattr(simulated, times), share)),
                bound=CLOSE_TAIL if share == "p99" else CLOSE,
            )
            found.append(deviation)
    return tuple(found)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
