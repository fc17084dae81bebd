"""Requests that place texts, ended at each step of their way: nothing of them stays, others are served as before."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

import pytest

from paceline.core.request import OWN_REQUESTS, FinishReason, RequestId
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt
from tests.pure.scheduler.test_scheduler_modules import OTHER, TEXT, around

MOST_STEPS = 60
Ending = Callable[[Bench, RequestId], object]


def aborted(one: Bench, request: RequestId) -> None:
    one.cut.add(request)
    one.engine.abort(request)


def failed(one: Bench, request: RequestId) -> None:
    """Its own step could not be computed."""
    one.cut.add(request)
    one.scheduler.fail(request, "internal_error")


def evicted_and_aborted(one: Bench, request: RequestId) -> None:
    one.scheduler.reset_prefix_cache()
    aborted(one, request)


def its_module_failed(one: Bench, request: RequestId) -> None:
    """What waits for the module ends with it; what has placed it does not."""
    own = [number for number in one.state.requests if number >= OWN_REQUESTS]
    for number in own[:1]:
        one.scheduler.fail(number, "internal_error")


def at_stage(depth: int, num_steps: int, end: Ending) -> bool:
    """One of three requests is ended after so many steps. False: it had come to its end before."""
    # One of the two that place texts has room at a time.
    one = Bench(engine_config(depth, num_blocks=50, max_model_len=120), overlapped=depth > 0)
    tokens, parts = around(TEXT, OTHER)
    ends = one.add(tokens, 3, modules=parts)
    turned, places = around(OTHER, TEXT)
    stays = one.add(turned, 3, modules=places)
    plain = one.add(prompt(9, start=200), 3)
    one.step(num_steps)
    if ends in one.finished:
        return False
    end(one, ends)
    one.flush()
    one.run()
    kept_on = {plain} if end is its_module_failed else {stays, plain}
    assert {one.finished[each].reason for each in kept_on} == {FinishReason.LENGTH}
    again = one.add(tokens, 3, modules=parts)  # its output is compared with that of such a prompt alone
    one.run()
    assert one.finished[again].reason is FinishReason.LENGTH
    modules = one.state.modules
    had = (modules._had, modules._lacks, modules._waiting)
    left = (modules.rows, modules.computing, modules.orders, modules.overtaken, *had)
    assert not any(left) and not one.state.kv.sources.rows, left
    return True


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("end", [aborted, failed, evicted_and_aborted, its_module_failed])
def test_whatever_ends_at_whatever_step_leaves_nothing(end: Ending, depth: int) -> None:
    stages = list(takewhile(lambda stage: at_stage(depth, stage, end), range(MOST_STEPS)))
    assert 5 < len(stages) < MOST_STEPS, "while it waited, was placed, computed and decoded, until its end"
