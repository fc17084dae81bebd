"""Runs that are over on the page, in a browser: a simulation, and the log of one that the page is compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.audit.runlog import read_run_log
from paceline.core.events import StepEvents
from paceline.lab.sim.replayer import replay
from paceline.scheduler.state import SchedulerState
from tests.browser.viewing import NARROW, View, Viewer
from tests.e2e.model_cli import run
from tests.e2e.shown_run import shown

pytestmark = pytest.mark.campaign
SIMULATED = (
    *("sim", "--trace", "uniform:200-900x60-200", "--num-requests", "60", "--rate", "20"),
    *("--max-num-seqs", "16", "--num-blocks", "200", "--block-size", "16", "--host-blocks", "400"),
    *("--max-model-len", "2048", "--faults", "preempt=0.02", "--seed", "3"),
)
# Two requests of more than a minute each, and minutes between them.
RESTING = (
    *("sim", "--trace", "fixed:3000x20000", "--num-requests", "2", "--rate", "0.005", "--seed", "0"),
    *("--max-num-seqs", "61", "--num-blocks", "2500", "--block-size", "16", "--max-model-len", "24000"),
)
# Batches of eight, whose prompts and answers differ in length.
PADDED = (
    *("sim", "--mode", "static", "--batch-size", "8", "--trace", "uniform:100-900x20-300", "--seed", "5"),
    *("--num-requests", "24", "--rate", "50", "--max-num-seqs", "16", "--max-model-len", "2048"),
)
# Whether the labels of this number of lanes keep off the edges of what they are drawn on.
LABELS_ARE_WHOLE = """(count) => {
  const { lanes, stage } = paceline, most = stage.mostRow;
  stage.mostRow = count - 1;
  lanes.fit(count, lanes.now);
  const { width, height } = lanes.labels, pen = lanes.labels.getContext("2d");
  const edges = [0, height - 1].flatMap((y) => [...pen.getImageData(0, y, width, 1).data]);
  stage.mostRow = most;
  return lanes.lanes === count && edges.every((value) => value === 0);
}"""


class Rows:
    """Which request is on which row after each step of a log, from the state of the scheduler that replays it."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self.after: dict[int, list[list[int]]] = {}

    def submitted(self, plan: object, decisions: object, time_s: float) -> None:
        rows = self.state.rows
        live = [row for row in range(rows.high) if rows.live[row]]
        self.after[plan.seq] = [[row, int(rows.request_id[row])] for row in live]  # type: ignore[attr-defined]

    def completed(self, seq: int, time_s: float, *, failed: bool = False) -> None: ...

    def on_events(self, events: StepEvents) -> None: ...

    def close(self, decisions: object, time_s: float) -> None: ...


def test_a_simulation_is_played_and_both_kinds_of_preemption_are_seen(viewer: Viewer, tmp_path: Path) -> None:
    with shown(tmp_path, *SIMULATED) as origin, viewer.view(origin) as view:
        page = view.page
        view.wait("stage.checked > 3")
        assert page.locator("#link").inner_text() == "recorded"
        assert page.locator("#steering").is_hidden() and page.locator("#traffic").is_hidden()
        page.locator("#play-button").click()
        before = view.value("paceline.player().time")
        view.wait("document.getElementById('play-button').textContent === 'Play'")
        seconds = float(page.locator("#play-slider").get_attribute("max") or 0)
        assert seconds > 1
        page.locator("#play-slider").fill(str(view.value("paceline.player().slider.max")))
        view.wait("stage.steps.length > 50 && stage.snapshot.finished >= 50")
        assert view.value("paceline.player().time") > before
        kinds = set(view.value("stage.marks.map((mark) => mark.kind)"))
        assert {"swap", "recompute", "finish"} <= kinds
        view.wait_for_pixels("lanes", "finish")
        at = view.value("stage.marks.findLast((mark) => mark.kind === 'swap').at")
        page.locator("#play-slider").fill(str(at + 0.2))
        view.wait_for_pixels("lanes", "swap")
        preempted = view.value("stage.marks.findLast((mark) => mark.kind === 'swap').request")
        page.evaluate("request => { paceline.drawer.show(request); }", preempted)
        page.wait_for_selector("#drawer-story li:has-text('host memory')")
        assert "preempted: swapped out" in page.locator("#drawer-falls span").all_inner_texts()
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


