"""The steps of a run log with their times: the food of a cost model.

Owns what a log says about time: how long a step took by the runner's clock, what the host needed before it, and how
long a request that came to an idle engine waited for its first step. What a model makes of that is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.audit.codec import Json, decode_time, decode_work
from paceline.audit.runlog import BROKEN, LoggedStep, RunLog, reason
from paceline.core.plan import StepWork
from paceline.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One completed step."""

    work: StepWork
    seconds: float  # by the runner's clock
    host_s: float | None  # what the host needed before it; None: there was nothing to do, or nobody can tell
    wake_s: float | None  # it was the first after nothing to do: from the arrival of who came to its start


def timed_steps(log: RunLog) -> list[TimedStep]:
    """Every completed step whose times were recorded, in order."""
    reader = _Reader(log.config.depth)
    steps = []
    for logged in log:
        try:
            step = reader.read(logged)
        except (*BROKEN, AttributeError) as problem:
            raise InputError(f"{log.path}: line {logged.line} is broken: {reason(problem)}") from problem
        if step is not None and step.seconds > 0.0:
            steps.append(step)
    return steps


class _Reader:
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
