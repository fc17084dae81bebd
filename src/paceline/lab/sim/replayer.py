"""A recorded run, run again: the log's inputs and results go in, and every plan must come out as it was.

The scheduler is built from the log's config and driven by its journal alone, at the recorded times. Entries
that are consequences of others are not fed: the replay makes them itself, and they must be equal too. There
is no model, no runner, no token and no scheduling code here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np

from paceline.audit.codec import (
    Generations,
    Json,
    decode_add,
    decode_decision,
    decode_input,
    decode_result,
    encode_decision,
    encode_input,
    encode_plan,
    plain,
)
from paceline.audit.linefile import LineFile
from paceline.audit.runlog import BEGAN, LineEncoder, LoggedLine, LoggedStep, RunLog, dumps
from paceline.core import inputs
from paceline.core.clock import ManualClock
from paceline.core.dial import DialSetting
from paceline.core.events import Decision, DecisionKind, Rule
from paceline.core.plan import StepPlan, StepResult
from paceline.core.recorder import Inputs, RunWatcher, StepRecord
from paceline.core.request import BlockKey, Request, named_keys
from paceline.engine.trace import Watch
from paceline.errors import DeadlineImpossible, DeadlineInfeasible, InputError, NeverFits, QueueFull
from paceline.factory import build_scheduler
from paceline.policy import Policy
from paceline.scheduler.scheduler import Scheduler
from paceline.scheduler.state import SchedulerState

Progress = Callable[[int], None]  # steps replayed
MAX_SHOWN = 120  # characters of a value in a message
NOTHING = "nothing"
_ABSENT = object()  # stands for a value that is not there


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayDifference:
    """Where a replay first left the recorded run."""

    seq: int | None  # the step; None: after the last one
    line: int  # of the log
    part: str  # of the line, such as plan.spans.row[3]
    recorded: str
    replayed: str

    def __str__(self) -> str:
        where = "after the last step" if self.seq is None else f"step {self.seq}"
        return f"{where} (line {self.line}): {self.part} was {self.recorded}, the replay has {self.replayed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """What a replay found."""

    num_steps: int  # steps whose plans were equal
    complete: bool  # the log goes to the end of its run
    difference: ReplayDifference | None

    @property
    def is_equal(self) -> bool:
        return self.difference is None


def replay(
    log: RunLog,
    *,
    output: str | Path | TextIO | None = None,
    policy: Policy | None = None,
    watch: Watch | None = None,
    on_progress: Progress = lambda num_steps: None,
) -> ReplayReport:
    """Run a log again and compare. `output` takes the log of the replay: the same bytes if nothing differs.

    `policy` is for a run that was given a policy object instead of one its config names. `watch` makes a watcher of the
    run, as far as the replay gets.
    """
    log.check_decisions()
    replayer = _Replayer(log, policy, watch)
    if isinstance(output, str | Path) and Path(output).resolve() == log.path.resolve():
        raise InputError(f"{output} is the log to replay; write the replay to another file")
    file = None if output is None else LineFile(output)
    if file is not None:
        file.write(LineEncoder().header(log.header))
        replayer.write = file.write
    num_steps, difference = 0, None
    logged: LoggedLine | None = None
    try:
        for logged in log:
            replayer.step(logged)
            num_steps += 1
            on_progress(num_steps)
        logged = log.end
        replayer.finish(log.end)
    except _Differs as found:
        assert logged is not None
        difference = found.at(logged)
    finally:
        replayer.close()
        if file is not None:
            file.close()
    return ReplayReport(num_steps=num_steps, complete=log.end is not None, difference=difference)


class _Differs(Exception):
    """The replay has left the recorded run."""

    def __init__(self, part: str, recorded: object, replayed: object) -> None:
        super().__init__(part)
        self.part, self.recorded, self.replayed = part, recorded, replayed

    def at(self, logged: LoggedLine) -> ReplayDifference:
        return ReplayDifference(
            seq=logged.seq if isinstance(logged, LoggedStep) else None,
            line=logged.line,
            part=self.part,
            recorded=_shown(self.recorded),
            replayed=_shown(self.replayed),
        )


@dataclass(frozen=True, slots=True)
class _Underway:
    """A step whose plan was equal and whose result the scheduler has not been given yet."""

    logged: LoggedStep
    text: str
    result: StepResult | None


class _Replayer:
    """One scheduler, fed from one log."""

    def __init__(self, log: RunLog, policy: Policy | None, watch: Watch | None) -> None:
        self.write: Callable[[str], None] = lambda line: None
        self._clock = ManualClock(-math.inf)
        named = log.config.scheduler.scheduling_policy
        if policy is None and ":" in named:  # a file must not choose what is imported
            raise InputError(
                f"the run had a custom policy, {named}; a log must not choose what is imported, so give it "
                f"again: --scheduling-policy {named}"
            )
        hooks = _RecordedHooks()
        self._scheduler = build_scheduler(log.config, self._clock, hooks, policy=policy)
        self._state = hooks.state = self._scheduler.state
        self._hooks = hooks
        self._encoder = LineEncoder()
        self._generations = Generations()
        self._underway: dict[int, _Underway] = {}
        self._last: Sequence[Decision] = ()  # decisions after the last plan
        self._watch = watch  # until it has begun
        self._watcher: RunWatcher | None = None
        self._began_s = log.header.get(BEGAN)

    def step(self, logged: LoggedStep) -> None:
        """Everything up to the plan of one step, compared with its line."""
        if self._watch is not None:
            self._begin(self._watch, logged)
        plan = self._feed(logged)
        if plan is None:
            with _part("plan", logged.plan):
                self._clock.advance_to(logged.t_plan)
                plan = self._scheduler.schedule()
        noted, decisions = self._taken(logged)
        if plan is None:
            raise _Differs("plan", logged.plan, NOTHING)
        _compare("seq", logged.seq, plan.seq)
        _compare("plan", logged.plan, encode_plan(plan))
        _compare("t_plan", logged.t_plan, plain(self._state.now_s))
        self._generations.join(plan.joins.row, plan.joins.generation)
        result = None
        if logged.result is not None:
            with _part("result", logged.result):
                result = decode_result(logged.result, plan.seq, self._generations)
        record = StepRecord(
            t_plan=self._state.now_s,
            t_done=logged.t_done,
            inputs=noted,
            plan=plan,
            result=result,
            decisions=decisions,
        )
        text = self._encoder.step(record)
        if text != logged.text:  # equal in what it says, but not written as this program writes it
            raise _Differs("line", logged.text, text)
        self._underway[plan.seq] = _Underway(logged, text, result)
        if self._watcher is not None:
            self._watcher.submitted(plan, decisions, self._state.now_s)

    def _begin(self, watch: Watch, logged: LoggedStep) -> None:
        """A watcher begins with the run; where the log does not say when that is, with the first entry in it."""
        times = [logged.t_plan, *(entry[1] for entry in logged.inputs[:1]), self._began_s]
        known = [time_s for time_s in times if isinstance(time_s, int | float) and math.isfinite(time_s)]
        self._clock.advance_to(min(known, default=0.0))
        self._watch, self._watcher = None, watch(self._state)

    def finish(self, end: LoggedLine | None) -> None:
        """What came after the last plan. A log that was not closed ends with the steps it has."""
        if end is None:
            for step in self._underway.values():
                self.write(step.text)
            return
        if self._feed(end) is not None:
            raise _Differs("inputs", "no further plan", "a plan")
        noted, self._last = self._taken(end)
        text = self._encoder.end(noted, self._last)
        if text != end.text:
            raise _Differs("line", end.text, text)
        self.write(text)

    def close(self) -> None:
        """It went as far as it goes."""
        if self._watcher is not None:
            self._watcher.close(self._last, self._state.now_s)

    def _feed(self, logged: LoggedLine) -> StepPlan | None:
        """Feed the inputs of a line. Returns its plan, if one of the inputs shows that it was made here."""
        entries = logged.inputs
        self._hooks.expect(entries, logged.decisions)
        plan = None
        for index, entry in enumerate(entries):
            name = f"inputs[{index}]"
            if index >= len(self._state.journal):  # not the consequence of an earlier one
                if plan is not None:
                    raise _Differs(name, entry, "a plan before it")
                with _part(name, entry):
                    plan = self._apply(entries[index:])
            if index >= len(self._state.journal):
                raise _Differs(name, entry, NOTHING)
            _compare(name, entry, encode_input(*self._state.journal[index]))
        self._deliver()
        return plan

    def _taken(self, logged: LoggedLine) -> tuple[Inputs, Sequence[Decision]]:
        """What the scheduler noted and decided since the last plan: no more and no less than was recorded."""
        noted, decisions = self._scheduler.take_journal(), self._scheduler.take_decisions()
        _compare("inputs", logged.inputs, [encode_input(*entry) for entry in noted])
        _compare("decisions", logged.decisions, [encode_decision(decision) for decision in decisions])
        return noted, decisions

    def _apply(self, entries: list[Json]) -> StepPlan | None:
        """Do what the first of `entries` says; returns the plan if that was to make one."""
        time_s, given = decode_input(entries[0])
        self._clock.advance_to(time_s)
        match given:
            case inputs.AddRequest(together=together):
                added = [decode_add(entry[2]).make_request() for entry in entries[:together]]
                # Requests that came together are accepted or refused together.
                with suppress(QueueFull, NeverFits, DeadlineInfeasible, DeadlineImpossible):
                    self._scheduler.add(added)
            case inputs.Done(seq=seq):
                self._done(seq)
            case inputs.StepFailed():
                self._failed()
            case inputs.Withheld(blocks=blocks):
                for pool, count in zip(self._state.pools, blocks, strict=True):
                    pool.withheld = count
                return self._scheduler.schedule()
            case inputs.Idle() | inputs.Keys():  # noted while a plan is made
                return self._scheduler.schedule()
            case _:
                values = (getattr(given, spec.name) for spec in fields(cast(Any, given)))
                _COMMANDS[type(given)](self._scheduler, *values)
        return None

    def _done(self, seq: int) -> None:
        step = self._underway.pop(seq)
        assert step.result is not None, "the step failed and has no result"
        self._scheduler.update(step.result)
        self._completed(step)
        self._deliver()

    def _deliver(self) -> None:
        """Events go to the watcher; without one they are taken all the same, so that they do not pile up."""
        events = self._scheduler.take_events()
        if self._watcher is not None:
            self._watcher.on_events(events)

    def _failed(self) -> None:
        self._scheduler.recover()
        for step in self._underway.values():
            assert step.result is None, f"step {step.logged.seq} has a result, so it did not fail"
            self._completed(step)
        self._underway.clear()

    def _completed(self, step: _Underway) -> None:
        _compare(f"t_done of step {step.logged.seq}", step.logged.t_done, plain(self._state.now_s))
        self.write(step.text)
        if self._watcher is not None:
            self._watcher.completed(step.logged.seq, self._state.now_s, failed=step.result is None)


class _RecordedHooks:
    """Hooks that answer, and fail, as those of the recorded run did at the same point."""

    state: SchedulerState

    def __init__(self) -> None:
        self._inputs: list[Json] = []
        self._decisions: list[Json] = []

    def expect(self, given: list[Json], decisions: list[Json]) -> None:
        """What was recorded from here to the next plan."""
        self._inputs, self._decisions = given, decisions

    def admit(self, request: Request) -> None:
        self._fail_again(request)

    def new_keys(self, request: Request) -> Sequence[BlockKey]:
        self._fail_again(request)
        at = len(self.state.journal)
        if at < len(self._inputs):
            given = decode_input(self._inputs[at])[1]
            if isinstance(given, inputs.Keys) and given.request == request.id:
                return named_keys(given.keys, request.keys)
        return ()

    def finish(self, request: Request) -> None:
        self._fail_again(request, Rule.FINISH_HOOK)

    def _fail_again(self, request: Request, rule: Rule = Rule.REQUEST_FAILED) -> None:
        """A hook that raised is on record: the failure was the next thing decided."""
        at = len(self.state.decisions)
        if at < len(self._decisions):
            decision = decode_decision(self._decisions[at])
            if decision.kind is DecisionKind.FAIL and decision[1:3] == (request.id, rule):
                raise type(decision.detail, (Exception,), {})


# What makes an input, called with its values in their order.
_COMMANDS: dict[type[inputs.Input], Callable[..., object]] = {
    inputs.AbortRequest: Scheduler.abort,
    inputs.FinishRequest: Scheduler.finish_at,
    inputs.FailRequest: Scheduler.fail,
    inputs.Extend: lambda scheduler, request, count, more, stretches, modules: scheduler.extend(
        request, np.zeros(count, np.int32), more, inputs.logged_placed(stretches, modules)
    ),
    inputs.SetScore: Scheduler.set_score,
    inputs.SetPriority: Scheduler.set_priority,
    inputs.SetDeadline: Scheduler.set_deadline,
    inputs.SetPolicy: lambda scheduler, name, options: scheduler.set_policy(name, **dict(options)),
    inputs.SetDial: lambda scheduler, kind, value: scheduler.set_dial(DialSetting(kind=kind, value=value)),
    inputs.Preempt: lambda scheduler, request, swap: scheduler.preempt(request, swap=swap),
    inputs.Pause: lambda scheduler, request, swap: scheduler.pause(request, swap=swap),
    inputs.Resume: Scheduler.resume,
    inputs.Block: Scheduler.block,
    inputs.Unblock: Scheduler.unblock,
    inputs.ResetCache: Scheduler.reset_prefix_cache,
    inputs.Unpin: Scheduler.unpin,
    inputs.SetAdapter: Scheduler.set_adapter,
    inputs.Restored: lambda scheduler, places, keys, uses, learned: scheduler.restore(
        places, [BlockKey(key, b"") for key in keys], uses, learned
    ),
    inputs.AdapterRead: lambda scheduler, number, failed: scheduler.adapter_read(number, failed=failed),
    inputs.Expired: lambda scheduler, request: scheduler.expire(),
    inputs.Sleep: lambda scheduler, levels_lost: scheduler.sleep(levels_lost=levels_lost),
    inputs.MoveSlab: lambda scheduler, number, gained: scheduler.move_slab(number, gained=gained),
    inputs.Shrink: Scheduler.shrink,
    inputs.FailAll: Scheduler.fail_all,
}


@contextmanager
def _part(name: str, recorded: object) -> Iterator[None]:
    """Whatever goes wrong inside is a difference: in the recorded run it went well."""
    try:
        yield
    except (_Differs, InputError):
        raise
    except Exception as error:
        raise _Differs(name, recorded, f"{type(error).__name__}: {error}") from error


def _compare(part: str, recorded: Json, replayed: Json) -> None:
    """Raise with the first place where two JSON values differ."""
    if type(recorded) is not type(replayed):
        raise _Differs(part, recorded, replayed)
    if isinstance(recorded, dict):
        for name in [*recorded, *(name for name in replayed if name not in recorded)]:
            _compare(f"{part}.{name}", recorded.get(name, _ABSENT), replayed.get(name, _ABSENT))
    elif isinstance(recorded, list):
        for index, (one, other) in enumerate(zip(recorded, replayed, strict=False)):
            _compare(f"{part}[{index}]", one, other)
        shorter = min(len(recorded), len(replayed))
        if len(recorded) != len(replayed):
            rest = [(values[shorter:] or [_ABSENT])[0] for values in (recorded, replayed)]
            raise _Differs(f"{part}[{shorter}]", *rest)
    elif recorded != replayed:
        raise _Differs(part, recorded, replayed)


def _shown(value: object) -> str:
    text = NOTHING if value is _ABSENT else value if isinstance(value, str) else dumps(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