def test_a_run_that_rests_is_shown_at_rest_and_a_story_stays_whole(viewer: Viewer, tmp_path: Path) -> None:
    with shown(tmp_path, *RESTING) as origin, viewer.view(origin) as view:
        page, slider = view.page, view.page.locator("#play-slider")
        view.wait("stage.snapshot !== null")
        page.locator("#play-button").click()
        slider.fill("0")
        view.wait("stage.snapshot.time_s === 0 && stage.rows.size === 0")
        assert view.value("paceline.player().times[1]") > 1, "nothing is told before the first request"
        slider.fill("30")
        view.wait("paceline.charts.data[1][1].includes(0)")
        ago, rates = view.value("paceline.charts.data[1].slice(0, 2)")
        assert [rate is None for rate in rates] == [at < -30 for at in ago], (
            "there was no run before its beginning"
        )
        page.locator("#play-speed").select_option("32")
        play_until(view, 80)
        assert view.value("stage.rows.size") == 1
        page.evaluate("() => { paceline.drawer.show(0); }")
        way_is_whole(view)
        ended_s = view.value("paceline.drawer.explained.branches[0].decisions.at(-1).time_s")
        play_until(view, ended_s + 62)
        way_is_whole(view)
        assert view.value("stage.past.parts.size") == 1
        charts_rest(view)
        view.shoot("replay-at-rest")
        page.keyboard.press("Escape")
        slider.fill("100")  # what is played at once begins after the prompt
        view.wait("stage.rows.size === 1")
        page.evaluate("() => { paceline.drawer.show(0); }")
        way_is_whole(view)
        page.keyboard.press("Escape")
        slider.fill(str(ended_s + 20))
        view.wait("stage.rows.size === 0")
        steps_end_where_they_ended(view, ended_s)
        view.shoot("replay-after-a-request")
        for count in (1, 61, 100, 143, 200):
            assert page.evaluate(LABELS_ARE_WHOLE, count), count
        assert view.value("stage.disagreements") == 0


def play_until(view: View, time_s: float) -> None:
    view.page.locator("#play-button").click()
    view.wait(f"paceline.player().time > {time_s}")
    view.page.locator("#play-button").click()
    view.wait("!paceline.player().playing")


def way_is_whole(view: View) -> None:
    view.wait("document.querySelectorAll('#drawer-falls span').length === 3")
    labels = view.page.locator("#drawer-falls span").all_inner_texts()
    assert labels == ["prompt, 2,048 tokens", "prompt, 952 tokens", "decode"], labels


def charts_rest(view: View) -> None:
    """A minute without a step: nothing of steps, no tokens in any second, no requests."""
    view.wait("paceline.charts.data[0][0].length === 0")
    rates, requests = view.value("paceline.charts.data[1]"), view.value("paceline.charts.data[2]")
    assert len(rates[0]) >= 58 and set(rates[1]) == set(rates[2]) == {0}
    assert set(requests[1]) == set(requests[2]) == {0}
    gauges = view.page.locator(".gauge b").all_inner_texts()
    assert gauges[:4] == ["0", "0 %", "0", "0"]
    assert set(view.page.locator("#latencies td").all_inner_texts()) == {"–"}


def steps_end_where_they_ended(view: View, ended_s: float) -> None:
    """A request that ended twenty seconds ago: lines of its steps do not lead on to now."""
    view.wait("paceline.charts.data[0][1].length > 2 && paceline.charts.data[0][0].at(-1) < -19")
    now_s = view.value("paceline.player().time")
    ago, tokens = view.value("paceline.charts.data[0].slice(0, 2)")
    assert tokens[-1] is None and now_s + ago[-1] == pytest.approx(ended_s, abs=0.3)
    ago, rates = view.value("paceline.charts.data[1].slice(0, 2)")
    assert {rate > 0 for at, rate in zip(ago, rates, strict=True) if now_s + at < ended_s - 1} == {True}
    assert {rate for at, rate in zip(ago, rates, strict=True) if now_s + at > ended_s + 1} == {0}
    ago, running = view.value("paceline.charts.data[2].slice(0, 2)")
    assert running[-1] == ago[-1] == 0 and 1 in running


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
        view.wait("stage.snapshot !== null")
        view.keep_pictures()
        view.page.locator("#play-speed").select_option("32")
        view.wait("!paceline.player().playing && stage.snapshot.finished === 60")
        pictures = view.pictures()
        assert len(pictures) > 50
        assert {seq: rows.after[seq] for seq in pictures} == pictures
        assert view.value("stage.disagreements") == 0
        assert view.fits()
        view.shoot("replay-narrow-dark", whole=True)


def test_a_static_batch_shows_its_padding_in_grey_and_a_short_run_fills_the_window(
    viewer: Viewer, tmp_path: Path
) -> None:
    with shown(tmp_path, *PADDED) as origin, viewer.view(origin) as view:
        view.wait("stage.checked > 3")
        length_s = view.value("Number(paceline.player().slider.max)")
        assert view.value("paceline.lanes.windowS") == pytest.approx(length_s) and length_s < 20
        assert view.value("paceline.charts.spanS") <= max(1, length_s)
        view.page.locator("#play-slider").fill(str(length_s))
        view.wait("stage.snapshot.finished === 24")
        kinds = view.value("stage.segments.map((each) => each.kind)")
        assert kinds.count("padding") > 8
        assert view.value("stage.segments.some((each) => each.kind === 'prefill' && each.padded > 0.1)")
        assert view.pixels("lanes", "padding") > 1000
        assert view.value("paceline.charts.data[1][3].some((rate) => rate > 0)")
        assert view.gauge("padding, of computed tokens") not in ("0 %", "–")
        assert view.value("stage.disagreements") == 0
        view.shoot("static-padding")
