"""Figures of requests whose times are known, and the page that shows them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from paceline.lab.bench.load.figures import block_lines, figures, result_json, run_record
from paceline.lab.bench.load.generator import LoadRun
from paceline.lab.bench.load.reader import EventKind, ObservedAnswer
from paceline.lab.bench.load.sweep_page import SweepFigure, make_page
from paceline.lab.bench.tables import Grid
from paceline.lab.report.summary import summarize

ORIGIN_S = 100.0


def seen(index: int, pieces: list[float], **more: object) -> ObservedAnswer:
    """A request that was due `index` seconds after the start and sent a tenth of a second later."""
    due_s = ORIGIN_S + index
    given = {
        "sent_s": due_s + 0.1,
        "piece_s": [due_s + piece for piece in pieces],
        "ended_s": due_s + (pieces[-1] if pieces else 0.2),
        "kind": EventKind.FINISHED,
        "prompt_tokens": 10,
        "output_tokens": len(pieces),
        "wanted_tokens": len(pieces),
    }
    return ObservedAnswer(index=index, due_s=due_s, **{**given, **more})  # type: ignore[arg-type]


RUN = LoadRun(
    seen=[
        seen(0, [0.5, 0.6, 0.8]),
        seen(1, [0.3, 0.4, 0.5], output_tokens=5, cached_tokens=4),  # five tokens in three pieces
        seen(2, [0.7], wanted_tokens=2),
        seen(3, [], kind=EventKind.REFUSED, message="full", output_tokens=None),
        seen(3, [], kind=EventKind.UNFINISHED, ended_s=np.nan),
    ],
    started_s=ORIGIN_S,
    ended_s=ORIGIN_S + 4.0,
)


def test_latencies_run_from_when_a_request_was_due() -> None:
    found = figures(RUN, percentiles=(0.0, 100.0))
    ttft, tpot, itl, e2el = (found.spreads[name] for name in ("ttft", "tpot", "itl", "e2el"))
    assert ttft.mean == pytest.approx(500.0) and ttft.median == pytest.approx(500.0)
    assert [value for _, value in ttft.percentiles] == pytest.approx([300.0, 700.0])
    assert tpot.count == 2 and tpot.mean == pytest.approx((150.0 + 50.0) / 2)
    assert itl.count == 4 and itl.mean == pytest.approx(125.0)
    assert e2el.median == pytest.approx(700.0)
    assert found.spreads["ttft_from_sent"].mean == pytest.approx(400.0)
    assert found.spreads["lateness"].median == pytest.approx(100.0)


def test_only_whole_answers_count() -> None:
    found = figures(RUN)
    assert (found.completed, found.failed, found.unfinished) == (3, 1, 1)
    assert found.failures == {"refused": 1}
    assert (found.total_input_tokens, found.total_output_tokens, found.cached_input_tokens) == (30, 9, 4)
    assert found.output_throughput == pytest.approx(9 / 4) and found.request_throughput == pytest.approx(
        3 / 4
    )
    assert found.total_token_throughput == pytest.approx(39 / 4)
    assert found.max_output_tokens_per_s == pytest.approx(5.0)  # all of the second request came in one second
    assert (found.early_stops, found.max_concurrent_requests) == (1, 1)
    assert found.request_goodput is None


@pytest.mark.parametrize(
    ("bounds", "good"),
    [
        ({"ttft": 501.0}, 2),
        ({"ttft": 501.0, "tpot": 100.0}, 1),
        ({"itl": 101.0}, 2),  # a single piece has no gap
        ({"e2el": 100.0}, 0),
    ],
)
def test_good_requests_keep_every_bound(bounds: dict[str, float], good: int) -> None:
    assert figures(RUN, bounds=bounds).request_goodput == pytest.approx(good / 4)


def test_a_run_without_answers_has_no_latencies() -> None:
    empty = LoadRun(seen=[], started_s=0.0, ended_s=0.0)
    found = figures(empty)
    assert (found.completed, found.max_output_tokens_per_s, found.max_concurrent_requests) == (0, 0.0, 0)
    assert found.spreads["ttft"].mean is None
    assert "Mean TTFT (ms):                          -" in block_lines(found)


def test_the_block_has_the_lines_people_know() -> None:
    found = figures(RUN, percentiles=(99.0,), bounds={"ttft": 501.0})
    lines = block_lines(found, rate=1.0, max_concurrency=8)
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50 and {len(line) for line in lines if line[0] in "-="} == {50}
    names = [line.partition(":")[0] for line in lines if ":" in line]
    assert names[:12] == [
        "Successful requests",
        "Failed requests",
        "  refused",
        "Unfinished requests",
        "Maximum request concurrency",
        "Request rate configured (RPS)",
        "Benchmark duration (s)",
        "Total input tokens",
        "  found in the prefix cache",
        "Total generated tokens",
        "Request throughput (req/s)",
        "Request goodput (req/s)",
    ]
    assert "Median TTFT (ms):                        500.00" in lines
    assert "-----Time per Output Token (excl. 1st token)------" in lines


def test_the_file_has_an_entry_for_each_request() -> None:
    value = json.loads(json.dumps(result_json(figures(RUN), RUN), allow_nan=False))
    assert value["ttfts"] == [0.5, 0.3, 0.7, None, None]
    assert value["itls"] == [[0.1, 0.2], [0.1, 0.1], [], [], []]
    assert value["e2els"] == [0.8, 0.5, 0.7, None, None]
    assert value["start_times"][:3] == [0.1, 1.1, 2.1] and value["due_times"][:3] == [0.0, 1.0, 2.0]
    assert value["errors"] == ["", "", "", "refused: full", "unfinished"]
    assert value["output_lens"] == [3, 5, 1, 0, 0]
    assert value["median_ttft_ms"] == pytest.approx(500.0) and "p99_e2el_ms" in value
    assert value["mean_ttft_from_sent_ms"] == pytest.approx(400.0)


def test_the_record_of_a_run_says_the_same() -> None:
    summary = summarize(run_record(RUN, label="x"))
    assert summary.requests == {"finished": 3, "aborted": 0, "refused": 1, "failed": 0, "unfinished": 1}
    assert summary.ttft_s.mean == pytest.approx(0.5) and summary.e2e_s.p50 == pytest.approx(0.7)
    assert summary.itl_s.count == 4 and summary.queue_delay_s.count == 0


# ----------------------------------------------------------------
# The page of a sweep holds everything it shows, and shows text as text.


def test_pictures_are_inside_and_words_are_escaped(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(b"not really a picture")
    page = make_page(
        title="<model> & co",
        lead=["a < b"],
        grid=Grid(headings=("load", "<x>"), rows=[("1/s", "2 & 3")]),
        pictures=[SweepFigure(path=picture, heading='the "curve"', caption="<i>")],
        facts={"Command": "paceline bench sweep --title '<script>'"},
    )
    assert base64.b64encode(picture.read_bytes()).decode() in page
    assert "<script" not in page and "<model>" not in page and "<i>" not in page
    assert "<h1>&lt;model&gt; &amp; co</h1>" in page and ">2 &amp; 3</td>" in page
    assert page.startswith("<!doctype html>") and "http" not in page


def test_a_narrow_window_shows_every_column_with_its_heading() -> None:
    grid = Grid(headings=("load", "req/s", 'goodput "good"'), rows=[("1/s", "0.9", "0.5")])
    page = make_page(title="a", lead=[], grid=grid, pictures=[], facts={})
    row = '<tr><td>1/s</td><td data-heading="req/s">0.9</td>'
    assert f'{row}<td data-heading="goodput &quot;good&quot;">0.5</td></tr>' in page
    assert "content: attr(data-heading)" in page
