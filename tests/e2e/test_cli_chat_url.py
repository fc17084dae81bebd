"""`paceline chat --url`: a conversation with a real server, without a model in this process."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.client_server import ENDLESS, KEY, MODEL, ClientServer
from tests.e2e.model_cli import COMMAND, environment, run

TIMEOUT_S = 60


def chat(*arguments: str, cache: Path, key: str = KEY, lines: str = "") -> subprocess.CompletedProcess[str]:
    return run("chat", *arguments, cache=cache, stdin=lines, PACELINE_API_KEY=key)


def test_a_question_and_its_figures(server: ClientServer, tmp_path: Path) -> None:
    asked = ("--url", server.url, "-q", "hello there", "--max-tokens", "7", "--temperature", "0", "--stats")
    first = chat(*asked, cache=tmp_path)
    assert first.returncode == 0, first.stderr
    assert first.stdout.strip() and "7 tokens at" in first.stderr and "(cut after 7 tokens)" in first.stderr
    again = chat(*asked, "--model", MODEL, cache=tmp_path)
    assert again.stdout == first.stdout


def test_lines_of_a_pipe_are_turns(server: ClientServer, tmp_path: Path) -> None:
    done = chat(
        *("--url", f"{server.url}/v1/", "--max-tokens", "3", "--seed", "4"),
        cache=tmp_path,
        lines="one\ntwo\n/stats\n",
    )
    assert done.returncode == 0, done.stderr
    assert "conversation: 4 messages, " in done.stdout


def test_settings_are_the_servers_until_one_is_given(server: ClientServer, tmp_path: Path) -> None:
    lines = "/set\n/set temperature 0.5\n/set\nhello\n"
    done = chat("--url", server.url, "--max-tokens", "3", cache=tmp_path, lines=lines)
    assert done.returncode == 0, done.stderr
    told = [line.split() for line in done.stdout.splitlines()]
    settings = [line for line in told if line[0] in ("temperature", "top_p", "max_tokens")]
    first, said, second = settings[:3], settings[3], settings[4:7]
    assert first == [["max_tokens", "3"], ["temperature", "1.0"], ["top_p", "1.0"]], (
        "neutral: made-up weights"
    )
    assert said == ["temperature", "is", "0.5."]
    assert second == [["max_tokens", "3"], ["temperature", "0.5"], ["top_p", "1.0"]]


@pytest.mark.parametrize(
    ("arguments", "key", "says"),
    [
        (("--url", "http://127.0.0.1:9"), KEY, "the server at 127.0.0.1:9 cannot be reached"),
        (("--url", "{url}"), "wrong", "the server answered 401: "),
        (("--url", "{url}", "--model", "other"), KEY, "the server answered 404: "),
    ],
)
def test_mistakes_are_one_line(
    server: ClientServer, tmp_path: Path, arguments: tuple[str, ...], key: str, says: str
) -> None:
    given = [argument.replace("{url}", server.url) for argument in arguments]
    done = chat(*given, "-q", "hello", cache=tmp_path, key=key)
    assert done.returncode == 1
    assert done.stderr.startswith("paceline: error: ") and done.stderr.count("\n") == 1
    assert says in done.stderr


def test_an_interrupt_stops_the_answer_on_the_server_too(server: ClientServer, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "chat", "--url", server.url, "-q", "go on", "--max-tokens", str(ENDLESS)],
        env=environment(tmp_path, PACELINE_API_KEY=KEY),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(TIMEOUT_S) == 130
    finally:
        process.kill()
    server.wait_until(server.is_idle)
