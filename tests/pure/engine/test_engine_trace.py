"""A trace of an engine's steps shows what its state shows, live and of a run that is watched afterwards."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest

from paceline import server
from paceline.audit.story import _ENDS
from paceline.cli.top.picture import unpack_steps
from paceline.config.speculative import DraftConfig
from paceline.core.events import DecisionKind
from paceline.core.stretch import MediaPart
from paceline.engine.snapshot import CACHED, FREE, HELD, ROW_COLUMNS, SHARED, snapshot_of
from paceline.engine.trace import PeriodicTrace, StepTrace, TraceDelta
from paceline.process.live_view import delta_values
from tests.cases import first
from tests.dst.world import World
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt
from tests.pure.scheduler.test_scheduler_media import bench as seeing
from tests.pure.scheduler.test_scheduler_media import picture
from tests.pure.scheduler.test_scheduler_modules import OTHER, TEXT, around


class Picture:
    """The request on each row, from steps alone: what a page does."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.decoding: set[int] = set()
        self.filling: set[int] = set()
        self.last = 0

    def show(self, delta: TraceDelta) -> None:
        seqs = [step["seq"] for step in unpack_steps(delta_values(delta))]
        assert delta.dropped or seqs == list(range(self.last + 1, self.last + 1 + len(seqs)))
        self.last = delta.snapshot.seq
        for step in unpack_steps(delta_values(delta)):
            if "cleared" in step:
                self.clear()
            for row in step.get("leaves", ()):
                self.rows.pop(row, None)
                self.decoding.discard(row)
                self.filling.discard(row)
            for row, request in step.get("joins", ()):
                assert row not in self.rows
                self.rows[row] = request
            pads = sum(tokens for _, tokens in step.get("pads", ()))
            assert sum(tokens for _, tokens in step.get("spans", ())) + pads == step["p"]
            self.decoding -= set(step.get("off", ()))
            self.decoding |= set(step.get("on", ()))
            self.filling -= set(step.get("off", ()))
            self.filling |= set(step.get("fills", ()))
            assert self.filling <= self.decoding
            assert len(self.filling) == step["pr"] == step["padding"] - pads
        if delta.cleared:
            self.clear()

    def clear(self) -> None:
        self.rows.clear()
        self.decoding.clear()
        self.filling.clear()


def column(delta: TraceDelta, name: str) -> list[int]:
    found: list[int] = delta.snapshot.rows[ROW_COLUMNS.index(name)].tolist()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", first(8, range(40)))
def test_steps_and_state_tell_the_same(seed: int) -> None:
    world = World(seed)
    trace = world.engine.watcher = StepTrace(world.engine.scheduler.state)
    picture, rng, step = Picture(), random.Random(seed), world.step
    seen: set[str] = set()

    def watched_step() -> None:
        step()
        if rng.random() < 0.4:
            delta = trace.take_delta()
            picture.show(delta)
            snapshot = delta.snapshot
            shown = {row: request for row, request in picture.rows.items() if row not in snapshot.left}
            live = dict(zip(column(delta, "row"), column(delta, "request"), strict=True))
            assert shown == live
            assert snapshot.num_waiting == len(world.engine.scheduler.state.queue)
            for kinds, group in zip(snapshot.blocks, world.engine.scheduler.state.kv.groups, strict=True):
                pool = group.pool
                assert int((kinds <= CACHED).sum()) == pool.num_free
                assert int((kinds == SHARED).sum()) == int((pool.refs[1:] > 1).sum())
            seen.update(note.kind for note in delta.changes.notes[1])

    world.step = watched_step  # type: ignore[method-assign]
    world.run(120)
    assert DecisionKind.FINISH.value in seen or not world.clients


def test_rows_of_a_static_batch_are_told_as_padding_once_they_have_their_last_token() -> None:
    bench = Bench(engine_config(mode="static", batch_size=3))
    trace = bench.engine.watcher = StepTrace(bench.scheduler.state)
    for index, (num_prompt, num_output) in enumerate(((4, 2), (8, 6), (6, 4))):
        bench.add(prompt(num_prompt, index), num_output)
    bench.run()
    steps = unpack_steps(delta_values(trace.take_delta()))
    assert steps[0]["pads"] == [[0, 4], [2, 2]] and steps[0]["padding"] == 6
    began = {row: step["seq"] for step in steps for row in step.get("fills", ())}
    assert began == {0: steps[0]["seq"] + 2, 2: steps[0]["seq"] + 4}  # the first token came with the prompt
    assert [step["pr"] for step in steps] == [0, 0, 1, 1, 2, 2]


