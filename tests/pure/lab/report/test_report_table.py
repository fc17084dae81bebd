"""Tables and JSON: what is absent shows as a dash, numbers keep three digits, nothing is NaN."""

import io
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.lab.report.run_record import RunRecord
from paceline.lab.report.summary import Slo, Summary, summarize
from paceline.lab.report.table import compact_table, comparison_table, format_number, format_share, to_json

NAN = math.nan


def summary(label: str = "run", **changes: Any) -> Summary:
    fields: dict[str, Any] = {
        "label": label,
        "config": {},
        "max_num_seqs": 2,
        "duration_s": 2.0,
        "arrival_s": [0.0, 0.5],
        "admitted_s": [0.0, 0.5],
        "first_token_s": [0.0123456789, 0.75],
        "finished_s": [1.0, 2.0],
        "prompt_len": [1000, 500],
        "output_len": [10, 20],
        "cached_tokens": [0, 0],
        "preemptions": [0, 0],
        "tenant": [0, 0],
        "outcome": [0, 0],
        "itl_s": [0.02] * 28,
    }
    return summarize(RunRecord(**(fields | changes)), slo=Slo(ttft_s=0.1))


def nothing() -> Summary:
    never = [NAN, NAN]
    return summary(
        "nothing",
        admitted_s=never,
        first_token_s=never,
        finished_s=never,
        output_len=[0, 0],
        outcome=[4, 4],
        itl_s=[],
        duration_s=0.0,
    )


def printed(table: Table) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(table)
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def line(text: str, start: str) -> list[str]:
    """Cells of the first line that begins with these words."""
    found = next(row for row in text.splitlines() if row.strip().startswith(start))
    return found.strip().removeprefix(start).split()


def test_runs_stand_side_by_side() -> None:
    text = printed(comparison_table([summary("one"), summary("two", duration_s=4.0)]))
    assert line(text, "output tok/s") == ["15.0", "7.50"]
    assert line(text, "requests      finished") == ["2", "2"]
    assert line(text, "useful tokens") == ["1,530", "1,530"]


def test_every_measure_of_a_summary_has_a_row() -> None:
    text = printed(comparison_table([summary()]))
    for words in (
        "goodput",
        "cost per million tokens",
        "padded share",
        "slot occupancy",
        "KV occupancy",
        "KV waste",
        "busy share",
        "prefix hit share",
        "device time of prompts (s)",
        "per request",
        "per second",
        "queue delay",
        "TTFT",
        "ITL",
        "end to end",
        "p99 / p50",
    ):
        assert words in text


def test_what_is_absent_is_a_dash() -> None:
    text = printed(comparison_table([nothing()]))
    assert line(text, "output tok/s") == ["-"]
    assert line(text, "busy share") == ["-"]
    assert "nan" not in text.lower().replace("nothing", "")
    assert "None" not in text


def test_the_best_run_is_bold_and_a_tie_is_not() -> None:
    table = comparison_table([summary("one"), summary("two", duration_s=4.0)])
    cells = [list(column.cells) for column in table.columns]
    row = cells[1].index("output tok/s")
    assert [_style(cells[column][row]) for column in (2, 3)] == ["bold", ""]
    row = cells[1].index("mean (ms)")
    assert [_style(cells[column][row]) for column in (2, 3)] == ["", ""]


def test_labels_are_text_and_not_markup() -> None:
    label = "fcfs [red]chunk=512[/red]"
    assert label in printed(comparison_table([summary(label)]))
    assert label in printed(compact_table([summary(label)]))


def test_one_row_per_run() -> None:
    text = printed(compact_table([summary("one"), nothing()]))
    assert line(text, "one")[:5] == ["2", "/", "2", "1.00", "15.0"]
    assert line(text, "nothing")[:5] == ["0", "/", "2", "-", "-"]


def test_no_runs_make_an_empty_table() -> None:
    assert "measure" in printed(comparison_table([]))
    assert "run" in printed(compact_table([]))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1234567.8, "1,234,568"),
        (999.6, "1,000"),
        (999.4, "999"),
        (99.96, "100"),
        (99.94, "99.9"),
        (12.345, "12.3"),
        (1.0, "1.00"),
        (0.99999, "1.00"),
        (0.0123, "0.0123"),
        (0.000123456, "0.000123"),
        (-12.345, "-12.3"),
    ],
)
def test_numbers_keep_three_digits(value: float, text: str) -> None:
    assert format_number(value) == text


def test_shares_are_percentages() -> None:
    assert [format_share(value) for value in (0.0, 0.0004, 0.5, 1.0)] == [
        "0 %",
        "0.0400 %",
        "50.0 %",
        "100 %",
    ]


def test_json_is_plain_rounded_and_complete() -> None:
    made = summary()
    value = to_json(made)
    assert json.loads(json.dumps(value, allow_nan=False)) == value
    assert set(value) == set(Summary.__dataclass_fields__)
    assert value["requests"] == {"finished": 2, "aborted": 0, "refused": 0, "failed": 0, "unfinished": 0}
    assert value["useful_tokens"] == 1530
    assert value["slo"] == {"ttft_s": 0.1, "itl_s": None, "e2e_s": None}
    ttft = value["ttft_s"]
    assert isinstance(ttft, dict)
    assert ttft["mean"] == 0.131173  # six digits of 0.13117283945
    assert ttft["count"] == 2


def test_json_of_a_run_without_measures_has_nulls() -> None:
    text = json.dumps(to_json(nothing()), allow_nan=False)
    assert json.loads(text)["output_tokens_per_s"] is None
    assert json.loads(text)["e2e_s"] == {
        "count": 0, "mean": None, "p50": None, "p90": None, "p99": None, "tail_ratio": None
    }  # fmt: skip


def test_json_never_holds_nan_whatever_a_summary_holds() -> None:
    odd = replace(summary(), duration_s=NAN, requests_per_s=math.inf)
    value = to_json(odd)
    assert value["duration_s"] is None
    assert value["requests_per_s"] is None


def _style(cell: object) -> str:
    assert isinstance(cell, Text)
    return str(cell.style)


def test_classes_tenants_and_kinds_of_preemption_are_shown_where_there_are_any() -> None:
    plain = printed(comparison_table([summary()]))
    assert "by swap" not in plain and "service gap" not in plain and "by class" not in plain
    waiting: dict[str, Any] = {"admitted_s": [1.0, 1.5], "first_token_s": [1.1, 1.6]}
    both = summary(
        "both",
        tenant=[0, 1],
        service_class=[1, 0],
        classes=("interactive", "batch"),
        preempted_by={"blocks:swap": 2, "place:swap": 1, "place:recompute": 4},
        **waiting,
    )
    text = printed(comparison_table([summary(), both]))
    assert line(text, "by recompute") == ["-", "4"] and line(text, "by swap") == ["-", "3"]
    assert line(text, "fairness") == ["service", "gap", "of", "tenants", "(tokens)", "-", "0"]
    assert line(text, "batch p50 (ms)") == ["-", "1,000"]
    plain_values = to_json(both)
    assert plain_values["preempted_by"] == {"blocks:swap": 2, "place:recompute": 4, "place:swap": 1}
    by_class = plain_values["queue_delay_by_class_s"]
    assert isinstance(by_class, dict) and by_class["interactive"]["p99"] == 1.0
