"""Two more pictures of runs as their clients saw them: goodput over the load, and requests over time.

Each is a function of plain values and a path and writes a PNG. How it looks is decided in `plot_style`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.errors import InputError
from paceline.lab.report import plot_style as style
from paceline.lab.report.run_record import FINISHED, RunRecord

MOST_BARS = 400


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
    title: str | None = "Goodput",
    load: str = "offered requests/s",
    is_rate: bool = True,
) -> None:
    """Requests that came in time beside all that came; over a rate also the line on which nothing is lost."""
    if not points:
        raise InputError("there are no points to plot; measure at least one load")
    ordered = sorted(points, key=lambda point: point.load)
    loads = [point.load for point in ordered]
    with style.figure_file(path, width=10.5, height=4.8, title=title) as figure:
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


def plot_gantt(record: RunRecord, path: str | Path, *, title: str | None = None) -> None:
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
    with style.figure_file(
        path, width=10.5, height=height, title=title or f"Requests over time: {record.label}"
    ) as figure:
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
