"""The documentation builds as a strict site that loads nothing from anywhere and can be searched without a server."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.documented import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed: pip install 'paceline[docs]'"
)
# What a browser fetches automatically when it shows a page; a link is followed by a reader only.
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


class Loaded(HTMLParser):
    """The addresses a page loads from."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in LOADED and given.get("rel") not in ("canonical", "next", "prev"):
            self.found.append(given.get(LOADED[tag]) or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    # No proxy and no address: whatever wanted the network would fail.
    environment = {**os.environ, "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    paths = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")]
    pages = {path.with_name("index.html") if path.stem == "README" else path for path in paths}
    built = {path.relative_to(site) for path in site.rglob("*.html")}
    assert pages - built == set()
    assert Path("index.html") in built and Path("ARCHITECTURE.html") in built


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        loaded = Loaded(path.read_text(encoding="utf-8")).found
        assert [address for address in loaded if re.match(r"(https?:)?//", address)] == [], path.name
        for address in loaded:
            if path.name != "404.html" and not address.startswith(("data:", "#")):
                assert (path.parent / re.split(r"[?#]", address)[0]).exists(), f"{path.name}: {address}"


def test_the_search_needs_no_server(site: Path) -> None:
    """The index is a script, which a page from a folder may load; JSON it may not."""
    index = site / "search" / "search_index.js"
    assert "continuous batching" in index.read_text(encoding="utf-8").lower()
