"""`paceline sim` as a user runs it."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import paceline
from paceline.scheduler.invariants import InvariantChecker, InvariantViolation
from tests.e2e.model_cli import COMMAND, run, run_process

QUICK = ["--num-requests", "60", "--rate", "20"]

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02}.{second}00000,{100 + 7 * second},{5 + second % 9}\n"
    for second in range(1, 40)
)
MOONCAKE = "".join(
    json.dumps(
        {"timestamp": 400 * i, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1 + i % 3, 10 + i]}
    )
    + "\n"
    for i in range(30)
)
TENANTS = "req_id,client,arrival_s,prompt_len,output_len\n" + "".join(
    f"{i},client{i % 3},{i * 0.2:.1f},{50 + i},10\n" for i in range(30)
)


def sim(*arguments: str, cwd: Path | None = None) -> str:
    """What it prints; nothing goes to standard error, where no progress bar is shown without a terminal."""
    done = run("sim", *arguments, cwd=cwd)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


# ---------------------------------------------------------------- the table and the files


def test_modes_side_by_side_with_every_measure(tmp_path: Path) -> None:
    done = run_process(
        *("sim", "--mode", "continuous,dynamic,static", "--batch-size", "16", "--static-order", "sorted"),
        *("--slo", "ttft=1.0,itl=0.05,e2e=30", "--device-hour-price", "3.5", "--json", "out.json", *QUICK),
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    shown = done.stdout
    for measure in (
        *("requests/s", "useful tokens", "padded tokens", "padded share", "slot occupancy", "KV occupancy"),
        *("KV waste", "busy share", "preemption", "queue delay", "TTFT", "ITL", "end to end", "p99 / p50"),
        *("goodput", "cost per million tokens", "continuous", "dynamic", "static"),
    ):
        assert measure in shown, measure
    assert shown.rstrip().splitlines()[-1] == "Wrote out.json"
    value = json.loads((tmp_path / "out.json").read_text())
    assert (value["version"], value["seed"]) == (paceline.__version__, 0)
    assert value["command"].startswith("paceline sim --mode continuous,dynamic,static")
    assert [run["mode"] for run in value["runs"]] == ["continuous", "dynamic", "static"]
    for one in value["runs"]:
        assert one["summary"]["requests"]["finished"] == one["workload"]["num_requests"] == 60
        assert one["config"]["scheduler"]["batch_size"] == 16
        assert one["config"]["scheduler"]["static_order"] == "sorted"
        assert one["summary"]["cost_per_million_tokens"] > 0
        assert one["summary"]["goodput_per_s"] is not None
    continuous, dynamic, static = (run["summary"] for run in value["runs"])
    assert continuous["padded_tokens"] == 0 < dynamic["padded_tokens"]
    assert continuous["kv_waste"] < 0.04 < static["kv_waste"]


def test_the_same_command_writes_the_same_bytes(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        sim(
            *("--trace", "multi-tenant", "--num-requests", "80", "--replicas", "3", "--seed", "7"),
            *("--faults", "aborts=0.1,bursts=0.1,stalls=0.02,preempt=0.02", "--json", "out.json"),
            *("--scheduling-policy", "priority", "--priorities", "tenant"),
            cwd=folder,
        )
    texts = [(folder / "out.json").read_bytes() for folder in folders]
    assert texts[0] == texts[1]
    other = json.loads(texts[0])["runs"][0]["summary"]["requests"]
    assert other["aborted"] > 0 and sum(other.values()) == 88


def test_several_rates_give_a_curve_with_its_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown = sim(
        *("--rate", "5,40,200", "--mode", "continuous,static", "--num-requests", "80"),
        *("--plot", "curve.png", "--json", "curve.json"),
        cwd=tmp_path,
    )
    assert "Knee of continuous" in shown and "Knee of static" in shown
    assert shown.rstrip().splitlines()[-1] == (
        "Wrote curve.json, curve.png, curve.timeline.png, curve.timeline.static.png"
    )
    for name in ("curve.png", "curve.timeline.png", "curve.timeline.static.png"):
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n", name
    value = json.loads((tmp_path / "curve.json").read_text())
    assert [(one["mode"], one["rate"]) for one in value["runs"]] == [
        (mode, rate) for mode in ("continuous", "static") for rate in (5.0, 40.0, 200.0)
    ]
    assert set(value["knees"]) == {"continuous", "static"}


def test_a_plot_of_a_single_rate_sweeps_around_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown = sim("--rate", "30", "--num-requests", "60", "--plot", "one.png", cwd=tmp_path)
    assert "Around that rate" in shown and "continuous 15/s" in shown
    assert (tmp_path / "one.timeline.png").exists()


def test_a_checked_run_says_so() -> None:
    shown = sim(
        "--check", "--num-requests", "10", "--rate", "30", "--preemption", "swap", "--num-blocks", "60"
    )
    assert shown.rstrip().splitlines()[-1] == "Every invariant held, in every step of 1 run."


def test_the_run_log_is_written(tmp_path: Path) -> None:
    shown = sim("--log", "run.jsonl", *QUICK, cwd=tmp_path)
    assert shown.rstrip().splitlines()[-1] == "Wrote run.jsonl"
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    header, step, end = (json.loads(line) for line in (lines[0], lines[1], lines[-1]))
    assert (header["kind"], header["seed"], end["kind"]) == ("header", 0, "end")
    assert step["seq"] == 1 and step["plan"] and step["result"]


def test_a_fitted_cost_model_is_used(tmp_path: Path) -> None:
    nothing = ("decode_context_s", "prefill_context_products_s", "logit_rows_s", "copy_bytes_s")
    model = {
        "format": "paceline-costs",
        "version": 1,
        "fixed_s": 0.5,
        "knots": [],
        "slopes_s": [0.0],
        "error": {"mape": 0.0, "p90": 0.0, "num_samples": 100},
    } | dict.fromkeys(nothing, 0.0)
    (tmp_path / "costs.json").write_text(json.dumps(model))
    sim(
        *("--cost-model", "costs.json", "--trace", "fixed:10x5", "--num-requests", "1", "--json", "o.json"),
        cwd=tmp_path,
    )
    summary = json.loads((tmp_path / "o.json").read_text())["runs"][0]["summary"]
    assert summary["itl_s"]["p50"] == 0.5, "half a second a step, whatever is in it"


def test_a_cost_model_fitted_to_a_run_log_predicts_that_run(tmp_path: Path) -> None:
    sim("--log", "run.jsonl", "--json", "a.json", *QUICK, cwd=tmp_path)
    sim("--cost-model", "run.jsonl", "--json", "b.json", *QUICK, cwd=tmp_path)
    one, other = (
        json.loads((tmp_path / name).read_text())["runs"][0]["summary"] for name in ("a.json", "b.json")
    )
    for measure in ("ttft_s", "itl_s", "e2e_s"):
        assert other[measure]["mean"] == pytest.approx(one[measure]["mean"], rel=0.1), measure
        assert other[measure] != one[measure]


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [("azure.csv", AZURE, 39), ("mooncake.jsonl", MOONCAKE, 30), ("tenants.csv", TENANTS, 30)],
)
def test_trace_files_of_every_format(tmp_path: Path, name: str, text: str, count: int) -> None:
    (tmp_path / name).write_text(text)
    flags = ("--speed", "2", "--json", "o.json", "--replicas", "2", "--router", "prefix-aware")
    sim("--trace", name, *flags, cwd=tmp_path)
    summary = json.loads((tmp_path / "o.json").read_text())["runs"][0]["summary"]
    assert summary["requests"]["finished"] == count
    assert (summary["prefix_hit_share"] > 0.2) == (name == "mooncake.jsonl")


@pytest.mark.parametrize("trace", ["azure-code", "mooncake", "multi-tenant", "uniform:10-90x1-9"])
def test_every_built_in_runs_without_a_file(trace: str) -> None:
    assert "finished" in sim("--trace", trace, "--num-requests", "20", "--rate", "10")


def test_depth_changes_the_pace_of_a_slow_host(tmp_path: Path) -> None:
    rates = {}
    for depth in ("0", "1"):
        sim("--depth", depth, "--host-step-s", "0.01", "--json", "o.json", *QUICK, cwd=tmp_path)
        rates[depth] = json.loads((tmp_path / "o.json").read_text())["runs"][0]["summary"]["itl_s"]["p50"]
    assert rates["0"] > 1.3 * rates["1"]


def test_ranks_side_by_side_with_what_more_of_them_bring(tmp_path: Path) -> None:
    flags = ("--model", "llama-3.3-70b", "--device", "b200", "--link", "nvlink5", "--json", "o.json")
    load = ("--trace", "fixed:64x32", "--num-requests", "64", "--arrivals", "all-at-once")
    shown = sim("--tensor-parallel-size", "2,1", "--host-row-us", "5", *flags, *load, cwd=tmp_path)
    one, two = json.loads((tmp_path / "o.json").read_text())["runs"]
    assert (two["config"]["ranks"], two["config"]["link"]) == (2, "nvlink5")
    speed_up = two["summary"]["output_tokens_per_s"] / one["summary"]["output_tokens_per_s"]
    assert 1.0 < speed_up < 2.0
    assert f"tp 2: {speed_up:.2f} times the output tokens/s of tp 1" in shown


# ---------------------------------------------------------------- mistakes


def assert_one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("paceline: error: ") and len(lines[0]) < 400
    return lines[0]


@pytest.mark.parametrize(
    "flags",
    [
        ["--trace", "no-such-file.csv"],
        ["--no-such-flag"],
    ],
    ids=" ".join,
)
def test_mistakes_get_one_line_and_exit_code_2(flags: list[str], tmp_path: Path) -> None:
    """Two in the real process; the long list is in tests/pure/cli."""
    assert_one_line(run_process("sim", "--num-requests", "5", *flags, cwd=tmp_path))
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "trace.data").write_text("It was a dark and stormy night.\n")
    assert "trace.data" in assert_one_line(run("sim", "--trace", "trace.data", cwd=tmp_path))


# ---------------------------------------------------------------- the command itself


def test_version_help_and_an_unknown_command() -> None:
    assert run_process("--version").stdout == f"paceline {paceline.__version__}\n"
    page = run("sim", "--help-all")
    assert page.returncode == 0
    for flag in ("--trace", "--max-num-batched-tokens", "--num-blocks", "--host-blocks", "--batch-timeout"):
        assert flag in page.stdout
    bare = run_process()
    assert bare.returncode == 0 and "sim" in bare.stdout
    assert_one_line(run("simulate"))


def test_an_interrupt_ends_it_with_130(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "sim", "--num-requests", "15000", "--log", "run.jsonl"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    # The log grows once the simulation is under way.
    while not any(path.stat().st_size for path in tmp_path.iterdir()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors, output) == (130, "paceline: error: interrupted\n", "")


def test_a_reader_that_goes_away_is_no_crash() -> None:
    process = subprocess.Popen(
        [*COMMAND, "sim", *QUICK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.wait(timeout=60)
    assert "Traceback" not in errors and process.returncode == 1


def test_a_broken_invariant_is_one_line_and_exit_code_70(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise InvariantViolation("S99", "made up")

    monkeypatch.setattr(InvariantChecker, "after_schedule", broken)
    done = run("sim", "--check", "--num-requests", "5", "--seed", "3")
    assert done.returncode == 70
    assert done.stderr.count("\n") == 1 and "seed 3" in done.stderr and "S99" in done.stderr


# ---------------------------------------------------------------- real traces, where they are

DATA = os.environ.get("PACELINE_DATA")


@pytest.mark.skipif(not DATA, reason="PACELINE_DATA does not name a folder of traces")
@pytest.mark.parametrize(
    "name", ["azure2023_conv.csv", "mooncake_conversation_trace.jsonl", "vtc_arena_multiclient_trace.csv"]
)
def test_real_traces(name: str) -> None:
    path = Path(DATA or "") / name
    if not path.exists():
        pytest.skip(f"{name} is not there")
    assert "finished" in sim("--trace", str(path), "--num-requests", "100", "--speed", "4")
