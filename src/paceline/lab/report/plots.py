"""Six pictures of runs, each a function of plain values and a path, each written as PNG.

Throughput against latency over rates, one run's batch over time, distributions of several runs, modes side by side,
goodput over the load, and requests over time. What is drawn is decided here, how it looks in `plot_style`. matplotlib
is optional and loaded only when a picture is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.errors import InputError
from paceline.lab.report import plot_style as style
from paceline.lab.report.run_record import FINISHED, Floats, RunRecord
from paceline.lab.report.summary import Summary
from paceline.lab.report.table import format_number, format_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_BARS = 400  # requests of `plot_gantt`

# Where a latency curve turns up.
#
# Owns one definition, so that a sweep, a plot and a page mark the same place.


def find_knee(rates: Sequence[float], p99_ttft: Sequence[float | None]) -> float | None:
    """The rate after which p99 TTFT doubles: the highest measured rate below the first one whose p99 TTFT is
    more than twice that of the lowest rate.

    The reference is the lowest rate and not the neighbour, so the answer does not depend on how finely the
    rates were spaced. A rate without a p99 (nothing came back) counts as doubled; of one measured several
    times the worst counts. None where no such place was seen: the curve never doubles, or it has fewer than
    two rates, or the lowest rate has no p99 above zero.
    """
    worst: dict[float, float] = {}
    for rate, value in zip(rates, p99_ttft, strict=True):
        seconds = math.inf if value is None or math.isnan(value) else value
        worst[rate] = max(seconds, worst.get(rate, 0.0))
    ordered = sorted(worst.items())
    if not ordered or not 0.0 < ordered[0][1] < math.inf:
        return None
    bound = 2.0 * ordered[0][1]
    previous = ordered[0][0]
    for rate, seconds in ordered[1:]:
        if seconds > bound:
            return previous
        previous = rate
    return None


# A run's steps as a few hundred even bins of time, ready to draw.
#
# Each bin holds the mean over the time that steps ran in it, so a step counts for as long as it took however many
# share the bin. Gaps between steps shorter than a bin leave no notch; a bin without any step is zero. Replicas are
# added up. It draws nothing.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimelinePlot:
    """Means per bin; `edges_s` has one entry more than the others."""

    edges_s: Floats
    rows: Floats
    waiting: Floats
    decode: Floats  # tokens per step
    prefill: Floats
    padded: Floats
    kv_used: Floats  # slots
    kv_filled: Floats
    num_replicas: int

    @property
    def middles_s(self) -> Floats:
        return (self.edges_s[:-1] + self.edges_s[1:]) / 2.0


def make_timeline(record: RunRecord, *, replica: int | None = None, num_bins: int = 600) -> TimelinePlot:
    """Of all replicas together, or of one."""
    assert num_bins >= 1
    wanted = range(record.num_replicas) if replica is None else (replica,)
    end_s = max(record.duration_s, float(record.step_end_s.max(initial=0.0)))
    edges_s = np.linspace(0.0, end_s if end_s > 0.0 else 1.0, num_bins + 1)
    names = ("rows", "waiting", "decode", "prefill", "padded", "kv_used", "kv_filled")
    sums = {name: np.zeros(num_bins) for name in names}
    for number in wanted:
        chosen = np.flatnonzero(record.step_replica == number)
        chosen = chosen[np.argsort(record.step_start_s[chosen], kind="stable")]
        if not chosen.size:
            continue
        start_s, end_of_s = _without_overlap(record.step_start_s[chosen], record.step_end_s[chosen])
        covered = _per_bin(np.ones(chosen.size), start_s, end_of_s, edges_s)
        for name, total in sums.items():
            values = getattr(record, f"step_{name}")[chosen].astype(np.float64)
            integral = _per_bin(values, start_s, end_of_s, edges_s)
            total += np.divide(integral, covered, out=np.zeros(num_bins), where=covered > 0.0)
    return TimelinePlot(edges_s=edges_s, num_replicas=len(wanted), **sums)


def _without_overlap(start_s: Floats, end_s: Floats) -> tuple[Floats, Floats]:
    """Steps in order of start; one that begins before an earlier one ended begins at that end instead."""
    latest_end_s = np.maximum.accumulate(end_s)
    begins_s = start_s.copy()
    begins_s[1:] = np.maximum(start_s[1:], latest_end_s[:-1])
    return begins_s, np.maximum(end_s, begins_s)


def _per_bin(values: Floats, start_s: Floats, end_s: Floats, edges_s: Floats) -> Floats:
    """Integral over each bin of the function that is `values[i]` during step i and zero between steps."""
    until = np.cumsum(values * (end_s - start_s))
    corners_s = np.column_stack([start_s, end_s]).ravel()
    heights = np.column_stack([np.concatenate([[0.0], until[:-1]]), until]).ravel()
    integral: Floats = np.diff(np.interp(edges_s, corners_s, heights))
    # Interpolating rounds; a bin between two steps must be exactly empty.
    integral[np.abs(integral) < 1e-12 * max(float(until[-1]), 1e-300)] = 0.0
    return integral


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One run of a sweep. None where nothing came back."""

    rate: float  # requests/s offered
    throughput: float | None  # output tokens/s
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    e2e_p50_s: float | None
    e2e_p99_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    label: str
    points: Sequence[CurvePoint]

    @property
    def knee(self) -> float | None:
        return find_knee([point.rate for point in self.points], [point.ttft_p99_s for point in self.points])


