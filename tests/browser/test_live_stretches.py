"""What a prompt need not compute on the live page: contexts copied to their place, and pictures that are encoded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.viewing import Viewer
from tests.e2e.client_server import ClientServer, client_server
from tests.e2e.contexts.test_blend import FLAGS, TEXTS, blended, reused
from tests.e2e.contexts.test_contexts import create
from tests.e2e.shown_run import shown

pytestmark = pytest.mark.campaign
ADMIN = "key-of-the-operator"
PICTURES = (
    *("sim", "--trace", "mm-image", "--num-requests", "40", "--rate", "9.5", "--seed", "1"),
    *("--model", "qwen2.5-vl-7b", "--max-num-seqs", "16"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    folder = tmp_path_factory.mktemp("server")
    with client_server(folder, *FLAGS, "--block-size", "16", PACELINE_ADMIN_KEY=ADMIN) as running:
        running.wait_for(200)
        yield running


def test_what_is_copied_out_of_contexts_is_seen_in_a_row(viewer: Viewer, server: ClientServer) -> None:
    ids = [create(server, text=text, pin=False)["id"] for text in TEXTS]
    with viewer.view(f"http://127.0.0.1:{server.port}", key=ADMIN) as view:
        view.wait("stage.checked > 1")
        count = reused(blended(server, *ids)) + reused(blended(server, *reversed(ids)))
        view.wait(f"stage.segments.reduce((sum, each) => sum + each.copied, 0) === {count}")
        view.wait_for_pixels("lanes", "placed")
        assert view.value("stage.disagreements") == 0
        assert view.value(
            "stage.segments.some((each) => each.tokens && each.placed > 0.5 && each.placed < 1)"
        )
        names = view.page.locator("#lane-list button").all_inner_texts()
        assert any(name.startswith("context ") for name in names), names
        row = view.value("stage.segments.findLast((each) => each.copied).row")
        view.page.locator("#lane-list button").nth(row).click()
        view.page.get_by_text("copied from contexts").first.wait_for()
        view.shoot("live-contexts")


def test_pictures_of_a_simulation_are_seen_while_they_are_encoded(viewer: Viewer, tmp_path: Path) -> None:
    with shown(tmp_path, *PICTURES) as origin, viewer.view(origin) as view:
        view.wait("stage.checked > 3")
        view.wait("stage.segments.some((each) => each.kind === 'encode')")
        view.wait_for_pixels("lanes", "encode")
        view.shoot("live-pictures")
        assert view.value("stage.disagreements") == 0
