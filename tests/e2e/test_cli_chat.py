"""`paceline chat` as a user runs it: from a pipe, and on a terminal."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.chat_terminal import Terminal
from tests.e2e.model_cli import TIMEOUT_S, TINY, run
from tests.model_folder import write_model

STATS = re.compile(
    r"\(prompt (\d+) tokens(?: \((\d+) cached\))?, first token after [\d.]+ s, (\d+) tokens at"
)


def prompts(stderr: str) -> list[int]:
    return [int(found[1]) for found in STATS.finditer(stderr)]


# What the template puts around a message of a role, in characters, which are tokens here (markers are one each).
def turn(role: str, content: str) -> int:
    return 1 + len(role) + 1 + len(content) + 1 + 1


OPENING = 1 + len("assistant") + 1


# ---------------------------------------------------------------- from a pipe


def test_lines_of_a_pipe_are_a_conversation(model: str, tmp_path: Path) -> None:
    flags = ("--model", model, *TINY, "--max-tokens", "5", "--stats", "--system-prompt", "be brief")
    lines = ("hello", "", '"""two', 'lines"""', "/clear", "again", "/bye", "never asked")
    done = run("chat", *flags, cache=tmp_path, stdin="\n".join(lines))
    assert done.returncode == 0, done.stderr
    system = turn("system", "be brief")
    first = system + turn("user", "hello")
    second = first + turn("assistant", "12345") + turn("user", "two\nlines")
    third = system + turn("user", "again")
    assert prompts(done.stderr) == [first + OPENING, second + OPENING, third + OPENING]
    answers = done.stdout.splitlines()
    assert len(answers) == 4 and answers[2] == "The conversation is forgotten."
    assert done.stderr.count("(cut after 5 tokens)") == 3
    assert not (tmp_path / "chat_history").exists(), "history is for what is typed"


def test_commands(model: str, tmp_path: Path) -> None:
    lines = (
        *(
            "/?",
            "/system you are a cat",
            "/set max_tokens 3",
            "/set stop",
            "/set seed x",
            "/set temperature 7",
        ),
        *("/set colour red", "/nonsense", "/stats", "hi", "/stats", "/system", "/set", "hi"),
    )
    done = run("chat", "--model", model, *TINY, "--stats", cache=tmp_path, stdin="\n".join(lines))
    assert done.returncode == 0, done.stderr
    for text in ("/clear", "max_tokens is 3.", "nothing has been answered yet", "last answer: prompt"):
        assert text in done.stdout, text
    for text in (
        "(seed takes a whole number, not 'x')",
        "(temperature must be between 0 and 2, not 7.0)",
        "(there is no setting colour; there are max_tokens,",
        "(there is no command /nonsense; /? lists them)",
    ):
        assert text in done.stderr, text
    assert re.search(r"^conversation: 2 messages, \d+ of 256 tokens$", done.stdout, re.M)
    assert re.search(r"^max_tokens +3$", done.stdout, re.M)
    with_system, without = prompts(done.stderr)
    said = turn("user", "hi")
    assert with_system == turn("system", "you are a cat") + said + OPENING
    assert without == 2 * said + turn("assistant", "123") + OPENING


def test_the_oldest_turns_go_when_the_context_is_full(model: str, tmp_path: Path) -> None:
    lines = [f"{index} {'x' * 30}" for index in range(10)]
    flags = ("--model", model, *TINY, "--max-tokens", "20", "--stats")
    done = run("chat", *flags, cache=tmp_path, stdin="\n".join([*lines, "y" * 250, "short"]))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("its oldest turns are dropped") == 1
    counts = prompts(done.stderr)
    assert len(counts) == 11, "every line but the one that is too long alone was answered"
    assert max(counts) <= 256 - 20
    assert "maximum context length is 256 tokens" in done.stderr


def test_one_question(model: str, tmp_path: Path) -> None:
    flags = ("--model", model, *TINY, "--max-tokens", "6")
    quick = run("chat", "-q", "hello", *flags, cache=tmp_path, stdin="not read")
    assert (quick.returncode, quick.stderr) == (0, "(cut after 6 tokens)\n")
    assert quick.stdout == run("run", *flags, "hello", cache=tmp_path).stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--url", "ftp://localhost"), "--url ftp://localhost is not an address"),
        (("--url", "localhost", "--block-size", "8"), "--block-size is for a model in this process"),
        (("-q", " "), "the message of --quick is empty"),
        (("--top-p", "2"), "--top-p must be between 1e-09 and 1"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = run("chat", *arguments, cache=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("paceline: error: ") and done.stderr.count("\n") == 1
    assert says in done.stderr


def test_a_model_without_a_template_cannot_chat(tmp_path: Path) -> None:
    plain = str(write_model(tmp_path / "plain", template=None))
    done = run("chat", "--model", plain, *TINY, "-q", "hi", cache=tmp_path)
    assert done.returncode == 2 and "has no chat template; use paceline run --raw" in done.stderr


# ---------------------------------------------------------------- on a terminal


@pytest.fixture
def terminal(endless: str, tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal("--model", endless, *TINY, "--max-tokens", "90000", "--stats", cache=tmp_path)
    yield terminal
    terminal.close()


def test_a_conversation_on_a_terminal(terminal: Terminal, endless: str, tmp_path: Path) -> None:
    banner = terminal.wait_for(">>> ")
    assert banner.startswith("paceline ") and "Ctrl-D to leave" in banner and endless in banner
    terminal.type("go on\n")
    terminal.wait_for("go on\r\n")
    terminal.wait_for_length(20)
    terminal.interrupt()
    answer = terminal.wait_for("tokens at")
    found = re.search(r"(\d+) tokens at", answer)
    assert found is not None and 10 <= int(found[1]) < 80_000
    terminal.wait_for(">>> ")
    terminal.interrupt_until("(Ctrl-D or /bye leaves.)")
    terminal.wait_for(">>> ")
    terminal.type("/stats\n")
    assert "conversation: 2 messages" in terminal.wait_for("tokens\r\n>>> "), (
        "the stopped answer is part of it"
    )
    terminal.type("\x04")
    assert terminal.process.wait(TIMEOUT_S) == 0
    history = tmp_path / "chat_history"
    assert history.read_text().splitlines() == ["go on", "/stats"]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
