"""What guides list is what the code has."""

from __future__ import annotations

import re

from paceline.server.access.keys_file import FIELDS, PRICES
from paceline.server.batches.line_run import NOT_RUN
from paceline.server.billing.charge import receipt
from tests.documented import ROOT, Command, resembles
from tests.pure.billing.billing_helpers import record


def guide(name: str) -> str:
    return (ROOT / "docs" / "guides" / f"{name}.md").read_text(encoding="utf-8")


def test_keys_has_every_field() -> None:
    text = guide("keys")
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == list(FIELDS)
    assert all(f"`{name}`" in text for name in PRICES)


def test_billing_names_everything_a_receipt_says() -> None:
    done = record()
    told = receipt(done, done.charge)
    assert all(f'"{name}"' in guide("billing") for name in (*told, *told["price"]))


def test_batches_has_every_reason_for_not_running_a_line() -> None:
    assert all(f"`{code}`" in guide("batches") for code, _ in NOT_RUN.values())


def test_an_output_is_compared_word_for_word_or_by_its_shape() -> None:
    shown = "identical: 48,211 steps\nhead: 4...\n...\n"
    loose = Command(page="a", text="b", shown=shown)
    exact = Command(page="a", text="b", shown=shown, is_exact=True)
    assert resembles(loose, "identical: 7 steps\nhead: 9ab\n")
    assert resembles(exact, "identical: 48,211 steps\nhead: 4ab\nmore\nand more\n")
    assert not resembles(exact, "identical: 7 steps\nhead: 4ab\n")
    assert not resembles(loose, "identical: some steps\nhead: 4ab\n")
    assert not resembles(loose, "identical: 7 steps\n")
