"""The search behind `paceline tune`: a known best is found, the right questions are asked, bounds are verified."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli.main import run
from paceline.cli.tune import run as tune_run
from paceline.cli.tune.flags import TuneOptions
from paceline.cli.tune.run import (
    Task,
    conclusion,
    differences,
    knobs_for,
    parse_bounds,
    serve_flags,
    settings_of,
    share_of_slo,
    slo_lines,
)
from paceline.errors import ConfigError, InputError
from paceline.lab.report.summary import Distribution, Slo, Summary, summarize
from paceline.lab.sim import SimConfig, engine_config, simulate
from paceline.lab.sim.tune import Bound, Knob, Settings, TimeIsUp, Trial, TuneSearch, pressure_of
from tests.pure.lab.sim.sim_helpers import PerToken, machine, make_workload, random_workload, sim_config

BOUNDS = (
    Bound(measure="ttft", percentile="p99", seconds=1.0),
    Bound(measure="itl", percentile="p50", seconds=0.1),
)
EMPTY: Summary = summarize(simulate(sim_config(), make_workload([0.0])))


def times(seconds: float) -> Distribution:
    return Distribution(count=10, mean=seconds, p50=seconds, p90=seconds, p99=seconds, tail_ratio=1.0)


def summary(ttft_s: float, itl_s: float, *, refused: int = 0) -> Summary:
    requests = {**EMPTY.requests, "finished": 10, "refused": refused}
    return replace(EMPTY, ttft_s=times(ttft_s), itl_s=times(itl_s), requests=requests)


KNOBS = (
    Knob(name="a", values=(1, 2, 4, 8, 16)),
    Knob(name="b", values=(0.1, 0.5, 0.9)),
    Knob(name="c", values=("x", "y")),
)
START: Settings = {"a": 16, "b": 0.1, "c": "x"}


def valley(settings: Settings, rate: float) -> Summary:
    """Holds up to rate 20 with a=4, b=0.5, c=y and up to less with everything else; b matters only with that a."""
    a, b, c = float(settings["a"]), float(settings["b"]), settings["c"]
    capacity = 20.0 / (1 + abs(math.log2(a / 4)) + (2 * abs(b - 0.5) if a == 4 else 0.8) + (c == "x"))
    return summary(rate / capacity, 0.05)


def test_the_known_best_of_a_small_space_is_found() -> None:
    search = TuneSearch(valley, BOUNDS, KNOBS)
    best = search.highest_rate(START, first_rate=1.0)
    assert best is not None and best.settings == {"a": 4, "b": 0.5, "c": "y"}
    assert 19.0 <= best.rate <= 20.0 and best.holds and not search.was_cut
    assert len(search.trials) < 150
    shown = search.best_of(2, best.rate)
    assert shown[0].settings == best.settings and [each.rate for each in shown] == [best.rate] * 2
    assert [each.pressure for each in shown] == sorted(each.pressure for each in shown)
    assert len({tuple(each.settings.items()) for each in shown}) == 2


def test_at_a_given_rate_the_most_room_is_found() -> None:
    best = TuneSearch(valley, BOUNDS, KNOBS).most_room(START, 10.0)
    assert best is not None and best.settings == {"a": 4, "b": 0.5, "c": "y"}
    assert best.rate == 10.0 and best.pressure == pytest.approx(0.5)


def test_the_same_search_asks_the_same_questions() -> None:
    asked: list[list[tuple[tuple[str, object], ...]]] = []
    for _ in range(2):
        search = TuneSearch(valley, BOUNDS, KNOBS)
        search.highest_rate(START, 1.0)
        asked.append([(*trial.settings.items(), ("rate", trial.rate)) for trial in search.trials])
    assert asked[0] == asked[1] and len(set(asked[0])) == len(asked[0]), "nothing is simulated twice"


def test_an_slo_that_nothing_keeps_finds_nothing_and_ends() -> None:
    search = TuneSearch(lambda settings, rate: summary(2.0, 0.01), BOUNDS, KNOBS)
    assert search.highest_rate(START, 1.0) is None


def test_an_slo_that_everything_keeps_ends_too() -> None:
    search = TuneSearch(lambda settings, rate: summary(0.1, 0.01), BOUNDS, KNOBS)
    best = search.highest_rate(START, 1.0)
    assert best is not None and best.rate > 1e5 and len(search.trials) < 100


def test_a_start_that_never_holds_is_left() -> None:
    def only_four(settings: Settings, rate: float) -> Summary:
        return valley(settings, rate) if settings["a"] == 4 else summary(5.0, 0.01)

    best = TuneSearch(only_four, BOUNDS, KNOBS).highest_rate(START, 1.0)
    assert best is not None and best.settings == {"a": 4, "b": 0.5, "c": "y"}


@pytest.mark.parametrize("max_trials", [1, 7, 20])
def test_a_limit_ends_the_search_with_what_there_is(max_trials: int) -> None:
    search = TuneSearch(valley, BOUNDS, KNOBS, max_trials=max_trials)
    best = search.highest_rate(START, 1.0)
    assert search.was_cut and len(search.trials) <= max_trials
    assert best is not None and best.holds


def test_a_simulation_that_runs_out_of_time_ends_the_search_with_what_there_is() -> None:
    asked = 0

    def slow(settings: Settings, rate: float) -> Summary:
        nonlocal asked
        asked += 1
        if asked > 9:
            raise TimeIsUp
        return valley(settings, rate)

    search = TuneSearch(slow, BOUNDS, KNOBS)
    best = search.highest_rate(START, 1.0)
    assert best is not None and best.holds and search.was_cut
    assert search.best_of(3, best.rate) == [best], "nothing is simulated when there is no time"


def test_values_beyond_one_that_is_far_worse_are_not_tried() -> None:
    def steep(settings: Settings, rate: float) -> Summary:
        return summary(0.1 * 10.0 ** abs(math.log2(float(settings["a"]) / 8)), 0.01)

    search = TuneSearch(steep, BOUNDS, (Knob(name="a", values=(1, 2, 4, 8, 16)),))
    assert search.most_room({"a": 8}, 1.0) is not None
    assert [trial.settings["a"] for trial in search.trials] == [8, 4, 16]


def test_the_values_of_a_knob_lie_around_the_one_it_has() -> None:
    assert Knob(name="a", values=(1, 2, 4, 8)).away_from(4) == [[2, 1], [8]]
    assert Knob(name="a", values=(1, 2, 4, 8)).away_from(3) == [[2, 1], [4, 8]]
    assert Knob(name="pace", values=(0.0, 10.0, 20.0)).away_from(0.0) == [[20.0, 10.0], []], "0 is off"
    assert Knob(name="policy", values=("x", "y", "z")).away_from("y") == [["x", "z"]]


def test_settings_that_miss_the_slo_by_far_are_not_listed() -> None:
    def few_rows_are_hopeless(settings: Settings, rate: float) -> Summary:
        return summary({1: 65.0, 2: 1.5, 4: 0.9}[int(settings["a"])], 0.01)

    search = TuneSearch(few_rows_are_hopeless, BOUNDS, (Knob(name="a", values=(1, 2, 4)),))
    assert search.most_room({"a": 1}, 1.0) is not None
    assert [trial.settings["a"] for trial in search.trials] == [1, 2, 4]
    assert [trial.settings["a"] for trial in search.best_of(3, 1.0)] == [4, 2]
    assert [trial.settings["a"] for trial in search.best_so_far(3, 1.0)] == [4, 2]


def test_a_setting_that_rejects_requests_keeps_no_slo() -> None:
    assert pressure_of(summary(0.1, 0.01, refused=1), BOUNDS) == math.inf
    assert pressure_of(summary(0.5, 0.08), BOUNDS) == pytest.approx(0.8)


# -- with the simulator ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_too_few_rows_and_too_small_steps_are_found_out() -> None:
    """A fixed cost per step makes small steps dear, a bound between tokens makes large ones impossible."""
    workload = make_workload([float(index) for index in range(30)], prompt=200, output=20)
    task = Task(
        machine=machine(PerToken(0.01, 0.001)),
        workload=workload,
        seed=0,
        slo=Slo(ttft_s=2.0, itl_s=0.15),
    )
    bounds = parse_bounds("ttft_p99=2s,itl_p99=150ms")
    knobs = (
        Knob(name="max_num_batched_tokens", values=(16, 32, 128, 2048)),
        Knob(name="max_num_seqs", values=(1, 4, 64)),
    )
    search = TuneSearch(task.simulate, bounds, knobs)
    start = {"max_num_batched_tokens": 2048, "max_num_seqs": 1}
    best = search.highest_rate(start, 0.5)
    assert best is not None
    everything = [
        (tokens, rows)
        for tokens in knobs[0].values
        for rows in knobs[1].values
        if pressure_of(
            task.simulate({"max_num_batched_tokens": tokens, "max_num_seqs": rows}, best.rate * 1.1), bounds
        )
        <= 1.0
    ]
    assert everything == [], "no setting of the space holds at a rate that is a tenth higher"


# -- what is said on the command line ----------------------------------------------------------------------


def test_bounds_are_read_with_their_units() -> None:
    found = parse_bounds("ttft_p99=1s, itl_p50=50ms,e2e=2.5")
    assert [(bound.name, bound.seconds) for bound in found] == [
        ("ttft_p99", 1.0),
        ("itl_p50", 0.05),
        ("e2e_p99", 2.5),
    ]


@pytest.mark.parametrize(
    "text",
    ["ttft_p99", "ttft_p95=1s", "tpot_p99=1s", "ttft_p99=1h", "ttft_p99=-1", "ttft=0s", "ttft=1,ttft_p99=2"],
)
def test_bounds_that_are_not_understood(text: str) -> None:
    with pytest.raises(InputError, match=r"--slo '.*' is not understood"):
        parse_bounds(text)


def test_without_an_slo_there_is_nothing_to_keep() -> None:
    with pytest.raises(InputError, match="say what to keep"):
        parse_bounds("")


def test_flags_are_those_of_serve() -> None:
    from paceline.cli.serve.flags import SERVE

    known = {each.name for each in SERVE.options}
    start: Settings = {"max_num_batched_tokens": 24, "max_num_prompt_tokens": 72, "step_target_ms": 0.0}
    assert {knob.name for knob in knobs_for(BOUNDS, start)} == start.keys() <= known
    assert serve_flags({"max_num_seqs": 8, "long_prefill_share": 0.5, "scheduling_policy": "fcfs"}) == (
        "--max-num-seqs 8 --long-prefill-share 0.5 --scheduling-policy fcfs"
    )


def test_paces_lie_around_the_bound_between_tokens() -> None:
    paces = {
        knob.name: knob.values for knob in knobs_for(parse_bounds("itl_p99=40ms"), {"step_target_ms": 0.0})
    }["step_target_ms"]
    assert paces[0] == 0.0 and 40.0 in paces and 20.0 in paces


def test_options_outside_their_bounds_are_named() -> None:
    with pytest.raises(ConfigError, match="top"):
        TuneOptions(top=0)


@pytest.mark.parametrize(
    ("pressure", "told"),
    [
        (0.5, "50 %"),
        (0.9996, "99.96 %"),
        (1.0 - 1e-9, "100 %"),
        (1.0, "100 %"),
        (1.0004, "100.04 %"),
        (1.004, "100.4 %"),
        (1.04, "104 %"),
        (1.0 + 1e-9, "just over 100 %"),
        (math.inf, "not served"),
    ],
)
def test_what_misses_the_slo_never_reads_as_all_of_it(pressure: float, told: str) -> None:
    assert share_of_slo(Trial(settings=START, rate=1.0, summary=EMPTY, pressure=pressure)) == told


def test_the_best_so_far_needs_no_simulation() -> None:
    search = TuneSearch(valley, BOUNDS, KNOBS, max_trials=25)
    assert search.best_so_far(3, None) == []
    best = search.highest_rate(START, first_rate=1.0)
    tried = len(search.trials)
    shown = search.best_so_far(3, None)
    assert best is not None and shown[0].holds and shown[0].rate == best.rate
    assert {trial.rate for trial in shown} == {best.rate} and len(search.trials) == tried
    assert search.best_so_far(3, 123.0) == []


def test_time_ends_a_simulation_under_way(capsys: pytest.CaptureFixture[str]) -> None:
    """Minutes of simulated traffic, and a tenth of a second to search: said, instead of searched to its end."""
    arguments = ["--slo", "ttft_p99=1s", "--seconds", "0.1", "--num-requests", "5000"]
    assert run(["tune", *arguments]) == 2
    assert "in 0.1 s and 0 simulations: give more --seconds" in capsys.readouterr().err


@pytest.mark.parametrize("num_trials", [0, 12])
def test_ctrl_c_shows_what_was_found(
    num_trials: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = 0

    def interrupted(self: Task, settings: Settings, rate: float, look: object = None) -> Summary:
        nonlocal asked
        asked += 1
        if asked > 1 + num_trials:  # the first one finds a rate to begin with
            raise KeyboardInterrupt
        return summary(rate / 5.0, 0.05)

    monkeypatch.setattr(Task, "simulate", interrupted)
    target = tmp_path / "told.json"
    arguments = [
        "--slo",
        "ttft_p99=1s",
        "--trace",
        "fixed:20x5",
        "--num-requests",
        "20",
        "--json",
        str(target),
    ]
    assert run(["tune", *arguments]) == 130
    printed = capsys.readouterr()
    assert "Cut short" in printed.err and asked == 2 + num_trials
    assert target.exists() == (num_trials > 0)
    if num_trials:
        assert f"{num_trials} simulations in" in printed.out and "cut short" in printed.out
        assert printed.out.splitlines()[-2].startswith("paceline serve --max-num-batched-tokens ")
        assert json.loads(target.read_text())["cut_short"] is True
    else:
        assert printed.out == "" and "before anything kept the SLO" in printed.err


# ----------------------------------------------------------------
# What `paceline tune --verify` says about the bounds it was asked to keep.


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
    monkeypatch.setattr(
        tune_run, "server_values", lambda connection, path: answers.get(path.rpartition("/")[2])
    )
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
def test_larger_steps_while_no_row_decodes_are_compared(alone: int, is_found: bool) -> None:
    wanted = {**WANTED, "max_num_prompt_tokens": alone}
    assert (differences(wanted, {**WANTED, "max_num_prompt_tokens": 512}) == []) is is_found


@pytest.mark.parametrize("answers", [{}, {"policy": {"policy": "fcfs"}}, {"dial": {"limits": LIMITS}}])
def test_a_server_that_does_not_tell_is_named_so(
    answers: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    differing = differences(WANTED, told(monkeypatch, answers))
    assert differing is None and "does not tell its settings" in conclusion(WANTED, differing)
