"""What `paceline tune --verify` says about the bounds it was asked to keep."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.cli.tune import run as tune_run
from paceline.cli.tune.run import conclusion, differences, parse_bounds, settings_of, slo_lines
from paceline.lab.report.summary import summarize
from paceline.lab.sim import SimConfig, engine_config, simulate
from tests.pure.sim.sim_helpers import machine, random_workload


def test_each_bound_is_told_as_kept_or_missed_and_few_requests_are_named() -> None:
    workload = random_workload(20, 1)
    config = SimConfig(machine=machine(), engine=engine_config(machine(), workload, {}))
    seen = summarize(simulate(config, workload))
    ttft = replace(seen.ttft_s, p99=0.5)
    lines = slo_lines(parse_bounds("ttft_p99=1s,ttft_p50=1ms"), replace(seen, ttft_s=replace(ttft, p50=0.25)))
    assert lines[:2] == ["ttft_p99: kept, 500 of 1,000 ms.", "ttft_p50: missed, 250 of 1 ms."]
    assert lines[2].startswith("20 requests say little")
    closely = slo_lines(
        parse_bounds("ttft_p99=1s,ttft_p50=1ms"), replace(seen, ttft_s=replace(ttft, p99=1.0002))
    )
    assert closely[0] == "ttft_p99: missed, 1,000.2 of 1,000.0 ms."


WANTED: dict[str, int | float | str] = {
    "max_num_batched_tokens": 512,
    "max_num_seqs": 64,
    "long_prefill_share": 0.5,
    "step_target_ms": 0.0,
    "scheduling_policy": "fcfs",
}
LIMITS = {"max_step_tokens": 512, "max_rows": 64, "prompt_share": 0.5, "step_target_ms": None}


def told(monkeypatch: pytest.MonkeyPatch, answers: dict[str, object]) -> dict[str, int | float | str]:
    monkeypatch.setattr(tune_run, "told_by", lambda connection, path: answers.get(path.rpartition("/")[2]))
    return settings_of("http://127.0.0.1:9")


def test_the_settings_of_a_server_are_compared_with_those_found(monkeypatch: pytest.MonkeyPatch) -> None:
    same = told(monkeypatch, {"dial": {"limits": LIMITS}, "policy": {"policy": "fcfs"}})
    assert differences(WANTED, same) == []
    assert conclusion(WANTED, []).startswith(
        "The server runs with the settings found: --max-num-batched-tokens 512"
    )
    limits = {**LIMITS, "max_rows": 256, "step_target_ms": 40.0}
    other = told(monkeypatch, {"dial": {"limits": limits}, "policy": {"policy": "tail"}})
    differing = differences(WANTED, other)
    assert differing == [
        "--max-num-seqs 256 instead of 64",
        "--step-target-ms 40 instead of 0",
        "--scheduling-policy tail instead of fcfs",
    ]
    assert conclusion(WANTED, differing).startswith(
        "The prediction is for other settings than the server has"
    )


def test_fewer_tokens_for_a_pace_are_as_they_should_be() -> None:
    paced = {**WANTED, "step_target_ms": 40.0}
    assert differences(paced, {**paced, "max_num_batched_tokens": 128}) == []
    assert differences(paced, {**paced, "max_num_batched_tokens": 1024}) != []
    assert differences(WANTED, {**WANTED, "max_num_batched_tokens": 128}) != []


@pytest.mark.parametrize("alone, is_found", [(0, True), (100, True), (512, True), (1024, False)])
def test_larger_steps_while_nobody_decodes_are_compared(alone: int, is_found: bool) -> None:
    wanted = {**WANTED, "max_num_prompt_tokens": alone}
    assert (differences(wanted, {**WANTED, "max_num_prompt_tokens": 512}) == []) is is_found


@pytest.mark.parametrize("answers", [{}, {"policy": {"policy": "fcfs"}}, {"dial": {"limits": LIMITS}}])
def test_a_server_that_does_not_tell_is_named_so(
    answers: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    differing = differences(WANTED, told(monkeypatch, answers))
    assert differing is None and "does not tell its settings" in conclusion(WANTED, differing)
