"""What is shown of a fleet: how each engine stands, and which requests went on in another."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest

from paceline.process.client import EngineStats
from paceline.process.frames import Update
from paceline.server.access.caller import Caller
from paceline.server.generate.requests import RecentRequests
from paceline.server.live.feed import (
    WatchedModel,
    engines_of,
    feed_of,
    feeds_of,
    fleet_values,
    moved_names,
    num_moved,
)
from paceline.server.metrics.families import Families
from paceline.server.metrics.prometheus_page import fleet_families
from paceline.server.metrics.request_metrics import RequestFamilies
from tests.fake_engine import IdleClient
from tests.fake_fleet import PROMPT, SAMPLING, fleet_of, run


def test_one_engine_has_nothing_to_tell_of_others() -> None:
    client = IdleClient()
    assert fleet_values(client) == {} and engines_of(client) == [client]


def test_each_engine_says_how_it_stands_and_what_it_has_told() -> None:
    async def test() -> None:
        fleet, (one, other) = fleet_of(2)
        stream = fleet.submit(PROMPT, SAMPLING, tenant="a")
        one.tell((0, 11), (0, 12))
        await stream.take()
        other.client.on_update(
            Update(1.0, stats=EngineStats(running=3, waiting=2, blocks_used=1, blocks_total=4))
        )
        fleet.member(1).is_draining = True
        shown = msgspec.json.decode(msgspec.json.encode(fleet_values(fleet)))
        assert [each["state"] for each in shown["engines"]] == ["ready", "drained"]
        assert [each["output_tokens"] for each in shown["engines"]] == [2, 0]
        keys = ("rows", "running", "waiting", "kv_usage")
        assert [shown["engines"][1][key] for key in keys] == [4, 3, 2, 0.25]
        assert shown["passages"] == []

    run(test())


def test_requests_that_go_the_same_way_at_once_are_one_passage() -> None:
    async def test() -> None:
        fleet, (one, other) = fleet_of(2)
        streams = [fleet.submit(PROMPT, SAMPLING, tenant="a") for _ in range(4)]
        one.tell((0, 11), (0, 12))
        await streams[2].take()
        one.die()
        readers = [asyncio.create_task(stream.take()) for stream in streams]
        await asyncio.sleep(0.01)
        ((age_s, *passage),) = fleet_values(fleet)["passages"]
        assert passage == [0, 1, 2, 2] and 0 <= age_s < 5, "two requests, and one of them had two tokens"
        one.start()
        other.die()
        await asyncio.sleep(0.05)
        assert [each[1:] for each in fleet_values(fleet)["passages"]] == [(0, 1, 2, 2), (1, 0, 4, 2)]
        fleet.ways.passages[0].time_s -= 61.0
        assert [each[1] for each in fleet_values(fleet)["passages"]] == [1], "of the last minute"
        for reader in readers:
            reader.cancel()

    run(test())


@pytest.mark.parametrize("count", [2, 3])
def test_every_engine_has_a_feed_and_so_has_one_that_comes_later(count: int) -> None:
    async def test() -> None:
        fleet, _ = fleet_of(count)
        requests = RequestFamilies()
        model = WatchedModel("m", 1.0, fleet, requests, feeds_of(fleet, requests)[:-1])
        feeds = [feed_of(model, number) for number in range(count)]
        assert feeds == model.feeds and len(set(map(id, feeds))) == count
        assert feed_of(model, count - 1) is feeds[-1]

    run(test())


def test_metrics_say_of_each_engine_whether_it_takes_requests_and_what_it_has_made() -> None:
    async def test() -> None:
        fleet, (one, _) = fleet_of(2)
        stream = fleet.submit(PROMPT, SAMPLING, tenant="a")
        one.tell((0, 11), (0, 12), (0, 13))
        await stream.take()
        fleet.member(1).is_draining = True
        fleet.member(1).num_restarts = lambda: 2
        samples = {
            (sample.name, sample.labels["engine"]): sample.value
            for family in fleet_families(fleet, Families("", "m"), "m")
            for sample in family.samples
        }
        for name, values in {
            "fleet_engine_up": (1, 0),
            "fleet_generation_tokens_total": (3, 0),
            "fleet_engine_restarts_total": (0, 2),
        }.items():
            assert (samples[name, "0"], samples[name, "1"]) == values, name

    run(test())


def test_a_request_keeps_its_name_under_the_number_it_has_in_another_engine() -> None:
    async def test() -> None:
        fleet, (one, other) = fleet_of(2)
        recent = RecentRequests()
        stream = fleet.submit(PROMPT, replace(SAMPLING, n=2), tenant="a")
        recent.note("its-id", Caller(), (stream.first, stream.first + 1))
        assert moved_names(fleet, recent, num_moved(fleet)) == []
        one.die()
        reader = asyncio.create_task(stream.take())
        await asyncio.sleep(0.01)
        (add,) = other.adds
        assert add.first != stream.first and num_moved(fleet) == 1
        named = ((add.first, add.first + 1), "its-id", "", stream.first)
        assert moved_names(fleet, recent, 1) == [named] and moved_names(fleet, recent, 0) == []
        assert num_moved(IdleClient()) == 0 and moved_names(IdleClient(), recent, 1) == []
        reader.cancel()

    run(test())
