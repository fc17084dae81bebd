"""Logs that were changed or cut: the replay says where it left the recorded run, and uses what is left."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.audit.codec import pack, unpack
from paceline.audit.runlog import read_run_log
from paceline.errors import InputError
from paceline.lab.sim.replayer import replay
from tests.traffic import Runs, lines_of, write_lines


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


# -- runs that are not equal -------------------------------------------------------------------------------

Tamper = Callable[[list[dict[str, Any]]], dict[str, Any]]  # changes the lines, returns the one it changed


def first_with(lines: list[dict[str, Any]], test: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    return next(line for line in lines[20:] if "plan" in line and test(line))


def other_plan(lines: list[dict[str, Any]]) -> dict[str, Any]:
    line = first_with(lines, lambda line: "new_blocks" in line["plan"])
    line["plan"]["new_blocks"]["block"][0] += 1
    return line


def fewer_spans(lines: list[dict[str, Any]]) -> dict[str, Any]:
    line = first_with(lines, lambda line: "spans" in line["plan"])
    del line["plan"]["spans"]
    return line


def other_decision(lines: list[dict[str, Any]]) -> dict[str, Any]:
    line = first_with(lines, lambda line: line["decisions"])
    line["decisions"][-1][3] += 1
    return line


def lost_decision(lines: list[dict[str, Any]]) -> dict[str, Any]:
    line = first_with(lines, lambda line: line["decisions"])
    line["decisions"].pop()
    return line


def lost_input(lines: list[dict[str, Any]]) -> dict[str, Any]:
    line = first_with(lines, lambda line: any(entry[0] == "add" for entry in line["inputs"]))
    line["inputs"] = [entry for entry in line["inputs"] if entry[0] != "add"]
    return line


def other_time(lines: list[dict[str, Any]]) -> dict[str, Any]:
    line = first_with(lines, lambda line: line["inputs"])
    line["inputs"][0][1] -= 1.0
    return line


def unknown_input(lines: list[dict[str, Any]]) -> dict[str, Any]:
    line = first_with(lines, lambda line: line["inputs"])
    line["inputs"][0][0] = "wish"
    return line


def unknown_request(lines: list[dict[str, Any]]) -> dict[str, Any]:
    line = first_with(lines, lambda line: True)
    line["inputs"].append(["priority", line["t_plan"], 987654, 0])
    return line


def other_result(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Every row of a step that went on has found a stop."""
    line = first_with(lines, lambda line: line["result"] and set(line["result"]) == {"rows", "count"})
    line["result"]["finished"] = pack(np.ones_like(unpack(line["result"]["rows"])))
    return line


def broken_result(lines: list[dict[str, Any]]) -> dict[str, Any]:
    line = first_with(lines, lambda line: line["result"])
    line["result"]["rows"] += ",7"
    return line


def lost_result(lines: list[dict[str, Any]]) -> dict[str, Any]:
    line = first_with(lines, lambda line: line["result"])
    line["result"] = None
    return line


def other_end_time(lines: list[dict[str, Any]]) -> dict[str, Any]:
    line = first_with(lines, lambda line: line["result"])
    line["t_done"] += 0.25
    return line