def curve_point(rate: float, summary: Summary) -> CurvePoint:
    return CurvePoint(
        rate=rate,
        throughput=summary.output_tokens_per_s,
        ttft_p50_s=summary.ttft_s.p50,
        ttft_p99_s=summary.ttft_s.p99,
        e2e_p50_s=summary.e2e_s.p50,
        e2e_p99_s=summary.e2e_s.p99,
    )


def plot_throughput_latency(
    curves: Sequence[Curve],
    path: str | Path,
    *,
    title: str | None = "Throughput and latency",
    load: str = "offered requests/s",
) -> None:
    """Throughput, TTFT and E2E over the load, and TTFT over throughput; knees ringed."""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        raise InputError("there are no points to plot; measure at least one rate")
    with style.figure_file(path, width=10.5, height=7.6, title=title) as figure:
        panels = figure.subplots(2, 2)
        for index, curve in enumerate(curves):
            _draw_curve(panels, index, curve, unit="/s" if load.endswith("/s") else "")
        if any(curve.knee is not None for curve in curves):
            panels[0, 0].plot([], [], **_RING, color=style.GREY, label="knee: beyond it p99 TTFT has doubled")
        (throughput, frontier), (ttft, e2e) = panels
        throughput.set_title("Throughput")
        style.count_axis(throughput, label="output tokens/s")
        frontier.set_title("First token at a given throughput (p99)")
        frontier.set_xlabel("output tokens/s")
        style.from_zero(frontier, vertical=False)
        frontier.xaxis.set_major_formatter(lambda value, _: style.format_count(value))
        style.seconds_axis(frontier, vertical=True, label="TTFT p99")
        ttft.set_title("Time to first token")
        style.seconds_axis(ttft, vertical=True, label="TTFT (solid p99, dashed p50)")
        e2e.set_title("End to end")
        style.seconds_axis(e2e, vertical=True, label="E2E (solid p99, dashed p50)")
        for panel in (throughput, ttft, e2e):
            panel.set_xlabel(load)
            style.from_zero(panel, vertical=False)
        style.legend_below(figure, throughput, 4)


def plot_timeline(
    record: RunRecord, path: str | Path, *, replica: int | None = None, title: str | None = None
) -> None:
    """Rows and queue, tokens per step and KV use over the time of one run; replicas added up unless one is
    chosen."""
    if not record.num_steps:
        raise InputError(
            f"run '{record.label}' has no steps to draw; record a run that lasts at least one step"
        )
    timeline = make_timeline(record, replica=replica)
    heading = title or f"The batch over time: {record.label}"
    with style.figure_file(path, width=10.5, height=8.2, title=heading) as figure:
        rows, tokens, kv = figure.subplots(3, 1, sharex=True, height_ratios=(1.0, 1.15, 0.8))
        _draw_rows(rows, timeline, record.max_num_seqs * timeline.num_replicas)
        _draw_tokens(tokens, timeline)
        _draw_kv(kv, timeline, record.kv_total_slots * timeline.num_replicas)
        kv.set_xlabel("time (s)")
        kv.set_xlim(0.0, float(timeline.edges_s[-1]))
        figure.align_ylabels()
        for panel in (rows, tokens, kv):
            if panel.get_legend_handles_labels()[0]:
                panel.legend(loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=4, borderaxespad=0.2)


