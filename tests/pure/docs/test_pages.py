"""What README, ARCHITECTURE and CHANGELOG promise about themselves: short, with names that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.version import __version__
from tests.documented import ROOT

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
