"""Cost models from files: one that was fitted before, or run logs, to which one is fitted now.

Owns which of the two a file is, how the steps of logs become samples, and what is said about a fit: its error by
kind of step. The fit itself and both formats belong to `costs` and `audit`, which do not know each other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.audit.codec import Json, decode_time, decode_work
from paceline.audit.runlog import BROKEN, LoggedStep, RunLog, read_run_log, reason
from paceline.config.engine import EngineConfig
from paceline.core.plan import StepWork
from paceline.costs.cost_model import CostModel, StepShape
from paceline.costs.fit import FittedCost, HostCosts
from paceline.errors import InputError
from paceline.lab.sim.simulated_runner import step_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One completed step, and what its log says about time."""

    work: StepWork
    seconds: float  # by the runner's clock
    host_s: float | None  # what the host needed before it; None: there was nothing to do, or it is not known
    wake_s: float | None  # it was the first after nothing to do: from the request's arrival to its start


def timed_steps(log: RunLog) -> list[TimedStep]:
    """Every completed step whose times were recorded, in order; those that verified drafts are of another kind."""
    reader = _LogReader(log.config.depth)
    steps = []
    for logged in log:
        try:
            step = reader.read(logged)
        except (*BROKEN, AttributeError) as problem:
            raise InputError(f"{log.path}: line {logged.line} is broken: {reason(problem)}") from problem
        if step is not None and step.seconds > 0.0 and "verified" not in (logged.result or {}):
            steps.append(step)
    return steps


class _LogReader:
    """Knows how many requests were live when the last step ended."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._num_live = 0
        self._end_s: float | None = None  # of the step before
        self._done_s: list[float] = []  # when the results of the last steps were taken in

    def read(self, logged: LoggedStep) -> TimedStep | None:
        since_s = self._host_since()
        arrivals = _arrivals(logged)
        there = sum(arrival_s <= since_s for arrival_s in arrivals) if since_s is not None else 0
        num_ended = sum(decision[0] == "finish" for decision in logged.decisions)
        num_waiting_on = self._num_live + there - num_ended  # live all the while since then
        self._num_live += len(arrivals) - num_ended
        times = None if logged.result is None else logged.result.get("times")
        self._done_s = [*self._done_s[-self._depth - 1 :], logged.t_done]
        if times is None:
            self._end_s = None
            return None
        before_s = self._end_s
        start_s, self._end_s = map(decode_time, times)
        until_s = start_s if self._depth == 0 else logged.t_plan
        began_s = start_s if before_s is None else max(start_s, before_s)  # it waited for the one before it
        return TimedStep(
            work=decode_work(logged.plan),
            seconds=self._end_s - began_s,
            host_s=max(0.0, until_s - since_s) if num_waiting_on and since_s is not None else None,
            wake_s=max(0.0, start_s - min(arrivals)) if arrivals and not num_waiting_on else None,
        )

    def _host_since(self) -> float | None:
        """When the host had what it needs to begin with this step: the end of the one before, or, where steps are
        planned ahead, the moment it took in the last result it had to wait for."""
        if self._depth == 0:
            return self._end_s
        return self._done_s[-self._depth - 1] if len(self._done_s) > self._depth else None


def _arrivals(logged: LoggedStep) -> list[float]:
    """Of the requests that were added before this step and not refused."""
    refused = {decision[1] for decision in logged.decisions if decision[0] == "refuse"}
    added: list[Json] = [entry[2] for entry in logged.inputs if entry[0] == "add"]
    return [decode_time(add["arrival_s"]) for add in added if add["id"] not in refused]


_FIRST_LINE_BYTES = 1 << 20
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True, kw_only=True)
class KindError:
    """How well steps of one kind are predicted."""

    kind: str
    num_steps: int
    mean_s: float
    mape: float  # mean of |predicted - timed| / timed
    p90: float  # of the same
    bias: float  # seconds predicted for all of them / seconds they took, less 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A model and how well it fits the steps it was fitted to."""

    cost: FittedCost
    kinds: tuple[KindError, ...]


