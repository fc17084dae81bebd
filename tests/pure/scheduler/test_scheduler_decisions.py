"""Every decision says what explains it: step, time, budget, blocks and the request it was compared with."""

from __future__ import annotations

from paceline.core.events import NO_NUMBER, NO_REQUEST, Decision, DecisionKind, Rule
from paceline.core.request import RequestId
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt


def decisions(bench: Bench, kind: DecisionKind, request_id: int) -> list[Decision]:
    found = bench.watch.decisions + bench.state.decisions
    return [decision for decision in found if decision.kind is kind and decision.request == request_id]


def test_an_admission_says_what_was_needed_and_what_was_there() -> None:
    bench = Bench(engine_config(num_blocks=11, max_num_batched_tokens=64, block_size=4))
    first, second = bench.add(prompt(9), 2), bench.add(prompt(4, 1), 2)
    bench.clock.advance(0.5)
    bench.step()
    [admitted] = decisions(bench, DecisionKind.ADMIT, first)
    assert (admitted.reason, admitted.step, admitted.time_s) == (Rule.FITS, 1, 0.5)
    assert (admitted.blocks_needed, admitted.blocks_free, admitted.budget_left) == (3, 10, 64)
    assert (admitted.against, admitted.seconds) == (NO_REQUEST, 0.5)
    [admitted] = decisions(bench, DecisionKind.ADMIT, second)
    assert (admitted.blocks_needed, admitted.blocks_free, admitted.budget_left) == (1, 7, 55)
    assert admitted.against == first


def test_a_deferral_for_blocks_names_the_request_that_took_them_and_what_is_kept_back() -> None:
    bench = Bench(engine_config(num_blocks=11, watermark=0.2))
    first = bench.add(prompt(24), 2)  # six blocks of ten
    bench.step()
    second = bench.add(prompt(12, 1), 2)
    bench.step()
    [deferred] = decisions(bench, DecisionKind.DEFER, second)
    assert (deferred.reason, deferred.step, deferred.against) == (Rule.BLOCKS, 2, first)
    # The first has taken a seventh block; two of the three that are left stay free.
    assert (deferred.blocks_needed, deferred.blocks_free, deferred.value) == (3, 3, 2)


def test_a_deferral_for_rows_is_noted_once_for_the_first_request() -> None:
    bench = Bench(engine_config(max_num_seqs=2))
    ids = [bench.add(prompt(3, start), 6) for start in range(4)]
    bench.step(4)
    [deferred] = decisions(bench, DecisionKind.DEFER, ids[2])
    assert (deferred.reason, deferred.against, deferred.step) == (Rule.ROWS, ids[1], 2)
    assert (deferred.blocks_free, deferred.blocks_needed) == (NO_NUMBER, NO_NUMBER)
    assert not decisions(bench, DecisionKind.DEFER, ids[3])
    bench.run()


def test_a_deferral_for_budget_names_the_prompt_that_took_it() -> None:
    bench = Bench(engine_config(max_num_batched_tokens=16, long_prefill_share=1.0))
    first, second = bench.add(prompt(16), 2), bench.add(prompt(5, 1), 2)
    bench.step()
    [deferred] = decisions(bench, DecisionKind.DEFER, second)
    assert (deferred.reason, deferred.against, deferred.budget_left) == (Rule.BUDGET, first, 0)


def test_a_chunk_says_what_cut_it() -> None:
    bench = Bench(engine_config(max_num_batched_tokens=16, long_prefill_share=0.5))
    alone = bench.add(prompt(20), 2)
    bench.step()
    assert decisions(bench, DecisionKind.CHUNK, alone)[-1].reason is Rule.BUDGET
    bench = Bench(engine_config(max_num_batched_tokens=16, long_prefill_share=0.5))
    long, other = bench.add(prompt(30), 2), bench.add(prompt(8, 1), 2)
    bench.step()
    chunk = decisions(bench, DecisionKind.CHUNK, long)[0]
    assert (chunk.reason, chunk.value, chunk.budget_left) == (Rule.SHARE, 8, 8)
    assert not decisions(bench, DecisionKind.CHUNK, other)


def test_a_victim_names_the_request_that_got_its_place() -> None:
    bench = Bench(engine_config(num_blocks=7))
    ids = [bench.add(prompt(4, start), 20) for start in range(4)]
    bench.run()
    first = [decisions(bench, DecisionKind.PREEMPT, name) for name in ids][3][0]
    assert (first.reason, first.against, first.value) == (Rule.BLOCKS_RECOMPUTE, ids[0], 4)
    assert first.blocks_needed == 2 and first.blocks_free == 2, "four need one each, and two are there"
    again = decisions(bench, DecisionKind.RESUME, ids[3])[0]
    assert (
        again.step > first.step and again.time_s > first.time_s and again.blocks_free >= again.blocks_needed
    )


def test_a_request_that_waits_for_a_prefix_names_the_one_that_computes_it() -> None:
    bench = Bench(engine_config(max_num_batched_tokens=8))
    first = bench.add(prompt(16), 2)
    bench.step()
    second = bench.add([*prompt(16), 5], 2)
    bench.step()
    deferred = decisions(bench, DecisionKind.DEFER, second)
    assert [(each.reason, each.against) for each in deferred] == [(Rule.PREFIX, first)]


def test_an_end_that_no_rule_names_keeps_its_word() -> None:
    bench = Bench(engine_config())
    one, other = bench.add(prompt(4), 9), bench.add(prompt(4, 1), 9)
    bench.step()
    bench.scheduler.abort(RequestId(one), "the client went")
    bench.scheduler.abort(RequestId(other), "deadline")
    [ended] = decisions(bench, DecisionKind.FINISH, one)
    assert (ended.reason, ended.detail, ended.value, ended.step) == (Rule.ABORT, "the client went", 1, 2)
    [ended] = decisions(bench, DecisionKind.FINISH, other)
    assert (ended.reason, ended.detail) == (Rule.DEADLINE, "")
