"""A server with two engines: streams go on with the same text when one of them is killed, and everything is billed
once."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client_server import KEY, ClientServer, client_server
from tests.e2e.model_cli import run
from tests.waiting import wait_until

PRICES = {"prompt": 1, "cached_prompt": 1, "output": 10}  # the same whatever is cached
FLAGS = (*("--replicas", "2", "--router", "round-robin", "--max-restarts", "40", "--restart-backoff-s", "0"),)
LONG = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True}
FORMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.1, "seed": 5},
    "branches": {"temperature": 1.2, "seed": 6, "n": 2, "max_tokens": 1000},
    "stop": {"temperature": 1.0, "seed": 7, "stop": ["zzz", "q7"]},
    "logprobs": {"temperature": 0.9, "seed": 8, "logprobs": 2},
    "penalties": {"temperature": 1.0, "seed": 9, "frequency_penalty": 0.6, "presence_penalty": 0.3},
    "min_tokens": {"temperature": 1.0, "seed": 10, "min_tokens": 1000, "ignore_eos": False},
    "structure": {
        "temperature": 1.0,
        "seed": 11,
        "structured_outputs": {"regex": "([a-f]{3}[0-9]{2}-){200}"},
        "ignore_eos": False,
    },
}


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ledger") / "ledger.db"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, ledger: Path) -> Iterator[ClientServer]:
    folder = tmp_path_factory.mktemp("server")
    keys = folder / "priced-keys"
    keys.write_text(
        json.dumps(
            {"name": "payer", "sha256": sha256(KEY.encode()).hexdigest(), "prices": PRICES, "admin": True}
        )
    )
    keys.chmod(0o600)
    flags = ("--ledger", str(ledger), "--api-keys-file", str(keys), *FLAGS)
    with client_server(folder, *flags) as running:
        running.wait_for(200)
        yield running


def engines(server: ClientServer) -> list[int]:
    """Processes of the engines, in the order they were started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if int(fields[1]) == server.process.pid and b"engine_main" in words and fields[0] != "Z":
                found.append(int(entry.name))
    return sorted(found)


