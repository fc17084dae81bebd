"""The commands and the program of docs/guides/batches.md, run as they stand there, give what the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.server.batches.results import NOT_RUN
from tests.e2e.client_server import KEY, MODEL, ClientServer, client_server

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "batches.md"
TEXT = GUIDE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    folder = tmp_path_factory.mktemp("guide")
    with client_server(folder, "--batch-dir", str(folder / "batches")) as running:
        running.wait_for(200)
        yield running


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def adapted(text: str, server: ClientServer) -> str:
    """The server of the test in place of the one on the page, its key and its model."""
    text = text.replace("http://127.0.0.1:8000", server.url).replace("smollm2", MODEL)
    text = text.replace('api_key="none"', f'api_key="{KEY}"').replace("sleep 1", "sleep 0.1")
    return text.replace("curl -s", f"curl -s -H 'Authorization: Bearer {KEY}'")


def test_the_commands_and_the_program_do_what_the_guide_shows(server: ClientServer, tmp_path: Path) -> None:
    (session,) = blocks("console")
    script, shown = [], []
    for step in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
        command, end, rest = step.partition("\nEND\n")
        if not end:
            command, _, rest = step.partition("\n")
        script.append(adapted(command, server) + end.rstrip("\n"))
        shown.append(rest)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "".join(shown), done.stderr
    (program,) = blocks("python")
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    answers = subprocess.run(
        [sys.executable, "-c", adapted(program, server)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=True,
    )
    assert answers.stdout.count('"status_code":200') == 2


def test_the_guide_has_every_reason_for_not_running_a_line() -> None:
    assert all(f"`{code}`" in TEXT for code, _ in NOT_RUN.values())
