"""`paceline demo` and `paceline tune` as a user runs them: real processes, the demonstration on made-up weights."""

import json
import os
import pty
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from paceline.audit.runlog import read_run_log
from paceline.lab.sim.replayer import replay
from tests.e2e.client_server import ADMIN, KEY, ClientServer
from tests.e2e.model_cli import COMMAND, environment, run, start

QUICK = ("demo", "--shape", "tiny", "--seconds", "0.5", "--rate", "40", "--rows", "4")
HANG_S = 120.0


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """One demonstration for all tests: what it printed, and its folder."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("demo")
    done = run(*QUICK, "--out", str(folder / "out"), cache=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout, folder / "out"


def test_every_mode_does_the_same_work_and_only_continuous_pads_nothing(shown: tuple[str, Path]) -> None:
    found = json.loads((shown[1] / "demo.json").read_text())
    modes = {mode["mode"]: mode for mode in found["modes"]}
    assert list(modes) == ["static", "dynamic", "continuous"]
    summaries = {name: mode["summary"] for name, mode in modes.items()}
    assert len({json.dumps(each["requests"]) for each in summaries.values()}) == 1
    assert summaries["static"]["requests"]["finished"] == 20 == sum(summaries["static"]["requests"].values())
    assert summaries["continuous"]["padded_tokens"] == 0
    for name in ("static", "dynamic"):
        assert summaries[name]["padded_tokens"] > 0, f"{name} computes its padding"
        assert modes[name]["useful_slots"] < 1.0
    useful = {name: each["useful_tokens"] for name, each in summaries.items()}
    assert len(set(useful.values())) == 1, useful
    assert found["machine"] and found["command"].startswith("paceline")


def test_the_table_stands_beside_the_claims(shown: tuple[str, Path]) -> None:
    text = " ".join(shown[0].split())
    assert "20 requests in bursts over about 0.5 s" in text, "as --seconds says"
    for part in ("static begins", "continuous begins", "2 to 4 x", "-60 %", "padded share", "against static"):
        assert part in text


def test_pictures_and_logs_are_what_they_say(shown: tuple[str, Path]) -> None:
    folder = shown[1]
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    svg = (folder / "demo.svg").read_text()
    assert svg.startswith("<?xml") and svg.rstrip().endswith("</svg>")
    for mode in ("static", "dynamic", "continuous"):
        log = read_run_log(folder / f"{mode}.jsonl.gz")
        assert log.config.scheduler.mode == mode
        assert replay(log).is_equal


def test_ctrl_c_ends_with_the_modes_that_had_ended(tmp_path: Path) -> None:
    process = start(
        *QUICK[:-4], "--rate", "40", "--rows", "4", "--out", str(tmp_path / "out"), cache=tmp_path
    )
    assert process.stdout is not None
    for line in process.stdout:
        if b"dynamic begins" in line:
            break
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, stderr
    assert stderr.decode() == "paceline: error: interrupted\n" and b"against static" not in stdout
    modes = json.loads((tmp_path / "out" / "demo.json").read_text())["modes"]
    assert [mode["mode"] for mode in modes] == ["static"]
    wrote = stdout.decode().splitlines()[-1].removeprefix("Wrote ").split(", ")
    assert {str(path) for path in (tmp_path / "out").iterdir()} == set(wrote), "no file that is not told"


def test_a_terminal_gets_lanes(tmp_path: Path) -> None:
    """On a pseudo-terminal the rows of the batch are drawn while it runs."""
    own, other = pty.openpty()
    try:
        process = subprocess.Popen(
            [*COMMAND, *QUICK, "--out", str(tmp_path / "out")],
            stdin=other,
            stdout=other,
            stderr=other,
            env={**environment(tmp_path), "TERM": "xterm", "LINES": "50"},
        )
        os.close(other)
        written, until_s = b"", time.monotonic() + HANG_S
        while time.monotonic() < until_s:
            if select.select([own], [], [], 0.2)[0]:
                try:
                    written += os.read(own, 65536)
                except OSError:  # the other end is closed: it has ended
                    break
        assert process.wait(HANG_S) == 0
    finally:
        os.close(own)
    text = written.decode(errors="replace")
    assert "A lane is a row of the batch" in text and "█" in text


def test_a_folder_that_cannot_be_made_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run(*QUICK, "--out", str(tmp_path / "file" / "out"), cache=tmp_path)
    assert done.returncode == 2 and "--out" in done.stderr and len(done.stderr.splitlines()) == 1


# -- calibrate, compare, tune ------------------------------------------------------------------------------


def test_from_a_recorded_run_to_flags(shown: tuple[str, Path], tmp_path: Path) -> None:
    """The way of the guide: calibrate on a real run, compare it, and tune with the model."""
    log = str(shown[1] / "continuous.jsonl.gz")
    costs, told = str(tmp_path / "costs.json"), tmp_path / "told.json"
    flags = ("--calibrate", log, "--save-costs", costs, "--compare", log, "--json", told)
    done = run("sim", *flags, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Cost model fitted to" in done.stdout and "as they were and as simulated" in done.stdout
    measures = {each["name"]: each for each in json.loads(told.read_text())["measures"]}
    assert measures["throughput"]["seen"] > 0 and measures["TTFT p99"]["error"] is not None
    logs = f"{log},{shown[1] / 'dynamic.jsonl.gz'}"
    both = run("sim", "--calibrate", logs, "--save-costs", str(tmp_path / "both.json"), cache=tmp_path)
    assert both.returncode == 0, both.stderr
    steps = [
        json.loads(Path(path).read_text())["error"]["num_samples"] for path in (costs, tmp_path / "both.json")
    ]
    assert steps[1] > steps[0], "the steps of both runs"
    arguments = ("--slo", "ttft_p99=30s,itl_p99=5s", "--trace", "fixed:50x10", "--num-requests", "20")
    tuned = run("tune", "--cost-model", costs, *arguments, "--max-trials", "12", cache=tmp_path)
    assert tuned.returncode == 0, tuned.stderr
    assert tuned.stdout.splitlines()[-1].startswith("paceline serve --max-num-batched-tokens ")


def test_what_was_found_is_verified_on_a_live_server(
    shown: tuple[str, Path], server: ClientServer, tmp_path: Path
) -> None:
    log = str(shown[1] / "continuous.jsonl.gz")
    asked = ("--slo", "ttft_p99=30s", "--trace", "fixed:20x5", "--num-requests", "30", "--rate", "15")
    done = run(
        *("tune", "--cost-model", log, *asked, "--max-trials", "2"),
        *("--verify", server.url, "--verify-seconds", "2"),
        cache=tmp_path,
        PACELINE_API_KEY=KEY,
        PACELINE_ADMIN_KEY=ADMIN,
    )
    refused = run("tune", "--cost-model", log, *asked, "--verify", server.url, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Sending 30 requests to" in done.stdout and "predicted" in done.stdout
    lines = {line.split("(")[0].strip(): line for line in done.stdout.splitlines() if "(ms)" in line}
    assert set(lines) >= {"TTFT p50", "TTFT p99", "ITL p50", "end to end p99"}
    assert "not answered" not in done.stdout
    said = next(line for line in done.stdout.splitlines() if "has other settings than those found" in line)
    assert " instead of 4" in said and "--max-num-seqs" in said, "the recorded engine had four rows"
    assert "start it with: --max-num-batched-tokens" in done.stdout
    assert refused.returncode != 0 and "401" in refused.stderr, "a server that wants a key says so"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("demo", "--replay", "missing"), "give the --out folder of a finished demo"),
        (("sim", "--compare", "run.jsonl"), "give --cost-model FILE, or --calibrate LOG"),
        (("sim", "--save-costs", "x.json", "--compare", "run.jsonl"), "give --calibrate LOG too"),
        (("sim", "--calibrate", "a", "--cost-model", "b"), "give one of them"),
        (("sim", "--calibrate", "missing.jsonl"), "missing.jsonl"),
        (("sim", "--calibrate", "one.jsonl,,two.jsonl"), "has an empty entry"),
        (("tune",), "say what to keep"),
        (("tune", "--slo", "ttft=1s", "--cost-model", "missing.json"), "cannot read cost model missing.json"),
        (("tune", "--slo", "ttft=1s", "--trace", "nothing"), "neither a file nor a built-in workload"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = run(*arguments, cache=tmp_path)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
