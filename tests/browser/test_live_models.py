"""The live page of a server with several models, adapters and a disk: what each takes, and a page for each model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapter_folders import adapter_arrays, write_adapter
from tests.browser.viewing import NARROW, WIDE, Viewer
from tests.e2e.client_server import ADMIN
from tests.e2e.test_serve_adapters import spec_of
from tests.e2e.test_serve_models import entry, several, write_models

pytestmark = pytest.mark.campaign


def test_models_adapters_and_levels_are_shown(tmp_path: Path, viewer: Viewer) -> None:
    left, right = write_models(tmp_path, "left", "right").values()
    poet = write_adapter(tmp_path / "poet", adapter_arrays(spec_of(left), seed=1))
    disk = {"kv_disk_dir": str(tmp_path / "kv"), "kv_disk_size": "4M", "lora_modules": f"poet={poet}"}
    with several(tmp_path, [entry(left, share=3, **disk), entry(right)]) as server:
        for name in ("left", "right", "poet"):
            assert server.text(name)
        for size in (WIDE, NARROW):
            with viewer.view(server.url, key=ADMIN, size=size) as view:
                view.wait("stage.snapshot")
                lines = view.page.locator("#models div")
                lines.nth(1).wait_for()
                assert "left" in lines.nth(0).inner_text() and "share 75 %" in lines.nth(0).inner_text()
                assert "1 of 1 in memory" in view.page.locator("#adapters").inner_text()
                assert "blocks stored" in view.page.locator("#levels").inner_text()
                assert view.fits()
                view.shoot(f"models-{size['width']}")
        with viewer.view(server.url, key=ADMIN) as view:
            view.wait("stage.snapshot")
            view.page.locator("#models a", has_text="right").click()
            view.wait("stage.snapshot && stage.snapshot.finished === 1")
            assert "right" in view.page.locator("#about").inner_text()
            assert not view.page.locator("#levels div").count()
        assert server.rest("right", "sleep").status == 200
        with viewer.view(server.url, key=ADMIN) as view:
            view.page.locator("#models b", has_text="asleep").wait_for()