def plot_cdfs(
    records: Sequence[RunRecord], path: str | Path, *, title: str | None = "Latency distributions"
) -> None:
    """Share of requests (gaps, for ITL) that took at most so long, for several runs."""
    if not records:
        raise InputError("there are no runs to plot; give at least one")
    panels: list[tuple[str, Callable[[RunRecord], Floats]]] = [
        ("Time to first token", lambda record: record.first_token_s - record.arrival_s),
        ("Between tokens (ITL)", lambda record: record.itl_s.astype(np.float64)),
        ("End to end", lambda record: (record.finished_s - record.arrival_s)[record.outcome == FINISHED]),
    ]
    with style.figure_file(path, width=12.0, height=4.6, title=title) as figure:
        for panel, (name, values_of) in zip(figure.subplots(1, 3), panels, strict=True):
            panel.set_title(name)
            _draw_cdfs(panel, [(record.label, values_of(record)) for record in records])
        figure.axes[0].set_ylabel("share at or below")
        fullest = max(figure.axes, key=lambda axes: len(axes.get_legend_handles_labels()[0]))
        style.legend_below(figure, fullest, 4)
        style.space_seconds(figure, figure.axes)


def plot_modes(
    summaries: Sequence[Summary], path: str | Path, *, title: str | None = "Modes side by side"
) -> None:
    """Output rate, median and tail of E2E, and padded share, a bar per run."""
    if not summaries:
        raise InputError("there are no runs to plot; give at least one")
    panels: list[tuple[str, Callable[[Summary], float | None], Callable[[float], str]]] = [
        ("Output tokens/s", lambda summary: summary.output_tokens_per_s, format_number),
        ("E2E p50 (s)", lambda summary: summary.e2e_s.p50, format_number),
        ("E2E p99 (s)", lambda summary: summary.e2e_s.p99, format_number),
        ("Padded share", lambda summary: summary.padded_share, format_share),
    ]
    height = 1.9 + 0.48 * len(summaries)
    with style.figure_file(path, width=12.0, height=height, title=title) as figure:
        axes = figure.subplots(1, len(panels), sharey=True)
        for panel, (name, value_of, text) in zip(axes, panels, strict=True):
            panel.set_title(name)
            _draw_bars(panel, [value_of(summary) for summary in summaries], text)
        axes[0].set_yticks(range(len(summaries)), [summary.label for summary in summaries])
        axes[0].tick_params(axis="y", labelcolor=style.INK)
        axes[0].invert_yaxis()


_RING: Any = {
    "marker": "o",
    "markersize": 13,
    "markerfacecolor": "none",
    "markeredgewidth": 1.8,
    "linestyle": "none",
}


def _draw_curve(
    panels: np.ndarray[tuple[int, int], np.dtype[np.object_]], index: int, curve: Curve, unit: str
) -> None:
    (throughput, frontier), (ttft, e2e) = panels
    points = sorted(curve.points, key=lambda point: point.rate)
    rates = _column(points, lambda point: point.rate)
    served = _column(points, lambda point: point.throughput)
    ttft_p99 = _column(points, lambda point: point.ttft_p99_s)
    looks: Any = {"color": style.colour(index), "marker": style.marker(index)}
    solid: Any = {**looks, "label": curve.label}
    dashed: Any = {**looks, "linestyle": (0, (4, 2)), "alpha": 0.65, "linewidth": 1.5, "markersize": 4.0}
    throughput.plot(rates, served, **solid)
    frontier.plot(served, ttft_p99, **solid)
    ttft.plot(rates, ttft_p99, **solid)
    ttft.plot(rates, _column(points, lambda point: point.ttft_p50_s), **dashed)
    e2e.plot(rates, _column(points, lambda point: point.e2e_p99_s), **solid)
    e2e.plot(rates, _column(points, lambda point: point.e2e_p50_s), **dashed)
    knee = curve.knee
    if knee is not None:
        at = next(i for i, point in enumerate(points) if point.rate == knee)
        _ring(throughput, rates[at], served[at], index, None)
        _ring(frontier, served[at], ttft_p99[at], index, None)
        _ring(ttft, rates[at], ttft_p99[at], index, f"knee {knee:.3g}{unit}")


