"""The commands of docs/guides/benchmarks.md that put load on a server, run as they stand there against a mock."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli.main import run
from tests.mock_openai import running_mock

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "benchmarks.md"
TEXT = GUIDE.read_text(encoding="utf-8")
COMMANDS = re.findall(r"^(?:\$ )?paceline (bench (?:serve|sweep|compare) .*)$", TEXT, re.MULTILINE)
# A flag given twice has its last value: the guide's own numbers take too long here.
QUICK: dict[str, Callable[[str], list[str]]] = {
    "serve": lambda url: ["--url", url, "--num-prompts", "12", "--rate", "100"],
    "sweep": lambda url: ["--url", url, "--duration", "0.4"],
    "compare": lambda url: [],
}


@pytest.mark.campaign
def test_the_commands_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) >= 4
    with running_mock(ttft_ms=2, gap_ms=0) as mock:
        for name in ("before.json", "after.json"):
            flags = ["--rate", "100", "--num-prompts", "12", "--json", name]
            assert run(["bench", "serve", "--url", mock.url, *flags]) == 0
        for command in COMMANDS:
            arguments = shlex.split(command)
            # Chance may make one run worse than the other.
            allowed = (0, 1) if "--fail-if-worse" in command else (0,)
            assert run([*arguments, *QUICK[arguments[1]](mock.url)]) in allowed, command


def test_the_guide_shows_the_block_as_it_is_printed() -> None:
    shown = [line for line in TEXT.splitlines() if re.fullmatch(r"[-=].*[-=]", line) and len(line) == 50]
    assert shown[0] == "============ Serving Benchmark Result ============" and shown[-1] == "=" * 50
    assert "---------------Time to First Token----------------" in shown
