"""A server keeps a decision log; `paceline audit` looks at it, as an operator does."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sqlite3
from pathlib import Path

import pytest

from paceline.audit.trail import trail_files
from tests.e2e.client_server import KEY, NARROW_KEY, ClientServer, client_server
from tests.e2e.model_cli import run, run_process

NUM_REQUESTS = 10  # of each key


def complete(server: ClientServer, key: str = KEY, **fields: object) -> None:
    assert server.complete(key=key, max_tokens=3, **fields).status == 200


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit")
    with client_server(folder, "--decision-log", str(folder / "decisions")) as server:
        server.wait_for(200)
        for number in range(NUM_REQUESTS):
            complete(server, priority=number % 3)
            complete(server, key=NARROW_KEY, service_tier="batch", priority=number % 3)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    return folder / "decisions"


def test_the_log_of_a_server_that_was_stopped_is_whole(log: Path) -> None:
    done = run_process("audit", "verify", log)
    assert done.returncode == 0, done.stderr
    first, head = done.stdout.splitlines()
    # Two decisions about each request, at least.
    count = int(first.removeprefix("whole: ").partition(" ")[0])
    assert " decisions in pages 1 to " in first and count >= 4 * NUM_REQUESTS
    assert run("audit", "verify", log, "--head", head.removeprefix("head: ")).returncode == 0
    assert run("audit", "verify", log, "--head", "f" * 64).returncode == 1


def test_groups_are_compared(log: Path) -> None:
    done = run("audit", "bias", log, "--by", "key", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["num_requests"] == 2 * NUM_REQUESTS
    assert {each["measure"] for each in found["comparisons"]} == {"delay_s", "preemptions"}
    assert {each["count"] for each in found["comparisons"]} == {NUM_REQUESTS}
    told = run("audit", "bias", log).stdout.splitlines()
    assert told[0] == f"{2 * NUM_REQUESTS} requests that were admitted and have ended"
    assert told[1].split()[:3] == ["by", "group", "of"] and "luck" in told[-1]


def test_classes_are_told_apart_whatever_the_numbers_of_priority(log: Path) -> None:
    found = json.loads(run("audit", "bias", log, "--by", "class", "--json").stdout)
    assert {(each["group"], each["count"]) for each in found["comparisons"]} == {("batch", NUM_REQUESTS)}


def test_a_change_is_named(log: Path, tmp_path: Path) -> None:
    log = shutil.copytree(log, tmp_path / "decisions")
    connection = sqlite3.connect(trail_files(log)[0])
    changed = "UPDATE pages SET body = replace(body, 'admit', 'defer') WHERE page = 2"
    connection.executescript(f"DROP TRIGGER no_update; {changed}")
    first, last = connection.execute("SELECT first, first + count - 1 FROM pages WHERE page = 2").fetchone()
    connection.close()
    done = run("audit", "verify", log)
    said = f"broken: page 2 (entries {first} to {last}) was changed; page 1 before it is whole\n"
    assert (done.returncode, done.stdout) == (1, said)


def test_a_server_that_was_killed_leaves_a_log_that_is_whole(tmp_path: Path) -> None:
    log = tmp_path / "decisions"
    counts = [0]

    def found() -> int:
        """Entries on disk so far; a log in which there are none yet, or that is being written, has none."""
        said = run_process("audit", "verify", log).stdout if any(log.iterdir()) else ""
        match = re.search(r"whole: ([\d,]+) decisions", said)
        return int(match[1].replace(",", "")) if match else 0

    for _ in range(2):  # the second run goes on where the first was cut off
        with client_server(tmp_path, "--decision-log", str(log)) as server:
            server.wait_for(200)
            for _ in range(NUM_REQUESTS):
                complete(server)
            server.wait_until(lambda: found() > counts[-1])
            server.process.kill()
            server.process.wait(60)
        done = run("audit", "verify", log)
        assert done.returncode == 0, done.stdout + done.stderr
        counts.append(found())
    assert 0 < counts[1] < counts[2]


@pytest.mark.parametrize("command", ["verify", "bias"])
def test_mistakes_are_answered_with_a_sentence(command: str, tmp_path: Path) -> None:
    for arguments, message in (((), "say which log"), ((tmp_path,), "holds no decision log")):
        done = run("audit", command, *arguments)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
