"""Decisions on their way to the log: pages made beside the steps, which never wait for them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.audit.bias import requests_of
from paceline.audit.codec import decode_decision
from paceline.audit.trail import (
    PAGE,
    TrailDb,
    TrailReader,
    TrailWriter,
    make_pages,
    page_text,
    standard_text,
    verify,
)
from paceline.core.events import Decision, DecisionKind, Rule
from paceline.core.inputs import AddRequest, Done, Input, Journal
from paceline.core.plan import StepPlan
from paceline.core.recorder import BothRecorders, NoRecorder, StepRecord
from paceline.core.request import RequestId
from tests.waiting import wait_until


def add(request: int) -> tuple[float, Input]:
    return 1.0, AddRequest(
        id=RequestId(request),
        num_prompt=9,
        max_tokens=11,
        arrival_s=0.5,
        tenant="a",
        priority=2,
        keys=(b"key",),
        num_tokens=9,
        service_class="spot",
    )


def record(request: int, *decisions: Decision, inputs: Journal | None = None) -> StepRecord:
    told = [add(request), (1.0, Done(seq=3))] if inputs is None else inputs
    return StepRecord(
        t_plan=1.0, t_done=1.0, inputs=told, plan=StepPlan(seq=1), result=None, decisions=decisions
    )


def life(request: int) -> tuple[Decision, ...]:
    me = RequestId(request)
    return (
        Decision(DecisionKind.ADMIT, me, Rule.FITS, 0, 1, 1.0, 9, 9, 1, RequestId(1), 0.5),
        Decision(DecisionKind.PREEMPT, me, Rule.FORCED_RECOMPUTE, 4, 2, 1.5),
        Decision(DecisionKind.FINISH, me, Rule.LENGTH, 11, 3, 2.0),
    )


def pages(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(page.body) for page in TrailReader(folder)]


def test_decisions_are_written_with_the_requests_they_speak_of(tmp_path: Path) -> None:
    both = BothRecorders(NoRecorder(), TrailWriter(TrailDb(tmp_path)))
    both.step(record(7, *life(7)[:2]))
    both.close([], life(7)[2:])
    both.close([], ())
    start, page = pages(tmp_path)
    assert start["start"].keys() == {"version", "unix_s", "clock_s"}
    assert page["adds"] == [[7, 9, 11, 0.5, "a", 2, None, "spot"]]  # no keys, no text
    assert [decode_decision(entry) for entry in page["decisions"]] == list(life(7))
    found = verify(tmp_path)
    assert found.problem == "" and found.num_entries == 3


def test_pages_say_how_requests_fared(tmp_path: Path) -> None:
    for _ in range(2):  # a second run numbers its requests anew
        writer = TrailWriter(TrailDb(tmp_path))
        writer.step(record(7, *life(7)[:2]))
        writer.step(record(8, life(8)[0]))  # has not ended
        writer.close([], life(7)[2:])
    fared = {"tenant": "a", "class": "spot", "num_prompt": 9, "delay_s": 0.5, "preemptions": 1}
    assert requests_of(page.body for page in TrailReader(tmp_path)) == [fared, fared]


def test_pages_are_written_while_the_engine_runs(tmp_path: Path) -> None:
    writer = TrailWriter(TrailDb(tmp_path), interval_s=0.01)
    writer.step(record(7, *life(7)))
    wait_until(lambda: verify(tmp_path).num_entries == 3)
    writer.close([], ())


def test_steps_of_plain_decode_leave_nothing(tmp_path: Path) -> None:
    writer = TrailWriter(TrailDb(tmp_path), interval_s=60.0, most_waiting=2)
    for _ in range(10):
        writer.step(record(7, inputs=[(1.0, Done(seq=3))]))
    writer.step(record(8, inputs=[add(8)]))  # a request that came while all rows were taken
    writer.close([], ())
    assert [page.get("adds") for page in pages(tmp_path)] == [None, [[8, 9, 11, 0.5, "a", 2, None, "spot"]]]


def test_what_a_slow_disk_does_not_take_is_counted(tmp_path: Path) -> None:
    writer = TrailWriter(TrailDb(tmp_path), interval_s=60.0, most_waiting=2)
    for request in range(4):
        writer.step(record(request, *life(request)))
    writer.close([], ())
    assert pages(tmp_path)[-1] == {"lost": 6}


def test_a_disk_that_fails_fails_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    db = TrailDb(tmp_path)
    writer = TrailWriter(db, interval_s=0.01)
    db.close()
    for request in range(3):
        writer.step(record(request, *life(request)))
    wait_until(lambda: "decisions are not written any more" in caplog.text)
    writer.step(record(9, *life(9)))
    writer.close([], ())
    assert verify(tmp_path).first is None


def test_many_decisions_make_many_pages() -> None:
    steps = [([add(number)], life(number)) for number in range(PAGE)]
    made = list(make_pages(steps))
    counts = [count for _, count in made]
    assert sum(counts) == 3 * PAGE and len(made) > 2 and all(count < PAGE + 3 for count in counts)
    told = [decode_decision(entry) for text, _ in made for entry in json.loads(text)["decisions"]]
    assert told == [decision for number in range(PAGE) for decision in life(number)]


def test_both_ways_of_making_a_text_say_the_same() -> None:
    odd = Decision(DecisionKind.DEFER, RequestId(3), Rule.BLOCKS, 5, 1, 1e-7, detail='"é\n')
    odd = odd._replace(value=np.int32(5), blocks_free=np.int64(1 << 40))  # type: ignore[arg-type]
    page = {"adds": [(1, None, "ü")], "decisions": [odd, *life(1)]}
    assert json.loads(page_text(page)) == json.loads(standard_text(page))
    assert json.loads(standard_text({"x": math.inf})) == {"x": "inf"}  # a number that JSON lacks
