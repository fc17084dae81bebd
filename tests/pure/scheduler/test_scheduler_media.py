"""Pictures in steps: a line that rows pay for, vectors in pages, and rows that stop at what is not encoded."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from paceline.audit.story import story
from paceline.config.encoder import EncoderWork
from paceline.core.events import DecisionKind, Rule
from paceline.core.stretch import MediaInput, MediaPart
from paceline.errors import InvalidRequest, NeverFits
from paceline.scheduler.step.stretches import make_room_for_pages
from tests.fakes import FakeRunner
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt


def bench(
    *,
    num_pages: int = 8,
    max_units: int = 64,
    positions: float = 2.0,
    least: str = "position",
    **options: Any,
) -> Bench:
    work = EncoderWork(
        layers=2,
        num_pages=num_pages,
        page_vectors=4,
        max_units=max_units,
        token_positions=positions,
        least=least,
    )
    return Bench(engine_config(encoder=work, **options))


def picture(content: int, outputs: int = 8, units: int = 8) -> MediaInput:
    return MediaInput(content=bytes([content]), units=units, outputs=outputs)


def device(of: Bench) -> FakeRunner:
    assert isinstance(of.runner, FakeRunner)
    return of.runner


def encoded(of: Bench) -> list[int]:
    """Positions of lines that each plan computes."""
    return [seen.plan.encodes.count for seen in of.seen]


def test_a_row_stops_at_a_picture_and_pays_for_it_with_its_share() -> None:
    one = bench()  # 32 tokens a step
    request = one.add(prompt(40), media=[MediaPart(4, picture(1, units=40))])
    one.run()
    # Its line has 2 x 2 x 40 positions; of the first step 4 tokens go to what stands before it, 28 to 56 of these.
    assert encoded(one)[:3] == [56, 64, 40]
    spans = [seen.spans.get(request) for seen in one.seen[:4]]
    assert spans == [4, None, 12, 24], "20 tokens for the last 40 positions, 12 for what stands behind them"


def test_a_gpu_computes_whole_layers() -> None:
    one = bench(least="layer")  # 32 tokens a step, which pay for 64 positions; a layer has 80
    request = one.add(prompt(40), media=[MediaPart(0, picture(1, units=40))])
    one.run()
    assert encoded(one)[:2] == [80, 80], "each step goes on by a layer, although it pays for less"
    many = bench(least="layer", positions=2.9)  # 92 positions: 12 of them count for the next layer
    many.add(prompt(12), media=[MediaPart(0, picture(1, units=40))])
    many.run()
    assert encoded(many)[:2] == [80, 80] and one.seen[2].spans.get(request) == 32
    wide = bench(least="layer", positions=6.0, max_num_batched_tokens=8)  # 48 positions; a layer has 24
    two = [MediaPart(0, picture(1, units=6)), MediaPart(8, picture(2, units=6))]
    wide.add(prompt(20), media=two)
    wide.run()
    assert encoded(wide)[0] == 48, "two layers of both items"


def test_a_whole_picture_can_be_asked_for() -> None:
    one = bench(least="line", max_num_batched_tokens=8)
    one.add(prompt(4), 20)
    one.step(2)
    one.add(prompt(30), media=[MediaPart(0, picture(1, outputs=20, units=200))])
    one.run()
    assert [count for count in encoded(one) if count] == [800], "its whole line stands in one step"


def test_a_picture_makes_no_step_longer_for_rows_that_decode() -> None:
    one = bench(max_num_batched_tokens=16)
    others = [one.add(prompt(5, start), 30) for start in range(1, 4)]
    one.step(2)
    one.add(prompt(30), media=[MediaPart(0, picture(1, outputs=20, units=200))])
    one.step(8)
    for seen in one.seen[-8:]:
        assert seen.decodes == set(others), "no row that decodes waits"
        assert seen.plan.work.decode_rows + seen.plan.encodes.count / 2 <= 16
    one.run()


def test_rows_that_leave_a_step_to_a_prompt_leave_it_to_its_picture() -> None:
    one = bench(max_num_batched_tokens=16, scheduling_policy="priority")
    others = [one.add(prompt(5, start), 30, priority=5) for start in range(1, 4)]
    one.step(2)
    one.add(prompt(30), media=[MediaPart(0, picture(1, outputs=20, units=200))])
    one.add(prompt(3, 7), priority=5)
    one.step(8)
    for seen in one.seen[-8:]:
        assert seen.plan.encodes.count and not seen.decodes, "its encoder takes the whole budget"
    one.run()
    assert all(len(one.tokens[number]) == 30 for number in others)


def test_the_same_picture_is_computed_once() -> None:
    one = bench()
    first = one.add(prompt(20, 1), media=[MediaPart(2, picture(1))])
    second = one.add(prompt(20, 2), media=[MediaPart(9, picture(1))])
    one.run()
    third = one.add(prompt(20, 3), media=[MediaPart(0, picture(1))])
    one.run()
    assert sum(encoded(one)) == 2 * 2 * 8
    reasons = {d.request: d.reason for d in one.watch.decisions if d.kind is DecisionKind.ENCODE}
    assert reasons == {first: Rule.ENCODED, second: Rule.ENCODED, third: Rule.FOUND_ENCODED}


def test_tenants_share_no_pictures() -> None:
    one = bench()
    for tenant in ("a", "b"):
        one.add(prompt(20), tenant=tenant, media=[MediaPart(2, picture(1))])
    one.run()
    assert sum(encoded(one)) == 2 * (2 * 2 * 8)


def test_prompts_that_differ_in_a_picture_only_share_what_stands_before_it() -> None:
    one = bench()
    for content in (1, 2, 1):
        one.add(prompt(32), media=[MediaPart(9, picture(content))])
        one.run()
    cached = [one.finished[number].num_cached for number in sorted(one.finished)]
    assert cached == [0, 8, 28]


def test_pages_that_hold_one_picture_serve_prompts_of_many() -> None:
    one = bench(num_pages=2, max_num_seqs=3)
    for start in range(3):
        parts = [MediaPart(1 + 9 * at, picture(10 * start + at)) for at in range(3)]
        one.add(prompt(40, start), media=parts)
    one.run()
    assert len(one.finished) == 3 and one.state.encodings.pool.num_evicted


def test_a_picture_that_no_request_needs_any_more_is_not_encoded_to_its_end() -> None:
    one = bench(max_num_batched_tokens=8)
    gone = one.add(prompt(30), media=[MediaPart(0, picture(1, units=100))])
    other = one.add(prompt(30, 1), media=[MediaPart(0, picture(2, units=4))])
    one.step(2)
    assert one.state.encodings.group is not None
    one.scheduler.abort(gone)
    one.run()
    assert other in one.finished and sum(encoded(one)) < 2 * 2 * 100
    assert one.state.encodings.pool.num_free == one.state.encodings.pool.usable


def test_a_group_outlives_the_preemption_of_its_rows() -> None:
    one = bench(max_num_batched_tokens=8)
    request = one.add(prompt(30), media=[MediaPart(0, picture(1, units=40))])
    one.step(3)
    one.scheduler.preempt(request)
    one.run()
    assert sum(encoded(one)) == 2 * 2 * 40, "no position is computed twice"


def test_numbers_that_are_not_finite_end_those_that_need_them() -> None:
    one = bench()
    device(one).faults.bad_encoding = 1.0
    bad = one.add(prompt(20), media=[MediaPart(2, picture(1))])
    good = one.add(prompt(20, 1))
    one.run()
    assert (one.finished[bad].detail, one.finished[good].detail) == ("numerical_error", "")
    device(one).faults.bad_encoding = 0.0
    again = one.add(prompt(20), media=[MediaPart(2, picture(1))])
    one.run()
    assert one.finished[again].detail == "", "what was bad was not kept"


def test_a_branch_has_the_pictures_of_its_parent() -> None:
    one = bench()
    request = one.add(prompt(20), 20, media=[MediaPart(2, picture(1))])
    one.step(4)
    one.fork(request, 2)
    one.run()
    assert len(one.finished) == 3


def test_a_branch_that_waits_at_a_picture_writes_into_no_block_that_its_parent_left_cached() -> None:
    one = bench(num_pages=2)
    parent = one.add(prompt(10), 6, seed=5, media=[MediaPart(2, picture(1))])
    one.step(2)
    while not one.tokens[parent]:
        one.step()
    one.add(prompt(12, 1), media=[MediaPart(0, picture(2, units=400))])
    one.step()
    assert one.state.encodings.pool.num_evicted == 2, "the vectors of the first picture are gone"
    (branch,) = one.fork(parent, at=0)
    while parent not in one.finished:
        one.step()
    row = one.request(branch).row
    assert one.state.rows.computed[row] == 9, "its last token is in the picture, which is not encoded yet"
    one.run()
    again = one.add([*prompt(10), *one.tokens[parent]], media=[MediaPart(2, picture(1))])
    one.run()
    assert one.finished[again].num_cached == 12, "what the parent left is there, and right"


def test_what_pictures_are_made_from_is_held_while_requests_need_it() -> None:
    one = bench()
    for start in (0, 1):
        one.add(
            prompt(20, start), 3 + 20 * start, media=[MediaPart(2, picture(start)), MediaPart(11, picture(7))]
        )
    assert device(one).encoder.num_held == 3
    one.step(12)
    assert device(one).encoder.num_held == 2, "one request has ended"
    one.run()
    one.step(2)
    assert device(one).encoder.num_held == 0


def test_a_model_that_sleeps_keeps_no_runner_and_its_pictures_are_there_when_it_wakes() -> None:
    one = bench()
    first = one.add(prompt(20), media=[MediaPart(2, picture(1))])
    gone = one.add(prompt(20, 7), media=[MediaPart(2, picture(7))])
    one.step(2)
    one.engine.sleep()
    left = weakref.ref(one.runner)
    one.runner = FakeRunner(one.config)
    gc.collect()
    assert left() is None, "its weights and its KV are given back"
    second = one.add(prompt(20, 5), media=[MediaPart(2, picture(2))])
    one.engine.abort(gone)
    one.engine.wake(one.runner)
    one.run()
    assert one.finished.keys() == {first, gone, second}
    one.step(2)
    assert device(one).encoder.num_held == 0


def test_pages_held_behind_the_first_are_taken_where_nothing_else_goes_on() -> None:
    one = bench(max_num_batched_tokens=8)
    first, second = (one.add(prompt(24, n), media=[MediaPart(0, picture(1, units=99))]) for n in (1, 2))
    one.step(3)
    state, rows = one.state, [one.request(number).row for number in (first, second)]
    assert state.encodings.rows[rows[1]].held, "both wait for one picture"
    assert not make_room_for_pages(state, rows), "pages are not what is short"
    state.encodings.lacks_pages = True
    assert make_room_for_pages(state, rows)
    assert [one.request(number).preemptions for number in (first, second)] == [0, 1]
    assert state.decisions[-1].reason is Rule.PAGES_RECOMPUTE
    one.run()
    assert one.finished.keys() == {first, second}


@pytest.mark.parametrize("part", [MediaPart(15, picture(1)), MediaPart(-1, picture(1))])
def test_a_picture_has_its_tokens_in_the_prompt(part: MediaPart) -> None:
    with pytest.raises(InvalidRequest, match="do not stand in the prompt"):
        bench().add(prompt(20), media=[part])


def test_what_can_never_be_encoded_is_refused() -> None:
    one = bench(num_pages=2)
    with pytest.raises(NeverFits, match="picture 2 has 9 tokens, and there is room for the vectors of 8"):
        one.add(prompt(40), media=[MediaPart(0, picture(1)), MediaPart(20, picture(2, outputs=9))])
    with pytest.raises(InvalidRequest, match="takes text only"):
        Bench().add(prompt(20), media=[MediaPart(0, picture(1))])
    assert device(one).encoder.num_held == 0


def test_the_story_of_a_request_tells_when_its_pictures_were_encoded() -> None:
    one = bench(max_num_batched_tokens=16)
    one.add(prompt(5, 9), 40)
    one.step(2)
    request = one.add(prompt(30), media=[MediaPart(0, picture(1, units=30)), MediaPart(9, picture(2))])
    one.run()
    told = " ".join(story(d for d in one.watch.decisions if d.request == request))
    assert "its picture 1 of 2 (8 tokens) was encoded in steps 3 to 8 beside 1 decoding rows" in told


def test_what_becomes_of_pictures_is_counted() -> None:
    one = bench(num_pages=4)
    first = one.engine.scheduler.state.requests[
        one.add(prompt(40), 12, media=[MediaPart(4, picture(1, units=40))])
    ]
    one.step(8)
    counters = one.engine.scheduler.state.counters
    use = one.engine.scheduler.state.encodings.use()
    assert (counters.media_queries, counters.media_hits) == (1, 0)
    assert (counters.encoded, counters.encoded_units, counters.encode_positions) == (1, 40, 160)
    assert counters.encode_as_tokens == pytest.approx(80)
    assert counters.encode_waits == 1 and counters.encode_wait_s > 0.0
    assert (use.held, use.cached, use.pages) == (0, 2, 4), "its row has passed it"
    again = one.engine.scheduler.state.requests[
        one.add(prompt(40, 7), 2, media=[MediaPart(0, picture(1, units=40))])
    ]
    one.run()
    assert (again.cost.encoded_units, again.cost.encodings_reused) == (0, 1)
    assert first.cost.encoded_units == 40
    assert (counters.media_queries, counters.media_hits, counters.encoded) == (2, 1, 1)
    assert counters.encode_waits == 1


def test_items_are_numbered_in_the_order_of_the_prompt() -> None:
    """In every process alike: a set of keys would have another order in a replay."""
    one = bench(num_pages=40, max_num_batched_tokens=256, max_model_len=256)
    one.add(prompt(120), media=[MediaPart(8 * place, picture(place)) for place in range(12)])
    one.run()
    numbers = [number for seen in one.seen for join in seen.plan.joins.media for _, _, number in join]
    assert numbers == list(range(1, 13))
