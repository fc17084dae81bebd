"""What figures are made of: deliveries, differences, rows of a table."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from paceline.cli.bench.view import show
from paceline.core.sampling import SamplingParams
from paceline.errors import EngineFailed
from paceline.lab.bench.latency import ObservedRequest, summarize
from paceline.lab.bench.tables import (
    Grid,
    latency_json,
    latency_table,
    recheck_json,
    recheck_lines,
    split_grid,
    throughput_json,
    throughput_table,
)
from paceline.lab.bench.throughput import (
    Recheck,
    ThroughputResult,
    TokenDifference,
    check_complete,
    choose,
    first_difference,
    sampling_of,
    warm_up_requests,
)
from paceline.lab.bench.workloads import LARGEST_TOKEN, OFFLINE, BenchRequest, BenchWorkload, make_workload
from paceline.lab.report.summary import distribution
from paceline.llm.outputs import CompletionOutput, RequestMetrics, RequestOutput

TWO = BenchWorkload(
    name="two", requests=(BenchRequest(prompt=[1], num_output=4), BenchRequest(prompt=[2], num_output=4))
)


def output(*tokens: int, preemptions: int = 0) -> RequestOutput:
    part = CompletionOutput(index=0, token_ids=list(tokens), finish_reason="length")
    metrics = RequestMetrics(arrival_s=0.0, preemptions=preemptions)
    return RequestOutput(
        request_id="1", prompt=None, prompt_token_ids=[1], outputs=[part], finished=True, metrics=metrics
    )


def test_a_delivery_of_several_tokens_is_one() -> None:
    first = ObservedRequest(due_s=10.0, sent_s=10.5)
    first.take(output(), 10.75)  # nothing new: no delivery
    first.take(output(1), 11.0)
    first.take(output(1, 2, 3), 13.0)
    first.take(output(1, 2, 3, 4), 14.0)
    first.take(output(1, 2, 3, 4, preemptions=2), 15.0)  # it only says that it has ended
    assert first.deliveries_s == [11.0, 13.0, 14.0]
    second = ObservedRequest(due_s=12.0, sent_s=12.0)
    second.take(output(1, 2, 3, 4), 14.0)
    result = summarize(TWO, [first, second], 10.0, steps=9, sampling=SamplingParams(temperature=0.5))
    assert (result.ttft_s.p50, result.itl_s.p50, result.itl_s.count) == (1.5, 1.5, 2)
    assert (result.e2e_s.p50, result.lateness_s.p50, result.preemptions) == (3.0, 0.25, 2)
    assert (result.seconds, result.output_tokens_per_s) == (4.0, 2.0)
    assert json.loads(json.dumps(latency_json(result)))["ttft_s"]["p50"] == 1.5
    (row,) = latency_table([result]).rows
    assert row[:4] == ("two", "2", "2.00", "1,500 / 1,900 / 1,990")


def test_a_request_without_all_its_tokens_ends_the_run() -> None:
    check_complete(TWO, [output(1, 2, 3, 4)] * 2)
    with pytest.raises(
        EngineFailed, match="two: 1 of 2 requests.*request 1 has 3 of 4 and ended with length"
    ):
        check_complete(TWO, [output(1, 2, 3, 4), output(1, 2, 3)])


def test_rates_follow_from_the_counts() -> None:
    result = ThroughputResult(
        workload="decode-b8",
        mode="continuous",
        temperature=0.0,
        num_requests=8,
        prompt_tokens=128,
        output_tokens=2048,
        cached_tokens=0,
        seconds=2.0,
        steps=257,
        preemptions=0,
        e2e_s=distribution(np.array([1.0, 2.0, 2.0])),
        padded_share=0.125,
        output_tokens_per_request=256,
    )
    (row,) = throughput_table([result]).rows
    assert row == (
        "decode-b8",
        "2.000",
        "1,024",
        "1,088",
        "4.00",
        "7.81",
        "2.00 / 2.00 / 2.00",
        "12.5%",
        "257",
        "0",
    )
    assert throughput_json(result)["ms_per_step"] == 7.8125
    table = throughput_table([result, replace(result, mode="static")])
    assert table.headings[:2] == ("workload", "mode")
    assert [row[:3] for row in table.rows] == [
        ("decode-b8", "continuous", "2.000"),
        ("decode-b8", "static", "2.000"),
    ]


@pytest.mark.parametrize(
    "one, two, place",
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0), ([], [], None)],
)
def test_the_first_difference(one: list[int], two: list[int], place: int | None) -> None:
    assert first_difference(one, two) == place


def test_requests_to_generate_again_are_spread_over_the_workloads() -> None:
    workloads = [make_workload(name, OFFLINE) for name in ("decode-b1", "decode-b8", "decode-b64")]
    chosen = choose(workloads, 8, seed=3)
    assert [len(numbers) for numbers in chosen.values()] == [1, 4, 3]
    assert all(len(set(numbers)) == len(numbers) for numbers in chosen.values())
    assert chosen == choose(workloads, 8, seed=3) != choose(workloads, 8, seed=4)
    assert sum(len(numbers) for numbers in choose(workloads, 1000, seed=0).values()) == 73


def test_differences_are_counted_and_placed() -> None:
    one = TokenDifference(
        workload="nano",
        request=7,
        num_tokens=100,
        first=40,
        num_different=55,
        in_run=1,
        alone=2,
        logit_gap=0.001,
    )
    outcome = Recheck(num_requests=8, num_tokens=900, is_eager=True, differences=(one,) * 17)
    lines = recheck_lines(outcome)
    assert "8 requests, 900 tokens" in lines[0] and "17 different" in lines[0] and "eagerly" in lines[0]
    assert "nano request 7: first difference at token 40 of 100" in lines[1] and "0.001 apart" in lines[1]
    assert lines[-1].startswith("  and 1 more")
    assert recheck_json(outcome)["num_different"] == 17


def test_every_request_has_its_own_seed_unless_it_is_greedy() -> None:
    drawn = sampling_of(TWO, None, 5)
    assert [(one.temperature, one.seed, one.max_tokens) for one in drawn] == [(0.6, 5, 4), (0.6, 6, 4)]
    assert all(one.ignore_eos and not one.detokenize for one in drawn)
    assert [one.seed for one in sampling_of(TWO, 0.0, 5)] == [None, None]


def test_the_warm_up_has_tokens_no_workload_has() -> None:
    prompts, sampling = warm_up_requests(LARGEST_TOKEN + 2)
    assert {token for prompt in prompts for token in prompt} == {LARGEST_TOKEN + 1}
    assert len(prompts) == len(sampling)


WIDE = Grid(
    headings=("load", "completed", "output tok/s", "TTFT median / P99 ms", "E2EL median / P99 ms"),
    rows=[
        ("0.5/s", "1,200", "12.3", "61.0 / 62.2", "309 / 310"),
        ("16/s", "12", "1,748", "1,061 / 12,345", "12,309 / 123,456"),
    ],
    breaks=(3,),
)


def test_a_table_without_room_is_split_where_it_says() -> None:
    whole = split_grid(WIDE, 66, edge=1, gap=3)
    assert whole == [WIDE], "headings may be broken, so that it has room in 66 columns"
    counts, times = split_grid(WIDE, 65, edge=1, gap=3)
    assert counts.headings == ["load", "completed", "output tok/s"]
    assert times.headings == ["load", "TTFT median / P99 ms", "E2EL median / P99 ms"]
    assert times.rows[1] == ["16/s", "1,061 / 12,345", "12,309 / 123,456"]


def test_a_very_narrow_table_keeps_every_column() -> None:
    parts = split_grid(WIDE, 10, edge=1, gap=3)
    assert [part.headings for part in parts] == [["load", heading] for heading in WIDE.headings[1:]]


@pytest.mark.parametrize("width", [40, 66, 80, 200])
def test_numbers_are_never_broken(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    show("a title", WIDE)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= width
    for cell in (cell for row in WIDE.rows for cell in row):
        assert any(cell in line for line in lines), f"{cell} is not in one piece"
    assert any("completed" in line for line in lines)
