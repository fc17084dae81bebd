"""The demonstration's figures, and the table that sets them beside what the field claims for continuous batching.

Owns which figures those are and the claims. The measures themselves are `report`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from paceline.lab.bench.demo_runs import ModeRun
from paceline.lab.report.summary import Summary, summarize
from paceline.lab.report.table import ABSENT, format_number
from paceline.lab.report.table import to_json as summary_json


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeFigures:
    """One mode."""

    mode: str
    origin_s: float  # when it began, on the clock of its run log
    summary: Summary
    useful_slots: float | None  # share of rows that computed for a request that still wanted it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    name: str
    value: Callable[[ModeFigures], float | None]
    text: Callable[[float], str]
    claim: str = ""
    # Continuous over static as "2.1 x", else as a change in percent; "" where text is a share.
    as_factor: bool = False
    compares: bool = True


def figures_of(run: ModeRun) -> ModeFigures:
    return ModeFigures(
        mode=run.mode,
        origin_s=run.origin_s,
        summary=summarize(run.record),
        useful_slots=run.lanes.useful_share,
    )


def demo_table(figures: Sequence[ModeFigures]) -> Table:
    """A column for each mode that ran; how the last compares with the first, and what is claimed."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    table.add_column("", no_wrap=True)
    for each in figures:
        table.add_column(each.mode, justify="right", no_wrap=True)
    compares = len(figures) > 1
    if compares:
        table.add_column(f"against {figures[0].mode}", justify="right", no_wrap=True)
    table.add_column("claimed", no_wrap=True)
    for line in _LINES:
        values = [line.value(each) for each in figures]
        cells = [ABSENT if value is None else line.text(value) for value in values]
        if compares:
            cells.append(_against(line, values[0], values[-1]))
        table.add_row(line.name, *cells, line.claim)
    return table


def to_json(figures: ModeFigures) -> dict[str, object]:
    return {
        "mode": figures.mode,
        "origin_s": figures.origin_s,
        "useful_slots": figures.useful_slots,
        "summary": summary_json(figures.summary),
    }


def _against(line: _Line, first: float | None, last: float | None) -> str:
    if not line.compares or not first or last is None:
        return ""
    return f"{last / first:.1f} x" if line.as_factor else f"{100 * (last / first - 1):+.0f} %"


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


_LINES = (
    _Line(
        name="output tokens/s",
        value=lambda each: each.summary.output_tokens_per_s,
        text=format_number,
        claim="2 to 4 x",
        as_factor=True,
    ),
    _Line(
        name="answer, p50 (s)", value=lambda each: each.summary.e2e_s.p50, text=format_number, claim="-60 %"
    ),
    _Line(name="answer, p99 (s)", value=lambda each: each.summary.e2e_s.p99, text=format_number),
    _Line(name="first token, p50 (s)", value=lambda each: each.summary.ttft_s.p50, text=format_number),
    _Line(
        name="padded share",
        value=lambda each: each.summary.padded_share,
        text=_share,
        claim="30 to 50 % to none",
        compares=False,
    ),
    _Line(
        name="slots that do useful work", value=lambda each: each.useful_slots, text=_share, as_factor=True
    ),
    _Line(
        name="all answered after (s)",
        value=lambda each: each.summary.duration_s,
        text=format_number,
    ),
)
