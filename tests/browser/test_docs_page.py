"""/docs in a browser, against a real server with keys: the key, search, examples of answers, and requests it sends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.viewing import NARROW, View, Viewer
from tests.e2e.client_server import KEY, MODEL, ClientServer, client_server

pytestmark = pytest.mark.campaign
HOSTILE = "<img src=x onerror=alert(1)>"
REFUSED = "the server responded with a status of"  # what Chromium notes of an answer that is an error


@pytest.fixture(scope="module")
def server(viewer: Viewer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    folder = tmp_path_factory.mktemp("server")
    with client_server(folder, "--batch-dir", str(folder / "batches")) as running:
        running.wait_for(200)
        yield running


def forget_refusals(view: View) -> None:
    view.problems[:] = [problem for problem in view.problems if REFUSED not in problem]


def article(name: str) -> str:
    return f"article#{name}"


def test_with_keys_the_page_asks_for_one_and_says_when_it_is_wrong(
    viewer: Viewer, server: ClientServer
) -> None:
    with viewer.view(server.url, "/docs", size=NARROW) as view:
        page = view.page
        page.wait_for_selector("#key:not([hidden])")
        assert page.locator("#operations article").count() == 0, "nothing is shown without the key"
        assert page.locator("#key-problem").inner_text() == ""
        page.fill("#key-text", "no-such-key")
        page.locator("#key button").click()
        page.wait_for_selector("#key-problem:has-text('This key is wrong')")
        view.shoot("docs-key-390")
        page.fill("#key-text", KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("article")
        assert page.locator("#key").is_hidden()
        assert KEY not in page.content()
        forget_refusals(view)


@pytest.mark.parametrize("dark", [False, True])
def test_every_route_is_there_and_nothing_is_cut(viewer: Viewer, server: ClientServer, dark: bool) -> None:
    with viewer.view(server.url, "/docs", dark=dark, key=KEY) as view:
        page = view.page
        page.wait_for_selector("article")
        names = page.locator("article h3").all_inner_texts()
        assert len(names) > 35 and any("/v1/chat/completions" in name for name in names)
        assert view.fits()
        view.shoot(f"docs-1440{'-dark' if dark else ''}")
        page.set_viewport_size(NARROW)
        assert view.fits()
        view.shoot(f"docs-390{'-dark' if dark else ''}")


def test_search_finds_routes_and_fields(viewer: Viewer, server: ClientServer) -> None:
    with viewer.view(server.url, "/docs", key=KEY) as view:
        page = view.page
        page.wait_for_selector("article")
        page.locator("h1").click()
        page.keyboard.press("/")
        page.keyboard.type("frequency_penalty")
        shown = page.locator("article:visible")
        assert "/v1/chat/completions" in " ".join(shown.all_inner_texts())
        assert 0 < shown.count() < 10
        assert page.locator("tr.hit:visible").first.inner_text().startswith("frequency_penalty")
        assert " of " in page.locator("#found").inner_text()
        view.shoot("docs-search")
        page.fill("#search", HOSTILE)
        assert shown.count() == 0 and HOSTILE in page.locator("#found").inner_text(), "text stays text"
        page.keyboard.press("Escape")
        assert shown.count() > 35


def test_answers_of_every_generating_route_are_shown_whole_and_streamed(
    viewer: Viewer, server: ClientServer
) -> None:
    with viewer.view(server.url, "/docs", key=KEY) as view:
        page = view.page
        page.wait_for_selector("article")
        for name in ("chat-completions", "completions", "responses", "messages"):
            place = page.locator(article(f"post-v1-{name}"))
            buttons = place.locator("button[aria-pressed]")
            assert buttons.all_inner_texts() == ["Answer", "Stream", "Error"]
            assert json.loads(place.locator("pre").nth(1).inner_text())["id"]
            buttons.nth(1).click()
            assert "data: {" in place.locator("pre").nth(1).inner_text()
            buttons.nth(2).click()
            assert "temperature" in json.loads(place.locator("pre").nth(1).inner_text())["error"]["message"]
            command = place.locator("pre").first.inner_text()
            assert f'"model":"{MODEL}"' in command, "the model this server has"
            assert "$PACELINE_API_KEY" in command and KEY not in command


@pytest.mark.parametrize("route", ["chat-completions", "completions", "responses", "messages"])
def test_a_request_is_sent_and_its_answer_streams(viewer: Viewer, server: ClientServer, route: str) -> None:
    with viewer.view(server.url, "/docs", key=KEY) as view:
        page = view.page
        page.wait_for_selector("article")
        place = page.locator(article(f"post-v1-{route}"))
        place.locator("button:has-text('Try it')").click()
        assert '"stream": true' in place.locator("textarea").input_value()
        assert place.locator("pre:has-text('curl -N')").count() == 1
        place.locator("button:has-text('Send')").click()
        place.locator(".status:has-text('complete after')").wait_for()
        assert place.locator(".status b").inner_text() == "200 OK"
        assert "x-request-id" in place.locator(".headers dt").all_inner_texts()
        raw = place.locator(".answer pre").nth(1).inner_text()
        # Tokens that wait for the reader come in one event, and some of this model's tokens have no text yet.
        assert raw.count("data: ") > 1
        assert place.locator(".answer pre.text").inner_text(), "the text of the answer alone"
        view.shoot(f"docs-try-{route}")
        place.locator("label.check input").uncheck()
        assert "stream" not in json.loads(place.locator("textarea").input_value())
        place.locator("button:has-text('Send')").click()
        place.locator(".headers dd:has-text('application/json')").wait_for()
        place.locator(".status:has-text('complete after')").wait_for()
        assert json.loads(place.locator(".answer pre").nth(1).inner_text())["usage"]


def test_refusals_and_bad_bodies_are_shown_as_they_are(viewer: Viewer, server: ClientServer) -> None:
    with viewer.view(server.url, "/docs", size=NARROW, key=KEY) as view:
        page = view.page
        page.wait_for_selector("article")
        place = page.locator(article("post-v1-chat-completions"))
        place.locator("button:has-text('Try it')").click()
        body = {"model": MODEL, "messages": [{"role": "user", "content": "it's"}], "temperature": HOSTILE}
        place.locator("textarea").fill(json.dumps(body))
        assert "it'\\''s" in place.locator(".try pre:has-text('curl')").inner_text(), "quoted for a shell"
        place.locator("button:has-text('Send')").click()
        place.locator(".status b:has-text('400')").wait_for()
        assert json.loads(place.locator(".answer pre").nth(1).inner_text())["error"]["param"] == "temperature"
        place.locator("textarea").fill("{")
        assert "not a JSON object" in place.locator(".problem").inner_text()
        place.locator("button:has-text('Send')").click()
        place.locator(".answer pre:has-text('JSON')").first.wait_for()
        assert page.locator("img").count() == 0 and view.fits()
        view.shoot("docs-try-390")
        forget_refusals(view)


def test_a_path_with_a_parameter_and_a_file_are_sent(
    viewer: Viewer, server: ClientServer, tmp_path: Path
) -> None:
    with viewer.view(server.url, "/docs", key=KEY) as view:
        page = view.page
        page.wait_for_selector("article")
        place = page.locator(article("get-v1-models-id"))
        place.locator("button:has-text('Try it')").click()
        place.locator("label:has-text('{id}') input").fill(MODEL)
        place.locator("button:has-text('Send')").click()
        place.locator(f".answer pre:has-text('{MODEL}')").wait_for()
        place = page.locator(article("post-v1-files"))
        place.locator("button:has-text('Try it')").click()
        (tmp_path / "requests.jsonl").write_text("{}\n")
        place.locator("input[type=file]").set_input_files(tmp_path / "requests.jsonl")
        place.locator("button:has-text('Send')").click()
        place.locator(".answer pre:has-text('requests.jsonl')").wait_for()
        assert view.fits()


def test_a_server_has_no_race_and_says_where_there_is_one(viewer: Viewer, server: ClientServer) -> None:
    with viewer.view(server.url, "/ui/race", key=KEY) as view:
        view.page.wait_for_selector("#notice:has-text('paceline demo --ui')")
        forget_refusals(view)
