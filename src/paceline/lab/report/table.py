"""Summaries as text for people and as plain values for programs.

Owns which measure stands in which group, its unit and how many digits it gets. Two tables: runs side by side
with every measure, or one line per run with the few that decide. It computes nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from paceline.lab.report.run_record import OUTCOMES
from paceline.lab.report.summary import Distribution, Summary

ABSENT = "-"
_JSON_DIGITS = 6

Value = float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measure:
    group: str
    label: str
    value: Callable[[Summary], Value]
    text: Callable[[float], str]
    better: int = 0  # 1: more is better, -1: less is better, 0: neither
    is_optional: bool = False  # left out where no run has it


def comparison_table(summaries: Sequence[Summary], *, title: str | None = None) -> Table:
    """One column per run, every measure a row; the best run of a row is bold."""
    table = _new_table(title)
    table.add_column("", style="dim", no_wrap=True)
    table.add_column("measure", no_wrap=True)
    for summary in summaries:
        table.add_column(Text(summary.label), justify="right", overflow="fold")
    group = ""
    for measure in (*_MEASURES, *_by_class(summaries), *_FORECASTS):
        if measure.is_optional and all(measure.value(summary) is None for summary in summaries):
            continue  # not measured
        if measure.group != group and group:
            table.add_section()
        name = measure.group if measure.group != group else ""
        group = measure.group
        table.add_row(name, measure.label, *_cells(measure, summaries))
    return table


def compact_table(summaries: Sequence[Summary], *, title: str | None = None) -> Table:
    """One row per run, for sweeps and long lists."""
    table = _new_table(title)
    table.add_column("run", overflow="fold")
    for heading, _ in _COMPACT:
        table.add_column(heading, justify="right", no_wrap=True)
    for summary in summaries:
        table.add_row(Text(summary.label), *(cell(summary) for _, cell in _COMPACT))
    return table


def to_json(summary: Summary) -> dict[str, object]:
    """Names as in `Summary`, floats to six significant digits, None for what is absent; never NaN."""
    value = _plain(summary)
    assert isinstance(value, dict)
    return value


def _new_table(title: str | None) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", header_style="bold", box=box.SIMPLE_HEAD
    )


def format_number(value: float) -> str:
    """Three significant digits below 1,000, whole numbers with separators above."""
    if value == 0:
        return "0"
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value) * 1.0005)))
    return f"{value:.{min(decimals, 8)}f}"


def format_share(value: float) -> str:
    return f"{format_number(value * 100)} %"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _milliseconds(value: float) -> str:
    return format_number(value * 1e3)


def _times(value: float) -> str:
    return f"{format_number(value)}x"


def _outcome(name: str) -> _Measure:
    return _Measure(group="requests", label=name, value=lambda summary: summary.requests[name], text=_count)


def _forecast(label: str, of: Callable[[Distribution], Value]) -> _Measure:
    def value(summary: Summary) -> Value:
        found = summary.ttft_forecast_error
        return None if found is None else of(found)

    label = f"error {label}"
    return _Measure(
        group="TTFT forecast", label=label, value=value, text=format_share, better=-1, is_optional=True
    )


def _preempted(kind: str) -> _Measure:
    """How many gave way in one of the ways there are, whatever for."""

    def value(summary: Summary) -> Value:
        if not summary.preempted_by:
            return None
        return sum(count for rule, count in summary.preempted_by.items() if rule.endswith(f":{kind}"))

    return _Measure(group="preemption", label=f"by {kind}", value=value, text=_count, is_optional=True)


def _by_class(summaries: Sequence[Summary]) -> list[_Measure]:
    """Queue delay of each class that any of the runs has."""
    names = dict.fromkeys(name for summary in summaries for name in summary.queue_delay_by_class_s)

    def measure(name: str, part: str) -> _Measure:
        def value(summary: Summary) -> Value:
            found = summary.queue_delay_by_class_s.get(name)
            return None if found is None else getattr(found, part)

        return _Measure(
            group="queue delay by class",
            label=f"{name} {part} (ms)",
            value=value,
            text=_milliseconds,
            better=-1,
        )

    return [measure(name, part) for name in names for part in ("p50", "p99")]


def _latency(
    label: str, unit: str, of: Callable[[Summary], Distribution], text: Callable[[float], str]
) -> list[_Measure]:
    values: dict[str, Callable[[Summary], Value]] = {
        "mean": lambda summary: of(summary).mean,
        "p50": lambda summary: of(summary).p50,
        "p90": lambda summary: of(summary).p90,
        "p99": lambda summary: of(summary).p99,
    }
    rows = [
        _Measure(group=label, label=f"{name} ({unit})", value=value, text=text, better=-1)
        for name, value in values.items()
    ]
    ratio = _Measure(
        group=label, label="p99 / p50", value=lambda summary: of(summary).tail_ratio, text=_times
    )
    return [*rows, ratio]


def _of(group: str, label: str, name: str, text: Callable[[float], str], better: int = 0) -> _Measure:
    return _Measure(
        group=group, label=label, value=lambda summary: getattr(summary, name), text=text, better=better
    )


_MEASURES: tuple[_Measure, ...] = (
    *(_outcome(name) for name in OUTCOMES),
    _of("throughput", "duration (s)", "duration_s", format_number),
    _of("throughput", "requests/s", "requests_per_s", format_number, 1),
    _of("throughput", "output tok/s", "output_tokens_per_s", format_number, 1),
    _of("throughput", "total tok/s", "total_tokens_per_s", format_number, 1),
    _of("throughput", "useful tokens", "useful_tokens", _count),
    _of("throughput", "goodput (requests/s)", "goodput_per_s", format_number, 1),
    _of("throughput", "cost per million tokens", "cost_per_million_tokens", format_number, -1),
    _of("waste", "padded tokens", "padded_tokens", _count, -1),
    _of("waste", "padded share", "padded_share", format_share, -1),
    _of("waste", "KV waste", "kv_waste", format_share, -1),
    _of("use", "slot occupancy", "slot_occupancy", format_share),
    _of("use", "KV occupancy", "kv_occupancy", format_share),
    _of("use", "busy share", "busy_share", format_share),
    _of("use", "prefix hit share", "prefix_hit_share", format_share, 1),
    _of("preemption", "total", "preemptions", _count, -1),
    _of("preemption", "per request", "preemptions_per_request", format_number, -1),
    _of("preemption", "per second", "preemptions_per_s", format_number, -1),
    _preempted("recompute"),
    _preempted("swap"),
    _Measure(
        group="fairness",
        label="service gap of tenants (tokens)",
        value=lambda summary: summary.fairness_gap,
        text=_count,
        better=-1,
        is_optional=True,
    ),
    *_latency("queue delay", "ms", lambda summary: summary.queue_delay_s, _milliseconds),
    *_latency("TTFT", "ms", lambda summary: summary.ttft_s, _milliseconds),
    *_latency("ITL", "ms", lambda summary: summary.itl_s, _milliseconds),
    *_latency("end to end", "s", lambda summary: summary.e2e_s, format_number),
)
_FORECASTS = (_forecast("p50", lambda error: error.p50), _forecast("p90", lambda error: error.p90))


def _pair(of: Callable[[Summary], Distribution], text: Callable[[float], str]) -> Callable[[Summary], str]:
    def cell(summary: Summary) -> str:
        values = of(summary)
        return f"{_shown(values.p50, text)} / {_shown(values.p99, text)}"

    return cell


def _single(name: str, text: Callable[[float], str]) -> Callable[[Summary], str]:
    return lambda summary: _shown(getattr(summary, name), text)


_COMPACT: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("finished", lambda summary: f"{summary.requests['finished']:,} / {sum(summary.requests.values()):,}"),
    ("req/s", _single("requests_per_s", format_number)),
    ("out tok/s", _single("output_tokens_per_s", format_number)),
    ("padded", _single("padded_share", format_share)),
    ("slots", _single("slot_occupancy", format_share)),
    ("KV waste", _single("kv_waste", format_share)),
    ("preempt", _single("preemptions", _count)),
    ("TTFT p50 / p99 ms", _pair(lambda summary: summary.ttft_s, _milliseconds)),
    ("ITL p50 / p99 ms", _pair(lambda summary: summary.itl_s, _milliseconds)),
    ("E2E p50 / p99 s", _pair(lambda summary: summary.e2e_s, format_number)),
    ("goodput", _single("goodput_per_s", format_number)),
)


def _shown(value: Value, text: Callable[[float], str]) -> str:
    return ABSENT if value is None else text(value)


def _cells(measure: _Measure, summaries: Sequence[Summary]) -> list[Text]:
    values = [measure.value(summary) for summary in summaries]
    texts = [_shown(value, measure.text) for value in values]
    there = [value for value in values if value is not None]
    best = max(there, key=lambda value: value * measure.better) if there and measure.better else None
    # When all look the same there is no best one to point at.
    marked = len(set(texts)) > 1
    return [
        Text(text, style="bold" if marked and value is not None and value == best else "")
        for value, text in zip(values, texts, strict=True)
    ]


def _plain(value: object) -> object:
    if is_dataclass(value):
        return {column.name: _plain(getattr(value, column.name)) for column in fields(value)}
    if isinstance(value, float):
        return float(f"{value:.{_JSON_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return value
