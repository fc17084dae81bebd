"""How every figure looks, and the only place that loads matplotlib.

Owns colours, type, grids, axis formats and the writing of the file. Figures are made without pyplot,
so no display is needed and nothing stays open. It knows no measures.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator

# The colours of Okabe and Ito, distinguishable with any common colour blindness; markers repeat the message.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PINK, SKY, INK, GREY = "#CC79A7", "#56B4E9", "#222222", "#8A8F98"
PALETTE = (BLUE, ORANGE, GREEN, RED, PINK, SKY, INK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
ROOM = 1.05  # of an axis from zero, beyond its largest value
GAP_PX = 6.0  # at least, between two labels beside each other

_STYLE: Any = {  # matplotlib types the keys as literals that differ between its versions
    "font.size": 10,
    "font.family": "sans-serif",
    "svg.hashsalt": "paceline",
    "text.parse_math": False,  # a label with dollar signs is a price
    "text.color": INK,
    "axes.edgecolor": "#B4B8BF",
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E6EA",
    "grid.linewidth": 0.8,
    "xtick.color": "#5A5F69",
    "ytick.color": "#5A5F69",
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 2.0,
    "lines.markersize": 5.5,
    "figure.dpi": 150,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
}


@contextmanager
def figure_file(path: str | Path, *, width: float, height: float, title: str | None) -> Iterator["Figure"]:
    """A figure of that many inches, written when the block ends well: as SVG if the path says so, else as PNG."""
    need_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height))
        FigureCanvasAgg(figure)
        if title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=14, fontweight="bold")
        yield figure
        kind = "svg" if str(path).lower().endswith(".svg") else "png"
        # The same picture should be the same file: an SVG carries its date and random names by default.
        options: Any = {"metadata": {"Date": None}} if kind == "svg" else {}
        try:
            figure.savefig(path, format=kind, facecolor="white", **options)
        except OSError as problem:
            raise InputError(f"cannot write plot {path}: {problem.strerror or problem}") from problem


def need_matplotlib() -> None:
    """For commands that measure for minutes before they plot."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as problem:
        raise InputError("plots need matplotlib: pip install matplotlib") from problem


def colour(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def marker(index: int) -> str:
    return MARKERS[index % len(MARKERS)]


def legend_below(figure: "Figure", axes: "Axes", num_columns: int) -> None:
    """One legend for the whole figure, under it, from the lines of one panel."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower left", ncols=max(1, min(num_columns, len(handles))))


def seconds_axis(axes: "Axes", *, vertical: bool, label: str) -> None:
    """A logarithmic axis whose ticks read 1 ms, 20 ms, 5 s; a word instead where no line has a value."""
    from matplotlib.ticker import NullFormatter, NullLocator

    drawn = [np.asarray(line.get_ydata() if vertical else line.get_xdata(), float) for line in axes.lines]
    if not any(np.isfinite(values).any() for values in drawn):
        say_empty(axes, "none recorded")
        return
    axis = axes.yaxis if vertical else axes.xaxis
    (axes.set_yscale if vertical else axes.set_xscale)("log")
    axis.set_major_locator(_seconds_locators(*sorted(axes.get_ylim() if vertical else axes.get_xlim()))[0])
    axis.set_major_formatter(lambda value, _: format_seconds(value))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
    axis.set_label_text(label)


def space_seconds(figure: "Figure", panels: Sequence["Axes"]) -> None:
    """Take fewer ticks on lower axes of seconds where labels would touch. The figure must be complete, since its
    layout decides how much room there is."""
    figure.draw_without_rendering()
    for axes in panels:
        if not axes.lines:
            continue
        for locator in _seconds_locators(*sorted(axes.get_xlim())):
            axes.xaxis.set_major_locator(locator)
            if not _touch(axes):
                break


def _seconds_locators(low: float, high: float) -> "list[Locator]":
    """Ways to place ticks on a logarithmic axis, from the closest to the widest apart."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    # Powers of ten alone would leave a narrow axis without numbers, and 1-2-5 a very narrow one.
    ratio = high / max(low, 1e-12)
    if ratio <= 4.0:
        return [MaxNLocator(nbins=count) for count in (5, 4, 3, 2)]
    within = [(1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)] if ratio <= 300.0 else [(1.0,)]
    locators: list[Locator] = [LogLocator(base=10.0, subs=subs, numticks=12) for subs in within]
    return locators + [LogLocator(base=10.0, numticks=count) for count in (5, 3)]


def _touch(axes: "Axes") -> bool:
    """Whether labels of the lower axis are too close to each other."""
    low, high = axes.get_xlim()
    shown = [
        label
        for label in axes.get_xticklabels()
        if label.get_text() and low <= label.get_position()[0] <= high
    ]
    boxes = sorted((label.get_window_extent() for label in shown), key=lambda box: box.x0)
    return any(left.x1 + GAP_PX > right.x0 for left, right in pairwise(boxes))


def count_axis(axes: "Axes", *, label: str) -> None:
    """An upright axis from zero with short numbers: 800, 12k, 3M."""
    axes.yaxis.set_major_formatter(lambda value, _: format_count(value))
    axes.set_ylabel(label)
    from_zero(axes, vertical=True)


def from_zero(axes: "Axes", *, vertical: bool) -> None:
    """Let an axis begin at zero and end beyond the largest value, so that no marker is cut.

    The room matplotlib leaves is a share of what the values span, which is next to nothing where all are alike.
    """
    high = (axes.get_ylim() if vertical else axes.get_xlim())[1]
    largest = axes.dataLim.y1 if vertical else axes.dataLim.x1
    if np.isfinite(largest):
        high = max(high, largest * ROOM)
    (axes.set_ylim if vertical else axes.set_xlim)(0.0, high)


def square_root_scale(axes: "Axes") -> None:
    """An upright axis from zero on which small values keep some height; round numbers as ticks."""
    from matplotlib.ticker import FixedLocator

    top = axes.get_ylim()[1]
    axes.set_yscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0.0)), np.square))
    axes.set_ylim(0.0, top)
    decade = 10.0 ** np.floor(np.log10(top))
    ticks: list[float] = []
    for tick in (decade * share for share in (8, 6, 4, 2, 1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)):
        # Round numbers get close together near zero; a tick needs a tenth of the axis for itself.
        height, above = np.sqrt(tick / top), np.sqrt(ticks[-1] / top) if ticks else 1.2
        if tick <= top and height > 0.1 and above - height > 0.1:
            ticks.append(tick)
    axes.yaxis.set_major_locator(FixedLocator([0.0, *ticks]))
    axes.yaxis.set_major_formatter(lambda value, _: format_count(value))


def format_seconds(value: float) -> str:
    if value < 1e-3:
        return f"{value * 1e6:g} µs"
    return f"{value * 1e3:g} ms" if value < 1.0 else f"{value:g} s"


def format_count(value: float) -> str:
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"


def say_empty(axes: "Axes", text: str, *, keep_x: bool = False) -> None:
    """For a panel that has nothing to show; an empty frame would look like a fault. `keep_x` leaves the lower
    axis alone, which a panel at the foot of a shared one needs."""
    axes.tick_params(axis="y", labelleft=False)
    axes.tick_params(axis="x", labelbottom=keep_x)
    axes.grid(False)
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)
