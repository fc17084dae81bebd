"""Every command and program of README and guides is run, or named here with the reason why it is not.

A page's commands run in its order, in one shell and a separate folder; each must succeed, and print what the page
shows: word for word in a `console` block, but for numbers in any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documented import Command, commands_of, documented_pages, resembles
from tests.e2e.docs.sandbox import OpenServer, Sandbox
from tests.pure.billing.guide_ledger import write_ledger

SETS_UP = "sets up an environment or runs the tests themselves"
OTHER_PROGRAM = "a program that is not a part of the development set-up"
NEEDS_GPU = "needs a GPU, or hours without one"
TAKES_MINUTES = "takes minutes on a CPU"
OTHER_DATA = "needs data that is not a part of the project"
OPERATOR = "changes the machine or a server on it"
ELSEWHERE = "run by test_guide_benchmarks.py, against a server with known timings"
# By the beginning of the command; one that no page has any more is a mistake.
NOT_RUN: dict[str, str] = {
    "make serve": SETS_UP,
    "make test": SETS_UP,
    "git clone": SETS_UP,
    "pip install": SETS_UP,
    "promtool ": OTHER_PROGRAM,
    "paceline bench serve --rate 2 --num-prompts 20": ELSEWHERE,
    "paceline bench sweep": ELSEWHERE,
    "paceline bench compare": ELSEWHERE,
    "paceline train-head ": TAKES_MINUTES,
    'paceline serve --speculative-config \'{"method": "eagle"': OTHER_DATA,
    "from PIL import Image": OTHER_DATA,
    "lm-eval run": OTHER_PROGRAM,
    "HF_HUB_OFFLINE=1 guidellm": OTHER_PROGRAM,
    "aiperf profile": OTHER_PROGRAM,
    "sqlite3 ": OTHER_PROGRAM,
    "podman ": OTHER_PROGRAM,
    "kubectl ": OTHER_PROGRAM,
    "sudo ": OPERATOR,
    "journalctl ": OPERATOR,
    "kill -HUP PID": OPERATOR,
    "kill -USR1 PID": OPERATOR,
    "paceline bench throughput --shape tiny --workload nano": TAKES_MINUTES,
    "paceline bench latency --model ./my-model": TAKES_MINUTES,
    "paceline bench structured --clients 8": TAKES_MINUTES,
    "paceline bench drafts": OTHER_DATA,
    "paceline serve ./my-model --device cuda": NEEDS_GPU,
    "paceline bench throughput --shape qwen3-0.6b": NEEDS_GPU,
    "paceline bench throughput --shape llama-3.1-8b": NEEDS_GPU,
    "paceline bench latency --shape llama-3.1-8b": NEEDS_GPU,
    "python -m paceline bench throughput --shape qwen3-0.6b": NEEDS_GPU,
}
# What a model says is its own business, and which requests wait on a test machine is not known.
FREE_OUTPUT = ("paceline chat", "paceline run", "paceline serve")
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02d}.0000000,{20 + 3 * second},{20 + second % 5}\n" for second in range(40)
)
QUESTIONS = (
    '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "smollm2", \
"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}}\n'
)


def furnish(folder: Path, sandbox: Sandbox, server: OpenServer) -> None:
    """What a reader of any page has at hand before its first command."""
    (folder / "my-model").symlink_to(sandbox.model)
    (folder / "decisions").symlink_to(server.folder / "decisions")
    (folder / "mytrace.csv").write_text(TRACE)
    (folder / "requests.csv").write_text(TRACE)
    (folder / "questions.jsonl").write_text(QUESTIONS)
    (folder / "models.yaml").write_text(
        "models: [{model: ./my-model, name: chat}, {model: ./my-model, name: code}]"
    )
    for name in ("run", "other"):
        (folder / f"{name}.jsonl.gz").write_bytes(sandbox.run_log)
    (folder / "run.costs.json").write_bytes(sandbox.cost_model)
    write_ledger(folder / "ledger.db")


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    return Sandbox(tmp_path_factory.mktemp("sandbox"))


@pytest.fixture(scope="module")
def server(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenServer]:
    folder = tmp_path_factory.mktemp("server")
    flags = ("--batch-dir", "batches", "--ledger", "ledger.db", "--decision-log", "decisions")
    paths = [str(folder / flag) if not flag.startswith("--") else flag for flag in flags]
    running = OpenServer(folder, *paths, **sandbox.variables)
    try:
        running.wait_for(200)
        yield running
    finally:
        running.close()


def is_run(command: Command) -> bool:
    return not command.name.startswith(tuple(NOT_RUN))


@pytest.mark.campaign
@pytest.mark.parametrize("page", documented_pages(), ids=lambda page: page.stem)
def test_the_commands_of_a_page_do_what_it_says(
    page: Path, sandbox: Sandbox, server: OpenServer, tmp_path: Path
) -> None:
    commands = [command for command in commands_of(page) if is_run(command)]
    furnish(tmp_path, sandbox, server)
    server.reset()
    outcomes, complaints = sandbox.run(commands, tmp_path, server.url)
    assert len(outcomes) == len(commands), complaints
    for command, outcome in zip(commands, outcomes, strict=True):
        assert outcome.code == 0, f"{command.name} ended with {outcome.code}:\n{outcome.output}\n{complaints}"
        if command.shown and not command.name.startswith(FREE_OUTPUT):
            assert resembles(command, outcome.output), (
                f"{command.name} printed\n{outcome.output}\nbut the page shows\n{command.shown}"
            )


def test_what_is_not_run_is_there() -> None:
    names = [command.name for page in documented_pages() for command in commands_of(page)]
    assert [entry for entry in NOT_RUN if not any(name.startswith(entry) for name in names)] == []


def test_a_command_stands_in_a_fence() -> None:
    """An indented block would not be seen by these tests."""
    starts = ("    paceline ", "    $ ", "    curl ")
    for page in documented_pages():
        lines = page.read_text(encoding="utf-8").splitlines()
        assert [line for line in lines if line.startswith(starts)] == [], page.name
