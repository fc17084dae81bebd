"""A client's result beside the simulator: what is read of it, and what is said of one that cannot be read."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InputError
from paceline.lab.report.summary import summarize
from paceline.lab.sim.client_run import read_client_run

RESULT: dict[str, Any] = {
    "input_lens": [10, 20, 30, 40],
    "output_lens": [3, 2, 0, 1],
    "ttfts": [0.5, 0.25, None, 0.1],
    "itls": [[0.1, 0.2], [0.3], [], []],
    "due_times": [2.0, 1.0, 3.0, 6.0],
    "start_times": [2.5, 1.5, 3.5, 6.5],
}


def write(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value))
    return path


def test_requests_that_were_answered_are_read_in_the_order_they_were_due(tmp_path: Path) -> None:
    run = read_client_run(write(tmp_path / "run.json", RESULT))
    assert run.num_left_out == 1
    assert run.workload.arrival_s.tolist() == [0.0, 1.0, 5.0]
    assert run.workload.prompt_len.tolist() == [20, 10, 40] and run.workload.output_len.tolist() == [2, 3, 1]
    assert run.record.first_token_s.tolist() == [0.25, 1.5, 5.1]
    assert run.record.finished_s.tolist() == pytest.approx([0.55, 1.8, 5.1])
    summary = summarize(run.record)
    assert summary.ttft_s.p50 == pytest.approx(0.25) and summary.itl_s.count == 3


def test_times_of_sending_stand_in_where_nobody_says_when_a_request_was_due(tmp_path: Path) -> None:
    result = {name: value for name, value in RESULT.items() if name != "due_times"}
    run = read_client_run(write(tmp_path / "run.json", result))
    assert run.workload.arrival_s.tolist() == [0.0, 1.0, 5.0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"itls": None}, "itls missing"),
        ({"due_times": None, "start_times": None}, "due_times missing"),
        ({"input_lens": [1, 2]}, "differ in length"),
        ({"input_lens": ["a", 1, 2, 3]}, "'input_lens' is not a list of numbers"),
        ({"ttfts": [None] * 4}, "none of its requests was answered"),
        ({"ttfts": None}, "holds no times of requests"),
    ],
)
def test_what_is_wrong_with_a_result_is_said(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    merged = {**RESULT, **changes}
    result = {name: value for name, value in merged.items() if value is not None}
    with pytest.raises(InputError, match=said):
        read_client_run(write(tmp_path / "run.json", result))


@pytest.mark.parametrize(("text", "said"), [("", "neither a run log nor JSON"), ("[1]", "holds no times")])
def test_files_of_another_kind(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(InputError, match=said):
        read_client_run(tmp_path / "run.json")
    with pytest.raises(InputError, match="cannot read"):
        read_client_run(tmp_path / "missing.json")
