"""`paceline serve --run-log`: a real server's run, with everything that happens to one, replays plan for plan."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.client_server import COMPLETION, KEY, NARROW_KEY, ClientServer, client_server
from tests.e2e.model_cli import run, run_process

# Blocks for some three of these requests at once.
SMALL = ("--max-model-len", "256", "--num-gpu-blocks-override", "40", "--max-num-seqs", "6")


def post(server: ClientServer, key: str = KEY, **fields: object) -> http.client.HTTPResponse:
    return server.open("POST", "/v1/completions", {**COMPLETION, "ignore_eos": True, **fields}, key=key)


def leave(server: ClientServer, prompt: str) -> None:
    """Read a part of a stream and hang up."""
    answer = post(server, prompt=prompt, max_tokens=200, stream=True)
    answer.read(200)
    answer.close()


def mixed(server: ClientServer, number: int) -> None:
    """A custom client."""
    prompt = f"{number:>3} " + "once upon a time there was a scheduler " * (1 + number % 3)
    if number % 5 == 0:
        leave(server, prompt)
    elif number % 5 == 1:
        assert post(server, prompt=prompt, max_tokens=60, n=2, temperature=1.0, seed=number).read()
    elif number % 5 == 2:
        assert post(server, prompt=prompt, max_tokens=120, stop=["a", "e", "q"]).read()
    elif number % 5 == 3:
        assert post(server, NARROW_KEY, prompt=prompt, max_tokens=40).read()
    else:
        assert post(server, prompt=prompt, max_tokens=120).read()


def all_at_once(server: ClientServer, count: int) -> None:
    clients = [threading.Thread(target=mixed, args=(server, number)) for number in range(count)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()


def seen(log: Path) -> Counter[str]:
    """Kinds of inputs and decisions."""
    counts: Counter[str] = Counter()
    for line in log.read_text().splitlines()[1:]:
        step = json.loads(line)
        counts.update(entry[0] for entry in step["inputs"] + step["decisions"])
    return counts


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a server that was busy and then told to stop."""
    folder = tmp_path_factory.mktemp("run-log")
    log = folder / "run.jsonl"
    with client_server(folder, *SMALL, "--run-log", str(log)) as server:
        server.wait_for(200)
        all_at_once(server, 25)
        all_at_once(server, 10)
        # A client is still there when it stops, and is not waited for.
        hanging = post(server, max_tokens=200, stream=True)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        hanging.close()
    return log


def test_a_run_of_the_server_replays_plan_for_plan(stopped: Path) -> None:
    counts = seen(stopped)
    for kind in ("add", "abort", "finish_at", "done", "admit", "fork", "preempt", "resume", "finish"):
        assert counts[kind], f"nothing of the kind {kind} happened: {dict(counts)}"
    again = stopped.with_name("again.jsonl")
    done = run("replay", stopped, "--output", again)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("identical: ") and "not closed" not in done.stdout
    assert again.read_bytes() == stopped.read_bytes()


def test_a_changed_figure_is_found(stopped: Path) -> None:
    lines = stopped.read_text().splitlines()
    at = next(index for index, line in enumerate(lines) if '"admit"' in line and index)
    step = json.loads(lines[at])
    decision = next(entry for entry in step["decisions"] if entry[0] == "admit")
    decision[7] += 1  # blocks free
    changed = stopped.with_name("changed.jsonl")
    changed.write_text(
        "\n".join([*lines[:at], json.dumps(step, separators=(",", ":")), *lines[at + 1 :]]) + "\n"
    )
    done = run("replay", changed)
    assert done.returncode == 1 and f"step {step['seq']} " in done.stdout and "decisions[" in done.stdout


def test_requests_are_explained_from_the_log(stopped: Path) -> None:
    victim = next(
        entry[1]
        for line in stopped.read_text().splitlines()[1:]
        for entry in json.loads(line)["decisions"]
        if entry[0] == "preempt"
    )
    done = run("explain", victim, "--log", stopped)
    assert (
        done.returncode == 0 and "was preempted at step" in done.stdout and "came back at step" in done.stdout
    )


def test_a_server_that_was_killed_leaves_a_log_that_replays(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl.gz"
    for _ in range(2):  # the second run keeps the log of the first
        with client_server(tmp_path, *SMALL, "--run-log", str(log)) as server:
            server.wait_for(200)
            all_at_once(server, 10)
            hanging = post(server, max_tokens=200, stream=True)
            hanging.read(200)
            server.wait_until(lambda: log.stat().st_size > 5_000)
            # The engine first: it ends its log well when it sees its server gone before it is killed for that.
            for child in (
                Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
            ):
                os.kill(int(child), signal.SIGKILL)
            server.process.kill()
            server.process.wait(60)
            hanging.close()
    for path in (log, log.with_name("run.jsonl.gz.1")):
        refused = run("replay", path)
        assert refused.returncode == 2 and "--allow-cut replays them" in refused.stderr
        done = run("replay", path, "--allow-cut")
        assert done.returncode == 0, done.stdout + done.stderr
        assert int(done.stdout.removeprefix("identical: ").partition(" ")[0].replace(",", "")) > 20


def test_a_log_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere" / "run.jsonl"
    done = run_process("serve", tmp_path, "--load-format", "dummy", "--run-log", missing, "--port", "0")
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode != 0 and "nowhere" in last and "make it first" in last, done.stderr
