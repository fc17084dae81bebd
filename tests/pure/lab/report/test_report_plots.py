"""Knees, bins and pictures. Pictures are checked for being there, not for being beautiful."""

import builtins
import math
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import InputError
from paceline.lab.report import plots
from paceline.lab.report.plots import find_knee, make_timeline
from paceline.lab.report.run_record import RunRecord
from paceline.lab.report.summary import summarize

pytestmark = pytest.mark.slow

NAN = math.nan


def record(label: str = "run", *, num_steps: int = 500, seed: int = 0, **changes: Any) -> RunRecord:
    """A plausible run: sixty requests, steps of a few milliseconds with a prefill chunk now and then."""
    rng = np.random.default_rng(seed)
    n = 60
    arrival_s = np.sort(rng.uniform(0.0, 4.0, n))
    first_s = arrival_s + rng.lognormal(-3.0, 0.5, n)
    ends_s = np.cumsum(rng.uniform(0.005, 0.015, num_steps))
    rows = rng.integers(1, 32, num_steps)
    used = rows * 64
    fields: dict[str, Any] = {
        "label": label,
        "config": {},
        "max_num_seqs": 32,
        "duration_s": float(ends_s[-1]) if num_steps else 1.0,
        "kv_total_slots": 4096,
        "arrival_s": arrival_s,
        "admitted_s": arrival_s + 0.01,
        "first_token_s": first_s,
        "finished_s": first_s + 0.5,
        "prompt_len": np.full(n, 100),
        "output_len": np.full(n, 20),
        "cached_tokens": np.zeros(n),
        "preemptions": np.zeros(n),
        "tenant": np.zeros(n),
        "outcome": np.zeros(n),
        "itl_s": rng.lognormal(-4.5, 0.4, 2000),
        "step_replica": np.zeros(num_steps),
        "step_start_s": np.concatenate([[0.0], ends_s[:-1]]) if num_steps else [],
        "step_end_s": ends_s,
        "step_rows": rows,
        "step_decode": rows,
        "step_prefill": np.where(rng.random(num_steps) < 0.2, 512, 0),
        "step_padded": np.zeros(num_steps),
        "step_waiting": rng.integers(0, 5, num_steps),
        "step_kv_used": used,
        "step_kv_filled": used - 10,
        "step_preempted": np.zeros(num_steps),
    }
    return RunRecord(**(fields | changes))


def steps(**columns: Any) -> RunRecord:
    """A record with hand-made steps; every step column that is not given is zero."""
    count = len(columns["step_start_s"])
    names = [name for name in RunRecord.__dataclass_fields__ if name.startswith("step_")]
    return record(num_steps=0, **({name: np.zeros(count) for name in names} | columns))


@pytest.mark.parametrize(
    ("rates", "p99", "knee"),
    [
        ([1, 2, 3, 4], [0.1, 0.11, 0.15, 0.9], 3),
        ([1, 2, 3, 4], [0.1, 0.2, 0.2, 0.2], None),  # exactly twice is not more than twice
        ([1, 2, 3, 4], [0.1, 0.13, 0.18, 0.25], 3),  # slow growth: no neighbour doubles, the whole does
        ([4, 1, 3, 2], [0.9, 0.1, 0.15, 0.11], 3),  # any order
        ([1, 2], [0.1, 0.5], 1),
        ([1, 2, 3], [0.1, 0.5, 0.1], 1),  # the first crossing counts, not a lucky run later
        ([1, 2, 3], [0.1, 0.1, None], 2),  # nothing came back
        ([1, 2, 3], [0.1, NAN, 0.1], 1),
        ([1, 2, 2, 3], [0.1, 0.1, 0.5, 0.6], 1),  # measured twice: the worse one counts
        ([1, 2, 3], [0.3, 0.1, 0.5], None),  # the lowest rate is the reference, however odd
        ([1], [0.1], None),
        ([], [], None),
        ([1, 2], [None, 0.1], None),
        ([1, 2], [0.0, 0.1], None),
    ],
)
def test_knee(rates: list[float], p99: list[float | None], knee: float | None) -> None:
    assert find_knee(rates, p99) == knee


def test_knee_of_columns_that_do_not_match() -> None:
    with pytest.raises(ValueError):
        find_knee([1.0, 2.0], [0.1])


def test_bins_weigh_steps_by_time() -> None:
    made = steps(step_start_s=[0.0, 1.0], step_end_s=[1.0, 4.0], step_rows=[8, 4], duration_s=4.0)
    assert make_timeline(made, num_bins=4).rows == pytest.approx([8, 4, 4, 4])
    assert make_timeline(made, num_bins=2).rows == pytest.approx([6, 4])
    assert make_timeline(made, num_bins=1).rows == pytest.approx([5])


