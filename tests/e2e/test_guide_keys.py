"""The commands of docs/guides/keys.md, run as they stand there, give what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from paceline.cli.main import run
from paceline.server.keys_entry import FIELDS, PRICES

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "keys.md"
TEXT = GUIDE.read_text(encoding="utf-8")


def test_the_commands_of_the_guide_do_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    num_shown = 0
    for block in re.findall(r"^```console\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL):
        for step in block.split("$ ")[1:]:
            command, _, shown = step.partition("\n")
            name, *arguments = shlex.split(command)
            assert name == "paceline" and run(arguments) == 0, command
            said = capsys.readouterr().out
            if arguments[1] == "add":
                assert re.fullmatch(r"pl-[\w-]{43}\n", said)
            else:
                num_shown += 1
                assert said == shown, command
    assert num_shown == 3


def test_the_guide_has_every_field() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)
    assert rows == list(FIELDS)
    assert all(f"`{name}`" in TEXT for name in PRICES)
