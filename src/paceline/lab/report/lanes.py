"""Rows of a batch over time as bytes, and the picture of batching modes: every row of every mode over the same seconds.

Owns the codes and how neighbouring steps of one row become one stretch. A lane is a row of the batch. What is drawn is
what was recorded, stretch by stretch; nothing is smoothed. How it looks is in `plot_style`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InputError
from paceline.lab.report import plot_style as style
from paceline.lab.report.summary import Summary
from paceline.lab.report.table import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Held: taken by a request whose prompt is not computed in this step.
EMPTY, PROMPT, DECODE, PADDING, HELD = range(5)

Codes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lanes:
    """What each row did in each step; times are seconds since the start of the run."""

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    codes: Codes  # [steps, rows]
    num_slots: int  # requests at once; where steps are planned ahead there are more rows, of which some rest

    def stretches(self, row: int, code: int) -> list[tuple[float, float]]:
        """When `row` did that, as (start, length); steps that follow each other without a gap are one stretch."""
        at = np.flatnonzero(self.codes[:, row] == code)
        if not at.size:
            return []
        cuts = np.flatnonzero(np.diff(at) > 1) + 1
        found = []
        for part in np.split(at, cuts):
            start_s = float(self.start_s[part[0]])
            found.append((start_s, float(self.end_s[part[-1]]) - start_s))
        return found

    @property
    def useful_share(self) -> float | None:
        """Of all slots, while steps ran, the share that computed for a request that still wanted it."""
        durations = self.end_s - self.start_s
        useful = ((self.codes == PROMPT) | (self.codes == DECODE)).sum(axis=1) / self.num_slots
        whole = float(durations.sum())
        return float(durations @ useful) / whole if whole > 0.0 else None


DRAWN = (
    (PROMPT, "prompt", style.ORANGE),
    (DECODE, "decode", style.BLUE),
    (PADDING, "padding: ended, still computed", "#BFC4CC"),
    (HELD, "held, waits for its prompt", "#E9EBEE"),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaneRun:
    """One mode: what its rows did and what came of it."""

    lanes: Lanes
    summary: Summary
    arrival_s: Sequence[float]


def plot_lanes(runs: Sequence[LaneRun], path: str | Path, *, title: str | None) -> None:
    """A panel of lanes for each run, over the same time."""
    if not runs or not all(len(run.lanes.start_s) for run in runs):
        raise InputError("there are no steps to draw; run at least one request")
    last_s = max(float(run.lanes.end_s[-1]) for run in runs)
    with style.figure_file(path, width=12.0, height=1.0 + 2.0 * len(runs), title=title) as figure:
        panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
        for panel, run in zip(panels, runs, strict=True):
            _draw_lanes(panel, run, last_s)
        panels[-1].set_xlabel("seconds")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=len(handles))


def _draw_lanes(axes: Axes, run: LaneRun, last_s: float) -> None:
    lanes, summary = run.lanes, run.summary
    num_rows = lanes.codes.shape[1]
    for code, label, colour in DRAWN:
        shown: Any = {"facecolors": colour, "linewidth": 0, "label": label}
        for row in range(num_rows):
            axes.broken_barh(lanes.stretches(row, code), (row + 0.08, 0.84), **shown)
            shown["label"] = None
    axes.plot(
        run.arrival_s,
        [num_rows + 0.9] * len(run.arrival_s),
        linestyle="none",
        marker="|",
        markersize=5,
        color=style.INK,
        label="a request arrives",
    )
    done_s = summary.duration_s
    axes.axvline(done_s, color=style.INK, linewidth=1.0, linestyle=(0, (2, 2)))
    axes.set_xlim(0.0, last_s * 1.01)
    axes.set_ylim(num_rows + 1.7, -0.4)
    axes.set_yticks([])
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.set_ylabel(f"{lanes.num_slots} rows")
    axes.set_title(_headline(summary))


def _headline(summary: Summary) -> str:
    parts = [f"{summary.label}: done after {format_number(summary.duration_s)} s"]
    if summary.output_tokens_per_s is not None:
        parts.append(f"{format_number(summary.output_tokens_per_s)} tokens/s")
    if summary.e2e_s.p50 is not None and summary.e2e_s.p99 is not None:
        parts.append(
            f"answers in {format_number(summary.e2e_s.p50)} s (p50), {format_number(summary.e2e_s.p99)} s (p99)"
        )
    if summary.padded_share is not None:
        parts.append(f"{100 * summary.padded_share:.0f} % padding")
    return "   ".join(parts)
