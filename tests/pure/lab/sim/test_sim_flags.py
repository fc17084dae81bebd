"""The flags of `paceline sim`: declared once, taken from the right config, and they reach the engine."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from paceline.cli.command import Command, CommandGroup
from paceline.cli.flags import split_list
from paceline.cli.sim import SIM
from paceline.cli.sim.flags import SimOptions
from paceline.cli.sim.run import parse_rates, parse_slo, plan_runs, run_all
from paceline.config.engine import KVConfig, SchedulerConfig
from paceline.config.options import option, options_of
from paceline.errors import ConfigError, InputError
from paceline.lab.report.summary import Slo
from paceline.lab.sim.settings import HOST_STEP_S


def test_every_option_of_the_scheduler_and_of_sim_has_a_flag() -> None:
    shown = {each.name for each in SIM.options}
    for config, missing in (
        (SimOptions, set()),
        (SchedulerConfig, {"mode", "encode"}),
        (KVConfig, {"eviction"}),
    ):
        assert {spec.name for spec in options_of(config)} - shown == missing
    assert "depth" in shown


def test_flags_do_not_clash() -> None:
    names = [name for each in SIM.options for name in each.names]
    assert len(names) == len(set(names))


def test_the_default_of_the_host_cost_is_the_simulators() -> None:
    (run,) = plan_runs(SimOptions(trace="fixed:100x10", num_requests=4, rate="4"), {})
    assert run.config.host_step_s == HOST_STEP_S


def test_engine_options_reach_the_engine_and_modes_and_rates_multiply() -> None:
    options = SimOptions(trace="fixed:100x10", num_requests=4, modes="static,continuous", rate="4,2")
    runs = plan_runs(options, {"max_num_seqs": 3, "block_size": 32, "depth": 0})
    assert [run.label for run in runs] == ["static 2/s", "static 4/s", "continuous 2/s", "continuous 4/s"]
    for run in runs:
        engine = run.config.engine
        assert (engine.scheduler.max_num_seqs, engine.kv.block_size, engine.depth) == (3, 32, 0)
        assert engine.scheduler.mode == run.mode
        assert run.requested and run.workload.arrival_s.max() > 0


def test_a_plot_of_one_rate_sweeps_around_it() -> None:
    options = SimOptions(trace="fixed:100x10", num_requests=4, rate="10", plot="x.png")
    runs = plan_runs(options, {})
    assert [run.rate for run in runs] == [5.0, 10.0, 20.0, 30.0, 40.0, 60.0, 80.0]
    assert [run.requested for run in runs] == [False, True, False, False, False, False, False]
    recorded = plan_runs(SimOptions(num_requests=50, plot="x.png"), {})
    base = next(run for run in recorded if run.requested)
    assert base.rate is not None
    for run in recorded:
        assert run.rate is not None
        assert run.workload.rate == pytest.approx(run.rate), "time is compressed, the pattern kept"
    several = plan_runs(SimOptions(num_requests=50, rate="1,2", plot="x.png"), {})
    assert [run.rate for run in several] == [1.0, 2.0]


def test_one_run_is_called_by_its_mode() -> None:
    assert [run.label for run in plan_runs(SimOptions(trace="fixed:10x10"), {})] == ["continuous"]


def test_slo() -> None:
    assert parse_slo("") is None
    assert parse_slo("ttft=1.0, itl=0.05,e2e=30") == Slo(ttft_s=1.0, itl_s=0.05, e2e_s=30.0)
    for text in ("ttft", "ttft=", "ttft=0", "ttft=-1", "ttft=inf", "ttft=nan", "tpot=1", "ttft=1,ttft=2"):
        with pytest.raises(InputError, match="--slo"):
            parse_slo(text)


def test_rates_and_lists() -> None:
    assert parse_rates("") == []
    assert parse_rates("8, 2,8") == [2.0, 8.0]
    assert split_list("a,b,a", "--mode") == ["a", "b"]
    for text in ("x", "0", "-1", "1,,2", "1,", "inf", "nan", " "):
        with pytest.raises(InputError, match="--rate"):
            parse_rates(text)


# ---------------------------------------------------------------- flags from declared options


@dataclass(frozen=True, kw_only=True)
class Declared:
    PANEL: ClassVar = "P"

    size: int = option(3, "how many", low=1)
    speed_s: float = option(0.5, "how fast", also=("--fast",))
    kind: str = option("a", "which", choices=("a", "b"))
    quick: bool = option(False, "hurry")
    safe: bool = option(True, "take care")
    name: str | None = option(None, "what", flag="--called")


def test_a_command_gets_its_flags_from_declared_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    got: list[dict[str, Any]] = []
    commands = [
        Command(
            name=name,
            help="Go.",
            run=lambda values: got.append(dict(values)),
            takes=(Declared,),
            is_optional=is_optional,
        )
        for name, is_optional in (("go", False), ("maybe", True))
    ]
    root = CommandGroup(name="p", help="Try.", headings={"Commands": tuple(commands)})
    root.call(["go", "--fast", "2", "--quick", "--called", "x", "--no-safe"], "p")
    assert got[-1] == {"size": 3, "speed_s": 2.0, "kind": "a", "quick": True, "safe": False, "name": "x"}
    root.call(["maybe", "--size", "5"], "p")
    assert got[-1] == {"size": 5, "speed_s": None, "kind": None, "quick": None, "safe": None, "name": None}
    monkeypatch.setenv("COLUMNS", "100")
    root.call(["go", "--help"], "p")
    page = capsys.readouterr().out
    for part in ("P:", "--speed-s, --fast", "a|b", "how many [3]", "take care [yes]", "--called"):
        assert part in page, page
    with pytest.raises(InputError, match="'x' is not a whole number"):
        root.call(["go", "--size", "x"], "p")


@pytest.mark.parametrize(
    "line, values",
    [
        ("--called -x", {"name": "-x"}),  # a value may begin with a dash
        ("--called=--x", {"name": "--x"}),
        ("--size 4k --size 5", {"size": 5}),
        ("--safe --no-safe", {"safe": False}),
    ],
)
def test_a_line_is_read_word_by_word(line: str, values: dict[str, Any]) -> None:
    got: list[dict[str, Any]] = []
    command = Command(name="go", help="Go.", run=lambda found: got.append(dict(found)), takes=(Declared,))
    command.call(line.split(), "go")
    assert {name: got[0][name] for name in values} == values


@pytest.mark.parametrize(
    "line, says",
    [
        ("--calld x", r"No such option: --calld \(Possible options: --called\)"),
        ("--size", "Option '--size' requires an argument"),
        ("--quick=1", "Option '--quick' does not take a value"),
        ("--speed-s x", "Invalid value for '--speed-s': 'x' is not a number"),
        ("more words", r"Got unexpected extra argument\(s\) \(more words\)"),
    ],
)
def test_a_mistake_on_a_line_is_named(line: str, says: str) -> None:
    command = Command(name="go", help="Go.", run=lambda values: None, takes=(Declared,))
    with pytest.raises(InputError, match=says):
        command.call(line.split(), "go")


def test_routers_are_compared_column_by_column() -> None:
    runs = plan_runs(
        SimOptions(trace="fixed:10x10", num_requests=4, replicas=3, routers="soonest,round-robin"), {}
    )
    assert [(run.label, run.config.router) for run in runs] == [("soonest",) * 2, ("round-robin",) * 2]
    with pytest.raises(ConfigError, match="--router must be one of"):
        plan_runs(SimOptions(trace="fixed:10x10", num_requests=4, routers="nearest"), {})


def test_bounds_of_own_options_are_those_declared() -> None:
    with pytest.raises(ConfigError, match="--replicas must be at least 1"):
        SimOptions(replicas=0)
    with pytest.raises(ConfigError, match="--on-infeasible must be one of"):
        SimOptions(on_infeasible="x")


def test_runs_in_processes_give_what_runs_in_order_give() -> None:
    options = SimOptions(trace="fixed:100x10", num_requests=6, replicas=2, routers="soonest,round-robin")
    runs = plan_runs(options, {})
    in_order, apart = run_all(runs, None), run_all(runs, None, jobs=2)
    assert [result.run.label for result in apart] == [run.label for run in runs] and len(runs) == 2
    for one, other in zip(in_order, apart, strict=True):
        assert one.summary == other.summary and (one.record is None) == (other.record is None)
        if one.record is not None and other.record is not None:
            assert one.record.first_token_s.tolist() == other.record.first_token_s.tolist()
            assert one.record.step_replica.tolist() == other.record.step_replica.tolist()
