"""Pages in a browser for tests: opened on a server, watched for errors and foreign requests, photographed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Error, Page, ViewportSize

from paceline.server.live.page_files import page_files

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_MS = 60_000.0
WIDE, NARROW = ViewportSize(width=1440, height=1000), ViewportSize(width=390, height=844)
NOWHERE = "http://pages.test"
KEY_NAME = "paceline-admin-key"  # under which the page keeps what its user typed in
# Every step the page has folded, with the request on each row after it and whether it decodes.
KEEP_PICTURES = """() => {
  window.pictures = {};
  paceline.stage.onStep = (seq, stage) => {
    window.pictures[seq] = [...stage.rows].map(([row, held]) => [row, held.request]).sort((a, b) => a[0] - b[0]);
  };
}"""
# How many pixels of a canvas have the colour the page's style gives a name.
COUNT_PIXELS = """([id, name]) => {
  const canvas = document.getElementById(id), probe = document.createElement("canvas").getContext("2d");
  probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
  probe.fillRect(0, 0, 1, 1);
  const [red, green, blue] = probe.getImageData(0, 0, 1, 1).data;
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let at = 0; at < data.length; at += 4) {
    if (data[at] === red && data[at + 1] === green && data[at + 2] === blue && data[at + 3] === 255) count += 1;
  }
  return count;
}"""


class View:
    """One page of the product."""

    def __init__(self, page: Page, origin: str) -> None:
        self.page = page
        self.problems: list[str] = []
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.problems.append(f"{error.message}\n{error.stack}"))
        page.on("request", lambda request: self._check(request.url, origin))

    def wait(self, condition: str) -> None:
        """Until an expression about the page's own objects is true. What it speaks of may not be there yet."""

        def is_true() -> bool:
            try:
                return bool(self.value(condition))
            except Error as error:
                if "Cannot read properties of" not in error.message:
                    raise
                return False

        self._until(condition, is_true)

    def value(self, expression: str) -> Any:
        given = f"const {{ stage }} = window.paceline; return {expression};"
        return self.page.evaluate(f"(() => {{ if (!window.paceline) return null; {given} }})()")

    def pixels(self, canvas: str, colour: str) -> int:
        count: int = self.page.evaluate(COUNT_PIXELS, [canvas, colour])
        return count

    def wait_for_pixels(self, canvas: str, colour: str) -> None:
        self._until(f"{canvas} shows {colour}", lambda: self.pixels(canvas, colour) > 0)

    def gauge(self, label: str) -> str:
        """What the gauge with this label shows."""
        own = self.page.locator(".gauge", has=self.page.get_by_text(label, exact=True))
        return str(own.locator("b").inner_text())

    def keep_pictures(self) -> None:
        self.page.evaluate(KEEP_PICTURES)

    def pictures(self) -> dict[int, list[list[int]]]:
        return {int(seq): rows for seq, rows in self.page.evaluate("window.pictures").items()}

    def shoot(self, name: str, *, whole: bool = False) -> None:
        folder = Path(os.environ.get("PACELINE_SCREENSHOTS") or ROOT / "build" / "screenshots")
        folder.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=folder / f"{name}.png", full_page=whole)

    def fits(self) -> bool:
        """Nothing sticks out to the right."""
        fits: bool = self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        return fits

    def _until(self, what: str, condition: Callable[[], bool]) -> None:
        """Playwright's own way of waiting evaluates text inside the page, which the page's policy forbids."""
        until_s = time.monotonic() + PATIENCE_MS / 1e3
        while not condition():
            state = self.page.evaluate("document.body.innerText.slice(0, 2000)")
            assert time.monotonic() < until_s, f"it did not happen in time: {what}\n{self.problems}\n{state}"
            self.page.wait_for_timeout(50)

    def _note(self, message: Any) -> None:
        if message.type == "error":
            self.problems.append(message.text)

    def _check(self, url: str, origin: str) -> None:
        if not url.startswith((f"{origin}/", "data:")):
            self.problems.append(f"asked for {url}")


class Viewer:
    """Opens pages."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    @contextmanager
    def view(
        self,
        origin: str,
        path: str = "/ui",
        *,
        size: ViewportSize = WIDE,
        dark: bool = False,
        key: str = "",
    ) -> Iterator[View]:
        """A page of a server, which must stay free of errors and foreign requests."""
        context = self._browser.new_context(viewport=size, color_scheme="dark" if dark else "light")
        context.set_default_timeout(PATIENCE_MS)
        if key:
            context.add_init_script(f"sessionStorage.setItem('{KEY_NAME}', '{key}')")
        try:
            view = View(context.new_page(), origin)
            view.page.goto(f"{origin}{path}")
            yield view
            assert not view.problems, view.problems
        finally:
            context.close()

    @contextmanager
    def modules(self) -> Iterator[Page]:
        """A page without a server that can import the modules of the pages."""
        context = self._browser.new_context()
        page = context.new_page()
        page.route(f"{NOWHERE}/ui/**", lambda route: route.fulfill(**_file(route.request.url)))
        page.route(
            f"{NOWHERE}/", lambda route: route.fulfill(content_type="text/html", body="<!doctype html>")
        )
        page.goto(f"{NOWHERE}/")
        try:
            yield page
        finally:
            context.close()


def _file(url: str) -> dict[str, Any]:
    body = page_files()[url.removeprefix(f"{NOWHERE}/ui/")]
    return {"body": body, "content_type": "text/javascript"}
