"""Replaying a run log: the same inputs and results give the same plans, and a changed or cut log is told."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.audit.codec import pack, unpack
from paceline.audit.runlog import BEGAN, RunLogWriter, read_run_log, run_header
from paceline.core.clock import ManualClock
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.errors import EngineFailed, InputError, NeverFits, QueueFull
from paceline.lab.sim import simulate
from paceline.lab.sim.replayer import replay
from paceline.policy import Policy, RequestView
from paceline.scheduler.state import SchedulerState
from paceline.server.live.recording import Recording
from tests.fake_faults import Faults
from tests.fakes import FakeRunner
from tests.pure.lab.sim.sim_helpers import make_workload, sim_config
from tests.traffic import (
    CASE_FAULTS,
    CASES,
    FIRST_TOKEN,
    Runs,
    Traffic,
    engine_with_log,
    lines_of,
    run_until_idle,
    seed_of,
    small_config,
    write_lines,
)

WANTED = [
    *("add", "abort", "finish_at", "priority", "deadline", "preempt", "pause", "resume", "block", "unblock"),
    *("preempt:place:recompute", "change:priority", "change:paused"),
    *("reset_cache", "expired", "done", "keys", "idle", "withheld", "step_failed", "lost step"),
    *("plan.leaves", "plan.joins", "plan.spans", "plan.decode_rows", "plan.new_blocks", "plan.block_copies"),
    *(
        "plan.row_copies",
        "plan.swap_out",
        "plan.swap_in",
        "plan.pad_tokens",
        "plan.padding_rows",
        "plan.work",
    ),
    *("preempt:forced:recompute", "preempt:forced:swap", "preempt:blocks:recompute", "preempt:blocks:swap"),
    *("preempt:paused:swap", "preempt:step_failed:recompute", "resume:swap", "resume:recompute"),
    *("refuse:queue_full", "refuse:context_length_exceeded", "finish:pruned", "finish:deadline"),
    *("finish:numerical_error", "stall:blocks", "defer:prefix", "defer:blocks", "fail:request_failed"),
    *("chunk:share", "fail:finish_hook"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


# -- watchers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("began_s, expected", [(0.0, 0.0), (None, 3.0), ("soon", 3.0)])
def test_a_replay_is_watched_from_the_beginning_its_log_names(
    began_s: object, expected: float, tmp_path: Path
) -> None:
    config, path, begun = sim_config(), tmp_path / "run.jsonl", list[float]()
    header = run_header(config.engine, **({} if began_s is None else {BEGAN: began_s}))
    simulate(config, make_workload([3.0]), recorder=RunLogWriter(path, header))

    def watch(state: SchedulerState) -> Recording:
        begun.append(state.clock.now())
        return Recording("run", num_rows=8, device="").watch(state)

    assert replay(read_run_log(path), watch=watch).is_equal
    assert begun == [expected]


# -- equal runs --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("case, faults", CASE_FAULTS)
def test_a_run_replays_byte_for_byte(case: str, faults: float, runs: Runs, tmp_path: Path) -> None:
    recorded, _ = runs.get(case, faults)
    report = replay(read_run_log(recorded), output=tmp_path / "again.jsonl")
    assert report.difference is None, str(report.difference)
    assert report.is_equal and report.complete
    assert report.num_steps == len(lines_of(recorded)) - 2
    assert (tmp_path / "again.jsonl").read_bytes() == recorded.read_bytes()


def test_the_runs_contain_every_kind_of_input_decision_and_plan(runs: Runs) -> None:
    kinds: Counter[str] = Counter()
    for case, faults in CASE_FAULTS:
        for line in lines_of(runs.get(case, faults)[0])[1:]:
            kinds.update(entry[0] for entry in line["inputs"])
            kinds.update(f"{kind}:{reason}" for kind, _, reason, *_ in line["decisions"])
            kinds.update(f"plan.{name}" for name in line.get("plan", ()))
            kinds["lost step"] += "plan" in line and line["result"] is None
    missing = [kind for kind in WANTED if not kinds[kind]]
    assert not missing


@pytest.mark.parametrize("case", ["far-ahead", "static"])
def test_the_same_seed_gives_the_same_log(case: str, runs: Runs, tmp_path: Path) -> None:
    Traffic(CASES[case], seed_of(case), tmp_path / "twin.jsonl", faults=0.03).run(110)
    assert (tmp_path / "twin.jsonl").read_bytes() == runs.get(case, 0.03)[0].read_bytes()
    Traffic(CASES[case], seed_of(case) + 100, tmp_path / "other.jsonl", faults=0.03).run(110)
    assert (tmp_path / "other.jsonl").read_bytes() != (tmp_path / "twin.jsonl").read_bytes()


@pytest.mark.parametrize("case", ["overlapped", "sliding-far-ahead", "dynamic"])
def test_no_token_id_is_in_the_log(case: str, runs: Runs) -> None:
    path, traffic = runs.get(case, 0.03)
    text = re.sub(r'"[0-9a-f]{64}"', '"key"', path.read_text())  # a key's digits mean nothing
    numbers = {int(number) for number in re.findall(r"\d+", re.sub(r"\d+\.\d+", "time", text))}
    assert max(numbers) < FIRST_TOKEN
    recognisable = {token for token in traffic.output_tokens if token >= 100_000}
    assert len(recognisable) > 30
    foreign = {request for request in numbers if 10_000 <= request <= 1_010_000}  # ids made by `foreign`
    assert not (recognisable & numbers) - foreign


def test_a_compressed_log_replays_too(tmp_path: Path) -> None:
    Traffic(CASES["plain"], 1, tmp_path / "run.jsonl.gz").run(40)
    report = replay(read_run_log(tmp_path / "run.jsonl.gz"), output=tmp_path / "again.jsonl.gz")
    assert report.is_equal
    assert (tmp_path / "again.jsonl.gz").read_bytes() == (tmp_path / "run.jsonl.gz").read_bytes()


# -- what drives a replay ----------------------------------------------------------------------------------


def test_prefix_keys_drive_hits_as_in_the_run(tmp_path: Path) -> None:
    config = small_config(depth=1)
    engine = engine_with_log(config, tmp_path / "run.jsonl")
    prompt = list(range(10, 23))
    sampling = SamplingParams(max_tokens=8)
    first = engine.add(prompt, sampling)[0]
    output: list[int] = []
    while engine.has_requests:
        for event in engine.step_overlapped().tokens:
            output += event.tokens.tolist()
    engine.add([*prompt, *output, 1, 2], sampling)  # the next turn of a conversation
    run_until_idle(engine)

    lines = lines_of(tmp_path / "run.jsonl")
    joined = [line["plan"]["joins"]["num_computed"] for line in lines[1:-1] if "joins" in line["plan"]]
    assert first == 1 and joined == [[0], [20]]  # the output's blocks are hit as well as the prompt's
    assert replay(read_run_log(tmp_path / "run.jsonl")).is_equal

    told = [(line, entry) for line in lines[1:] for entry in line["inputs"] if entry[0] == "keys"]
    told[0][1][3][0] = "00" * 32  # the first block of the output no longer has the key it is asked for by
    report = replay(read_run_log(write_lines(tmp_path / "other.jsonl", lines)))
    assert report.difference is not None
    assert report.difference.part == "decisions[1][3]"
    assert (report.difference.recorded, report.difference.replayed) == ("20", "12")


def test_branches_are_refused_together(tmp_path: Path) -> None:
    config = small_config(depth=0)
    engine = engine_with_log(config, tmp_path / "run.jsonl")
    for _ in range(18):
        engine.add([1, 2, 3], SamplingParams(max_tokens=2))
    with pytest.raises(QueueFull):
        engine.add([1, 2, 3], SamplingParams(max_tokens=2, n=3))  # two of the three would have fitted
    with pytest.raises(NeverFits):
        engine.add([1] * 60, SamplingParams(max_tokens=8, n=2))
    run_until_idle(engine)
    adds = [entry for entry in lines_of(tmp_path / "run.jsonl")[1]["inputs"] if entry[0] == "add"]
    assert len(adds) == 18 + 3 + 1
    assert [add[2].get("together", 1) for add in adds[18:]] == [3, 3, 3, 1]
    assert replay(read_run_log(tmp_path / "run.jsonl")).is_equal


def keep_stepping(engine: Engine) -> None:
    for _ in range(20):
        engine.step_overlapped()
        if not engine.has_requests:
            engine.add([1, 2, 3], SamplingParams(max_tokens=9))


def test_an_engine_that_gave_up_replays(tmp_path: Path) -> None:
    config = small_config(depth=2)
    runner = FakeRunner(config, Faults(step_failure=1.0))
    engine = engine_with_log(config, tmp_path / "run.jsonl", runner=runner)
    engine.add([1, 2, 3], SamplingParams(max_tokens=9))
    with pytest.raises(EngineFailed):
        keep_stepping(engine)
    engine.close()
    lines = lines_of(tmp_path / "run.jsonl")
    assert all(line["result"] is None for line in lines[1:-1])
    assert "fail_all" in [entry[0] for entry in lines[-1]["inputs"]]
    report = replay(read_run_log(tmp_path / "run.jsonl"), output=tmp_path / "again.jsonl")
    assert report.is_equal
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "run.jsonl").read_bytes()


class LastComeFirstServed(Policy):
    def order(self, view: RequestView) -> NDArray[np.float64]:
        return -view.arrival_s


def test_a_policy_of_its_own_must_be_given_again(tmp_path: Path) -> None:
    config = small_config(depth=0)
    clock = ManualClock()
    policy = LastComeFirstServed(config.scheduler)
    engine = engine_with_log(config, tmp_path / "run.jsonl", clock=clock, policy=policy)
    for _ in range(9):
        engine.add([1, 2, 3], SamplingParams(max_tokens=3))
        clock.advance(1.0)
    run_until_idle(engine)
    log = read_run_log(tmp_path / "run.jsonl")
    assert replay(log, policy=policy).is_equal
    assert not replay(log).is_equal


def test_looking_for_work_many_times_makes_no_long_log(tmp_path: Path) -> None:
    config = small_config(depth=0)
    engine = engine_with_log(config, tmp_path / "run.jsonl")
    for _ in range(1000):
        engine.step()
    engine.add([1, 2, 3], SamplingParams(max_tokens=3))
    run_until_idle(engine)
    kinds = Counter(entry[0] for line in lines_of(tmp_path / "run.jsonl")[1:] for entry in line["inputs"])
    assert kinds["idle"] == 1
    assert replay(read_run_log(tmp_path / "run.jsonl")).is_equal


def test_accounts_and_changes_of_policy_replay_byte_for_byte(tmp_path: Path) -> None:
    config = small_config(depth=1, scheduling_policy="fair")
    config = replace(config, scheduler=replace(config.scheduler, tenant_weights="a=2", max_queue=100))
    clock = ManualClock()
    faults = Faults(rng=random.Random(5), step_failure=0.05)
    engine = engine_with_log(config, tmp_path / "run.jsonl", clock=clock, runner=FakeRunner(config, faults))
    changes: dict[int, tuple[str, dict[str, float]]] = {
        12: ("tail", {}),
        18: ("fair", {"output_token_cost": 0.5}),
        25: ("shortest", {"ageing_s": 3.0}),
    }
    for number in range(40):
        engine.add([1, 2, 3, 4], SamplingParams(max_tokens=3 + number % 5), tenant="abc"[number % 3])
        if number in changes:
            name, options = changes[number]
            engine.scheduler.set_policy(name, **options)
        engine.step_overlapped()
        clock.advance(0.1)
    run_until_idle(engine)
    log = read_run_log(tmp_path / "run.jsonl")
    assert replay(log, output=tmp_path / "again.jsonl").is_equal
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "run.jsonl").read_bytes()
    kinds = Counter(entry[0] for line in lines_of(tmp_path / "run.jsonl")[1:] for entry in line["inputs"])
    assert kinds["policy"] == 3 and kinds["step_failed"] >= 1


def test_a_log_does_not_choose_what_is_imported(tmp_path: Path) -> None:
    name = f"{LastComeFirstServed.__module__}:OwnPolicy"
    config = small_config(depth=0, scheduling_policy=name)
    policy = LastComeFirstServed(config.scheduler)
    engine = engine_with_log(config, tmp_path / "run.jsonl", policy=policy)
    engine.add([1, 2, 3], SamplingParams(max_tokens=3))
    run_until_idle(engine)
    log = read_run_log(tmp_path / "run.jsonl")
    with pytest.raises(InputError, match="must not choose what is imported"):
        replay(log)
    assert replay(log, policy=policy).is_equal


# ----------------------------------------------------------------
# Logs that were changed or cut: the replay says where it left the recorded run, and uses what is left.


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