def test_what_a_block_is() -> None:
    bench = Bench(engine_config())
    bench.add(prompt(24), 4)
    bench.run()
    state = bench.scheduler.state
    (kinds,) = snapshot_of(state).blocks
    assert set(np.unique(kinds)) == {FREE, CACHED}
    request = bench.add(prompt(24) + prompt(3, 1), 8)
    bench.step(2)
    bench.fork(request)
    bench.step()
    (kinds,) = snapshot_of(state).blocks
    assert {HELD, SHARED} <= set(np.unique(kinds).tolist())
    assert len(kinds) == state.kv.groups[0].pool.usable


def test_steps_that_change_nothing_are_counted_with_the_one_before() -> None:
    bench = Bench(engine_config())
    trace = bench.engine.watcher = StepTrace(bench.scheduler.state)
    bench.add(prompt(8), 20)
    bench.step(12)
    delta = trace.take_delta()
    assert delta.steps.count == [1, 11] and delta.done[-1][0] == delta.snapshot.seq
    steps = unpack_steps(delta_values(delta))
    assert [step["seq"] for step in steps] == list(range(1, 13))
    assert [step["d"] for step in steps] == [0] + [1] * 11 and [step["p"] for step in steps] == [8] + [0] * 11
    times = [step["t"] for step in steps]
    assert times == sorted(times) and times[-1] == delta.steps.until_s[-1]


def test_what_is_not_fetched_is_dropped_and_counted() -> None:
    bench = Bench(engine_config())
    trace = bench.engine.watcher = StepTrace(bench.scheduler.state, most=3)
    for index in range(10):  # each step has a prompt to compute
        bench.add(prompt(8, index), 2)
        bench.step()
    delta = trace.take_delta()
    assert len(delta.steps) == 3 and delta.dropped == 7
    assert [seq for seq, *_ in delta.done] == [*delta.steps.seq, delta.snapshot.seq]
    again = trace.take_delta()
    assert not len(again.steps) and again.dropped == 0


def test_the_waiting_come_in_the_policys_order() -> None:
    bench = Bench(engine_config())
    for index in range(40):
        bench.add(prompt(20, index), 8)
    bench.step()
    snapshot = snapshot_of(bench.scheduler.state)
    assert snapshot.num_waiting == len(snapshot.waiting) > 10
    ids = [waiting.request for waiting in snapshot.waiting]
    assert ids == sorted(ids)


def test_evicted_prefixes_are_reported_once() -> None:
    bench = Bench(engine_config())
    trace = bench.engine.watcher = StepTrace(bench.scheduler.state)
    pool = bench.scheduler.state.kv.groups[0].pool
    for index in range(40):  # different prompts fill the cache, until it has to forget
        bench.add(prompt(20, index), 4)
    bench.run()
    delta = trace.take_delta()
    assert pool.num_evicted > 0
    (evicted,) = delta.evicted
    assert list(evicted) == [block - 1 for block in pool.evicted_last][-pool.num_evicted :]
    assert all(0 <= block < len(delta.snapshot.blocks[0]) for block in evicted)
    assert trace.take_delta().evicted == ((),)


def test_endings_are_told_before_a_step_notes_them() -> None:
    bench = Bench(engine_config())
    trace = bench.engine.watcher = StepTrace(bench.scheduler.state)
    first = bench.add(prompt(8), 3)
    bench.run()
    delta = trace.take_delta()
    assert [note.request for note in delta.ended] == [first] and delta.snapshot.left
    assert not any(note.kind == DecisionKind.FINISH.value for note in delta.changes.notes[1])
    bench.add(prompt(8, 1), 3)
    bench.step()
    delta = trace.take_delta()
    places, notes = delta.changes.notes
    told = zip(places, notes, strict=True)
    assert [(at, note.request) for at, note in told if note.kind == DecisionKind.FINISH.value] == [(0, first)]


