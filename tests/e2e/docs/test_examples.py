"""Every example runs and shows what it says it shows."""

from __future__ import annotations

import ast
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documented import ROOT
from tests.e2e.docs.sandbox import OpenServer, Sandbox
from tests.e2e.model_cli import TIMEOUT_S, environment

FOLDER = ROOT / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
MAX_LINES = 40
# What each prints at its end, on a model that says nothing sensible.
SHOWS = {
    "01_generate_offline": r"seed 7, alone:.+\nthe same\nseed 8, branch 0:.+\nseed 8, branch 1:.+",
    "02_chat_stream": r"\d+ tokens; waited [\d.]+ ms",
    "03_async_and_abort": r"left early: after a few tokens\nended by its name: finish_reason abort",
    "04_priorities_and_tenants": r"fair: \w+ (alice5 bob6|bob6 alice5) .*\npriority: bob6 (flood\d ){5}alice5",
    "05_fork_and_prune": r"step 24: 6 live, .*\n\d+ branches, 6 of them to the end; the best:\n-[\d.]+: .*",
    "06_write_a_policy": r"fcfs: TTFT .* s\nShortPromptsFirst: TTFT p50 [\d.]+ s, p99 [\d.]+ s",
    "07_simulate_and_plot": r"knee: \d+/s, after which p99 TTFT doubles\nwrote .*curve.png and .*timeline.png",
    "08_explain_and_replay": r"replay: identical, \d+ steps\ndecision log: whole, \d+ decisions",
    "09_structured_output": r"(yes|no); 20\d\d-\d\d-\d\d\nfields: name, age, languages",
    "10_trees": r"round 3: 2 kept, .*\n[\s\S]+\n6 branches, \d+ tokens\nbest of 4, \d+ tokens: -[\d.]+",
    "11_rag": r"3 near, the best \([\d.]+\): .+\nanswer: [\s\S]*",
}


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    return Sandbox(tmp_path_factory.mktemp("sandbox"))


@pytest.fixture
def server(sandbox: Sandbox, tmp_path: Path) -> Iterator[OpenServer]:
    running = OpenServer(tmp_path, **sandbox.variables)
    try:
        running.wait_for(200)
        yield running
    finally:
        running.close()


def test_the_examples_are_numbered_short_and_listed() -> None:
    listed = re.findall(
        r"^\| `(\w+)\.py` \|", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert listed == [path.stem for path in EXAMPLES] == list(SHOWS)
    for number, path in enumerate(EXAMPLES, 1):
        text = path.read_text(encoding="utf-8")
        assert path.name.startswith(f"{number:02d}_")
        assert f"python examples/{path.name}" in (ast.get_docstring(ast.parse(text)) or "")
        assert len(text.splitlines()) <= MAX_LINES, path.name


@pytest.mark.campaign
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_shows_what_it_says(
    path: Path, sandbox: Sandbox, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    arguments: list[str] = []
    if path.stem in ("02_chat_stream", "11_rag"):
        arguments = [request.getfixturevalue("server").url]
    elif path.stem == "07_simulate_and_plot":
        arguments = ["azure-conv", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        cwd=tmp_path,
        env=environment(tmp_path, **sandbox.variables, TMPDIR=str(tmp_path)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(rf"(?:^|\n){SHOWS[path.stem]}\s*$", done.stdout, re.DOTALL), done.stdout


def test_the_chat_example_says_that_it_needs_a_server(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        # Bound and not listened on: connections are refused.
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, str(FOLDER / "02_chat_stream.py"), url],
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith(f"no server at {url}: start one with `make serve`"), done.stderr
