"""What mkdocs gets beside mkdocs.yml: pages from the root of the repository, and links that leave the site.

README is the first page; architecture, security, changelog and contributing are pages too. Links are written for the
repository, where every file can be linked to: here those to pages become links to pages, those to a folder of pages
links to its first page, and those to code become plain text. One to nothing fails the build, which is strict.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ROOT_PAGES = {
    "README.md": "index.md",
    **{name: name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")},
}
_TARGET = re.compile(r"\]\(([^()\s]+)\)")
_PLAIN = "\0"  # the target of a link that becomes text
_TO_TEXT = re.compile(rf"\[([^\[\]]*)\]\({_PLAIN}\)")
_log = logging.getLogger("mkdocs.hooks.site")


def on_config(config: Any) -> Any:
    """A folder in the navigation stands for all its pages."""
    for entry in config["nav"]:
        for title, value in entry.items():
            if isinstance(value, str) and value.endswith("/"):
                entry[title] = [path.relative_to(DOCS).as_posix() for path in _pages(DOCS / value)]
    return config


def on_files(files: Files, config: Any) -> Files:
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    sources = {site: name for name, site in ROOT_PAGES.items()}
    site_path = page.file.src_uri
    source = ROOT / sources[site_path] if site_path in sources else DOCS / site_path

    def changed(found: re.Match[str]) -> str:
        place = _place(source, found.group(1))
        if place is None:
            return found.group(0)
        path, anchor = place
        to = _site_path(path)
        if to is None and not path.exists():
            _log.warning("%s links to %s, which is not there", source.relative_to(ROOT), found.group(1))
        if to is None:
            return f"]({_PLAIN})"
        return f"]({os.path.relpath(to, Path(site_path).parent)}{anchor})"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        part if part.startswith("```") else _TO_TEXT.sub(r"\1", _TARGET.sub(changed, part)) for part in parts
    )


def _place(source: Path, target: str) -> tuple[Path, str] | None:
    """The file a link means, and its anchor; None for addresses and anchors of the same page."""
    if re.match(r"[a-z]+:|#", target):
        return None
    path, mark, anchor = target.partition("#")
    return Path(os.path.normpath(source.parent / path)), mark + anchor


def _site_path(path: Path) -> str | None:
    """Where the site has a file of the repository."""
    if path.parent == ROOT and path.name in ROOT_PAGES:
        return ROOT_PAGES[path.name]
    if path.is_relative_to(DOCS) and path.is_dir() and _pages(path):
        path = _pages(path)[0]
    return path.relative_to(DOCS).as_posix() if path.is_relative_to(DOCS) and path.is_file() else None


def _pages(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.md"))