class Answer:
    """What came of a stream."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.logprobs: list[Any] = []
        self.reasons: dict[int, str] = {}
        self.errors: list[Any] = []
        self.usage: dict[str, Any] = {}
        self.id = ""
        self.is_whole = False

    @property
    def told(self) -> tuple[dict[int, str], list[Any], dict[int, str]]:
        return self.texts, self.logprobs, self.reasons

    def read(self, line: str) -> None:
        if line == "data: [DONE]":
            self.is_whole = True
        if not line.startswith("data: {"):
            return
        chunk = json.loads(line[6:])
        if "error" in chunk:
            self.errors.append(chunk["error"])
            return
        self.id = chunk["id"]
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            if choice.get("logprobs"):
                self.logprobs += choice["logprobs"]["token_logprobs"]
            if choice.get("finish_reason"):
                self.reasons[index] = choice["finish_reason"]


def stream(server: ClientServer, form: dict[str, Any], answer: Answer | None = None) -> Answer:
    answer = answer or Answer()
    body = {"model": "tiny", **LONG, **form, "stream_options": {"include_usage": True}}
    with server.open("POST", "/v1/completions", body) as reply:
        assert reply.status == 200, reply.read()
        for line in reply:
            answer.read(line.decode().strip())
    return answer


def wait_for_engines(server: ClientServer, count: int = 2) -> None:
    server.wait_until(lambda: server.metric("fleet_engine_up") == count)


def test_an_explanation_says_where_a_request_was(server: ClientServer) -> None:
    """The first test of this file: engines have the numbers in which they were started."""
    answer = Answer()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, server, {"seed": 1, "max_tokens": 3000}, answer)
        wait_until(lambda: len(answer.texts.get(0, "")) > 10, 60)
        (branch,) = server.ask("GET", f"/v1/requests/{answer.id}/explain").json["branches"]
        number = int(branch["decisions"][0]["detail"].removeprefix("engine ")[0])
        os.kill(engines(server)[number], signal.SIGKILL)
        running.result(120)
    assert answer.is_whole and answer.usage["paceline"]["failovers"] == 1
    (branch,) = server.ask("GET", f"/v1/requests/{answer.id}/explain").json["branches"]
    told = " | ".join(branch["sentences"])
    assert told.startswith(f"was given to engine {number}")
    assert f"engine {number} was lost with it, behind" in told and f"went on in engine {1 - number}" in told
    wait_for_engines(server)


def test_every_stream_is_the_same_when_an_engine_is_killed_under_it(
    server: ClientServer, ledger: Path
) -> None:
    with ThreadPoolExecutor(len(FORMS)) as pool:
        undisturbed = dict(
            zip(FORMS, pool.map(lambda form: stream(server, form), FORMS.values()), strict=True)
        )
    assert all(len(each.texts[0]) > 100 for each in undisturbed.values())
    answers, before = {name: Answer() for name in FORMS}, server.metric("failovers_total")
    with ThreadPoolExecutor(len(FORMS)) as pool:
        running = {name: pool.submit(stream, server, form, answers[name]) for name, form in FORMS.items()}
        wait_until(lambda: all(len(each.texts.get(0, "")) > 20 for each in answers.values()), 60)
        os.kill(engines(server)[0], signal.SIGKILL)
        for name, future in running.items():
            future.result(120)
            assert answers[name].told == undisturbed[name].told, name
            assert answers[name].is_whole and not answers[name].errors
    moved = [each for each in answers.values() if each.usage["paceline"].get("failovers")]
    assert len(moved) == len(FORMS) // 2, "every second one was in the engine that was killed"
    for name, answer in answers.items():
        prices = [each.usage["paceline"]["price"]["total_nano_units"] for each in (answer, undisturbed[name])]
        assert prices[0] == prices[1] > 0, "what was computed twice is not billed"
    with closing(sqlite3.connect(ledger)) as entries:
        for answer in answers.values():
            query = "SELECT state, output_tokens FROM opened JOIN closed USING (seq) WHERE id = ?"
            found = entries.execute(query, (answer.id.removeprefix("cmpl-"),)).fetchall()
            assert found == [("complete", answer.usage["completion_tokens"])]
    assert server.metric("failovers_total") == before + len(moved)
    wait_for_engines(server)


def test_without_any_engine_requests_wait_for_the_next(server: ClientServer) -> None:
    wait_for_engines(server)
    for pid in engines(server):
        os.kill(pid, signal.SIGKILL)
    answer = server.complete(max_tokens=5)
    assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == 5
    wait_for_engines(server)


def test_every_engine_can_be_watched_and_each_feed_tells_of_all(server: ClientServer) -> None:
    wait_for_engines(server)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, server, {"seed": 1}, answer := Answer())
        wait_until(lambda: len(answer.texts.get(0, "")) > 10, 60)
        shown = [first_message(server, number) for number in (0, 1)]
        running.result(120)
    assert sum(len(message["engine"]["snapshot"]["rows"][0]) for message in shown) == 1
    for message in shown:
        told = message["server"]["engines"]
        assert [each["number"] for each in told] == [0, 1] and sum(each["output_tokens"] for each in told) > 0
    about = server.ask("GET", "/v1/admin/about").json
    assert about["engines"] == 2
    one = server.ask("GET", "/v1/admin/about?engine=1").json["engine"]
    assert about["engine"]["max_num_seqs"] == 2 * one["max_num_seqs"]
    assert server.ask("GET", "/v1/admin/watch?engine=2").status == 400


def first_message(server: ClientServer, number: int) -> dict[str, Any]:
    with server.open("GET", f"/v1/admin/watch?engine={number}") as feed:
        found: dict[str, Any] = json.loads(feed.readline().removeprefix(b"data: "))
        return found


def test_cores_are_dealt_out(server: ClientServer) -> None:
    wait_for_engines(server)
    shares = [os.sched_getaffinity(pid) for pid in engines(server)]
    if len(os.sched_getaffinity(0)) > 1:
        assert len(shares) == 2 and not shares[0] & shares[1]


def test_an_engine_is_drained_without_an_error_to_any_client(server: ClientServer, tmp_path: Path) -> None:
    wait_for_engines(server)
    answers = [Answer() for _ in range(4)]
    with ThreadPoolExecutor(len(answers)) as pool:
        running = [pool.submit(stream, server, {"seed": 1, "max_tokens": 2000}, answer) for answer in answers]
        wait_until(lambda: all(len(each.texts.get(0, "")) > 10 for each in answers), 60)
        drained = run("fleet", "drain", "0", "--timeout-s", "0", "--url", server.url, PACELINE_ADMIN_KEY=KEY)
        assert drained.returncode == 0 and "2 requests go on in other engines" in drained.stdout
        for future in running:
            future.result(120)
    assert len({each.texts[0] for each in answers}) == 1 and all(each.is_whole for each in answers)
    listed = server.ask("GET", "/v1/admin/fleet").json["engines"]
    assert [(each["state"], each["requests"]) for each in listed] == [("drained", 0), ("ready", 0)]
    assert sorted(each["pid"] for each in listed) == engines(server)
    last = server.ask("POST", "/v1/admin/fleet/1/drain?timeout_s=0")
    assert last.status == 409, "none would be left"
    for path in ("7/drain", "x/drain", "1/drain?timeout_s=soon"):
        assert server.ask("POST", f"/v1/admin/fleet/{path}").status == 400
    assert run("fleet", "resume", "0", "--url", server.url, PACELINE_ADMIN_KEY=KEY).returncode == 0
    shown = run("fleet", "ls", "--url", server.url, PACELINE_ADMIN_KEY=KEY)
    assert shown.stdout.count("ready") == 2
    assert run("fleet", "drain", "--url", server.url).returncode == 2


def test_no_engine_comes_back(tmp_path: Path) -> None:
    flags = ("--replicas", "2", "--engine-wait-s", "0.3", "--restart-backoff-s", "30")
    with client_server(tmp_path, *flags) as server:
        server.wait_for(200)
        for _ in range(2):  # the second restart of each has to wait
            for pid in engines(server):
                os.kill(pid, signal.SIGKILL)
            if _ == 0:
                wait_for_engines(server)
        server.wait_until(lambda: server.metric("fleet_engine_up") == 0)
        began_s = time.monotonic()
        answer = server.complete()
        assert answer.status == 503 and answer.code == "engine_unavailable"
        assert "retry-after" in answer.headers and time.monotonic() - began_s >= 0.3
        assert server.ask("GET", "/health").status == 503
