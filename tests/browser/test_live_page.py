"""The live page in a browser, against a real server that is short of blocks: what it shows is what happens."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.browser.viewing import NARROW, WIDE, Viewer
from tests.e2e.client_server import KEY, MODEL, ClientServer, client_server

pytestmark = pytest.mark.campaign
ADMIN = "key-of-the-operator"
NUM_BLOCKS = 36  # of 16 tokens each: two long streams do not fit beside each other
PROMPT = "hello " * 20
LONG = 250  # tokens of output
CROWDS = 30  # a browser on a busy machine is sent a fresh state instead of the steps it was too slow for


@pytest.fixture(scope="module")
def run_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "run.jsonl"


@pytest.fixture(scope="module")
def server(viewer: Viewer, run_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    flags = (
        *("--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-model-len", "512", "--max-num-seqs", "8"),
        *("--run-log", str(run_log), "--disable-log-requests"),
        *("--cpu-backend", "torch"),  # native steps of this model are over before a page has drawn one
    )
    with client_server(tmp_path_factory.mktemp("server"), *flags, PACELINE_ADMIN_KEY=ADMIN) as running:
        running.wait_for(200)
        yield running


def ask(server: ClientServer, method: str, path: str, body: object = None, key: str = KEY) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        return json.loads(answer.read())
    finally:
        connection.close()


def sent(server: ClientServer, prompt: str, max_tokens: int) -> http.client.HTTPConnection:
    """A connection on which a streamed completion has been asked for; closing it ends the request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection


@contextmanager
def stream(server: ClientServer, prompt: str, max_tokens: int) -> Iterator[Iterator[dict[str, Any]]]:
    """The chunks of an answer that has begun."""
    connection = sent(server, prompt, max_tokens)
    answer = connection.getresponse()
    assert answer.status == 200

    def chunks() -> Iterator[dict[str, Any]]:
        for line in iter(answer.readline, b""):
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])

    try:
        yield chunks()
    finally:
        answer.close()
        connection.close()


@contextmanager
def crowd(server: ClientServer, count: int) -> Iterator[None]:
    """Requests whose answers are not read, each with a separate prompt; some of them wait."""
    connections = [sent(server, f"{number} {PROMPT}", LONG) for number in range(count)]
    try:
        yield
    finally:
        for connection in connections:
            connection.close()


def test_lanes_appear_and_leave_while_requests_stream(server: ClientServer, viewer: Viewer) -> None:
    with viewer.view(server.url, key=ADMIN) as view:
        view.wait("stage.snapshot && stage.rows.size === 0")
        assert view.page.locator("#engines").is_hidden(), "there is one"
        view.keep_pictures()
        with stream(server, "one", LONG) as first, stream(server, "two", LONG) as second:
            assert next(first) and next(second)
            view.wait("stage.rows.size === 2")
            view.wait_for_pixels("lanes", "decode")
        view.wait("stage.rows.size === 0")
        assert {len(rows) for rows in view.pictures().values()} >= {1, 2}
        view.wait("stage.marks.some((mark) => mark.kind === 'finish' || mark.kind === 'fail')")
        view.wait("stage.checked > 3")
        assert view.value("stage.disagreements") == 0


