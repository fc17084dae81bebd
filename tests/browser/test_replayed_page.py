"""Runs that are over on the page, in a browser: a simulation, and the log of one that the page is compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.audit.runlog import read_run_log
from paceline.core.events import StepEvents
from paceline.scheduler.state import SchedulerState
from paceline.sim.replay import replay
from tests.browser.viewing import NARROW, View, Viewer
from tests.e2e.model_cli import run
from tests.e2e.shown_run import shown

pytestmark = pytest.mark.xdist_group("browser")
SIMULATED = (
    *("sim", "--trace", "uniform:200-900x60-200", "--num-requests", "60", "--rate", "20"),
    *("--max-num-seqs", "16", "--num-blocks", "200", "--block-size", "16", "--host-blocks", "400"),
    *("--max-model-len", "2048", "--faults", "preempt=0.02", "--seed", "3"),
)


class Rows:
    """Who is on which row after each step of a log, from the state of the scheduler that replays it."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self.after: dict[int, list[list[int]]] = {}

    def submitted(self, plan: object, decisions: object, time_s: float) -> None:
        rows = self.state.rows
        live = [row for row in range(rows.high) if rows.live[row]]
        self.after[plan.seq] = [[row, int(rows.request_id[row])] for row in live]  # type: ignore[attr-defined]

    def completed(self, seq: int, time_s: float, *, failed: bool = False) -> None: ...

    def told(self, events: StepEvents) -> None: ...

    def close(self, decisions: object, time_s: float) -> None: ...


def test_a_simulation_is_played_and_both_ways_of_giving_way_are_seen(viewer: Viewer, tmp_path: Path) -> None:
    with shown(tmp_path, *SIMULATED) as origin, viewer.view(origin) as view:
        page = view.page
        view.wait("stage.checked > 3")
        assert page.locator("#link").inner_text() == "recorded"
        assert page.locator("#steering").is_hidden() and page.locator("#chat").is_hidden()
        page.locator("#play-button").click()
        before = view.value("paceline.player().time")
        view.wait("document.getElementById('play-button').textContent === 'Play'")
        seconds = float(page.locator("#play-slider").get_attribute("max") or 0)
        assert seconds > 1
        page.locator("#play-slider").fill(str(view.value("paceline.player().slider.max")))
        view.wait("stage.steps.length > 50 && stage.scene.finished >= 50")
        assert view.value("paceline.player().time") > before
        kinds = set(view.value("stage.marks.map((mark) => mark.kind)"))
        assert {"swap", "recompute", "finish"} <= kinds
        view.wait_for_pixels("lanes", "finish")
        at = view.value("stage.marks.findLast((mark) => mark.kind === 'swap').at")
        page.locator("#play-slider").fill(str(at + 0.2))
        view.wait_for_pixels("lanes", "swap")
        gave_way = view.value("stage.marks.findLast((mark) => mark.kind === 'swap').request")
        page.evaluate("request => { paceline.drawer.show(request); }", gave_way)
        page.wait_for_selector("#drawer-story li:has-text('host memory')")
        assert "gave way, swapped out" in page.locator("#drawer-falls span").all_inner_texts()
        assert view.value("stage.disagreements") == 0
        view.shoot("replay")
        follow_theme_and_window_while_paused(view)


def follow_theme_and_window_while_paused(view: View) -> None:
    page = view.page
    page.keyboard.press("Escape")  # the drawer
    page.locator("#play-slider").focus()
    playing = view.value("paceline.player().playing")
    page.keyboard.press("Space")
    view.wait(f"paceline.player().playing === {str(not playing).lower()}")
    if not playing:
        page.keyboard.press("Space")
        view.wait("!paceline.player().playing")
    page.emulate_media(color_scheme="dark")
    for chart in ("steps", "rates", "batch"):
        page.wait_for_selector(f"#chart-{chart} .uplot")
    page.evaluate(
        "addEventListener('resize', () => { window.wide = document.documentElement.scrollWidth; }, { once: true })"
    )
    page.set_viewport_size(NARROW)
    view.wait("window.wide > 0")
    assert view.value("window.wide <= innerWidth"), "it is too wide until the next picture"
    view.wait("document.querySelector('#chart-steps .uplot').clientWidth <= innerWidth")
    assert view.fits()
    view.shoot("replay-paused-dark-narrow", whole=True)


def test_a_log_is_played_step_by_step_as_it_was(viewer: Viewer, tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    done = run(*SIMULATED, "--log", str(log), cache=tmp_path)
    assert done.returncode == 0, done.stderr
    watchers: list[Rows] = []

    def watch(state: SchedulerState) -> Rows:
        watchers.append(Rows(state))
        return watchers[0]

    assert replay(read_run_log(log), watch=watch).is_equal
    (rows,) = watchers
    with shown(tmp_path, "replay", str(log)) as origin, viewer.view(origin, size=NARROW, dark=True) as view:
        view.wait("stage.scene !== null")
        view.keep_pictures()
        view.page.locator("#play-speed").select_option("32")
        view.wait("!paceline.player().playing && stage.scene.finished === 60")
        pictures = view.pictures()
        assert len(pictures) > 50
        assert {seq: rows.after[seq] for seq in pictures} == pictures
        assert view.value("stage.disagreements") == 0
        assert view.fits()
        view.shoot("replay-narrow-dark", whole=True)
