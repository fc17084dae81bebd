"""`paceline explain` and `paceline replay` over a log that `paceline sim` wrote, and over a real server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.client_server import KEY, NARROW_KEY, ClientServer
from tests.e2e.model_cli import run, run_process

CROWDED = ("sim", "--num-requests", "120", "--rate", "60", "--num-blocks", "500")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run.jsonl"
    done = run(*CROWDED, "--log", path)
    assert done.returncode == 0, done.stderr
    return path


def preempted(log: Path) -> int:
    """A request that was preempted."""
    for line in log.read_text().splitlines()[1:]:
        for kind, request, *_ in json.loads(line)["decisions"]:
            if kind == "preempt":
                return int(request)
    raise AssertionError("no request was preempted")


def test_the_story_of_a_preempted_request(log: Path) -> None:
    request = preempted(log)
    done = run_process("explain", request, "--log", log)
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert told[0].startswith(f"request {request} came at ") and "tokens of prompt" in told[0]
    assert any(line.startswith("waited ") for line in told)
    at = next(index for index, line in enumerate(told) if line.startswith("was preempted at step "))
    assert "for request " in told[at] and "more needed" in told[at]
    assert any(line.startswith("came back at step ") for line in told[at:])
    assert told[-1].startswith("reached its length")


def test_the_same_as_json(log: Path) -> None:
    request = preempted(log)
    done = run("explain", request, "--log", log, "--json")
    values = json.loads(done.stdout)
    assert values["request"]["id"] == request and values["is_whole"] is True
    kinds = [decision["kind"] for decision in values["decisions"]]
    assert kinds[-1] == "finish" and {"admit", "preempt", "resume"} <= set(kinds)
    victim = next(decision for decision in values["decisions"] if decision["kind"] == "preempt")
    assert {"step", "time_s", "blocks_free", "blocks_needed", "against"} <= victim.keys()
    assert values["sentences"] == run("explain", request, "--log", log).stdout.splitlines()


def test_a_replay_of_what_was_recorded_is_identical(log: Path, tmp_path: Path) -> None:
    done = run_process("replay", log, "--output", tmp_path / "again.jsonl")
    num_steps = len(log.read_text().splitlines()) - 2
    assert (done.returncode, done.stdout) == (0, f"identical: {num_steps:,} steps\n")
    assert (tmp_path / "again.jsonl").read_bytes() == log.read_bytes()


def test_a_replay_names_the_first_plan_that_differs(log: Path, tmp_path: Path) -> None:
    lines = log.read_text().splitlines()
    at = next(index for index, line in enumerate(lines) if '"spans":{"row":[' in line and index > 20)
    step = json.loads(lines[at])
    step["plan"]["spans"]["num_scheduled"][0] += 1
    lines[at] = json.dumps(step, separators=(",", ":"))
    changed = tmp_path / "changed.jsonl"
    changed.write_text("\n".join(lines) + "\n")
    done = run("replay", changed)
    assert done.returncode == 1
    assert f"step {step['seq']} (line {at + 1}): plan.spans.num_scheduled[0] was" in done.stdout
    done = run("replay", changed, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["identical"], found["difference"]["seq"]) == (1, False, step["seq"])


def test_a_log_that_is_cut_off_is_refused_and_can_be_replayed_as_far_as_it_goes(
    log: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.jsonl"
    cut.write_text(log.read_text()[:20_000])
    whole_lines = cut.read_text().count("\n")
    done = run("replay", cut)
    assert done.returncode == 2 and done.stdout == ""
    assert f"line {whole_lines + 1} is cut off" in done.stderr and "--allow-cut replays them" in done.stderr
    # The log of a server that runs is always cut off somewhere.
    done = run("explain", "1", "--log", cut)
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 0 and last.startswith("the log goes no further: ")
    assert f"line {whole_lines + 1} is cut off" in last
    done = run("replay", cut, "--allow-cut")
    assert done.returncode == 0
    assert done.stdout.startswith(f"identical: {whole_lines - 1} steps, up to the damage")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["explain"], "say which request"),
        (["explain", "3"], "say where the request is"),
        (["explain", "chatcmpl-3", "--log", "x"], "chatcmpl-3 is no number"),
        (["replay"], "say which log to replay"),
        (["replay", "{foreign}"], "is not a Paceline run log"),
        (["explain", "3", "--log", "{foreign}"], "is not a Paceline run log"),
        (["explain", "99999", "--log", "{log}"], "knows no request 99999: its requests are "),
        (["replay", "{log}", "--output", "{log}"], "write the replay to another file"),
        (["replay", "{old}"], "is a run log of version 1"),
        (["explain", "3", "--log", "{old}"], "is a run log of version 1"),
    ],
)
def test_mistakes_are_answered_with_a_sentence(
    arguments: list[str], message: str, log: Path, tmp_path: Path
) -> None:
    places = {"foreign": tmp_path / "foreign", "log": log, "old": tmp_path / "old"}
    places["foreign"].write_text("a,b,c\n1,2,3\n")
    places["old"].write_text('{"v":1,"kind":"header","config":{}}\n')
    done = run(*(argument.format(**places) for argument in arguments))
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and "Traceback" not in done.stderr and done.stderr.count("\n") == 1


# ----------------------------------------------------------------
# `paceline explain ID --url`: a real server tells the key that sent a request why it went as it did.


def explain(
    server: ClientServer, *arguments: str, cache: Path, key: str = KEY
) -> subprocess.CompletedProcess[str]:
    return run("explain", *arguments, "--url", server.url, cache=cache, PACELINE_API_KEY=key)


def test_the_story_of_a_request_that_has_ended(server: ClientServer, tmp_path: Path) -> None:
    request_id = server.complete(ignore_eos=True).json["id"]
    done = explain(server, request_id, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert told[0].startswith("request ") and told[0].endswith(" of the engine:")
    assert told[1].startswith("waited ") and "was admitted at step " in told[1]
    assert told[-1].startswith("reached its length after 5 tokens of output")
    values = json.loads(explain(server, request_id, "--json", cache=tmp_path).stdout)
    assert values["branches"][0]["sentences"] == told[1:] and values["branches"][0]["state"] == "ended"
    assert values["branches"][0]["decisions"][0]["kind"] == "admit"


def test_branches_are_told_apart(server: ClientServer, tmp_path: Path) -> None:
    done = explain(server, server.complete(n=2, temperature=1.0).json["id"], cache=tmp_path)
    headings = [line.partition(", ")[2] for line in done.stdout.splitlines() if line.startswith("request ")]
    assert headings == ["branch 0:", "branch 1:"] and "shares the KV of" in done.stdout


def test_another_key_hears_that_there_is_no_such_request(server: ClientServer, tmp_path: Path) -> None:
    request_id = server.complete().json["id"]
    for key, asked in ((NARROW_KEY, request_id), (KEY, "cmpl-never")):
        done = explain(server, asked, cache=tmp_path, key=key)
        assert (
            done.returncode == 1
            and "the server answered 404: this key has sent no request of that id" in done.stderr
        )