def test_short_gaps_vanish_and_long_ones_show() -> None:
    made = steps(
        step_start_s=[0.0, 1.1, 8.0], step_end_s=[1.0, 4.0, 10.0], step_rows=[8, 8, 8], duration_s=10.0
    )
    assert make_timeline(made, num_bins=5).rows == pytest.approx([8, 8, 0, 0, 8])


def test_steps_in_any_order_and_overlapping_ones() -> None:
    made = steps(step_start_s=[1.0, 0.0], step_end_s=[4.0, 2.0], step_rows=[4, 8], duration_s=4.0)
    assert make_timeline(made, num_bins=4).rows == pytest.approx([8, 8, 4, 4])


def test_replicas_are_added_or_taken_alone() -> None:
    made = steps(
        step_replica=[0, 1],
        step_start_s=[0.0, 0.0],
        step_end_s=[2.0, 1.0],
        step_rows=[3, 5],
        num_replicas=2,
        duration_s=2.0,
    )
    assert make_timeline(made, num_bins=2).rows == pytest.approx([8, 3])
    assert make_timeline(made, replica=1, num_bins=2).rows == pytest.approx([5, 0])


def test_a_long_run_keeps_its_total_when_it_is_thinned() -> None:
    made = record(num_steps=20_000)
    timeline = make_timeline(made, num_bins=300)
    assert len(timeline.rows) == len(timeline.middles_s) == 300
    exact = float(made.step_rows @ (made.step_end_s - made.step_start_s)) / made.duration_s
    assert float(timeline.rows.mean()) == pytest.approx(exact)


def test_a_run_without_steps_or_time_is_all_zero() -> None:
    timeline = make_timeline(record(num_steps=0, duration_s=0.0), num_bins=3)
    assert timeline.rows.tolist() == [0.0, 0.0, 0.0]


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    """Missing glyphs, empty logarithmic axes and the like are raised as warnings inside matplotlib."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def assert_picture(path: Path, *, min_width: int = 1200) -> None:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert min_width <= width <= 4000
    assert 250 <= height <= 4000
    assert 8_000 < len(data) < 2_000_000


def points(*, factor: float = 1.0, lost_after: float = math.inf) -> list[plots.CurvePoint]:
    made = []
    for rate in (2.0, 8.0, 16.0, 32.0):
        lost = rate > lost_after
        seconds = factor * 0.05 * (1 + (rate / 12) ** 3)
        made.append(
            plots.CurvePoint(
                rate=rate,
                throughput=200 * rate,
                ttft_p50_s=None if lost else seconds,
                ttft_p99_s=None if lost else 2 * seconds,
                e2e_p50_s=None if lost else 20 * seconds,
                e2e_p99_s=None if lost else 50 * seconds,
            )
        )
    return made


def test_throughput_latency(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    curves = [
        plots.Curve(label="continuous", points=points()),
        plots.Curve(label="static", points=points(factor=9.0, lost_after=16.0)),
        plots.Curve(label="never measured", points=[]),
    ]
    assert curves[0].knee == 8.0
    plots.plot_throughput_latency(curves, path)
    assert_picture(path)


def test_a_single_point_and_points_without_latency(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    plots.plot_throughput_latency([plots.Curve(label="one", points=points()[:1])], path)
    assert_picture(path)
    plots.plot_throughput_latency(
        [plots.Curve(label="lost", points=points(lost_after=0.0))], path, title=None
    )
    assert_picture(path)


def test_a_point_from_a_summary() -> None:
    summary = summarize(record())
    point = plots.curve_point(4.0, summary)
    assert (point.rate, point.ttft_p99_s) == (4.0, summary.ttft_s.p99)
    assert point.throughput == summary.output_tokens_per_s


def test_timeline_picture(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    plots.plot_timeline(record(num_steps=5000), path)
    assert_picture(path)
    padded = record(num_steps=300, step_padded=np.full(300, 7), kv_total_slots=0)
    plots.plot_timeline(padded, path, replica=0, title="Static")
    assert_picture(path)


def test_timeline_of_one_step(tmp_path: Path) -> None:
    plots.plot_timeline(record(num_steps=1), tmp_path / "one.png")
    assert_picture(tmp_path / "one.png")


def test_distributions(tmp_path: Path) -> None:
    path = tmp_path / "cdfs.png"
    runs = [record(f"run {i}", seed=i) for i in range(9)]
    plots.plot_cdfs(runs, path)
    assert_picture(path)


def test_distributions_of_nothing_and_of_zeros(tmp_path: Path) -> None:
    path = tmp_path / "cdfs.png"
    never = np.full(60, NAN)
    plots.plot_cdfs([record(first_token_s=never, finished_s=never, outcome=np.full(60, 4), itl_s=[])], path)
    assert_picture(path)
    plots.plot_cdfs([record(itl_s=np.zeros(10))], path)
    assert_picture(path)


def test_modes(tmp_path: Path) -> None:
    path = tmp_path / "modes.png"
    blind = record("a benchmark that sees no steps", num_steps=0)
    plots.plot_modes([summarize(record("static")), summarize(record("continuous")), summarize(blind)], path)
    assert_picture(path)


def test_labels_with_dollar_signs_are_not_mathematics(tmp_path: Path) -> None:
    made = record("cheap $1 or $x_ dear")
    plots.plot_cdfs([made], tmp_path / "a.png")
    plots.plot_modes([summarize(made)], tmp_path / "b.png")
    plots.plot_timeline(made, tmp_path / "c.png")
    assert_picture(tmp_path / "c.png")


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    path = tmp_path / "none.png"
    with pytest.raises(InputError, match="no points"):
        plots.plot_throughput_latency([plots.Curve(label="x", points=[])], path)
    with pytest.raises(InputError, match="has no steps to draw"):
        plots.plot_timeline(record(num_steps=0), path)
    with pytest.raises(InputError, match="no runs"):
        plots.plot_cdfs([], path)
    with pytest.raises(InputError, match="no runs"):
        plots.plot_modes([], path)
    assert not path.exists()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write plot .*none/modes\.png: No such file"):
        plots.plot_modes([summarize(record())], tmp_path / "none" / "modes.png")


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def refuse(name: str, *rest: Any, **named: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real_import(name, *rest, **named)

    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(InputError, match="pip install matplotlib"):
        plots.plot_modes([summarize(record())], tmp_path / "modes.png")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Draws a picture and gives the figure itself, drawn, for what cannot be read from a file."""
    figure_of = pytest.importorskip("matplotlib.figure").Figure
    kept: list[Any] = []
    save = figure_of.savefig

    def saved(figure: Any, *arguments: Any, **named: Any) -> None:
        save(figure, *arguments, **named)
        kept.append(figure)

    monkeypatch.setattr(figure_of, "savefig", saved)

    def draw(plot: Callable[..., None], *values: Any) -> Any:
        plot(*values, tmp_path / "a.png")
        kept[-1].draw_without_rendering()
        return kept[-1]

    return draw


