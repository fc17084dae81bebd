"""A run log as a timeline: the rows and requests are those of the run, and the format is one that Perfetto takes."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.audit.chrome_trace import trace_events, write_trace
from paceline.audit.runlog import RunLogWriter, read_run_log, run_header
from paceline.cli.main import run
from paceline.core.events import Decision
from paceline.core.plan import StepPlan
from paceline.errors import InputError
from paceline.scheduler.state import SchedulerState
from tests.cases import first
from tests.dst.world import World

Event = dict[str, Any]


class Truth:
    """The requests that joined in each step, as the engine knows it."""

    def __init__(self, state: SchedulerState) -> None:
        self.joins: list[tuple[int, int, int]] = []
        self._state = state

    def submitted(self, plan: StepPlan, decisions: Sequence[Decision], time_s: float) -> None:
        rows = self._state.rows
        for row in plan.joins.row.tolist():
            self.joins.append((plan.seq, row, int(rows.request_id[row])))

    def completed(self, seq: int, time_s: float, *, failed: bool = False) -> None:
        pass


def recorded(seed: int, path: Path, steps: int = 90) -> Truth:
    """A world with faults, forks, preemptions and aborts, and its log."""
    world = World(seed, make_recorder=lambda config: RunLogWriter(path, run_header(config, seed=seed)))
    truth = Truth(world.engine.scheduler.state)
    world.engine.watcher = truth
    world.run(steps)
    world.engine.close()
    return truth


@pytest.mark.slow
@pytest.mark.parametrize("seed", first(4, [*range(9), *range(10, 17)]))  # in 9 nothing is computed
def test_requests_are_on_the_rows_they_were_on(seed: int, tmp_path: Path) -> None:
    truth = recorded(seed, tmp_path / "run.jsonl")
    events = list(trace_events(read_run_log(tmp_path / "run.jsonl", allow_cut=True)))
    held = [
        (event["tid"] - 1, event["args"]["request"])
        for event in events
        if event["ph"] == "X" and event["name"].startswith("request ")
    ]
    assert sorted(held) == sorted((row, request) for _, row, request in truth.joins)
    came, ended = (
        sorted(
            event["id"] for event in events if event["ph"] == phase and event["name"].startswith("request ")
        )
        for phase in "be"
    )
    assert came == ended, "each that came ends once"
    well_formed(events)


def well_formed(events: list[Event]) -> None:
    """The rules of the format: phases, times in microseconds, slices of a thread that nest, pairs that match."""
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    pairs: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        assert event["ph"] in "MXiCbe" and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ts"] >= 0 and isinstance(event["name"], str)
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "be":
            pairs[event["id"]].append(event)
        elif event["ph"] == "C":
            assert all(isinstance(number, int) for number in event["args"].values())
    for found in slices.values():
        stack: list[float] = []
        for start, end in sorted(found, key=lambda each: (each[0], -each[1])):
            while stack and stack[-1] <= start + 1e-3:
                stack.pop()
            assert not stack or end <= stack[-1] + 1e-3, (
                "slices of a track overlap without one holding the other"
            )
            stack.append(end)
    for request, parts in pairs.items():
        assert parts[0]["name"] == f"request {request}"
        begun: list[str] = []
        for event in sorted(parts, key=lambda each: each["ts"]):  # in the order of the file at the same time
            if event["ph"] == "b":
                begun.append(event["name"])
            else:
                assert begun.pop() == event["name"], "what began last ends first"
        assert begun == []


def test_the_file_is_what_perfetto_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(3, tmp_path / "run.jsonl.gz")
    out = tmp_path / "trace.json.gz"
    assert run(["trace", str(tmp_path / "run.jsonl.gz"), "-o", str(out)]) == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    found = json.loads(gzip.decompress(out.read_bytes()))
    names = {
        event["args"]["name"]
        for event in found["traceEvents"]
        if event["ph"] == "M" and "name" in event["args"]
    }
    assert {"engine", "requests", "steps", "row 0"} <= names
    counters = {event["name"] for event in found["traceEvents"] if event["ph"] == "C"}
    assert counters == {"rows in use", "waiting", "KV blocks of rows", "tokens of a step"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_the_log_of_a_running_server_gives_a_trace_and_no_alarm(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, out = tmp_path / name, tmp_path / "trace.json"
    recorded(3, log)
    log.write_bytes(log.read_bytes()[: log.stat().st_size * 2 // 3])
    assert run(["trace", str(log), "-o", str(out)]) == 0
    said = capsys.readouterr()
    assert "The log has no end yet: its server is still running" in said.out and said.err == ""
    assert "damage" not in said.out and json.loads(out.read_text())["traceEvents"]


def test_a_damaged_log_gives_the_trace_of_what_is_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, out = tmp_path / "run.jsonl", tmp_path / "trace.json"
    recorded(3, log)
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*lines[:5], "{}\n", *lines[5:]]))
    assert run(["trace", str(log), "-o", str(out)]) == 0
    assert "the log is damaged: " in capsys.readouterr().err
    assert json.loads(out.read_text())["traceEvents"]


def test_a_log_without_steps_leaves_no_file(tmp_path: Path) -> None:
    recorded(3, tmp_path / "run.jsonl")
    header = (tmp_path / "run.jsonl").read_text().splitlines()[0]
    (tmp_path / "empty.jsonl").write_text(header + "\n")
    with pytest.raises(InputError, match="no step"):
        write_trace(read_run_log(tmp_path / "empty.jsonl", allow_cut=True), str(tmp_path / "t.json"))
    assert not (tmp_path / "t.json").exists()
    assert run(["trace", str(tmp_path / "run.jsonl"), "-o", str(tmp_path / "run.jsonl")]) == 2
    assert run(["trace"]) == 2
