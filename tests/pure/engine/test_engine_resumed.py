"""Requests that come with output another engine has made."""

from __future__ import annotations

import pytest

from paceline.core.request import FinishReason
from paceline.core.sampling import SamplingParams
from paceline.errors import QueueFull
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt
from tests.reference_output import reference_output


def test_what_has_begun_is_taken_although_the_queue_is_full() -> None:
    bench = Bench(engine_config(max_queue=1))
    sampling = SamplingParams(max_tokens=9, seed=5)
    known, _ = reference_output(prompt(11, 3), sampling)
    bench.add(prompt(6, 1))
    with pytest.raises(QueueFull):
        bench.add(prompt(6, 2))
    (late,) = bench.engine.add(prompt(11, 3), sampling, outputs=[known[:4]])
    bench.asked[late], bench.tokens[late], bench.placed[late] = (prompt(11, 3), sampling), known[:4], ()
    bench.run()
    assert bench.tokens[late] == known and bench.finished[late].num_output == 9


def test_output_that_is_complete_ends_without_a_step() -> None:
    bench = Bench()
    sampling = SamplingParams(max_tokens=3, seed=5)
    branches = bench.engine.add(prompt(6), sampling, outputs=[[7, 8, 9]])
    (ending,) = bench.engine.scheduler.take_events().finished
    assert (ending.request, ending.reason, ending.num_output) == (branches[0], FinishReason.LENGTH, 3)
    assert bench.engine.step().tokens == () and not bench.engine.has_requests


def test_its_blocks_are_shared_like_those_of_a_preempted_request() -> None:
    """Prompt and output are found in the cache where an earlier request with the same beginning has left them."""
    bench = Bench()
    sampling = SamplingParams(max_tokens=16, seed=5)
    first = bench.add(prompt(8), max_tokens=16, seed=5)
    bench.run()
    known = bench.tokens[first]
    (again,) = bench.engine.add(prompt(8), sampling, outputs=[known[:12]])
    bench.asked[again], bench.tokens[again], bench.placed[again] = (prompt(8), sampling), known[:12], ()
    bench.run()
    assert bench.tokens[again] == known
    assert bench.finished[again].num_cached == 8, "no more than its prompt counts as cached"
    computed = sum(seen.spans.get(again, 0) for seen in bench.seen)
    assert computed == 20 - 16, "four blocks are full: the prompt's two, and two of its output"
