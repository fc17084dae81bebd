"""One Chromium for all tests of the page: the system's own, without a display, a cache or the network.

Where there is none the tests are skipped with a notice, unless PACELINE_REQUIRE_BROWSER=1 says that they must run.
Screenshots are kept in the folder PACELINE_SCREENSHOTS names, else in build/screenshots.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.browser.viewing import Viewer

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage")


def chromium_path() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path is not None), None)


# While it runs, its thread has an event loop, which other tests could not start.
@pytest.fixture(scope="module")
def viewer() -> Iterator[Viewer]:
    path = chromium_path()
    if path is None:
        notice = f"no Chromium on this machine (looked for {', '.join(NAMES)}): the page is not tested"
        if os.environ.get("PACELINE_REQUIRE_BROWSER") == "1":
            pytest.fail(f"{notice}, although PACELINE_REQUIRE_BROWSER=1", pytrace=False)
        pytest.skip(notice)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield Viewer(browser)
        browser.close()