def _ring(axes: Axes, x: float, y: float, index: int, text: str | None) -> None:
    """An open circle around a point, with a word beside it."""
    colour = style.colour(index)
    axes.plot([x], [y], **_RING, color=colour, zorder=5)
    if text:
        # To the left, where the curve is lower; a point next to the axis has its words below, to the right.
        place: Any = {"xytext": (-9, 9), "textcoords": "offset points", "ha": "right"}
        if x <= axes.dataLim.x0:
            place |= {"xytext": (12, -16 - 11 * index), "ha": "left"}
        axes.annotate(text, (x, y), **place, fontsize=9, fontweight="bold", color=colour)


def _draw_rows(axes: Axes, timeline: TimelinePlot, max_rows: int) -> None:
    axes.set_title("Rows")
    time_s = timeline.middles_s
    axes.fill_between(time_s, timeline.rows, color=style.BLUE, alpha=0.22, linewidth=0)
    axes.plot(time_s, timeline.rows, color=style.BLUE, linewidth=1.4, label="running")
    axes.plot(time_s, timeline.waiting, color=style.RED, linewidth=1.4, label="waiting")
    # The limit is worth a line only where the run comes near it; else it would flatten everything.
    if max_rows <= 2.0 * max(float(timeline.rows.max()), float(timeline.waiting.max()), 1.0):
        axes.axhline(
            max_rows, color=style.GREY, linewidth=1.2, linestyle=(0, (2, 2)), label=f"limit {max_rows:,}"
        )
    style.count_axis(axes, label="requests")


def _draw_tokens(axes: Axes, timeline: TimelinePlot) -> None:
    axes.set_title("Tokens per step")
    layers = [("decode", timeline.decode, style.BLUE), ("prefill", timeline.prefill, style.ORANGE)]
    if timeline.padded.any():
        layers.insert(1, ("padded", timeline.padded, style.INK))
    names, values, colours = zip(*layers, strict=True)
    axes.stackplot(timeline.middles_s, *values, labels=names, colors=colours, alpha=0.88, linewidth=0)
    style.count_axis(axes, label="tokens")
    # A prefill chunk is often fifty times the decoding rows; on an even scale those would be a line.
    base = float((timeline.decode + timeline.padded).max())
    if float(timeline.prefill.max()) > 8.0 * base > 0.0:
        style.square_root_scale(axes)
        axes.set_ylabel("tokens (square-root scale)")


def _draw_kv(axes: Axes, timeline: TimelinePlot, total_slots: int) -> None:
    axes.set_title("KV slots")
    if total_slots < 1:
        style.say_empty(axes, "KV use was not recorded", keep_x=True)
        return
    time_s = timeline.middles_s
    used, filled = timeline.kv_used / total_slots * 100.0, timeline.kv_filled / total_slots * 100.0
    axes.fill_between(time_s, filled, color=style.GREEN, alpha=0.28, linewidth=0, label="filled")
    axes.fill_between(
        time_s, filled, used, color=style.RED, alpha=0.45, linewidth=0, label="allocated, empty"
    )
    axes.plot(time_s, used, color=style.GREEN, linewidth=1.3, label="allocated")
    axes.set_ylabel("% of all slots")
    highest = float(used.max())
    axes.set_ylim(0.0, 100.0 if highest > 45.0 else max(1.1 * highest, 1.0))


