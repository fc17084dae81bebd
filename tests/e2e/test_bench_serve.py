"""`paceline bench serve | sweep | compare` as a user runs them, against a server whose timings are known."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.cli.main import run as run_command
from tests.e2e.model_cli import run_process, start
from tests.mock_openai import RunningMock, running_mock
from tests.waiting import wait_until

ATTEMPTS = 3  # a busy machine may spoil one
PATIENCE_S = 60.0
SMALL = ("--input-len", "8", "--output-len", "4")


def measure(mock: RunningMock, target: Path, *flags: str) -> dict[str, Any]:
    """Run it here, and return what it wrote."""
    assert run_command(["bench", "serve", "--url", mock.url, "--json", str(target), *flags]) == 0
    found: dict[str, Any] = json.loads(target.read_text())
    return found


def flat(lists: list[list[float]]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.concatenate([np.array(each) for each in lists])


def is_near(found_s: float, known_s: float) -> bool:
    """Within 2 ms or 2 %, whichever is more."""
    return abs(found_s - known_s) <= max(0.002, 0.02 * known_s)


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"ttft_ms": 60, "gap_ms": 12}, "--max-concurrency 4 --num-prompts 16 --output-len 12"),
        ({"ttft_ms": 150, "gap_ms": 4, "role_first_ms": 5}, "--rate 20 --num-prompts 16 --output-len 30"),
        (
            {"ttft_ms": 30, "gap_ms": 25, "tokens_per_piece": 3},
            "--rate 15 --arrivals constant --num-prompts 12 --output-len 24 --api completions",
        ),
    ],
)
def test_known_latencies_are_measured(settings: dict[str, Any], flags: str, tmp_path: Path) -> None:
    """What the client saw is what the server noted when it handed each byte over, on the same clock."""
    target = tmp_path / "run.json"
    for attempt in range(ATTEMPTS):
        with running_mock(**settings) as mock:
            done = run_process(
                *("bench", "serve", "--url", mock.url, "--json", str(target), "--input-len", "8"),
                *flags.split(),
                cache=tmp_path,
            )
            assert done.returncode == 0, done.stderr
            entries = mock.entries()
        value = json.loads(target.read_text())
        assert value["completed"] == len(entries) == len(value["ttfts"])
        late = np.array(value["start_times"]) - np.array(value["due_times"])
        ttft = np.array(value["ttfts"]) - late
        known_ttft = np.array([entry["piece_s"][0] - entry["received_s"] for entry in entries])
        gaps = flat(value["itls"])
        known_gaps = flat([np.diff(entry["piece_s"]).tolist() for entry in entries])
        whole = np.array(value["e2els"]) - late
        known_whole = np.array([entry["piece_s"][-1] - entry["received_s"] for entry in entries])
        assert gaps.size == known_gaps.size  # no piece was taken for two, or two for one
        judged = [
            is_near(float(np.median(ttft)), float(np.median(known_ttft))),
            is_near(float(np.median(gaps)), float(np.median(known_gaps))),
            is_near(float(gaps.mean()), float(known_gaps.mean())),
            is_near(float(np.median(whole)), float(np.median(known_whole))),
            float(np.median(np.abs(gaps - known_gaps))) <= 0.002,
        ]
        if all(judged):
            return
        assert attempt + 1 < ATTEMPTS, (judged, np.median(ttft), np.median(known_ttft))


def test_failures_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = {
        "1": "500",
        "2": "429",
        "3": "stream_error",
        "4": "break",
        "5": "close",
        "6": "garbage",
        "7": "no_stream",
        "8": "hang",
        "9": "400",
        "10": "503",
    }
    with running_mock(faults=faults, gap_ms=1, has_usage=False, splits=True) as mock:
        flags = ("--rate", "100", "--num-prompts", "14", "--timeout", "4", *SMALL)
        value = measure(mock, tmp_path / "run.json", *flags)
    printed = capsys.readouterr()
    assert value["completed"] == 4 and value["failed"] == 10
    assert value["failures"] == {
        "broken off": 4,
        "server error": 2,
        "refused": 1,
        "error in stream": 1,
        "timeout": 1,
        "rejected": 1,
    }
    assert value["total_output_tokens"] == 16  # pieces, where the server counts nothing
    assert value["errors"][2] == "refused: told to say 429"
    assert "  broken off:                            4" in printed.out
    assert "1 timeout; the first: no whole answer within 4 s" in printed.err
    assert printed.out.startswith("============ Serving Benchmark Result ============\n")
    assert "\x1b" not in printed.out + printed.err  # no bar without a terminal


def test_refusals_are_counted_and_tried_again_only_when_asked(tmp_path: Path) -> None:
    flags = ("--max-concurrency", "2", "--num-prompts", "3", *SMALL)
    with running_mock(refused_until=2) as mock:
        first = measure(mock, tmp_path / "a.json", *flags, "--retries", "5")
    assert (first["completed"], first["failed"], first["retries"]) == (3, 0, 6)
    assert min(first["ttfts"]) > 0.1  # two refusals, each with 50 ms to come back, are part of the wait
    with running_mock(refused_until=2) as mock:
        target = tmp_path / "b.json"
        code = run_command(["bench", "serve", "--url", mock.url, "--json", str(target), *flags])
    second = json.loads(target.read_text())
    assert (code, second["completed"], second["failures"]) == (1, 0, {"refused": 3})


def test_an_open_loop_does_not_wait_and_a_closed_one_does(tmp_path: Path) -> None:
    with running_mock(ttft_ms=1500, gap_ms=1) as mock:
        flags = (
            "--rate",
            "40",
            "--arrivals",
            "constant",
            "--num-prompts",
            "10",
            "--num-warmups",
            "0",
            *SMALL,
        )
        value = measure(mock, tmp_path / "open.json", *flags)
        entries = mock.entries()
    assert value["due_times"] == pytest.approx([0.025 * number for number in range(1, 11)])
    assert max(entry["received_s"] for entry in entries) < min(entry["piece_s"][0] for entry in entries)
    assert value["max_concurrent_requests"] == 10
    with running_mock(ttft_ms=20, gap_ms=1) as mock:
        value = measure(
            mock, tmp_path / "closed.json", "--max-concurrency", "3", "--num-prompts", "9", *SMALL
        )
        assert mock.record()["connections"] == 3  # kept alive
    assert value["max_concurrent_requests"] == 3 and value["completed"] == 9


def test_waiting_for_a_place_is_part_of_the_latency(tmp_path: Path) -> None:
    with running_mock(ttft_ms=100, gap_ms=1) as mock:
        value = measure(
            mock, tmp_path / "run.json", "--max-concurrency", "1", "--rate", "1000", "--num-prompts", "4"
        )
    assert value["max_concurrent_requests"] == 1
    assert value["ttfts"][3] > 0.4 and value["median_ttft_from_sent_ms"] < 0.5 * value["median_ttft_ms"]


def test_warm_up_is_not_counted_and_time_ends_a_run(tmp_path: Path) -> None:
    with running_mock(ttft_ms=1, gap_ms=1, cached_tokens=3) as mock:
        flags = ("--max-concurrency", "2", "--duration", "0.5", "--num-warmups", "3", *SMALL)
        value = measure(mock, tmp_path / "run.json", *flags)
        entries = mock.record()["entries"]
    warm = [entry for entry in entries if entry["index"] < 0]
    assert len(warm) == 3 and len(entries) - 3 == value["completed"] == len(value["ttfts"])
    assert 0.4 < value["duration"] < PATIENCE_S and value["max_duration_s"] == 0.5
    assert value["cached_input_tokens"] == 3 * value["completed"]


def test_connections_that_the_server_closes_are_no_failures(tmp_path: Path) -> None:
    with running_mock(idle_closes_ms=40, ttft_ms=1, gap_ms=0) as mock:
        flags = ("--rate", "12", "--arrivals", "constant", "--num-prompts", "6", *SMALL)
        assert measure(mock, tmp_path / "idle.json", *flags)["completed"] == 6
        assert mock.record()["connections"] >= 6
    with running_mock(closes=True, ttft_ms=1, gap_ms=0) as mock:
        assert measure(mock, tmp_path / "close.json", "--num-prompts", "5", *SMALL)["completed"] == 5


def test_every_tenant_uses_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "sk-everybody")
    trace, keys = tmp_path / "trace.csv", tmp_path / "keys.json"
    trace.write_text(
        "arrival_s,client,prompt_len,output_len,ttft_slo_ms\n0,alice,9,2,\n0.05,bob,5,3,700\n0.1,alice,4,1,\n"
    )
    keys.write_text('{"alice": "sk-a", "bob": "sk-b"}')
    with running_mock(gap_ms=1) as mock:
        value = measure(mock, tmp_path / "run.json", "--workload", str(trace), "--tenant-keys", str(keys))
        entries = mock.entries()
        warm = [entry for entry in mock.record()["entries"] if entry["index"] < 0]
    assert [entry["key"] for entry in entries] == ["sk-a", "sk-b", "sk-a"]
    assert warm[0]["key"] in ("sk-a", "sk-b")
    assert [entry["body"]["max_tokens"] for entry in entries] == [2, 3, 1]
    assert [entry["body"].get("ttft_slo_ms") for entry in entries] == [None, 700, None]
    assert value["tenants"] == ["alice", "bob", "alice"] and value["due_times"] == [0.0, 0.05, 0.1]
    assert value["input_lens"] == [9, 5, 4]
    assert "sk-" not in json.dumps(value)  # a result may be shown in public
    with running_mock(gap_ms=1) as mock:
        measure(mock, tmp_path / "run.json", "--num-prompts", "1")
        assert {entry["key"] for entry in mock.record()["entries"]} == {"sk-everybody"}


def test_an_interrupted_run_shows_what_there_is(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    with running_mock(ttft_ms=5, gap_ms=5) as mock:
        flags = ("--max-concurrency", "3", "--duration", "300", "--json", str(target), *SMALL)
        process = start("bench", "serve", "--url", mock.url, *flags, cache=tmp_path)
        wait_until(lambda: len(mock.entries()) >= 10, PATIENCE_S)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    assert b"Serving Benchmark Result" in out and b"Interrupted: " in err
    value = json.loads(target.read_text())
    assert value["is_interrupted"] and value["completed"] >= 7 and value["unfinished"] <= 3


def test_a_file_says_what_was_measured_where(tmp_path: Path) -> None:
    with running_mock(gap_ms=1) as mock:
        value = measure(
            mock, tmp_path / "run.json", "--rate", "50", "--num-prompts", "3", "--seed", "4", *SMALL
        )
    assert (value["format"], value["kind"], value["model_id"]) == ("paceline-bench", "serve", "mock")
    assert value["server"] == {"url": mock.url, "model": "mock", "max_model_len": 4096, "version": "0.0-mock"}
    assert value["client"]["cpu"]["cores"] >= 1 and value["client"]["versions"]["python"]
    assert (value["request_rate"], value["seed"], value["workload"]) == (50.0, 4, "random 8x4")
    assert value["command"].startswith("paceline") and "commit" in value


def test_a_sweep_leaves_a_page_that_needs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "curve"
    with running_mock(ttft_ms=5, gap_ms=1) as mock:
        flags = ("--rates", "60,20", "--num-prompts", "6", "--goodput", "ttft:2000", "tpot:500", *SMALL)
        assert run_command(["bench", "sweep", "--url", mock.url, "--output", str(folder), *flags]) == 0
        prompts = [json.dumps(entry["body"]) for entry in mock.record()["entries"]]
    assert len(set(prompts)) == len(prompts) == 13  # no load finds the prompts of another in a cache
    names = {path.name for path in folder.iterdir()}
    pictures = {"throughput-latency.png", "cdfs.png", "goodput.png", "requests-60.png"}
    assert names == pictures | {"report.html", "sweep.json"}
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert not re.search(r"<script|<link|src=\"(?!data:)|url\(", page)
    assert "<td>20/s</td>" in page and re.search("No knee was seen|Knee: ", page)
    value = json.loads((folder / "sweep.json").read_text())
    assert [result["request_rate"] for result in value["results"]] == [20.0, 60.0]
    assert all(result["completed"] == 6 and result["request_goodput"] > 0 for result in value["results"])
    assert "goodput/s" in capsys.readouterr().out
    both = str(folder / "sweep.json")
    assert run_command(["bench", "compare", both, both, "--fail-if-worse", "0%"]) == 0
    printed = capsys.readouterr()
    assert "20/s" in printed.out and "60/s" in printed.out and "worse" not in printed.out


def test_a_sweep_over_users(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with running_mock(ttft_ms=5, gap_ms=1) as mock:
        flags = ("--concurrencies", "1,3", "--num-prompts", "6", "--output", str(tmp_path), *SMALL)
        assert run_command(["bench", "sweep", "--url", mock.url, *flags]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "<td>3 users</td>" in page and "there is no goodput" in page
    assert not (tmp_path / "goodput.png").exists()


def test_a_worse_server_fails_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--rate", "60", "--num-prompts", "20", *SMALL)
    for name, ttft_ms in (("before", 20), ("after", 80)):
        with running_mock(ttft_ms=ttft_ms, gap_ms=1) as mock:
            measure(mock, tmp_path / f"{name}.json", *flags)
    before, after = str(tmp_path / "before.json"), str(tmp_path / "after.json")
    capsys.readouterr()
    strict = ("--fail-if-worse", "10%", "--measures", "median_ttft_ms,p99_ttft_ms")
    target = tmp_path / "difference.json"
    assert run_command(["bench", "compare", before, after, *strict, "--json", str(target)]) == 1
    printed = capsys.readouterr()
    assert "worse by more than 10 %: median_ttft_ms +" in printed.err
    assert "may mean nothing" not in printed.err
    assert [line.split()[0] for line in printed.out.splitlines() if line.rstrip().endswith("worse")] == [
        "median_ttft_ms",
        "p99_ttft_ms",
    ]
    (result,) = json.loads(target.read_text())["results"]
    assert result["differences"][0]["verdict"] == "worse" and result["differences"][0]["low"] > 0.5
    assert run_command(["bench", "compare", after, before, *strict]) == 0
    assert run_command(["bench", "compare", before, after]) == 0  # no failure was requested


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("serve --rate 0", "--rate must be at least"),
        ("serve --rate 5 --arrivals often", "unknown arrivals 'often'"),
        ("serve --ramp 5", "FROM:TO:SECONDS"),
        ("serve --goodput speed:3", "--goodput 'speed:3' is not understood"),
        ("serve ttft:3", "'ttft:3' belongs to no flag"),
        ("serve --percentiles 50,x", "--percentiles 'x'"),
        ("serve --api responses", "--api must be one of chat, completions"),
        ("serve --extra-body nonsense", "--extra-body is not valid JSON"),
        ("serve --workload azure-con", "did you mean 'azure-conv'?"),
        ("serve --json /no/such/folder/x", "the folder /no/such/folder does not exist"),
        ("serve --url ftp://x", "is not an address"),
        ("sweep", "give --rates 1,2,4"),
        ("sweep --rates 1 --concurrencies 1", "one of them"),
        ("sweep --rates 1,zero", "--rates 'zero' is no load"),
        ("sweep --concurrencies 1.5", "whole numbers of users"),
        ("compare", "name two result files"),
        ("compare /no/a.json /no/b.json", "/no/a.json: cannot be read"),
        ("compare a b --fail-if-worse lots", "is no percentage"),
    ],
)
def test_mistakes_are_one_line(
    arguments: str,
    says: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["bench", *arguments.split()]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("paceline: error: ") and printed.err.count("\n") == 1
    assert says in printed.err and printed.out == ""


def test_files_that_cannot_be_compared_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for name, value in (
        ("serve", {"request_throughput": 1.0, "completed": 1}),
        ("throughput", {"format": "paceline-bench", "kind": "throughput", "results": []}),
        ("other", {"results": []}),
    ):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(value))
    serve, throughput, other = map(str, paths)
    assert run_command(["bench", "compare", serve, throughput]) == 2
    assert "compare two of a kind" in capsys.readouterr().err
    assert run_command(["bench", "compare", serve, other]) == 2
    assert "is no result of paceline bench" in capsys.readouterr().err


def test_a_server_that_is_not_there_or_says_no_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with running_mock(faults={"-1": "400"}) as mock:
        assert run_command(["bench", "serve", "--url", mock.url]) == 1
    assert "came to nothing (rejected with 400): told to say 400" in capsys.readouterr().err
    assert run_command(["bench", "serve", "--url", mock.url]) == 1
    assert "cannot be reached" in capsys.readouterr().err


def test_pictures_are_sent_as_parts_of_messages(tmp_path: Path) -> None:
    pictures = ("--images", "2", "--image-size", "64x48", "--image-reuse", "1")
    with running_mock() as mock:
        found = measure(mock, tmp_path / "run.json", *SMALL, "--num-prompts", "6", *pictures)
        bodies = [entry["body"] for entry in mock.entries() if "messages" in entry["body"]]
    assert found["completed"] == 6 and found["workload"].endswith("2 pictures of 64x48")
    parts = [body["messages"][0]["content"] for body in bodies]
    assert all([part["type"] for part in each] == ["image_url", "image_url", "text"] for each in parts)
    assert len({part["image_url"]["url"] for each in parts for part in each[:2]}) <= 8
