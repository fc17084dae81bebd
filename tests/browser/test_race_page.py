"""The race in a browser: live while `paceline demo --ui` runs, and recorded, from the files of the same demo."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.browser.viewing import NARROW, PATIENCE_MS, View, Viewer
from tests.e2e.shown_run import shown

pytestmark = pytest.mark.campaign
DEMO = ("demo", "--shape", "tiny", "--seconds", "1.5", "--rate", "10", "--rows", "4")
MODES = ["static", "dynamic", "continuous"]
# Every combination of the tracks' states that the page has been in.
KEEP_STATES = """() => {
  window.states = new Set();
  setInterval(() => window.states.add(paceline.tracks.map((track) => track.status.state).join()), 20);
}"""


@pytest.fixture(scope="module")
def folder(viewer: Viewer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("race")


@pytest.fixture(scope="module")
def live(viewer: Viewer, folder: Path) -> Iterator[str]:
    """The origin of a demonstration that has just been started."""
    with shown(folder, *DEMO, "--out", str(folder / "out"), until="The race is over") as origin:
        yield origin


@pytest.fixture(scope="module")
def recorded(live: str, folder: Path) -> Iterator[str]:
    """The same race from its files."""
    figures(folder)
    with shown(folder, "demo", "--replay", str(folder / "out")) as origin:
        yield origin


def figures(folder: Path) -> dict[str, Any]:
    """What the demonstration wrote, once it has."""
    path, until_s = folder / "out" / "demo.json", time.monotonic() + PATIENCE_MS / 1e3
    while time.monotonic() < until_s:
        with suppress(OSError, ValueError):  # not there yet, or not all of it
            return {mode["mode"]: mode["summary"] for mode in json.loads(path.read_text())["modes"]}
        time.sleep(0.1)
    raise AssertionError("the demonstration wrote no figures")


def reached(view: View) -> dict[str, dict[str, Any]]:
    """What the page says of each mode at the end."""
    found = view.value("Object.fromEntries(paceline.tracks.map((track) => [track.name, track.at(Infinity)]))")
    assert list(found) == MODES
    return dict(found)


def same_as_written(view: View, folder: Path) -> None:
    for mode, written in figures(folder).items():
        told = reached(view)[mode]
        assert told["tokens"] == pytest.approx(written["output_tokens_per_s"] * written["duration_s"], abs=1)
        assert told["done"] == written["requests"]["finished"] == 15
        assert told["rate"] == pytest.approx(written["output_tokens_per_s"], rel=1e-3)
        assert told["median"] == pytest.approx(written["e2e_s"]["p50"], rel=1e-3)
        assert told["padding"] == pytest.approx(written["padded_share"], abs=0.02)
        assert told["seconds"] == pytest.approx(written["duration_s"], rel=1e-3)
    assert view.value("paceline.tracks.map((track) => track.stage.disagreements)") == [0, 0, 0]


def pause(view: View) -> None:
    if view.value("paceline.race().playing"):
        view.page.keyboard.press("Space")
    view.wait("!paceline.race().playing")


def to_the_end(view: View) -> None:
    view.page.locator("#slider").fill("1")
    view.wait("paceline.race().time === paceline.race().total && !document.getElementById('result').hidden")


def test_each_mode_is_seen_while_it_runs_and_then_all_race_again(
    viewer: Viewer, live: str, folder: Path
) -> None:
    with viewer.view(live, "/ui/race") as view:
        page = view.page
        view.wait("paceline.tracks.length === 3")
        page.evaluate(KEEP_STATES)
        assert page.locator("#player").is_hidden(), "what runs cannot be moved"
        view.wait("paceline.tracks[0].status.state === 'over'")
        view.wait_for_pixels("lanes-static", "finish")
        view.shoot("race-live-1440")
        for track in (1, 2):
            view.wait(f"paceline.tracks[{track}].status.state === 'over'")
        view.wait("paceline.race().mode === 'race'")
        assert {"running,waiting,waiting", "over,running,waiting", "over,over,running"} <= set(
            page.evaluate("[...window.states]")
        )
        page.wait_for_selector("#result:not([hidden])")
        assert page.locator(".flag:visible").count() == 3
        same_as_written(view, folder)
        assert len(page.locator(".podium li").all_inner_texts()) == 3
        page.locator("#again").click()
        view.wait("paceline.race().playing && paceline.race().time > 0")
        assert page.locator("#result").is_hidden() and page.locator(".flag:visible").count() < 3
        page.locator("h1").click()
        pause(view)
        to_the_end(view)
        assert view.fits()


def test_a_recorded_race_is_played_by_one_clock(viewer: Viewer, recorded: str, folder: Path) -> None:
    with viewer.view(recorded, "/ui/race") as view:
        page = view.page
        view.wait("paceline.race().playing && paceline.race().time > 0")
        pause(view)
        page.locator("#slider").fill("0.1")
        view.wait("Math.abs(paceline.race().time - paceline.race().total / 10) < 0.01")
        view.wait("document.getElementById('clock').textContent.startsWith(paceline.race().time.toFixed(1))")
        page.locator("#slider").blur()
        shown_s = page.locator(".figures div:nth-child(5) dd").all_inner_texts()
        assert len(set(shown_s)) == 1, "one clock for all, while none is done"
        before = view.value("paceline.race().time")
        page.keyboard.press("ArrowRight")
        view.wait(f"paceline.race().time > {before}")
        view.shoot("race-recorded-1440")
        to_the_end(view)
        same_as_written(view, folder)
        assert view.pixels("lanes-static", "padding") > 0 < view.pixels("lanes-dynamic", "padding")
        assert view.pixels("lanes-continuous", "padding") == 0
        assert "continuous" in page.locator(".gains small").first.inner_text()
        page.emulate_media(color_scheme="dark")
        view.wait_for_pixels("lanes-static", "padding")
        view.shoot("race-recorded-1440-dark")


def test_with_reduced_motion_the_result_is_shown_at_once(viewer: Viewer, recorded: str) -> None:
    with viewer.view(recorded, "/ui/race", size=NARROW, dark=True) as view:
        page = view.page
        page.emulate_media(reduced_motion="reduce")
        page.reload()
        page.wait_for_selector("#result:not([hidden])")
        assert not view.value("paceline.race().playing")
        assert view.fits()
        view.shoot("race-recorded-390-dark", whole=True)
        page.emulate_media(color_scheme="light")
        page.set_viewport_size({"width": 1440, "height": 1000})
        view.wait_for_pixels("lanes-static", "padding")
        assert view.fits()
        page.set_viewport_size(NARROW)
        page.keyboard.press("r")
        view.wait("paceline.race().playing")
        view.wait_for_pixels("lanes-static", "decode")
        view.shoot("race-recorded-390", whole=True)
        assert view.fits()