EVER = 10**9
TAMPERED: dict[str, tuple[Tamper, str, int]] = {  # what is changed, the part named, steps later at most
    "other plan": (other_plan, r"plan\.new_blocks\.block\[0\]", 0),
    "fewer spans": (fewer_spans, r"plan\.spans", 0),
    "other decision": (other_decision, r"decisions\[\d+\]\[3\]", 0),
    "lost decision": (lost_decision, r"decisions\[\d+\]", 0),
    "lost input": (lost_input, r"inputs.*|decisions.*|plan.*", EVER),
    "other time": (other_time, r"inputs\[0\]\[1\]", 0),
    "unknown input": (unknown_input, r"inputs\[0\]", 0),
    "unknown request": (unknown_request, r"inputs\[\d+\]", 0),
    "other result": (other_result, r"inputs.*|decisions.*|plan.*", EVER),
    "broken result": (broken_result, r"result", 0),
    "lost result": (lost_result, r"inputs\[\d+\]", 3),
    "other end time": (other_end_time, r"t_done of step \d+", 3),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_log_is_found_out(name: str, runs: Runs, tmp_path: Path) -> None:
    tamper, part, later = TAMPERED[name]
    lines = lines_of(runs.get("far-ahead", 0.0)[0])
    changed = tamper(lines)
    report = replay(read_run_log(write_lines(tmp_path / "bad.jsonl", lines)), output=tmp_path / "out.jsonl")
    difference = report.difference
    assert difference is not None and difference.seq is not None
    assert changed["seq"] <= difference.seq <= changed["seq"] + later
    assert re.fullmatch(part, difference.part), difference.part
    assert difference.line == difference.seq + 1
    assert str(difference).startswith(
        f"step {difference.seq} (line {difference.line}): {difference.part} was "
    )
    assert len(str(difference)) < 400
    assert report.num_steps == difference.seq - 1


def test_a_difference_after_the_last_step_is_found(runs: Runs, tmp_path: Path) -> None:
    lines = lines_of(runs.get("plain", 0.0)[0])
    lines[-1]["inputs"].append(["abort", 1e6, 77, "abort"])
    report = replay(read_run_log(write_lines(tmp_path / "bad.jsonl", lines)))
    assert report.difference is not None and report.difference.seq is None
    assert str(report.difference).startswith(f"after the last step (line {len(lines)}): inputs[")


def test_another_config_is_another_run(runs: Runs, tmp_path: Path) -> None:
    lines = lines_of(runs.get("tight", 0.0)[0])
    lines[0]["config"]["kv"]["num_blocks"] += 8
    report = replay(read_run_log(write_lines(tmp_path / "bad.jsonl", lines)))
    assert not report.is_equal


def test_a_line_that_says_the_same_in_other_words_is_not_equal(runs: Runs, tmp_path: Path) -> None:
    lines = runs.get("plain", 0.0)[0].read_text().splitlines(keepends=True)
    lines[4] = lines[4].replace('"plan":', '"plan": ')
    (tmp_path / "spaced.jsonl").write_text("".join(lines))
    report = replay(read_run_log(tmp_path / "spaced.jsonl"))
    assert report.difference is not None
    assert (report.difference.line, report.difference.part) == (5, "line")


# -- logs that are not whole -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["plain", "far-ahead"])
def test_what_is_left_of_a_log_can_be_replayed(case: str, runs: Runs, tmp_path: Path) -> None:
    recorded = runs.get(case, 0.03)[0].read_bytes().splitlines(keepends=True)
    whole = b"".join(recorded[:40])
    (tmp_path / "cut.jsonl").write_bytes(whole + recorded[40][:25])
    with pytest.raises(InputError, match="line 41 is cut off; the 39 steps before it can be used"):
        replay(read_run_log(tmp_path / "cut.jsonl"))
    log = read_run_log(tmp_path / "cut.jsonl", allow_cut=True)
    report = replay(log, output=tmp_path / "again.jsonl")
    assert report.is_equal and not report.complete and report.num_steps == 39
    assert log.damage is not None
    assert (tmp_path / "again.jsonl").read_bytes() == whole


def test_a_replay_does_not_overwrite_its_log(runs: Runs, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(runs.get("plain", 0.0)[0].read_bytes())
    with pytest.raises(InputError, match="write the replay to another file"):
        replay(read_run_log(path), output=str(path))
    assert path.read_bytes() == runs.get("plain", 0.0)[0].read_bytes()


@pytest.mark.parametrize(
    "header, message",
    [
        ({}, "the header holds no engine config"),
        ({"config": {"kv": {}}}, "not one this version knows: 'groups'"),
        ({"config": 3}, "not one this version knows"),
        (
            {"config": {"kv": {"groups": [{}]}, "scheduler": {"warp": 9}}},
            "not one this version knows: .*warp",
        ),
        (
            {"config": {"kv": {"groups": [{}]}, "scheduler": {"mode": "x"}}},
            "not valid: --mode must be one of",
        ),
    ],
)
def test_a_header_without_a_usable_config(header: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "run.jsonl", [{"v": 2, "kind": "header", **header}])
    with pytest.raises(InputError, match=message):
        replay(read_run_log(tmp_path / "run.jsonl"))