# ----------------------------------------------------------------
# Deltas of a run that is watched afterwards: by its own clock, never too many, and nothing lost between
# them.


@pytest.mark.slow
@pytest.mark.parametrize("seed", first(3, range(10)))
def test_deltas_taken_inside_a_run_agree_with_its_state(seed: int) -> None:
    world, deltas = World(seed), list[TraceDelta]()
    trace = PeriodicTrace(world.engine.scheduler.state, deltas.append, interval_s=0.05, doubles_after=10_000)
    world.engine.watcher = trace
    world.run(120)
    trace.take_delta(world.engine.now_s)
    picture, steps = Picture(), 0
    for delta in deltas:
        picture.show(delta)
        shown = {row: request for row, request in picture.rows.items() if row not in delta.snapshot.left}
        assert shown == dict(zip(column(delta, "row"), column(delta, "request"), strict=True))
        assert delta.dropped == 0
        steps += len(delta.steps)
    assert steps == world.engine.num_submitted
    times = [delta.snapshot.time_s for delta in deltas]
    assert times == sorted(times)


@pytest.mark.slow
def test_deltas_of_a_long_run_come_less_and_less_often() -> None:
    world, deltas = World(3), list[TraceDelta]()
    trace = PeriodicTrace(world.engine.scheduler.state, deltas.append, interval_s=1e-4, doubles_after=4)
    world.engine.watcher = trace
    world.run(120)
    trace.take_delta(world.engine.now_s)
    sizes = [len(delta.steps) for delta in deltas]
    assert sum(sizes) == world.engine.num_submitted
    assert sizes[0] == 1 and max(sizes) > 1


def test_drafts_are_told() -> None:
    bench = Bench(engine_config(drafts=DraftConfig(width=3)))
    bench.add(prompt(4), 40)
    bench.run()
    found = snapshot_of(bench.state)
    assert found.draft_tokens > found.accepted_tokens > 0
    assert found.draft_tokens == bench.state.counters.draft_tokens


def test_the_page_marks_as_finished_what_the_story_tells_as_an_end_that_was_wanted() -> None:
    stage = Path(server.__file__).parent / "live" / "ui" / "stage.js"
    [listed] = re.findall(r"GOOD_ENDS = new Map\(\[(.*)\]\)", stage.read_text(encoding="utf-8"))
    wanted = {rule.value for rule, words in _ENDS.items() if not words.startswith(("was ", "failed"))}
    assert set(re.findall(r'"(.*?)"', listed)) == wanted


def test_what_is_placed_and_encoded_is_told_by_row() -> None:
    bench = Bench(engine_config(max_num_batched_tokens=64))
    trace = bench.engine.watcher = StepTrace(bench.scheduler.state)
    tokens, parts = around(TEXT, OTHER)
    bench.add(tokens, 2, modules=parts)
    bench.run()
    steps = unpack_steps(delta_values(trace.take_delta()))
    placed = [entry for step in steps for entry in step.get("placed", ())]
    bodies = [len(TEXT) - 16, len(OTHER) - 16]
    assert [tokens for _, tokens in placed] == bodies and len({row for row, _ in placed}) == 1
    assert not any("encodes" in step for step in steps)


def test_a_row_is_told_of_for_as_long_as_its_picture_is_encoded() -> None:
    bench = seeing(max_num_batched_tokens=16)
    trace = bench.engine.watcher = StepTrace(bench.scheduler.state)
    bench.add(prompt(4, 9), 60)
    bench.step(2)
    bench.add(prompt(30), 2, media=[MediaPart(3, picture(1, units=60))])
    bench.run()
    steps = unpack_steps(delta_values(trace.take_delta()))
    encoding = [step for step in steps if "encodes" in step]
    planned = [seen for seen in bench.seen if seen.plan.encodes.count]
    assert len(encoding) == len(planned) > 1
    (row,) = {row for step in encoding for row in step["encodes"]}
    assert row == next(entry[0] for step in steps for entry in step.get("joins", ()) if entry[1] == 2)
