"""A sweep as one HTML file that needs nothing beside it: pictures inside, no script, no other host.

Owns the layout of the page. It is given words, rows and pictures and computes nothing.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.lab.bench.tables import Grid

STYLE = """
:root { color-scheme: light dark; --ink: #222; --soft: #5a5f69; --line: #e4e6ea; --back: #fff; --card: #fafbfc }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --soft: #a0a6b1; --line: #353a43; --back: #16181c; --card: #1e2126 }
}
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 76rem; padding: 2rem 1.2rem 4rem; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.7rem; margin: 0 0 .2rem } h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem }
p { margin: .3rem 0; color: var(--soft) }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; background: var(--card) }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .85rem }
th, td { padding: .45rem .55rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
th { font-weight: 600; color: var(--soft); white-space: normal; vertical-align: bottom }
tr:last-child td { border-bottom: 0 }
th:first-child, td:first-child { text-align: left }
.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere } .facts td:first-child { width: 12rem }
@media (max-width: 60rem) {
  .figures, .figures tbody, .figures tr { display: block }
  .figures tr:first-child { display: none }
  .figures td { display: flex; justify-content: space-between; gap: 1rem; padding: .25rem .7rem; border: 0 }
  .figures td:first-child { padding-top: .6rem; font-weight: 600 }
  .figures td:last-child { padding-bottom: .6rem; border-bottom: 1px solid var(--line) }
  .figures td[data-heading]::before { content: attr(data-heading); color: var(--soft) }
}
figure { margin: 0 0 1.2rem; padding: .6rem; background: #fff; border: 1px solid var(--line); border-radius: 8px }
img { display: block; width: 100%; height: auto }
figcaption { color: #5a5f69; font-size: .9rem; padding: .4rem .2rem 0 }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFigure:
    path: Path
    heading: str
    caption: str


def make_page(
    *,
    title: str,
    lead: Sequence[str],
    grid: Grid,
    pictures: Sequence[SweepFigure],
    facts: Mapping[str, str],
) -> str:
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{_text(title)}</h1>",
        *(f"<p>{_text(line)}</p>" for line in lead),
        "<h2>Figures</h2>",
        _table(grid),
        *(_figure(picture) for picture in pictures),
        "<h2>How it was measured</h2>",
        _facts(facts),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _table(grid: Grid) -> str:
    head = "".join(f"<th>{_text(heading)}</th>" for heading in grid.headings)
    rows = "".join(f"<tr>{_cells(grid.headings, row)}</tr>" for row in grid.rows)
    return f'<div class="scroll"><table class="figures"><tr>{head}</tr>{rows}</table></div>'


def _cells(headings: Sequence[str], row: Sequence[str]) -> str:
    """The cells of a row. A narrow window shows them below each other, each with its heading."""
    others = zip(headings[1:], row[1:], strict=True)
    named = (f'<td data-heading="{_text(heading)}">{_text(cell)}</td>' for heading, cell in others)
    return f"<td>{_text(row[0])}</td>{''.join(named)}"


def _figure(picture: SweepFigure) -> str:
    data = base64.b64encode(picture.path.read_bytes()).decode()
    return (
        f"<h2>{_text(picture.heading)}</h2><figure>"
        f'<img alt="{_text(picture.heading)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{_text(picture.caption)}</figcaption></figure>"
    )


def _facts(facts: Mapping[str, str]) -> str:
    rows = "".join(f"<tr><td>{_text(name)}</td><td>{_text(value)}</td></tr>" for name, value in facts.items())
    return f'<div class="scroll"><table class="facts">{rows}</table></div>'


def _text(value: str) -> str:
    return html.escape(value, quote=True)
