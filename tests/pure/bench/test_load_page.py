"""The page of a sweep holds everything it shows, and shows text as text."""

from __future__ import annotations

import base64
from pathlib import Path

from paceline.lab.bench.load.sweep_page import SweepFigure, make_page
from paceline.lab.bench.tables import Grid


def test_pictures_are_inside_and_words_are_escaped(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(b"not really a picture")
    page = make_page(
        title="<model> & co",
        lead=["a < b"],
        grid=Grid(headings=("load", "<x>"), rows=[("1/s", "2 & 3")]),
        pictures=[SweepFigure(path=picture, heading='the "curve"', caption="<i>")],
        facts={"Command": "paceline bench sweep --title '<script>'"},
    )
    assert base64.b64encode(picture.read_bytes()).decode() in page
    assert "<script" not in page and "<model>" not in page and "<i>" not in page
    assert "<h1>&lt;model&gt; &amp; co</h1>" in page and ">2 &amp; 3</td>" in page
    assert page.startswith("<!doctype html>") and "http" not in page


def test_a_narrow_window_shows_every_column_with_its_heading() -> None:
    grid = Grid(headings=("load", "req/s", 'goodput "good"'), rows=[("1/s", "0.9", "0.5")])
    page = make_page(title="a", lead=[], grid=grid, pictures=[], facts={})
    row = '<tr><td>1/s</td><td data-heading="req/s">0.9</td>'
    assert f'{row}<td data-heading="goodput &quot;good&quot;">0.5</td></tr>' in page
    assert "content: attr(data-heading)" in page
