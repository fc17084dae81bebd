"""Results of `paceline bench` as tables for people and as plain values for programs. Computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.lab.bench.drafts import DraftsResult, ScriptResult
from paceline.lab.bench.latency import LatencyResult
from paceline.lab.bench.structured import StructuredResult
from paceline.lab.bench.throughput import Recheck, ThroughputResult
from paceline.lab.bench.vector_runs import EmbedResult
from paceline.lab.report.summary import Distribution

ABSENT = "-"
_DIGITS = 6  # significant, in JSON
MAX_SHOWN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table as text: the first column stands left, the others right."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    breaks: Sequence[int] = ()  # columns that begin another table where there is no room for one

    def least_width(self, column: int) -> int:
        """Of a column whose heading may be broken between words; what stands below it may not."""
        return max(*map(len, self.headings[column].split()), *(len(row[column]) for row in self.rows))

    def of(self, columns: Sequence[int]) -> Grid:
        rows = [[row[column] for column in columns] for row in self.rows]
        return Grid(headings=[self.headings[column] for column in columns], rows=rows)


def _short(value: float) -> str:
    """Three significant digits below 1,000, whole numbers with separators above."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".rstrip(".")


def _number(name: str, digits: Callable[[float], str] = _short) -> Callable[[Any], str]:
    def cell(result: Any) -> str:
        value = getattr(result, name)
        return ABSENT if value is None else digits(value)

    return cell


def _count(value: float) -> str:
    return f"{value:,}"


def _percentiles(name: str, factor: float) -> Callable[[Any], str]:
    def cell(result: Any) -> str:
        values: Distribution = getattr(result, name)
        parts = (values.p50, values.p90, values.p99)
        return " / ".join(ABSENT if value is None else _short(value * factor) for value in parts)

    return cell


_Column = tuple[str, Callable[[Any], str]]  # heading, and the cell of a result
_MODE: _Column = ("mode", _number("mode", str))
_THROUGHPUT: tuple[_Column, ...] = (
    ("seconds", _number("seconds", lambda value: f"{value:,.3f}")),
    ("output tok/s", _number("output_tokens_per_s")),
    ("total tok/s", _number("total_tokens_per_s")),
    ("requests/s", _number("requests_per_s")),
    ("ms per step", _number("ms_per_step")),
    ("E2E p50 / p90 / p99 s", _percentiles("e2e_s", 1.0)),
    ("padded", _number("padded_share", lambda value: f"{value:.1%}")),
    ("steps", _number("steps", _count)),
    ("preemptions", _number("preemptions", _count)),
)
_LATENCY: tuple[_Column, ...] = (
    ("requests", _number("num_requests", _count)),
    ("output tok/s", _number("output_tokens_per_s")),
    ("TTFT p50 / p90 / p99 ms", _percentiles("ttft_s", 1e3)),
    ("ITL p50 / p90 / p99 ms", _percentiles("itl_s", 1e3)),
    ("E2E p50 / p90 / p99 s", _percentiles("e2e_s", 1.0)),
    ("preemptions", _number("preemptions", _count)),
)

_STRUCTURED: tuple[_Column, ...] = (
    ("requests", _number("num_requests", _count)),
    ("tokens", _number("output_tokens", _count)),
    ("cut off", _number("cut_off", _count)),
    ("free tok/s", _number("free_tokens_per_s")),
    ("structured tok/s", _number("structured_tokens_per_s")),
    ("ratio", _number("ratio")),
    ("tokens per step, free", _number("free_tokens_per_step")),
    ("tokens per step", _number("tokens_per_step")),
)


_EMBED: tuple[_Column, ...] = (
    ("texts", _number("num_texts", _count)),
    ("tok/s", _number("tokens_per_s")),
    ("texts/s", _number("texts_per_s")),
    ("latency p50 / p90 / p99 ms", _percentiles("latency_s", 1e3)),
    ("steps", _number("steps", _count)),
)


def split_grid(grid: Grid, width: int, *, edge: int, gap: int) -> list[Grid]:
    """As few tables as have room in a width, each with the first column. A table takes `edge` characters itself and
    `gap` for each column."""
    name = edge + gap + grid.least_width(0)
    places = [gap + grid.least_width(column) for column in range(len(grid.headings))]
    if name + sum(places[1:]) <= width:
        return [grid]
    parts: list[list[int]] = []
    for column in range(1, len(grid.headings)):
        is_full = not parts or name + sum(places[each] for each in (*parts[-1], column)) > width
        if is_full or column in grid.breaks:
            parts.append([])
        parts[-1].append(column)
    return [grid.of([0, *part]) for part in parts]