def load_cost_model(path: str | Path, kv_bytes_per_token: int) -> FittedCost:
    """The cost model in a file, or the one that fits the step times of a run log."""
    if not is_run_log(Path(path)):
        return FittedCost.load(path)
    return calibrate([path], kv_bytes_per_token).cost


def calibrate(paths: Sequence[str | Path], kv_bytes_per_token: int) -> Calibration:
    """Fit one cost model to the steps of all these run logs; the first says what sizes the engine has."""
    samples: list[Sample] = []
    steps: list[TimedStep] = []
    sizes: dict[str, int] = {}
    for path in paths:
        log = read_run_log(path, allow_cut=True)  # what a server that was killed left is as good as the rest
        own = timed_steps(log)
        steps.extend(own)
        samples.extend(_samples(own, log.config, kv_bytes_per_token))
        sizes = sizes or _engine_sizes(log.config)
    try:
        cost = FittedCost.fit(samples, host=_host_costs(steps), engine=sizes)
    except InputError as problem:
        raise InputError(f"{', '.join(map(str, paths))}: {problem}") from problem
    return Calibration(cost=cost, kinds=_kind_errors(cost, samples))


def step_errors(cost: CostModel, path: str | Path, kv_bytes_per_token: int) -> tuple[KindError, ...]:
    """How well a model predicts the steps of a run log, whether or not it was fitted to it."""
    log = read_run_log(path, allow_cut=True)
    return _kind_errors(cost, _samples(timed_steps(log), log.config, kv_bytes_per_token))


Sample = tuple[StepShape, float]


def _samples(steps: Sequence[TimedStep], config: EngineConfig, kv_bytes_per_token: int) -> list[Sample]:
    block_bytes = config.kv.block_size * kv_bytes_per_token
    return [(step_shape(step.work, block_bytes), step.seconds) for step in steps]


def _kind_errors(cost: CostModel, samples: Sequence[Sample]) -> tuple[KindError, ...]:
    """The error of a model on timed steps, by kind of step; kinds that do not occur are left out."""
    by_kind: dict[str, list[tuple[float, float]]] = {"decode": [], "mixed": [], "prefill": []}
    for shape, seconds in samples:
        by_kind[_kind(shape)].append((cost.step_seconds(shape), seconds))
    found = []
    for kind, pairs in by_kind.items():
        if pairs:
            predicted, timed = np.array(pairs).T
            errors = np.abs(predicted / timed - 1.0)
            error = KindError(
                kind=kind,
                num_steps=len(pairs),
                mean_s=float(timed.mean()),
                mape=float(errors.mean()),
                p90=float(np.quantile(errors, 0.9)),
                bias=float(predicted.sum() / timed.sum() - 1.0),
            )
            found.append(error)
    return tuple(found)


def is_run_log(path: Path) -> bool:
    """Whether the first line is a log's header. Anything unreadable is left to the cost model's own errors."""
    try:
        with path.open("rb") as file:
            start = file.readline(_FIRST_LINE_BYTES)
        if start.startswith(_GZIP):
            return True  # no cost model is compressed
        first = json.loads(start)
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and first.get("kind") == "header"


def _kind(shape: StepShape) -> str:
    if not shape.prefill_tokens:
        return "decode"
    return "mixed" if shape.decode_rows else "prefill"


def _engine_sizes(config: EngineConfig) -> dict[str, int]:
    """What a simulation of the same engine starts from."""
    return {
        "depth": config.depth,
        "block_size": config.kv.block_size,
        "num_blocks": config.kv.num_blocks,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "max_num_prompt_tokens": config.scheduler.max_num_prompt_tokens,
    }


def _host_costs(steps: Sequence[TimedStep]) -> HostCosts:
    """Medians: a pause of the machine is no cost of a step."""
    between = [step.host_s for step in steps if step.host_s is not None]
    woken = [step.wake_s for step in steps if step.wake_s is not None]
    step_s = float(np.median(between)) if between else None
    # A request at an idle engine waited until the engine knew of it, and then for the planning of a step.
    request_s = max(0.0, float(np.median(woken)) - (step_s or 0.0)) if woken else 0.0
    return HostCosts(step_s=step_s, request_s=request_s)
