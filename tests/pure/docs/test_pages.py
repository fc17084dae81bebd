"""What pages promise: README and its like stay short, and what they name, list or measure is what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.server.access.keys_file import FIELDS, PRICES
from paceline.server.batches.line_run import NOT_RUN
from paceline.server.billing.charge import receipt
from paceline.version import __version__
from tests.documented import ROOT, Command, resembles
from tests.pure.billing.billing_helpers import record
from tools import api_pages
from tools.figure_tables import TABLES, filled, pages, sentences

PACKAGE = ROOT / "src" / "paceline"
MAX_README_WORDS = 700
MAX_CHANGE = 160
# Pages name the request, tenant or thread instead.
VAGUE = re.compile(r"\b(?:nobody|somebody|everybody|whoever)\b", re.IGNORECASE)
# A walk that names more files than these is no way into the code.
WALKS = {"A request in the engine": 18, "A request over HTTP": 16}


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def files_of(text: str) -> set[str]:
    return set(re.findall(r"`([\w/]+\.py)`", text))


def table_of(heading: str) -> str:
    """The lines of the table below a heading of ARCHITECTURE.md."""
    section = page("ARCHITECTURE.md").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return "\n".join(line for line in section.splitlines() if line.startswith("|"))


def all_pages() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def test_readme_is_short() -> None:
    assert len(page("README.md").split()) <= MAX_README_WORDS


def test_architecture_names_files_and_folders_that_exist() -> None:
    text = page("ARCHITECTURE.md")
    folders = re.findall(r"^\| `([\w/]+)`", text, re.MULTILINE)
    assert len(files_of(text)) > 30 and len(folders) > 5
    assert [name for name in (*files_of(text), *folders) if not (PACKAGE / name).exists()] == []


@pytest.mark.parametrize("heading", WALKS)
def test_a_walk_names_few_files(heading: str) -> None:
    assert 10 <= len(files_of(table_of(heading))) <= WALKS[heading]


def test_the_changelog_has_the_version_and_short_lines() -> None:
    text = page("CHANGELOG.md")
    assert re.search(rf"^## \[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d$", text, re.MULTILINE)
    assert [line for line in text.splitlines() if len(line) > MAX_CHANGE] == []


def test_benchmarks_and_tools_that_pages_name_exist() -> None:
    named = {
        (path.name, name)
        for path in all_pages()
        for name in re.findall(
            r"\b((?:benchmarks|tools)[./](?!md\b)\w[\w./-]*)", path.read_text(encoding="utf-8")
        )
    }
    missing = [(path, name) for path, name in sorted(named) if not _exists(name)]
    assert len(named) > 40 and missing == []


def _exists(name: str) -> bool:
    """A file or folder, or a module by its dotted name, with a trailing full stop or without."""
    name = name.rstrip("./-")
    place = ROOT / name
    dotted = ROOT / name.replace(".", "/")
    return place.exists() or dotted.exists() or dotted.with_suffix(".py").exists()


def test_pages_name_their_subject() -> None:
    assert [path.name for path in all_pages() if VAGUE.search(path.read_text(encoding="utf-8"))] == []


# ----------------------------------------------------------------
# What guides list is what the code has.


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


# ----------------------------------------------------------------
# Figures on the pages are those of the result files.


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


# ----------------------------------------------------------------
# The generated pages are what the code would write now.


def test_the_generated_pages_are_up_to_date() -> None:
    for path, text in api_pages.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run `make options`"


def test_the_pages_have_what_they_are_for() -> None:
    http, python = api_pages.http_page(), api_pages.python_page()
    assert "| `POST /v1/chat/completions` |" in http and "\n## POST /v1/chat/completions\n" in http
    assert "| `POST /v1/batches` |" in http and "| `GET /health/ready` |" in http
    assert "async def abort(request_id: str) -> None" in python
    assert "| `max_tokens` | int | `16` |" in python
