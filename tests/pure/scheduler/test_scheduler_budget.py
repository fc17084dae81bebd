"""How a step is composed: one token budget, decodes first, prompts in chunks, rows and blocks as limits."""

import pytest

from paceline.core.events import DecisionKind
from paceline.core.request import RequestState
from tests.pure.engine.engine_helpers import Bench, Seen, engine_config, prompt


def planned(bench: Bench) -> Seen:
    seen = bench.step()
    assert seen is not None
    return seen


# -- chunks ------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    bench = Bench(engine_config(max_num_batched_tokens=10, long_prefill_share=1.0))
    request = bench.add(prompt(25))
    assert [planned(bench).spans for _ in range(3)] == [{request: 10}, {request: 10}, {request: 5}]
    assert bench.tokens[request] != []
    assert planned(bench).decodes == {request}
    assert bench.reasons(DecisionKind.CHUNK, request) == ["budget", "budget"]


def test_a_prompt_with_no_request_behind_it_may_have_the_whole_step() -> None:
    bench = Bench(engine_config(max_num_batched_tokens=32, long_prefill_share=0.5))
    request = bench.add(prompt(32))
    assert planned(bench).spans == {request: 32}


def test_a_prompt_under_way_may_have_the_whole_step_when_no_request_waits() -> None:
    bench = Bench(engine_config(max_num_batched_tokens=32, long_prefill_share=0.5))
    request = bench.add(prompt(100))
    bench.step()
    assert planned(bench).spans == {request: 32}


def test_while_others_wait_one_prompt_takes_at_most_its_share() -> None:
    bench = Bench(engine_config(num_blocks=129, max_num_batched_tokens=32, long_prefill_share=0.25))
    ids = [bench.add(prompt(100, start)) for start in range(3)]
    for _ in range(4):
        spans = planned(bench).spans
        assert spans[ids[0]] == 16, "the first in order gets what no other may take"
        assert spans[ids[1]] == spans[ids[2]] == 8


def test_tokens_that_are_left_go_to_a_prompt_that_has_just_come() -> None:
    bench = Bench(engine_config(max_num_batched_tokens=32, long_prefill_share=0.5))
    long, short = bench.add(prompt(100)), bench.add(prompt(5, 1))
    assert planned(bench).spans == {long: 27, short: 5}


def test_tokens_that_are_left_go_to_the_prompt_that_was_held_back() -> None:
    bench = Bench(engine_config(max_num_batched_tokens=32, long_prefill_share=0.5))
    long = bench.add(prompt(120))
    bench.step()
    short = bench.add(prompt(5, 1))
    assert planned(bench).spans == {long: 27, short: 5}


def test_a_short_prompt_is_not_kept_behind_a_long_one() -> None:
    """B6: head-of-line blocking. The short one has its first token while the long one is still computing."""
    bench = Bench(engine_config(max_num_batched_tokens=16, long_prefill_share=0.5))
    long = bench.add(prompt(120))
    bench.step(2)
    short = bench.add(prompt(6, 1))
    bench.step()
    assert bench.tokens[short] and not bench.tokens[long]


def test_the_smallest_share_is_one_token() -> None:
    bench = Bench(engine_config(max_num_batched_tokens=4, long_prefill_share=0.01))
    ids = [bench.add(prompt(20, start)) for start in range(6)]
    spans = planned(bench).spans
    assert spans == dict.fromkeys(ids[:4], 1)


# -- decodes first -----------------------------------------------------------------------------------------


def test_decodes_come_before_prompts_under_one_budget() -> None:
    bench = Bench(engine_config(max_num_batched_tokens=16))
    decoding = [bench.add(prompt(2, start), 20) for start in range(4)]
    bench.step(2)
    long = bench.add(prompt(60, 9))
    bench.step()
    seen = planned(bench)
    assert seen.decodes == set(decoding)
    assert seen.spans == {long: 12}
    assert seen.plan.work.decode_rows + seen.plan.work.prefill_tokens == 16


def test_a_budget_smaller_than_the_rows_serves_the_first_in_order() -> None:
    """Requests that are copied back from the host take no token of a step for it, so that there may be more rows."""
    config = engine_config(
        depth=1, max_num_batched_tokens=3, scheduling_policy="priority", num_host_blocks=32, max_preemptions=0
    )
    bench = Bench(config, overlapped=True)
    first = [bench.add(prompt(1, start), 40) for start in range(3)]
    bench.step(4)
    for request in first:
        assert bench.scheduler.preempt(request, swap=True)
    later = [bench.add(prompt(1, start), 40, priority=-1) for start in range(3, 6)]
    bench.step(12)
    assert list(bench.states().values()) == [RequestState.RUNNING] * 6
    assert [planned(bench).decodes for _ in range(2)] == [set(later)] * 2
    bench.scheduler.set_priority(first[2], -2)
    planned(bench)  # the last token it knows is computed again
    assert [planned(bench).decodes for _ in range(3)] == [{first[2], *later[:2]}] * 3
    bench.run()