@pytest.mark.parametrize(
    "span_s",
    [(0.3076, 0.3112), (0.0595, 0.0625), (0.9, 2.6), (1.0, 12.0), (0.1, 20.0), (0.002, 0.4), (1e-5, 900.0)],
)
def test_labels_of_a_logarithmic_axis_do_not_touch(span_s: tuple[float, float], drawn: Any) -> None:
    arrival_s = record().arrival_s
    took_s = np.geomspace(*span_s, arrival_s.size)
    run = record(first_token_s=arrival_s + took_s, finished_s=arrival_s + took_s, itl_s=took_s)
    for axes in drawn(plots.plot_cdfs, [run]).axes:
        low, high = axes.get_xlim()
        there = [label for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high]
        boxes = sorted((label.get_window_extent() for label in there), key=lambda box: box.x0)
        assert boxes, "an axis without numbers says nothing"
        for left, right in pairwise(boxes):
            assert left.x1 < right.x0, [label.get_text() for label in there]


@pytest.mark.parametrize("served", [[3460.0, 3470.0, 3480.0], [100.0, 2000.0, 3480.0]])
def test_no_marker_is_cut_at_the_edge(served: list[float], drawn: Any) -> None:
    points = [
        plots.CurvePoint(
            rate=rate, throughput=tokens, ttft_p50_s=1.0, ttft_p99_s=2.0, e2e_p50_s=5.0, e2e_p99_s=9.0
        )
        for rate, tokens in zip((78.0, 79.0, 80.0), served, strict=True)
    ]
    figure = drawn(plots.plot_throughput_latency, [plots.Curve(label="flat", points=points)])
    for axes in figure.axes:
        frame = axes.get_window_extent()
        for line in axes.lines:
            radius = line.get_markersize() / 72.0 * figure.dpi / 2.0
            for x, y in axes.transData.transform(line.get_xydata()):
                assert x + radius <= frame.x1 and y + radius <= frame.y1, axes.get_title(loc="left")
