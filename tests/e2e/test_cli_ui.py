"""`paceline sim --ui` and `paceline replay --ui`: what they serve, to which clients, and how they end."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import time
from pathlib import Path
from typing import Any

from tests.e2e.model_cli import run
from tests.e2e.shown_run import shown

SMALL = ("sim", "--trace", "fixed:60x20", "--num-requests", "30", "--rate", "40", "--max-num-seqs", "8")


def ask(origin: str, path: str, host: str = "localhost") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(origin.removeprefix("http://"), timeout=30)
    try:
        connection.request("GET", path, headers={"Host": host})
        answer = connection.getresponse()
        body = answer.read()
        return answer.status, gzip.decompress(body) if answer.getheader(
            "content-encoding"
        ) == "gzip" else body
    finally:
        connection.close()


def get(origin: str, path: str) -> Any:
    status, body = ask(origin, path)
    assert status == 200, body
    return json.loads(body)


def test_runs_of_several_modes_are_served_with_their_stories(tmp_path: Path) -> None:
    with shown(tmp_path, *SMALL, "--mode", "continuous,static") as origin:
        assert b"<canvas" in ask(origin, "/ui")[1]
        about = get(origin, "/v1/admin/about")
        assert [each["name"] for each in about["recordings"]] == ["continuous", "static"]
        assert about["recordings"][0]["engine"]["max_num_seqs"] == 8
        for number, recording in enumerate(about["recordings"]):
            last = (len(recording["times"]) - 1) // about["bundle"]
            messages = get(origin, f"/v1/admin/recordings/{number}/{last}")
            assert messages[-1]["n"] == len(recording["times"])
            assert messages[-1]["engine"]["snapshot"]["finished"] == 30
            told = get(origin, f"/v1/admin/recordings/{number}/requests/3/explain")
            assert told["branches"][0]["state"] == "ended"
        for path in ("/v1/admin/recordings/2/0", "/v1/admin/recordings/0/99999", "/v1/admin/watch"):
            assert ask(origin, path)[0] == 404
        # A page elsewhere whose name was rebound to this address.
        assert ask(origin, "/v1/admin/about", host="evil.example")[0] in (400, 403, 421)


def test_a_log_that_is_cut_off_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    assert run(*SMALL, "--log", str(log), cache=tmp_path).returncode == 0
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:40]) + lines[40][:30])
    with shown(tmp_path, "replay", str(log), "--allow-cut") as origin:
        (recording,) = get(origin, "/v1/admin/about")["recordings"]
        assert recording["name"] == "run.jsonl"
        messages = get(origin, "/v1/admin/recordings/0/0")
        assert 0 < messages[-1]["engine"]["snapshot"]["seq"] <= 39


def test_mistakes_are_told_before_the_run(tmp_path: Path) -> None:
    several = run(*SMALL, "--ui", "--ui-port", "0", "--replicas", "2", cache=tmp_path)
    assert several.returncode == 2 and "--replicas 1" in several.stderr and not several.stdout
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        busy = run(*SMALL, "--ui", "--ui-port", port, cache=tmp_path)
    assert busy.returncode == 78 and "--ui-port" in busy.stderr and not busy.stdout


def test_the_demonstration_is_served_while_it_runs_and_its_modes_afterwards(tmp_path: Path) -> None:
    quick = ("demo", "--shape", "tiny", "--seconds", "0.5", "--rate", "20", "--rows", "4")
    modes = ["static", "dynamic", "continuous"]
    with shown(tmp_path, *quick, "--out", str(tmp_path / "out"), until="The race is over") as origin:
        assert b"/ui/race/main.js" in ask(origin, "/ui/race")[1]
        race = get(origin, "/v1/admin/race")
        assert [track["name"] for track in race["tracks"]] == modes and race["is_live"]
        assert race["tracks"][2]["state"] == "waiting", "it is there before the runs"
        until_s = time.monotonic() + 120
        while any(track["state"] != "over" for track in race["tracks"]):
            assert time.monotonic() < until_s
            time.sleep(0.1)
            race = get(origin, "/v1/admin/race")
        assert {len(track["answers"]) for track in race["tracks"]} == {race["num_requests"]}
        about = get(origin, "/v1/admin/about")
        assert [each["name"] for each in about["recordings"]] == modes
        assert all(each["times"] for each in about["recordings"])
