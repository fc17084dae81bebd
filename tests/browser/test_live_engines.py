"""The live page of a server with several engines: a tile for each, failovers as they happen, a page for each."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from tests.browser.viewing import NARROW, WIDE, View, Viewer
from tests.e2e.client_server import ADMIN, ENDLESS, KEY, MODEL, ClientServer, client_server

pytestmark = pytest.mark.campaign
FLAGS = ("--replicas", "2", "--router", "round-robin", "--restart-backoff-s", "0")
LONG = {"prompt": "hello", "max_tokens": ENDLESS, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server(viewer: Viewer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    folder = tmp_path_factory.mktemp("server")
    with client_server(folder, *FLAGS, PACELINE_ADMIN_KEY=ADMIN) as running:
        running.wait_for(200)
        yield running


def streamed(server: ClientServer) -> http.client.HTTPConnection:
    """A stream that has begun; closing it ends the request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", "/v1/completions", json.dumps({"model": MODEL, **LONG}), headers)
    answer = connection.getresponse()
    assert answer.status == 200 and answer.readline().startswith(b"data: {")
    return connection


def wait_for(view: View, number: int, *words: str) -> None:
    """Until the tile of an engine says so."""
    tile = view.page.locator("#engine-tiles a").nth(number)
    for text in words:
        tile.get_by_text(text).wait_for()


def test_a_failover_is_seen_and_each_engine_has_its_page(server: ClientServer, viewer: Viewer) -> None:
    with ExitStack() as streams:
        for _ in range(4):
            streams.enter_context(closing(streamed(server)))
        with viewer.view(server.url, key=ADMIN) as view:
            view.wait("stage.rows.size === 2")
            wait_for(view, 0, "ready", "2 of ")
            wait_for(view, 1, "ready", "2 of ")
            assert view.page.locator("#engine-note").is_hidden() and view.fits()
            assert view.page.locator("#engine-tiles a[aria-current]").inner_text().startswith("Engine 0")
            pids = [each["pid"] for each in server.ask("GET", "/v1/admin/fleet", key=ADMIN).json["engines"]]
            os.kill(pids[1], signal.SIGKILL)
            view.page.locator("#engine-arcs text").get_by_text("2", exact=True).wait_for()
            view.page.locator(
                "#engine-note", has_text="2 requests went on from engine 1 to engine 0"
            ).wait_for()
            view.wait("stage.rows.size === 4")
            moved = view.page.locator("#lane-list button", has_text=" · ")
            assert moved.count() == 4, "requests keep their names where they go on"
            assert [text[0] for text in sorted(moved.all_inner_texts())] == ["1", "2", "3", "4"]
            moved.filter(has_text="2 · ").click()
            view.page.locator("#drawer-story", has_text="went on in engine 0").wait_for()
            view.page.locator("#drawer-falls", has_text="decode").wait_for()
            assert view.page.locator("#lane-list button.open").inner_text().startswith("2 · ")
            view.page.locator("#drawer-close").click()
            view.shoot("engines-failover")
            wait_for(view, 0, "4 of ")
            wait_for(view, 1, "ready", "0 of ", "restarted once")
            view.page.locator("#engine-tiles a", has_text="Engine 1").click()
            view.wait("stage.snapshot && stage.rows.size === 0")
            assert "engine 1" in view.page.locator("#about").inner_text()
            with closing(streamed(server)), closing(streamed(server)):
                view.wait("stage.rows.size === 1")
                wait_for(view, 0, "5 of ")
            assert view.value("stage.disagreements") == 0


def test_a_drained_engine_says_so_and_the_tiles_fit(server: ClientServer, viewer: Viewer) -> None:
    assert server.ask("POST", "/v1/admin/fleet/0/drain?timeout_s=0", key=ADMIN).status == 200
    try:
        for size in (WIDE, NARROW):
            with viewer.view(server.url, size=size, key=ADMIN, dark=size is NARROW) as view:
                wait_for(view, 0, "drained")
                assert view.fits()
                view.shoot(f"engines-{size['width']}")
    finally:
        assert server.ask("POST", "/v1/admin/fleet/0/resume", key=ADMIN).status == 200
