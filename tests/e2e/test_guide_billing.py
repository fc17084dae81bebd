"""The commands of docs/guides/billing.md, run on a ledger of four requests, print what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from paceline.cli.main import run
from paceline.server.billing.ledger_db import INCOMPLETE, LedgerDb
from tests.pure.billing.billing_helpers import ended, opening

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "billing.md"
TEXT = GUIDE.read_text(encoding="utf-8")


def write_ledger(path: Path) -> None:
    db = LedgerDb(path)
    sizes = {"cached_tokens": 40, "output_tokens": 7, "block_us": 3_000_000}
    amounts = {"prompt_nano": 9000, "cached_nano": 2000, "output_nano": 1245}
    whole = {**sizes, **amounts}
    again = {**whole, "block_us": 6_500_000, "recomputed_tokens": 12, "preemptions": 2, "kv_nano": 20_000}
    left = {"cached_tokens": 0, "output_tokens": 11, "block_us": 1_000_000, "output_nano": 15_835}
    db.write(
        [opening(n, key="team-b" if n == 4 else "team-a", prompt_tokens=100) for n in (1, 2, 3, 4)],
        [
            ended(1, **whole),
            ended(2, **again),
            ended(3, state=INCOMPLETE, prompt_nano=900, cached_nano=0, **left),
            ended(4, **whole),
        ],
    )
    db.close()


def test_the_commands_of_the_guide_print_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_ledger(tmp_path / "ledger.db")
    shown = 0
    for block in re.findall(r"^```console\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL):
        for step in block.split("$ ")[1:]:
            command, _, expected = step.partition("\n")
            name, *arguments = shlex.split(command)
            assert name == "paceline" and run(arguments) == 0, command
            assert capsys.readouterr().out == expected, command
            shown += 1
    assert shown == 2


def test_the_guide_names_everything_a_receipt_says() -> None:
    from paceline.server.billing.charge import receipt
    from tests.pure.billing.billing_helpers import record

    told = receipt(record())
    assert all(f'"{name}"' in TEXT for name in (*told, *told["price"]))
