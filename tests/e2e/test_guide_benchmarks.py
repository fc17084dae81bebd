"""The commands of docs/guides/benchmarks.md that put load on a server, run as they stand there against a mock."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from paceline.cli.main import run
from tests.mock_openai import running_mock

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "benchmarks.md"
TEXT = GUIDE.read_text(encoding="utf-8")
COMMANDS = re.findall(r"^(?:\$ )?paceline (bench (?:serve|sweep|compare) .*)$", TEXT, re.MULTILINE)
QUICK = {"serve": ["--num-prompts", "12"], "sweep": ["--duration", "0.4"], "compare": []}


def test_the_commands_of_the_guide_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) >= 4
    with running_mock(ttft_ms=2, gap_ms=0) as mock:
        for name in ("before.json", "after.json"):
            flags = ["--rate", "100", "--num-prompts", "12", "--json", name]
            assert run(["bench", "serve", "--url", mock.url, *flags]) == 0
        for command in COMMANDS:
            arguments = shlex.split(command)
            # A flag given twice has its last value: the guide's own numbers take too long here.
            quick = QUICK[arguments[1]]
            url = [] if arguments[1] == "compare" else ["--url", mock.url, "--rate", "100"]
            code = run([*arguments, *quick, *(url[:2] if arguments[1] == "sweep" else url)])
            assert code == (1 if "--fail-if-worse" in command and "worse by" in capsys.readouterr().err else 0)


def test_the_guide_shows_the_block_as_it_is_printed() -> None:
    shown = [line for line in TEXT.splitlines() if re.fullmatch(r"[-=].*[-=]", line) and len(line) == 50]
    assert shown[0] == "============ Serving Benchmark Result ============" and shown[-1] == "=" * 50
    assert "---------------Time to First Token----------------" in shown