def throughput_table(results: Sequence[ThroughputResult]) -> Grid:
    """Rows name their mode where there are several."""
    several = len({result.mode for result in results}) > 1
    return _grid(results, (_MODE, *_THROUGHPUT) if several else _THROUGHPUT)


def latency_table(results: Sequence[LatencyResult]) -> Grid:
    return _grid(results, _LATENCY)


def structured_table(results: Sequence[StructuredResult]) -> Grid:
    return _grid(results, _STRUCTURED)


def structured_json(result: StructuredResult) -> dict[str, Any]:
    rates = ("free_tokens_per_s", "structured_tokens_per_s")
    return rounded({**asdict(result), **{name: getattr(result, name) for name in rates}})


def embed_table(results: Sequence[EmbedResult]) -> Grid:
    return _grid(results, _EMBED)


def embed_json(result: EmbedResult) -> dict[str, Any]:
    rates = ("tokens_per_s", "texts_per_s")
    return rounded({**asdict(result), **{name: getattr(result, name) for name in rates}})


def throughput_json(result: ThroughputResult) -> dict[str, Any]:
    rates = ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s", "ms_per_step")
    return rounded({**asdict(result), **{name: getattr(result, name) for name in rates}})


def _share(value: float) -> str:
    return f"{value:.0%}"


_DRAFTS: tuple[_Column, ...] = (
    ("clients", _number("clients", _count)),
    ("off tok/s", _number("plain_tokens_per_s")),
    ("on tok/s", _number("drafted_tokens_per_s")),
    ("ratio", _number("ratio", lambda value: f"{value:.3f}")),
    ("tokens per step", _number("tokens_per_step")),
    ("verified per token", _number("verified_per_token")),
    ("right", _number("right", _share)),
)
_SCRIPT: tuple[_Column, ...] = (
    ("requests", _number("num_requests", _count)),
    ("tokens per step", _number("tokens_per_step")),
    ("verified per token", _number("verified_per_token")),
)


def drafts_table(results: Sequence[DraftsResult]) -> Grid:
    return _grid(results, _DRAFTS, first="category")


def script_table(results: Sequence[ScriptResult]) -> Grid:
    return _grid(results, _SCRIPT, first="method")


def latency_json(result: LatencyResult) -> dict[str, Any]:
    return rounded(asdict(result))


def recheck_json(outcome: Recheck) -> dict[str, Any]:
    return rounded({**asdict(outcome), "num_different": len(outcome.differences)})


def recheck_lines(outcome: Recheck) -> list[str]:
    """What came out, differences first: one line for each of the first few."""
    how = "eagerly" if outcome.is_eager else "by the same engine"
    equal = outcome.num_requests - len(outcome.differences)
    lines = [
        f"Generated again, alone, {how}: {outcome.num_requests} requests, {outcome.num_tokens:,} tokens; "
        f"{equal} equal, {len(outcome.differences)} different"
    ]
    for one in outcome.differences[:MAX_SHOWN]:
        gap = "" if one.logit_gap is None else f", the two best logits {one.logit_gap:.2g} apart"
        lines.append(
            f"  {one.workload} request {one.request}: first difference at token {one.first} of {one.num_tokens} "
            f"({one.in_run} in the run, {one.alone} alone{gap}); {one.num_different} tokens differ"
        )
    if len(outcome.differences) > MAX_SHOWN:
        lines.append(f"  and {len(outcome.differences) - MAX_SHOWN} more, in the JSON")
    return lines


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    """Floats to six significant digits, at any depth."""
    return {name: _round(entry) for name, entry in values.items()}


def _round(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return rounded(value)
    if isinstance(value, list | tuple):
        return [_round(entry) for entry in value]
    return value


def _grid(results: Sequence[Any], columns: Sequence[_Column], first: str = "workload") -> Grid:
    rows = [(getattr(result, first), *(cell(result) for _, cell in columns)) for result in results]
    return Grid(headings=(first, *(heading for heading, _ in columns)), rows=rows)
