"""What policies see: every column of a view is what the requests themselves say, whatever happened to them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.core.request import NO_ROW, RequestId
from paceline.policy import RequestView
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt


def running(bench: Bench) -> RequestView:
    state = bench.scheduler.state
    return state.row_view(np.flatnonzero(state.rows.live))


def waiting(bench: Bench) -> RequestView:
    state = bench.scheduler.state
    return state.queue.view(state.now_s)


@pytest.mark.parametrize("deadline_s", [None, 50.0])
def test_a_deadline_is_in_the_column_wherever_the_request_is(deadline_s: float | None) -> None:
    bench = Bench(engine_config(max_num_seqs=1))
    first = bench.add(prompt(3), max_tokens=8, deadline_s=deadline_s)
    second = bench.add(prompt(3), max_tokens=8, deadline_s=deadline_s)
    bench.step()
    due_s = math.inf if deadline_s is None else deadline_s
    assert running(bench).deadline_s.tolist() == [due_s]
    assert waiting(bench).deadline_s.tolist() == [due_s]
    bench.scheduler.set_deadline(first, 70.0)
    bench.scheduler.set_deadline(second, 80.0)
    assert running(bench).deadline_s.tolist() == [70.0]
    assert waiting(bench).deadline_s.tolist() == [80.0]
    bench.scheduler.set_deadline(second, None)
    assert waiting(bench).deadline_s.tolist() == [math.inf]


def test_what_was_attained_is_kept_when_a_request_gives_way() -> None:
    bench = Bench(engine_config())
    rid = bench.add(prompt(5), max_tokens=8)
    assert waiting(bench).started.tolist() == [0]
    for _ in range(3):
        bench.step()
    view = running(bench)
    computed = int(view.num_computed[0])
    assert computed >= 6 and view.peak_computed.tolist() == [computed] and view.started.tolist() == [1]
    assert view.num_output.tolist() == [computed - 5 + 1]
    bench.scheduler.preempt(rid)
    view = waiting(bench)
    assert view.row.tolist() == [NO_ROW] and view.started.tolist() == [1]
    assert (view.num_computed.tolist(), view.peak_computed.tolist()) == ([0], [computed])
    assert view.num_output.tolist() == [computed - 5 + 1]
    bench.step()  # computes again what it had: nothing new is peak_computed before it has got on
    assert running(bench).peak_computed[0] >= computed


def test_tokens_kept_on_the_host_count_as_computed() -> None:
    bench = Bench(engine_config(num_host_blocks=16))
    rid = bench.add(prompt(5), max_tokens=8)
    for _ in range(3):
        bench.step()
    computed = int(running(bench).num_computed[0])
    bench.scheduler.preempt(RequestId(rid), swap=True)
    assert waiting(bench).num_computed.tolist() == [computed]
