"""Between the dial and the scheduler: what the dial observes, how its limits are applied, what is recorded.

Every move is a decision with where it came from, where it went, what was measured and what was asked for; so is the
moment from which a target cannot be held, and the one from which it can.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from paceline.core.dial import DialSetting, DialWord
from paceline.core.events import NO_REQUEST, Decision, DecisionKind, Rule
from paceline.errors import ConfigError
from paceline.scheduler.dial.engine_dial import Dial
from paceline.scheduler.state import Flight, SchedulerState

Index = NDArray[np.int64]


def turn(state: SchedulerState, setting: DialSetting) -> None:
    """An operator sets the dial."""
    before = state.dial.position
    state.dial.set(setting)
    _record(state, Rule.OPERATOR, before, 0.0)


def check_turn(state: SchedulerState) -> None:
    """Raise where a dial would mean nothing."""
    if state.mode.keeps_finished:
        raise ConfigError("the dial needs --mode continuous: padded batches are not cut by time")


def judge(state: SchedulerState) -> None:
    """After a step: the dial looks whether its target is held, once in a while."""
    dial = state.dial
    if not dial.is_due(state.now_s):
        return
    waits = state.now_s - state.queue.view(state.now_s).arrival_s
    found = dial.judge(state.now_s, rows=state.rows.num_live, waits=waits)
    if found is None:
        return
    if found.after != found.before:
        rule = Rule.OVER_TARGET if found.seen_s * 1e3 > dial.setting.value else Rule.UNDER_TARGET
        _record(state, rule, found.before, found.seen_s)
    lost = (found.word is DialWord.UNREACHABLE, found.word_before is DialWord.UNREACHABLE)
    if lost == (True, False):
        _record(state, Rule.OUT_OF_REACH, found.before, found.seen_s)
    elif lost == (False, True):
        _record(state, Rule.WITHIN_REACH, found.before, found.seen_s)


def delivered(state: SchedulerState, flight: Flight, rows: Index, place: Index) -> None:
    """Rows got their tokens; `place` counts those since each joined."""
    work = flight.work
    is_full = work.prefill_tokens > 0 and work.decode_rows + work.prefill_tokens >= flight.budget
    state.dial.tokens(rows, place, state.now_s, is_full=is_full)


def record_policy(state: SchedulerState, name: str, options: Mapping[str, float | str]) -> None:
    """An operator has changed the policy."""
    detail = " ".join([name, *(f"{option}={value}" for option, value in sorted(options.items()))])
    _decide(state, DecisionKind.POLICY, Rule.OPERATOR, 0, 0.0, detail)


def record_drafts(state: SchedulerState, rows: int, width: int, tokens: int) -> None:
    """How many drafts rows may have has changed, with what is expected of that and what was seen before."""
    drafts = state.drafts
    if drafts is None or not drafts.is_news(width, state.now_s):
        return
    predicted, seen = drafts.gains(rows, width)
    rule = Rule.MORE_DRAFTS if width > drafts.recorded else Rule.FEWER_DRAFTS
    parts = (
        f"from={drafts.recorded}",
        f"to={width}",
        f"tokens={tokens}",
        f"rows={rows}",
        f"floor={drafts.floor:.3f}",
    )
    detail = " ".join([*parts, f"gain={predicted:.3f}", f"seen={seen:.3f}"])
    drafts.recorded = width
    _decide(state, DecisionKind.DRAFT, rule, width, 0.0, detail)


def _record(state: SchedulerState, rule: Rule, before: float, seen_s: float) -> None:
    detail = move_detail(state.dial, before, seen_s)
    _decide(state, DecisionKind.DIAL, rule, round(state.dial.position * 1000), seen_s, detail)


def _decide(
    state: SchedulerState, kind: DecisionKind, rule: Rule, value: int, seen_s: float, detail: str
) -> None:
    """Put on record what is about no request."""
    decision = Decision(
        kind=kind,
        request=NO_REQUEST,
        reason=rule,
        value=value,
        step=state.kv.submitted + 1,
        time_s=state.now_s,
        seconds=seen_s,
        detail=detail,
    )
    state.decisions.append(decision)


def move_detail(dial: Dial, before: float, seen_s: float) -> str:
    """Everything about a move, as words and numbers in a fixed order."""
    status, limits = dial.status(), dial.limits
    parts = [f"{dial.setting.kind.value}={dial.setting.value:g}", f"from={before:g}", f"to={dial.position:g}"]
    if seen_s:
        parts.append(f"seen_ms={seen_s * 1e3:.4g}")
    if limits is not None and limits.target_s is not None:
        parts.append(f"step_ms={limits.target_s * 1e3:.4g}")
    parts += [f"tokens={status.max_step_tokens}", f"share={status.prompt_share:g}", f"rows={status.max_rows}"]
    return " ".join(parts)
