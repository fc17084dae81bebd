"""Summaries as text for people and as plain values for programs.

Owns which measure stands in which group, its unit and how many digits it gets. Two tables: runs side by side
with every measure, or one line per run with the few that decide. It computes nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from rich import box
from rich.table import Table
from rich.text import Text

from paceline.lab.report.run_record import OUTCOMES
from paceline.lab.report.summary import Summary

ABSENT = "-"
_JSON_DIGITS = 6

Value = float | None


@dataclass(frozen=True, slots=True)
class _Measure:
    group: str
    label: str
    path: str  # to the value in a summary: names separated by dots
    text: Callable[[float], str]
    better: int = 0  # 1: more is better, -1: less is better, 0: neither
    is_optional: bool = False  # left out where no run has it

    def value(self, summary: Summary) -> Value:
        return _value(summary, self.path)


def comparison_table(summaries: Sequence[Summary]) -> Table:
    """One column per run, every measure a row; the best run of a row is bold."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD)
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


def compact_table(summaries: Sequence[Summary]) -> Table:
    """One row per run, for sweeps and long lists."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("run", overflow="fold")
    for heading, _ in _COMPACT:
        table.add_column(heading, justify="right", no_wrap=True)
    for summary in summaries:
        table.add_row(Text(summary.label), *(cell(summary) for _, cell in _COMPACT))
    return table


def to_json(summary: Summary) -> dict[str, object]:
    """Names as in `Summary`, floats to six significant digits, None for what is absent; never NaN."""
    return {name: _plain(value) for name, value in asdict(summary).items()}


def format_number(value: Value) -> str:
    """Three significant digits below 1,000, whole numbers with separators above; a dash for what is absent."""
    if value is None:
        return ABSENT
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


def _by_class(summaries: Sequence[Summary]) -> list[_Measure]:
    """Queue delay of each class that any of the runs has."""
    names = dict.fromkeys(name for summary in summaries for name in summary.queue_delay_by_class_s)

    return [
        _Measure(
            "queue delay by class",
            f"{name} {part} (ms)",
            f"queue_delay_by_class_s.{name}.{part}",
            _milliseconds,
            better=-1,
        )
        for name in names
        for part in ("p50", "p99")
    ]


def _latency(group: str, unit: str, name: str, text: Callable[[float], str]) -> list[_Measure]:
    rows = [
        _Measure(group, f"{part} ({unit})", f"{name}.{part}", text, better=-1)
        for part in ("mean", "p50", "p90", "p99")
    ]
    return [*rows, _Measure(group, "p99 / p50", f"{name}.tail_ratio", _times)]


_MEASURES = (
    *(_Measure("requests", name, f"requests.{name}", _count) for name in OUTCOMES),
    _Measure("throughput", "duration (s)", "duration_s", format_number),
    _Measure("throughput", "requests/s", "requests_per_s", format_number, 1),
    _Measure("throughput", "output tok/s", "output_tokens_per_s", format_number, 1),
    _Measure("throughput", "total tok/s", "total_tokens_per_s", format_number, 1),
    _Measure("throughput", "useful tokens", "useful_tokens", _count),
    _Measure("throughput", "goodput (requests/s)", "goodput_per_s", format_number, 1),
    _Measure("throughput", "cost per million tokens", "cost_per_million_tokens", format_number, -1),
    _Measure("waste", "padded tokens", "padded_tokens", _count, -1),
    _Measure("waste", "padded share", "padded_share", format_share, -1),
    _Measure("waste", "KV waste", "kv_waste", format_share, -1),
    _Measure("use", "slot occupancy", "slot_occupancy", format_share),
    _Measure("use", "KV occupancy", "kv_occupancy", format_share),
    _Measure("use", "busy share", "busy_share", format_share),
    _Measure("use", "prefix hit share", "prefix_hit_share", format_share, 1),
    _Measure("use", "device time of prompts (s)", "prompt_device_s", format_number, -1),
    _Measure("preemption", "total", "preemptions", _count, -1),
    _Measure("preemption", "per request", "preemptions_per_request", format_number, -1),
    _Measure("preemption", "per second", "preemptions_per_s", format_number, -1),
    _Measure("preemption", "by recompute", "preempted_by_kind.recompute", _count, is_optional=True),
    _Measure("preemption", "by swap", "preempted_by_kind.swap", _count, is_optional=True),
    _Measure("fairness", "service gap of tenants (tokens)", "fairness_gap", _count, -1, is_optional=True),
    *_latency("queue delay", "ms", "queue_delay_s", _milliseconds),
    *_latency("TTFT", "ms", "ttft_s", _milliseconds),
    *_latency("ITL", "ms", "itl_s", _milliseconds),
    *_latency("end to end", "s", "e2e_s", format_number),
)
_FORECASTS = tuple(
    _Measure(
        "TTFT forecast", f"error {part}", f"ttft_forecast_error.{part}", format_share, -1, is_optional=True
    )
    for part in ("p50", "p90")
)


def _cell(text: Callable[[float], str], *paths: str) -> Callable[[Summary], str]:
    return lambda summary: " / ".join(_shown(_value(summary, path), text) for path in paths)


_COMPACT: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("finished", lambda summary: f"{summary.requests['finished']:,} / {sum(summary.requests.values()):,}"),
    ("req/s", _cell(format_number, "requests_per_s")),
    ("out tok/s", _cell(format_number, "output_tokens_per_s")),
    ("padded", _cell(format_share, "padded_share")),
    ("slots", _cell(format_share, "slot_occupancy")),
    ("KV waste", _cell(format_share, "kv_waste")),
    ("preempt", _cell(_count, "preemptions")),
    ("TTFT p50 / p99 ms", _cell(_milliseconds, "ttft_s.p50", "ttft_s.p99")),
    ("ITL p50 / p99 ms", _cell(_milliseconds, "itl_s.p50", "itl_s.p99")),
    ("E2E p50 / p99 s", _cell(format_number, "e2e_s.p50", "e2e_s.p99")),
    ("goodput", _cell(format_number, "goodput_per_s")),
)


def _value(summary: Summary, path: str) -> Value:
    found: Any = summary
    for name in path.split("."):
        if found is not None:
            found = found.get(name) if isinstance(found, Mapping) else getattr(found, name)
    return cast(Value, found)


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
    if isinstance(value, float):
        return float(f"{value:.{_JSON_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return value