def test_work_is_what_the_step_computes() -> None:
    bench = Bench(engine_config(max_num_batched_tokens=16, long_prefill_share=1.0))
    first = bench.add(prompt(6), 9)
    work = planned(bench).plan.work
    assert (work.decode_rows, work.decode_context, work.logit_rows) == (0, 0, 1)
    assert (work.prefill_tokens, work.prefill_context_products) == (6, 1 + 2 + 3 + 4 + 5 + 6)
    second = bench.add(prompt(20, 1), 2)
    work = planned(bench).plan.work
    assert (work.decode_rows, work.decode_context, work.logit_rows) == (1, 7, 1)
    assert (work.prefill_tokens, work.prefill_context_products) == (15, 15 * 16 // 2)
    work = planned(bench).plan.work
    assert (work.decode_rows, work.decode_context, work.logit_rows) == (1, 8, 2)
    assert (work.prefill_tokens, work.prefill_context_products) == (5, 16 + 17 + 18 + 19 + 20)
    assert planned(bench).decodes == {first, second}


# -- rows and blocks ---------------------------------------------------------------------------------------


def test_no_more_rows_run_than_allowed() -> None:
    bench = Bench(engine_config(max_num_seqs=2))
    ids = [bench.add(prompt(3, start), 3) for start in range(4)]
    bench.step()
    running = [name for name, state in bench.states().items() if state is RequestState.RUNNING]
    assert running == ids[:2]
    assert "rows" in bench.reasons(DecisionKind.DEFER) or bench.states()[ids[2]] is RequestState.WAITING
    bench.step(2)
    assert bench.finished.keys() == set(ids[:2])
    assert planned(bench).spans.keys() == set(ids[2:]), "a row that left is used in the very next plan"
    bench.run()


def test_the_watermark_keeps_blocks_free_while_others_run() -> None:
    bench = Bench(engine_config(num_blocks=11, watermark=0.2))
    first = bench.add(prompt(24), 2)  # six blocks of ten
    bench.step()
    second = bench.add(prompt(12, 1), 2)  # three more would leave one free, two are to stay
    bench.step()
    assert bench.states()[second] is RequestState.WAITING
    assert bench.reasons(DecisionKind.DEFER, second) == ["blocks"]
    bench.run()
    assert {first, second} == bench.finished.keys()


def test_the_watermark_does_not_keep_out_a_lone_request() -> None:
    bench = Bench(engine_config(num_blocks=11, watermark=0.9))
    bench.add(prompt(38), 2)
    bench.run()


def test_no_request_passes_one_that_waits_for_room() -> None:
    """F2: a small request behind a large one waits with it."""
    bench = Bench(engine_config(num_blocks=11))
    bench.add(prompt(20), 12)
    bench.step(2)
    large = bench.add(prompt(24, 1), 2)
    small = bench.add(prompt(2, 2), 2)
    bench.step()
    assert bench.states()[large] is bench.states()[small] is RequestState.WAITING
    bench.run()
    first_span = [
        next(at for at, seen in enumerate(bench.seen) if name in seen.spans) for name in (large, small)
    ]
    assert first_span == sorted(first_span)


def test_prompts_under_way_keep_the_blocks_they_still_need() -> None:
    """Admission counts what running prompts have yet to take: they are not starved by newcomers."""
    bench = Bench(engine_config(num_blocks=13, max_num_batched_tokens=8, long_prefill_share=0.5))
    first = bench.add(prompt(36), 2)  # nine blocks of twelve, computed a few at a time
    bench.step()
    second = bench.add(prompt(16, 1), 2)
    bench.step()
    assert bench.states()[second] is RequestState.WAITING
    bench.run()
    assert not bench.finished[first].preemptions


def test_nothing_to_do_is_no_plan() -> None:
    bench = Bench()
    assert bench.step() is None
    bench.add(prompt(3), 1)
    assert bench.step() is not None
    assert bench.step() is None


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("budget", [1, 3, 32])
def test_outputs_do_not_depend_on_chunk_and_block_sizes(block_size: int, budget: int) -> None:
    """O1."""
    bench = Bench(engine_config(block_size=block_size, num_blocks=80, max_num_batched_tokens=budget))
    for start in range(5):
        bench.add(prompt(3 * start + 1, start), 5)
    bench.run()
    assert all(len(tokens) == 5 for tokens in bench.tokens.values())
