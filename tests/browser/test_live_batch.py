"""The live page with a full batch: its own traffic over one connection, opened late, by link and by keyboard."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.viewing import NARROW, WIDE, View, Viewer
from tests.e2e.client_server import KEY, ClientServer

pytestmark = pytest.mark.campaign
ADMIN = "key-of-the-operator"
AT_ONCE = 32
SLOW = ("--cpu-backend", "torch")  # native steps of this model are over before a page has drawn one
SIZES = ("--max-model-len", "512", "--max-num-seqs", "40", "--max-num-batched-tokens", "512", *SLOW)


class KeylessServer(ClientServer):
    """A server on loopback without keys, which may show prompts."""

    def _model_flags(self) -> list[str]:
        flags = super()._model_flags()
        return flags[: flags.index("--api-keys-file")]


@pytest.fixture(scope="module")
def server(viewer: Viewer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    running = KeylessServer(tmp_path_factory.mktemp("server"), *SIZES)
    try:
        running.wait_for(200)
        yield running
    finally:
        running.close()


STOP_WHEN_RUNNING = """() => new Promise((done) => {
    const stop = document.getElementById("traffic-stop"), until = performance.now() + 30_000;
    const look = () => {
        const runs = paceline.stage.rows.size > 0 && stop.checkVisibility();
        if (runs) stop.click();
        if (runs || performance.now() > until) done(runs);
        else setTimeout(look, 5);
    };
    look();
})"""


def send(view: View, message: str, count: int) -> None:
    view.page.locator("#traffic-text").fill(message)
    view.page.locator("#traffic-count").fill(str(count))
    view.page.locator("#traffic button").first.click()


def test_32_at_once_run_together_and_a_lane_is_opened_meanwhile(server: ClientServer, viewer: Viewer) -> None:
    for size, dark in ((WIDE, False), (NARROW, True)):
        with viewer.view(server.url, size=size, dark=dark) as view:
            view.wait("stage.snapshot !== null")
            send(view, "Hold the line " * 20, AT_ONCE)
            # A drawn answer may end before the last one has begun.
            view.wait(f"stage.counts.some((each) => each.r >= {AT_ONCE - 8})")
            entry = view.page.locator("#lane-list button:not([data-state=free])").last
            entry.evaluate("(button) => button.click()")  # wherever it has moved to
            assert view.page.locator("#drawer-falls span").count() > 0, "what the lanes show is there at once"
            view.page.wait_for_selector("#drawer-story li:has-text('step')")
            view.shoot(f"batch-drawer-{size['width']}")
            view.page.keyboard.press("Escape")
            assert view.fits()
            view.shoot(f"batch-{size['width']}", whole=size is NARROW)
            view.wait("stage.rows.size === 0")
            view.wait(
                f"document.getElementById('traffic-note').textContent === '{AT_ONCE} sent, {AT_ONCE} ended'"
            )
            answers = view.page.locator("#traffic-answers span").all_inner_texts()
            assert len(answers) == AT_ONCE and len({len(answer) for answer in answers}) > 4
            assert view.value("stage.disagreements") == 0


def test_stopping_the_traffic_aborts_it(server: ClientServer, viewer: Viewer) -> None:
    with viewer.view(server.url) as view:
        view.wait("stage.snapshot !== null")
        send(view, "Stop in time", AT_ONCE)
        # Pressed by the page itself: a fast machine ends all of it sooner than a driver finds the button.
        assert view.page.evaluate(STOP_WHEN_RUNNING)
        view.page.wait_for_selector("#traffic-note:has-text('stopped')")
        view.wait("stage.rows.size === 0")
        server.wait_until(server.is_idle)


def test_a_page_opened_late_shows_what_happened(server: ClientServer, viewer: Viewer) -> None:
    with viewer.view(server.url) as view:
        view.wait("stage.snapshot !== null")
        send(view, "Nobody else looks", 12)
        view.wait("document.getElementById('traffic-note').textContent === '12 sent, 12 ended'")
    server.wait_until(server.is_idle)
    with viewer.view(server.url) as view:
        view.wait("paceline.lanes.lanes > 0")
        assert view.value("new Set(stage.segments.map((each) => each.request)).size") >= 12
        view.wait_for_pixels("lanes", "decode")
        assert "Nobody else looks" in view.page.locator("#lane-list").inner_text()
        assert view.value("stage.disagreements") == 0
        view.wait("paceline.charts.data[1][1].some((rate) => rate > 0)")
        view.shoot("opened-late")


def test_a_request_is_opened_by_link_and_by_keyboard(server: ClientServer, viewer: Viewer) -> None:
    with viewer.view(server.url) as view:
        page = view.page
        view.wait("stage.snapshot !== null")
        send(view, "Open me", 3)
        view.wait("document.getElementById('traffic-note').textContent === '3 sent, 3 ended'")
        link = page.locator("#traffic-answers a").nth(1).get_attribute("href") or ""
        page.locator("#traffic-answers a").nth(1).click()
        page.wait_for_selector("#drawer-state:has-text('ended')")
        number = view.value("paceline.drawer.request")
        page.wait_for_selector("#drawer-title:has-text('Open me')")
        assert page.locator("#drawer-title").inner_text().startswith(f"Request {number} · ")
        page.keyboard.press("Escape")
        assert page.locator("#drawer").is_hidden() and "request" not in page.url
        page.locator("#lane-list button[tabindex='0']").focus()
        page.keyboard.press("End")
        page.keyboard.press("Home")
        page.keyboard.press("ArrowDown")
        focused = "document.activeElement"
        row = view.value(f"[...{focused}.parentElement.children].indexOf({focused})")
        assert row == 1
        asked = view.value(f"Number({focused}.dataset.request)")
        page.keyboard.press("Enter")
        page.wait_for_selector(f"#drawer-title:has-text('Request {asked} ·')")
        page.keyboard.press("Escape")
        assert view.value(f"Number({focused}.dataset.request)") == asked, (
            "the focus goes back to where it was"
        )
    for name in (link.removeprefix("#request="), str(number)):
        with viewer.view(server.url, path=f"/ui#request={name}") as view:
            view.page.wait_for_selector("#drawer-state:has-text('ended')")
            assert view.value("paceline.drawer.request") == number
            view.page.wait_for_selector("#lane-list button.open")


def test_the_page_leads_to_the_chat_the_api_and_its_guide(server: ClientServer, viewer: Viewer) -> None:
    with viewer.view(server.url) as view:
        links = view.page.locator("nav a")
        found = [links.nth(index).get_attribute("href") for index in range(links.count())]
        assert found == ["/", "/docs", "#guide"]
        for path in found[:2]:
            answer = view.page.request.get(f"{server.url}{path}")
            assert answer.ok and "text/html" in answer.headers["content-type"]


def test_prompts_are_hidden_and_a_wrong_key_is_told_where_a_server_has_keys(
    viewer: Viewer, tmp_path: Path
) -> None:
    server = ClientServer(tmp_path, *SIZES, "--mode", "static", "--batch-size", "8", PACELINE_ADMIN_KEY=ADMIN)
    try:
        server.wait_for(200)
        with viewer.view(server.url) as view:
            page = view.page
            page.wait_for_selector("#key:visible")
            assert page.locator("#key-note").inner_text() == "" and page.locator("main").is_hidden()
            for key, note in (("no such key", "does not know this key"), (KEY, "not an admin key")):
                page.locator("#key-text").fill(key)
                page.locator("#key button").click()
                page.wait_for_selector(f"#key-note:has-text('{note}')")
            view.shoot("key-wrong")
            page.locator("#key-text").fill(ADMIN)
            page.locator("#key button").click()
            page.wait_for_selector("#link[data-state=live]")
            assert page.locator("#key").is_hidden() and page.locator("main").is_visible()
            view.wait("stage.snapshot !== null")
            send(view, "A secret of mine", 8)
            view.wait("stage.segments.some((each) => each.kind === 'padding')")
            view.wait_for_pixels("lanes", "padding")
            view.wait("document.getElementById('traffic-note').textContent === '8 sent, 8 ended'")
            view.wait("stage.rows.size === 0")
            view.shoot("live-static-padding")
            assert view.gauge("padding, of computed tokens") not in ("0 %", "–")
            assert "secret" not in page.locator("#lane-list").inner_text()
            assert not any("secret" in json.dumps(name) for name in view.value("[...paceline.names.known]"))
            view.problems[:] = [each for each in view.problems if "401" not in each and "403" not in each]
    finally:
        server.close()