def test_branches_are_joined_to_their_parent(server: ClientServer, viewer: Viewer) -> None:
    with viewer.view(server.url, key=ADMIN) as view, stream(server, "one", LONG) as parent:
        view.wait("stage.snapshot && stage.rows.size === 1")
        id = next(parent)["id"]
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        body = json.dumps({"n": 2, "stream": True, "on_stop": "hold", "max_tokens": 20, "score": 2})
        connection.request("POST", f"/v1/requests/{id}/fork", body, headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        view.wait("stage.marks.filter((mark) => mark.kind === 'fork').length === 2")
        view.wait_for_pixels("lanes", "accent")
        joined = view.value(
            "stage.marks.filter((mark) => mark.kind === 'fork').map((mark) => [mark.from, mark.row])"
        )
        ((first, one), (second, other)) = joined
        assert first == second and len({first, one, other}) == 3
        view.page.evaluate(f"location.hash = '#request={id}'")
        view.page.wait_for_selector("#drawer .branch:has-text('Branch 2'):has-text('held')")
        told = view.page.locator("#drawer li").all_inner_texts()
        assert sum("was forked from" in sentence and "2" in sentence for sentence in told) == 2, told
        view.shoot("live-branches")
        answer.close()
        connection.close()


def test_a_picture_of_a_step_is_the_engines_own(server: ClientServer, viewer: Viewer) -> None:
    """What the page folds from steps is compared with the states another reader of the feed is sent."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with closing(connection), viewer.view(server.url, key=ADMIN) as view:
        connection.request("GET", "/v1/admin/watch", None, {"Authorization": f"Bearer {ADMIN}"})
        feed = connection.getresponse()
        view.wait("stage.snapshot !== null")
        view.keep_pictures()
        for _ in range(CROWDS):
            with crowd(server, 4):
                view.page.wait_for_timeout(1000)
            if len(pictures := view.pictures()) > 50:
                break
        compared = 0
        for line in iter(feed.readline, b""):
            if not line.startswith(b"data: "):
                continue
            snapshot = json.loads(line[6:])["engine"]["snapshot"]
            if snapshot["seq"] in pictures:
                shown = [each for each in pictures[snapshot["seq"]] if each[0] not in snapshot["left"]]
                assert shown == [list(each) for each in zip(*snapshot["rows"][:2], strict=True)]
                compared += bool(shown)
            if snapshot["seq"] >= max(pictures):
                break
        assert compared > 0
        assert view.value("stage.disagreements") == 0


def test_a_preemption_is_seen_and_the_drawer_tells_what_the_api_tells(
    server: ClientServer, viewer: Viewer
) -> None:
    with viewer.view(server.url, key=ADMIN) as view:
        view.wait("stage.snapshot !== null")
        with ExitStack() as stack:
            streams = [stack.enter_context(stream(server, f"{number} {PROMPT}", LONG)) for number in range(3)]
            ids = [next(each)["id"] for each in streams]
            numbers = [
                ask(server, "GET", f"/v1/requests/{each}/explain")["branches"][0]["number"] for each in ids
            ]
            theirs = f"(mark) => mark.kind === 'recompute' && !mark.back && {numbers}.includes(mark.request)"
            view.wait(f"stage.marks.some({theirs})")
            view.wait_for_pixels("lanes", "recompute")
            view.shoot("preemption")
            for each in streams:
                assert list(each)[-1]
        view.wait("stage.rows.size === 0")
        preempted = view.value(f"stage.marks.find({theirs}).request")
        view.page.evaluate("request => { paceline.drawer.show(request); }", preempted)
        view.page.wait_for_selector("#drawer-state:has-text('ended')")
        told = view.page.locator("#drawer-story li").all_inner_texts()
        stories = [ask(server, "GET", f"/v1/requests/{each}/explain") for each in ids]
        (own,) = [each for each in stories if each["branches"][0]["number"] == preempted]
        assert told == own["branches"][0]["sentences"]
        assert any("was preempted" in sentence for sentence in told)
        assert own["id"] in view.page.locator("#drawer-title").inner_text()
        phases = view.page.locator("#drawer-falls span").all_inner_texts()
        assert "preempted: recomputed" in phases and "decode" in phases
        assert any(phase.startswith("prompt, ") for phase in phases)
        assert any(phase.startswith("recomputed, ") for phase in phases)
        view.shoot("drawer")
        view.page.keyboard.press("Escape")
        assert view.page.locator("#drawer").is_hidden()


def test_a_lane_is_clicked_for_its_story(server: ClientServer, viewer: Viewer) -> None:
    with viewer.view(server.url, key=ADMIN) as view:
        view.wait("stage.snapshot !== null")
        with stream(server, "who", LONG) as answer:
            assert next(answer)
            view.wait("stage.rows.size > 0 && paceline.lanes.lanes > 0")
            row, request = view.value("[...stage.rows].map(([row, held]) => [row, held.request])[0]")
        box = view.page.locator("#lanes").bounding_box()
        assert box is not None
        height = view.value("paceline.lanes.height")
        view.page.mouse.click(box["x"] + box["width"] - 2, box["y"] + (row + 0.4) * height)
        view.page.wait_for_selector(f"#drawer-title:has-text('Request {request}')")


def test_the_dial_and_the_policy_are_turned_and_a_refusal_is_told(
    server: ClientServer, viewer: Viewer
) -> None:
    with viewer.view(server.url, key=ADMIN) as view:
        page = view.page
        page.wait_for_selector("#steering:visible")
        page.wait_for_selector("#steer-position.off")
        page.locator("#steer-target").fill("80")
        page.locator("#steer-hold button").click()
        view.wait("document.getElementById('steer-note').textContent.includes('80')")
        assert ask(server, "GET", "/v1/admin/dial", key=ADMIN)["setting"] == {"itl_p99_ms": 80.0}
        page.wait_for_selector("#steer-position:not(.off)")
        page.locator("#steer-target").fill("1000000000")
        page.locator("#steer-hold button").click()
        page.wait_for_selector("#steer-problem:has-text('itl_p99_ms')")
        page.locator("#steer-off").click()
        view.wait("document.getElementById('steer-shown').textContent === 'off'")
        assert page.locator("#steer-position.off").get_attribute("aria-valuetext") == "off"
        view.shoot("dial-off")
        assert page.locator("#steer-problem").is_hidden()
        page.locator("#steer-policy").select_option("priority")
        server.wait_until(lambda: ask(server, "GET", "/v1/admin/policy", key=ADMIN)["policy"] == "priority")
        page.locator("#steer-policy").select_option("fcfs")
        server.wait_until(lambda: ask(server, "GET", "/v1/admin/policy", key=ADMIN)["policy"] == "fcfs")
        view.problems[:] = [problem for problem in view.problems if "status of 400" not in problem]


def test_a_key_is_asked_for_and_a_wrong_one_is_refused(server: ClientServer, viewer: Viewer) -> None:
    with viewer.view(server.url) as view:
        page = view.page
        page.wait_for_selector("#key:visible")
        page.locator("#key-text").fill(KEY)
        page.locator("#key button").click()
        page.wait_for_selector("#key-note:has-text('not an admin key')")
        page.locator("#key-text").fill(ADMIN)
        page.locator("#key button").click()
        page.wait_for_selector("#link[data-state=live]")
        view.wait("stage.snapshot !== null")
        view.problems[:] = [each for each in view.problems if "401" not in each and "403" not in each]


def test_screenshots_wide_and_narrow_light_and_dark(server: ClientServer, viewer: Viewer) -> None:
    for name, size, dark in (("wide", WIDE, False), ("narrow", NARROW, False), ("wide-dark", WIDE, True)):
        with viewer.view(server.url, size=size, dark=dark, key=ADMIN) as view:
            view.wait("stage.snapshot !== null")
            with crowd(server, 6):
                view.wait("stage.steps.length > 20")
                view.wait_for_pixels("blocks", "held")
                assert f" of {NUM_BLOCKS - 1} held" in view.page.locator("#block-note").inner_text()
                assert view.fits()
                view.shoot(name, whole=size is NARROW)
    with viewer.view(server.url, size=NARROW, dark=True, key=ADMIN) as view:
        view.wait("stage.snapshot !== null && stage.rows.size === 0")
        assert view.fits()
        view.shoot("narrow-dark", whole=True)


def test_what_watching_costs_is_counted(server: ClientServer, viewer: Viewer) -> None:
    with viewer.view(server.url, key=ADMIN) as view:
        view.wait("stage.snapshot !== null")
        server.wait_until(lambda: server.metric("watch_cpu_seconds_total") > 0)
    assert server.metric("watch_cpu_seconds_total") < server.metric("engine_cpu_seconds_total")