def _draw_cdfs(axes: Axes, runs: Sequence[tuple[str, Floats]]) -> None:
    # Many thousand points would only make the file larger; the tail keeps its own resolution.
    shares = np.concatenate([np.linspace(0.0, 0.98, 400), np.linspace(0.981, 1.0, 120)])
    for index, (label, values) in enumerate(runs):
        there = values[np.isfinite(values)]
        if not there.size:
            continue
        dashes = ("-", (0, (5, 1.5)), (0, (1.5, 1)))[index // len(style.PALETTE) % 3]
        # A logarithmic axis has no zero; 10 microseconds stand in for it.
        seconds = np.maximum(np.quantile(there, shares, method="inverted_cdf"), 1e-5)
        axes.plot(seconds, shares, color=style.colour(index), linestyle=dashes, label=label)
    if axes.lines:
        axes.set_ylim(0.0, 1.02)
        axes.set_yticks([0.0, 0.25, 0.5, 0.75, 0.9, 0.99], ["0", "25 %", "50 %", "75 %", "90 %", "99 %"])
    style.seconds_axis(axes, vertical=False, label="")


def _draw_bars(axes: Axes, values: Sequence[float | None], text: Callable[[float], str]) -> None:
    lengths = [value or 0.0 for value in values]
    colours = [style.colour(index) for index in range(len(values))]
    bars = axes.barh(range(len(values)), lengths, color=colours, height=0.62)
    labels = ["-" if value is None else text(value) for value in values]
    axes.bar_label(bars, labels, padding=4, fontsize=9.5)
    axes.set_xlim(0.0, max(max(lengths) * 1.32, 1e-9))
    axes.grid(False)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def _column(points: Sequence[CurvePoint], value_of: Callable[[CurvePoint], float | None]) -> Floats:
    values = [value_of(point) for point in points]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


# Runs as their clients saw them.


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputPoint:
    """One run of a sweep, in requests per second."""

    load: float  # rate, or users
    completed: float
    good: float  # completed, within every bound


def plot_goodput(
    points: Sequence[GoodputPoint],
    path: str | Path,
    *,
    load: str = "offered requests/s",
    is_rate: bool = True,
) -> None:
    """Requests that came in time beside all that came; over a rate also the line on which nothing is lost."""
    if not points:
        raise InputError("there are no points to plot; measure at least one load")
    ordered = sorted(points, key=lambda point: point.load)
    loads = [point.load for point in ordered]
    with style.figure_file(path, width=10.5, height=4.8, title="Goodput") as figure:
        axes = figure.subplots()
        if is_rate:
            axes.plot(
                [0.0, loads[-1]],
                [0.0, loads[-1]],
                color=style.GREY,
                linewidth=1.2,
                linestyle=(0, (2, 2)),
                label="offered",
            )
        completed = [point.completed for point in ordered]
        good = [point.good for point in ordered]
        axes.plot(loads, completed, color=style.SKY, marker=style.marker(1), label="completed")
        axes.plot(loads, good, color=style.GREEN, marker=style.marker(0), label="completed within all bounds")
        axes.fill_between(loads, good, completed, color=style.RED, alpha=0.12, linewidth=0)
        best = int(np.argmax(good))
        if good[best] > 0:
            axes.set_title(f"Most within all bounds: {good[best]:.3g}/s at {loads[best]:.3g}")
        style.count_axis(axes, label="requests/s")
        axes.set_xlabel(load)
        style.from_zero(axes, vertical=False)
        style.legend_below(figure, axes, 3)


def plot_gantt(record: RunRecord, path: str | Path) -> None:
    """A line for each request: until its first token, then while tokens came; failures marked. Of many requests those
    around the middle of the run are shown, one after the other."""
    if not record.num_requests:
        raise InputError(f"run '{record.label}' has no requests to draw")
    order = np.argsort(record.arrival_s, kind="stable")
    spare = max(0, order.size - MOST_BARS)
    shown = order[spare // 2 : spare // 2 + MOST_BARS]
    rows = np.arange(shown.size)
    due, first, last = record.arrival_s[shown], record.first_token_s[shown], record.finished_s[shown]
    finished = record.outcome[shown] == FINISHED
    height = min(9.0, 2.2 + 0.03 * shown.size)
    title = f"Requests over time: {record.label}"
    with style.figure_file(path, width=10.5, height=height, title=title) as figure:
        axes = figure.subplots()
        width = float(np.clip(260.0 / max(shown.size, 1), 0.9, 6.0))
        axes.hlines(
            rows[finished],
            due[finished],
            first[finished],
            color=style.ORANGE,
            linewidth=width,
            label="until the first token",
        )
        axes.hlines(
            rows[finished],
            first[finished],
            last[finished],
            color=style.BLUE,
            linewidth=width,
            label="tokens arrive",
        )
        if not finished.all():
            lost = ~finished
            axes.plot(
                due[lost],
                rows[lost],
                linestyle="none",
                marker="x",
                color=style.RED,
                markersize=5.0,
                label="not answered",
            )
        axes.set_xlabel("time (s)")
        axes.set_ylabel("requests" if not spare else f"{shown.size} of {order.size:,} requests")
        axes.set_yticks([])
        axes.set_ylim(shown.size - 0.4, -0.6)  # the first on top, and no bar cut
        axes.margins(x=0.01)
        style.legend_below(figure, axes, 3)
