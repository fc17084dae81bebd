"""Figures on the pages are those of the result files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documented import ROOT
from tools.figure_tables import TABLES, filled, pages, sentences

WITH_FIGURES = [page for page in pages() if "<!--figures:" in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", WITH_FIGURES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_tables_of_a_page_are_those_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert filled(text) == text, "python -m tools.figure_tables writes them again"


def test_every_table_is_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in pages())
    assert set(re.findall(r"<!--figures:([\w-]+)-->", text)) == set(TABLES)
    assert text.count("<!--figures:") == text.count("<!--end-->")


@pytest.mark.parametrize("page", sentences())
def test_running_text_repeats_the_results(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert [sentence for sentence in sentences()[page] if sentence not in text] == []


def test_a_changed_figure_is_found() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    wrong = re.sub(r"\*\*[\d,]+\*\*", "**7**", text)
    assert wrong != text and filled(wrong) == text
