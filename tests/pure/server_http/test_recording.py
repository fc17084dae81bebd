"""A run that was watched: its messages are those of a live page, its stories whole, its latencies those of the run."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import numpy as np
import pytest

from paceline.cli.top.picture import unpack_steps
from paceline.core.events import Finished, TokenEvents
from paceline.core.request import FinishReason, RequestId
from paceline.lab.report.run_record import RunRecord
from paceline.lab.sim import simulate
from paceline.process.client import EngineStats
from paceline.server.access.caller import Caller
from paceline.server.errors import UnknownRequestId
from paceline.server.generate.requests import Explanations, RecentRequests
from paceline.server.live.feed import (
    FREE_SHARE,
    INTERVAL_S,
    LONGEST_INTERVAL_S,
    MOST_SHARE,
    LookInterval,
    Past,
)
from paceline.server.live.recording import BUNDLE, Race, Recording
from paceline.server.live.replay_server import about_values, show_routes
from tests.pure.lab.sim.sim_helpers import make_workload, random_workload, sim_config


@pytest.fixture(scope="module")
def run() -> tuple[Recording, RunRecord]:
    recording = Recording("run", num_rows=8, device="made up")
    record = simulate(sim_config(), random_workload(80, 1), watch=recording.watch)
    return recording, record


def messages(recording: Recording) -> list[dict[str, Any]]:
    return [message for bundle in recording.bundles for message in json.loads(gzip.decompress(bundle))]


def test_messages_are_numbered_whole_and_in_bundles(run: tuple[Recording, RunRecord]) -> None:
    recording, _ = run
    found = messages(recording)
    assert [message["n"] for message in found] == list(range(1, len(recording.times) + 1))
    assert len(recording.bundles) == -(-len(found) // BUNDLE)
    assert [message["engine"]["snapshot"]["time_s"] for message in found] == pytest.approx(recording.times)
    assert found[0]["engine"]["first"] and not any(message["engine"]["first"] for message in found[1:])
    steps = [step["seq"] for message in found for step in unpack_steps(message["engine"])]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    noted = {seq for message in found for seq in message["engine"]["steps"]["seq"]}
    done = [each[0] for message in found for each in message["engine"]["done"]]
    assert done == sorted(set(done)) and noted <= set(done) <= set(steps)
    assert found[-1]["engine"]["snapshot"]["finished"] == 80


def test_a_run_begins_before_its_first_request_and_rests_are_told_when_they_begin() -> None:
    recording = Recording("run", num_rows=8, device="made up")
    simulate(sim_config(), make_workload([3.0, 60.0], prompt=20, output=5), watch=recording.watch)
    found = messages(recording)
    assert recording.times[0] == 0.0
    assert found[0]["engine"]["steps"]["seq"] == [] and found[0]["engine"]["snapshot"]["rows"][0] == []
    told = [step["seq"] for message in found for step in unpack_steps(message["engine"])]
    assert told == list(range(1, len(told) + 1)), "the first step is told like every other"
    resting = [message["engine"] for message in found if 3.0 < message["engine"]["snapshot"]["time_s"] < 59.0]
    assert resting[-1]["snapshot"]["rows"][0] == [] and resting[-1]["snapshot"]["finished"] == 1
    last_done = max(done for engine in resting for _, done, _ in engine["done"])
    assert resting[-1]["snapshot"]["time_s"] == pytest.approx(last_done)
    assert [kind for kind, *_ in resting[-1]["ended"]] == ["finish"]


def test_latencies_are_those_the_simulation_measured(run: tuple[Recording, RunRecord]) -> None:
    recording, record = run
    told = messages(recording)[-1]["server"]
    assert sum(told["ttft"]) == sum(told["e2e"]) == 80
    histogram = recording.requests.histograms["time_to_first_token_seconds"][1]
    ttft = record.first_token_s - record.arrival_s
    expected = np.bincount(np.searchsorted(histogram.bounds, ttft), minlength=len(histogram.counts))
    assert told["ttft"] == expected.tolist()
    assert told["longest"]["ttft"] == ttft.max()
    assert sum(told["itl"]) == int(record.output_len.sum()) - 80
    assert told["tokens"][0] == int(record.output_len.sum())


def test_prompts_count_from_the_first_token_on(run: tuple[Recording, RunRecord]) -> None:
    recording, record = run
    found = messages(recording)
    assert found[-1]["server"]["tokens"][1] == int(record.prompt_len.sum())
    assert recording.requests.prompt_tokens == int(record.prompt_len.sum()), "each once"
    is_between = False
    for time_s, message in zip(recording.times, found, strict=True):
        # A message may be made just before what its own moment brings is told.
        counted = message["server"]["tokens"][1]
        begun = [
            int(record.prompt_len[at].sum())
            for at in (record.first_token_s < time_s, record.first_token_s <= time_s)
        ]
        assert begun[0] <= counted <= begun[1]
        is_between |= counted > int(record.prompt_len[record.finished_s <= time_s].sum())
    assert is_between, "before their requests have ended"


def test_a_prompt_counts_once_however_its_requests_end() -> None:
    recording = Recording("run", num_rows=4, device="made up")
    latencies = recording._latencies

    def ended(request: int, num_prompt: int) -> Finished:
        return Finished(RequestId(request), FinishReason.ABORT, "", 2.0, num_prompt, 0, 0, 0)

    latencies.began(1, 0.0, 30)
    latencies.began(2, 0.0, 0)  # a branch of the first
    latencies.began(3000, 0.0, 500)
    one = np.ones(2, np.int32)
    latencies.tokens(
        TokenEvents(seq=1, time_s=1.0, requests=np.array([1, 2]), tokens=one, index=np.zeros(2, int))
    )
    assert recording.requests.prompt_tokens == 30
    latencies.tokens(
        TokenEvents(seq=2, time_s=1.5, requests=np.array([1, 2]), tokens=one, index=np.ones(2, int))
    )
    latencies.finished(ended(1, 30))
    latencies.finished(ended(2, 30))
    assert recording.requests.prompt_tokens == 30
    latencies.finished(ended(3000, 500))  # begun, and never answered
    latencies.finished(ended(4, 7))  # never begun
    latencies.finished(ended(90_000, 11))
    assert recording.requests.prompt_tokens == 30 + 500 + 7 + 11


def test_a_story_is_whole_and_unknown_requests_are_unknown(run: tuple[Recording, RunRecord]) -> None:
    recording, _ = run
    told = asyncio.run(Explanations(recording, RecentRequests()).explain_any("7", Caller(is_admin=True)))
    assert told["branches"][0]["state"] == "ended"
    assert "reached its length" in told["branches"][0]["sentences"][-1]
    with pytest.raises(UnknownRequestId):
        asyncio.run(Explanations(recording, RecentRequests()).explain_any("10000", Caller(is_admin=True)))


def test_what_the_page_asks_for_first(run: tuple[Recording, RunRecord]) -> None:
    recording, _ = run
    about = about_values([recording, recording])
    json.dumps(about)
    paths = [route.path for route in show_routes([recording, recording])]
    assert "/v1/admin/recordings/{run}/{bundle}" in paths and "/ui" in paths
    assert len(paths) == len(set(paths))


def test_answers_are_told_exactly_and_a_run_under_way_can_be_read(run: tuple[Recording, RunRecord]) -> None:
    recording, record = run
    expected = sorted(zip(record.finished_s, record.finished_s - record.arrival_s, strict=True))
    assert np.array(sorted(recording.answers)) == pytest.approx(np.array(expected))
    growing = Recording("run", num_rows=8, device="made up")
    seen: list[int] = []

    def take(state: Any) -> Any:
        watcher = growing.watch(state)
        on_events = watcher.on_events

        def record(events: Any) -> None:
            on_events(events)
            number = max(0, len(growing.times) - 1) // BUNDLE
            seen.append(json.loads(gzip.decompress(growing.bundle(number)))[-1]["n"] - len(growing.times))

        watcher.on_events = record  # type: ignore[method-assign]
        return watcher

    simulate(sim_config(), random_workload(80, 1), watch=take)
    assert set(seen) == {0}, "the newest message is there at once"
    assert growing.is_over and growing.bundles == recording.bundles
    with pytest.raises(IndexError):
        growing.bundle(len(growing.bundles))


def test_a_race_shows_which_modes_wait_run_and_are_over(run: tuple[Recording, RunRecord]) -> None:
    over, waiting = run[0], Recording("other", num_rows=8, device="made up")
    race = Race([over, waiting], what="a model", is_live=True, starts={"run": -1.0})
    first, second = race.values()["tracks"]
    assert (first["state"], first["start_s"], first["num_messages"]) == ("over", -1.0, len(over.times))
    assert first["now_s"] == over.times[-1] and len(first["answers"]) == 80
    assert (second["state"], second["start_s"], second["answers"]) == ("waiting", None, [])
    assert race.recording("other") is waiting


# ----------------------------------------------------------------
# How often the feed looks at the engine, and what it keeps of the last minute.


def settled(look_s: float, busy: float) -> float:
    """The time between looks at last, when each takes so long of an engine that is busy for a share of the time."""
    pace, now_s, watch_s, interval_s = LookInterval(), 100.0, 0.0, 0.0
    while now_s < 160.0:
        stats = EngineStats(watch_cpu_s=watch_s, cpu_s=watch_s + busy * (now_s - 100.0))
        interval_s = pace.interval_s(stats, now_s)
        watch_s += look_s
        now_s += interval_s
    return interval_s


def test_cheap_looks_are_frequent() -> None:
    assert settled(0.0005, busy=0.5) == INTERVAL_S
    assert settled(0.0001, busy=0.0) == INTERVAL_S


@pytest.mark.parametrize("busy", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("look_s", [0.0008, 0.002, 0.004])
def test_dear_looks_take_no_more_than_their_share(look_s: float, busy: float) -> None:
    interval_s = settled(look_s, busy)
    assert look_s / interval_s <= MOST_SHARE * (busy + look_s / interval_s) * 1.1
    assert INTERVAL_S <= interval_s < LONGEST_INTERVAL_S


def test_an_engine_with_nothing_to_do_is_looked_at_all_the_same() -> None:
    assert settled(0.001, busy=0.0) == pytest.approx(0.001 / FREE_SHARE, rel=0.1)


def test_no_caller_waits_forever_for_a_picture() -> None:
    assert settled(1.0, busy=0.5) == LONGEST_INTERVAL_S


def test_an_engine_that_was_started_anew_is_judged_anew() -> None:
    pace = LookInterval()
    pace.interval_s(EngineStats(watch_cpu_s=1.0, cpu_s=50.0), 0.0)
    dear = pace.interval_s(EngineStats(watch_cpu_s=2.0, cpu_s=51.0), 10.0)
    assert dear > INTERVAL_S
    assert pace.interval_s(EngineStats(watch_cpu_s=0.0, cpu_s=0.1), 20.0) == dear
    assert pace.interval_s(EngineStats(watch_cpu_s=0.0001, cpu_s=9.0), 40.0) == INTERVAL_S


def test_the_last_minute_is_kept_with_the_state_before_it() -> None:
    past = Past(seconds=60.0)
    for now_s in range(0, 200, 2):
        past.add(b"%d" % now_s, float(now_s))
    assert past.messages() == [b"%d" % now_s for now_s in range(136, 200, 2)]
    past.drop(1000.0)
    assert past.messages() == [b"198"], "of a time long gone only the state counts"


def test_the_last_minute_takes_a_bounded_number_of_bytes() -> None:
    past = Past(most_bytes=1000)
    for now_s in range(50):
        past.add(bytes(100), float(now_s))
    assert len(past) == 10
    past.add(bytes(5000), 51.0)
    assert len(past) == 1, "the newest is kept, however large it is"
