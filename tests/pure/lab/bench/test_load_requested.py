"""What the options of a run mean together: how many requests, when they are due, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import InputError
from paceline.lab.bench.bench_options import LoadOptions
from paceline.lab.bench.load.generator import LoadPlan
from paceline.lab.bench.load.requested import (
    LoadPoint,
    Ramp,
    parse_bounds,
    parse_percentiles,
    parse_ramp,
    requested_load,
)
from paceline.lab.workload.arrivals import parse_arrivals

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:00:{second:02}.0,{20 + second},4\n" for second in range(0, 40, 10)
)


def plan(point: LoadPoint | None = None, **options: Any) -> LoadPlan:
    return requested_load(LoadOptions(**options)).plan(point or LoadPoint())


def due(**options: Any) -> list[float]:
    found = plan(LoadPoint(rate=options.pop("rate", None), ramp=options.pop("ramp", None)), **options).due_s
    assert found is not None
    return list(found)


def test_without_anything_all_are_sent_at_once() -> None:
    assert due() == [0.0] * 100
    assert due(num_prompts=7) == [0.0] * 7
    assert due(duration=3.0) == [0.0] * 100


def test_a_rate_opens_the_loop() -> None:
    times = due(rate=20.0, num_prompts=2000)
    assert len(times) == 2000 and times == sorted(times)
    assert 90 < times[-1] < 110
    gaps = np.diff(times)
    assert 0.85 < gaps.std() / gaps.mean() < 1.15  # as of a Poisson process


def test_constant_arrivals_are_even() -> None:
    assert due(rate=10.0, num_prompts=4, arrivals="constant") == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_a_duration_ends_what_is_sent() -> None:
    times = due(rate=50.0, duration=4.0)
    assert 150 < len(times) < 250 and times[-1] <= 4.0
    assert due(rate=50.0, duration=4.0, num_prompts=5) == times[:5]


def test_users_close_the_loop() -> None:
    found = plan(LoadPoint(max_concurrency=3), num_prompts=9)
    assert (found.due_s, found.max_concurrency, found.num_requests, found.duration_s) == (None, 3, 9, None)
    timed = plan(LoadPoint(max_concurrency=3), duration=2.0)
    assert (timed.num_requests, timed.duration_s) == (None, 2.0)
    both = plan(LoadPoint(max_concurrency=3, rate=5.0), num_prompts=9)
    assert both.due_s is not None and both.max_concurrency == 3


def test_a_trace_keeps_its_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    assert due(workload=str(path)) == [0.0, 10.0, 20.0, 30.0]
    assert due(workload=str(path), speed=2.0, num_prompts=3) == [0.0, 5.0, 10.0]
    assert due(workload=str(path), duration=15.0) == [0.0, 10.0]
    assert len(due(workload=str(path), rate=1.0)) == 4
    assert due(workload=str(path), arrivals="all-at-once") == [0.0] * 4


def test_a_trace_is_cut_to_the_model(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE.replace(",20,4", ",20000,4"))
    asked = requested_load(LoadOptions(workload=str(path))).fitted(4096)
    assert (asked.num_requests, asked.touched) == (3, 1)


def test_a_file_of_prompts_is_asked_once_each(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\ntwo\nthree\n")
    asked = requested_load(LoadOptions(workload=str(path)))
    assert (asked.num_requests, asked.ignore_eos) == (3, False)
    assert requested_load(LoadOptions(workload=str(path), num_prompts=8, ignore_eos=True)).ignore_eos
    assert asked.source.make(4).prompt == "two"


def test_a_later_run_has_other_requests_and_other_times() -> None:
    asked = requested_load(LoadOptions(num_prompts=5))
    first, second = (asked.plan(LoadPoint(rate=1.0), first_index=index) for index in (0, 5))
    assert second.first_index == 5 and first.due_s != second.due_s


def test_a_ramp_sends_ever_more() -> None:
    ramp = Ramp(start=0.0, end=20.0, seconds=10.0)
    pattern = parse_arrivals("constant")
    times = LoadPoint(ramp=ramp).due_s(pattern, num_requests=None, duration_s=15.0, seed=0)
    counts = np.histogram(times, bins=[0, 5, 10, 15])[0]
    assert counts.tolist() == pytest.approx([25, 75, 100], abs=1)


@pytest.mark.parametrize("ramp", ["5:5:10", "10:2:4"])
def test_ramps_that_do_not_rise(ramp: str) -> None:
    found = parse_ramp(ramp)
    times = found.times(np.arange(1.0, 41.0))
    assert (np.diff(times) > 0).all() and times[0] > 0
    after = found.seconds + (40 - (found.start + found.end) / 2 * found.seconds) / found.end
    assert times[-1] == pytest.approx(after if found.start != found.end else 8.0)


def test_bounds_and_percentiles_are_read() -> None:
    assert parse_bounds("ttft:1000 tpot:50,e2el:3e4") == {"ttft": 1000.0, "tpot": 50.0, "e2el": 30_000.0}
    assert parse_bounds(None) == {}
    assert parse_percentiles("50,99,99.9,50") == (50.0, 99.0, 99.9)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"arrivals": "poisson"}, "--arrivals needs --rate or --ramp"),
        ({"arrivals": "all-at-once", "rate": 3.0}, "drop one of them"),
        ({"arrivals": "onoff:1,1", "ramp": "1:2:3"}, "--ramp goes with --arrivals poisson"),
        ({"arrivals": "sometimes"}, "unknown arrivals 'sometimes'"),
        ({"rate": 1e6, "duration": 1e6}, "more than 10,000,000 requests"),
        ({"ramp": "1:2"}, "FROM:TO:SECONDS"),
        ({"ramp": "1:0:3"}, "the last one and the seconds above 0"),
        ({"workload": "azure-con"}, "did you mean 'azure-conv'?"),
        ({"tenant_keys": "/no/such/file"}, "--tenant-keys /no/such/file: cannot be read"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], says: str) -> None:
    ramp = options.pop("ramp", None)
    with pytest.raises(InputError) as caught:
        due(ramp=None if ramp is None else parse_ramp(ramp), **options)
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "ttft:-1", "speed:3", "ttft:1 ttft:2"])
def test_bounds_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--goodput"):
        parse_bounds(text)


@pytest.mark.parametrize("text", ["", "a", "101", "50,,99"])
def test_percentiles_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--percentiles"):
        parse_percentiles(text)


def test_every_tenant_needs_a_key(tmp_path: Path) -> None:
    trace, keys = tmp_path / "trace.csv", tmp_path / "keys.json"
    trace.write_text("arrival_s,client,prompt_len,output_len\n0,alice,3,1\n1,bob,3,1\n")
    keys.write_text('{"alice": "sk-a"}')
    with pytest.raises(InputError, match="no key for bob"):
        requested_load(LoadOptions(workload=str(trace), tenant_keys=str(keys)))
    keys.write_text('{"alice": "sk-a", "": "sk-others"}')
    asked = requested_load(LoadOptions(workload=str(trace), tenant_keys=str(keys)))
    assert asked.keys["alice"] == "sk-a" and asked.source.make(1).tenant == "bob"


def test_how_requests_came_is_told_as_it_was(tmp_path: Path) -> None:
    def told(point: LoadPoint, **options: Any) -> str:
        return requested_load(LoadOptions(**options)).arrivals(point)

    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    assert told(LoadPoint(rate=2.0)) == told(LoadPoint(rate=2.0), workload=str(trace)) == "poisson"
    assert told(LoadPoint()) == "all-at-once"
    assert told(LoadPoint(max_concurrency=4)) == "closed"
    assert told(LoadPoint(), workload=str(trace)) == "recorded"
    assert told(LoadPoint(rate=2.0), arrivals="gamma:2") == "gamma:2"


def test_pictures_are_parts_of_chats() -> None:
    asked = requested_load(LoadOptions(images=2, image_size="64x32", num_prompts=4))
    assert len(asked.sent.make(0).images) == 2
    assert requested_load(LoadOptions(num_prompts=4)).sent.make(0).images == ()
    for wrong, message in (
        (LoadOptions(images=1, api="completions"), "leave out --api completions"),
        (LoadOptions(images=1, image_size="64"), "WxH"),
    ):
        with pytest.raises(InputError, match=message):
            requested_load(wrong)
