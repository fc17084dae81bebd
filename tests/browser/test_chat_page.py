"""The chat at / in a browser, against a real server with keys: answers, their lanes, and everything that goes wrong."""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.chatting import (
    SHORT,
    chat,
    ended,
    expect_status,
    messages,
    sampling,
    scripted,
    send,
)
from tests.browser.viewing import NARROW, WIDE, Viewer
from tests.e2e.client_server import ADMIN, DISABLED_KEY, KEY, MODEL, NARROW_KEY, ClientServer, client_server
from tests.e2e.model_cli import environment

pytestmark = pytest.mark.campaign
CONTEXT = 32_768
NO_STORAGE = (
    "() => { Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }; }"
)
# A browser that forbids storage throws when it is looked at.
FORBIDDEN = """for (const name of ["localStorage", "sessionStorage"])
  Object.defineProperty(window, name, { get() { throw new DOMException("no", "SecurityError"); } });"""
HOSTILE = (
    "<img src=x onerror=alert(1)> **<script>alert(2)</script>** [a](javascript:alert(3)) `<b>`\n\n"
    "[b](data:text/html,x) [c](https://example.org/?q=<i>) <javascript:alert(4)>\n\n"
    "```<svg onload=alert(5)>\n</code><script>alert(6)</script>\n```\n\n"
    "| <u> | y |\n|---|---|\n| [d](vbscript:x) | z |\n"
)


@pytest.fixture(scope="module")
def server(viewer: Viewer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    flags = ("--max-model-len", str(CONTEXT), "--max-num-seqs", "8", "--disable-log-requests")
    with client_server(tmp_path_factory.mktemp("server"), *flags, PACELINE_ADMIN_KEY=ADMIN) as running:
        running.wait_for(200)
        yield running


def test_a_key_is_asked_for_and_a_wrong_one_is_named(server: ClientServer, viewer: Viewer) -> None:
    with chat(viewer, server, key="") as view:
        page = view.page
        page.wait_for_selector("#key:visible")
        assert page.locator("#send").is_disabled()
        for key, told in (("wrong", "The key is wrong."), (DISABLED_KEY, "This API key is disabled.")):
            page.locator("#key-text").fill(key)
            page.locator("#key-text").press("Enter")
            page.wait_for_selector(f"#key-note:has-text('{told}')")
        view.shoot("chat-key")
        page.locator("#key-text").fill(KEY)
        page.locator("#key button").click()
        page.wait_for_selector("#key", state="hidden")
        page.wait_for_selector("#batch-note:has-text('Only an admin key may watch')")
        page.evaluate(f"() => {{ paceline.current().settings.sampling = {sampling(SHORT)}; }}")
        send(page, "Hello")
        assert ended(view)[1]["content"]
        page.reload()
        view.wait("paceline.server.state === 'ready'")  # the tab keeps the key
        expect_status(view, 401)
        expect_status(view, 403)


def test_an_answer_is_a_lane_of_ones_own_and_is_explained(server: ClientServer, viewer: Viewer) -> None:
    with chat(viewer, server, max_tokens=400) as view:
        page = view.page
        send(page, "Tell me a story")
        view.wait("paceline.strip.own.size === 1")
        view.wait("stage.segments.some((each) => each.request === [...paceline.strip.own.values()][0])")
        view.wait_for_pixels("lanes", "own")
        answer = ended(view)[1]
        assert answer["state"] == "done" and answer["tokens"] == 400 and answer["rate"] > 0
        page.wait_for_selector(".figures:has-text('400 tokens')")  # drawn with the next frame
        assert "tokens/s" in page.locator(".figures").inner_text()
        lane = page.locator(".foot a").get_attribute("href")
        assert lane == f"/ui#request={answer['request']}"
        page.locator(".foot button", has_text="Explain").click()
        page.wait_for_selector("#story-sentences li:has-text('admitted')")
        told = page.locator("#story-sentences li").all_inner_texts()
        assert told == explained(server, answer["request"])
        assert page.locator("#story-lane").get_attribute("href") == lane
        view.shoot("chat-explained")
        page.keyboard.press("Escape")
        assert page.locator("#story").is_hidden()
        with page.expect_popup() as opened:
            page.locator(".foot a").click()
        opened.value.wait_for_selector(
            f"#drawer-title:has-text('{answer['request'].removeprefix('chatcmpl-')}')"
        )


def explained(server: ClientServer, request: str) -> list[str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    path = f"/v1/requests/{request}/explain"
    connection.request("GET", path, headers={"Authorization": f"Bearer {ADMIN}"})
    found = json.loads(connection.getresponse().read())
    connection.close()
    sentences: list[str] = found["branches"][0]["sentences"]
    return sentences


def test_a_stopped_answer_is_kept_and_goes_on(server: ClientServer, viewer: Viewer) -> None:
    with chat(viewer, server, max_tokens=2000) as view:
        page = view.page
        send(page, "Go on and on")
        view.wait("paceline.current().messages[1].content.length > 20")
        assert page.locator("#send").inner_text() == "Stop"
        page.keyboard.press("Escape")
        answer = ended(view)[1]
        assert answer["state"] == "stopped" and len(answer["content"]) > 20
        page.wait_for_selector(".state:has-text('Stopped.')")
        server.wait_until(server.is_idle)
        page.evaluate(f"paceline.current().settings.sampling.max_tokens = {SHORT}")
        page.locator(".state button", has_text="Continue").click()
        longer = ended(view)[1]
        assert longer["content"].startswith(answer["content"]) and longer["content"] != answer["content"]
        assert longer["finish"] == "length" and longer["tokens"] >= SHORT
        page.wait_for_selector(".state:has-text('maximum length')")


def test_regenerate_and_edit_replace_what_follows_and_can_be_undone(
    server: ClientServer, viewer: Viewer
) -> None:
    with chat(viewer, server) as view:
        page = view.page
        send(page, "First question")
        first = ended(view)[1]
        page.locator(".foot button", has_text="Regenerate").click()
        view.wait("paceline.running.size === 0 && paceline.current().messages[1].state === 'done'")
        assert messages(view)[1]["request"] != first["request"]
        page.locator("#toast button").click()
        assert messages(view)[1]["request"] == first["request"]
        send(page, "Second question")
        assert [each["role"] for each in ended(view)] == ["user", "assistant", "user", "assistant"]
        page.locator(".user .foot button", has_text="Edit").first.click()
        page.locator(".editing textarea").fill("Another question")
        page.locator(".editing textarea").press("Enter")
        view.wait("paceline.current().messages.length === 2 && paceline.running.size === 0")
        assert messages(view)[0]["content"] == "Another question" and messages(view)[1]["content"]
        page.locator("#toast button").click()
        assert [each["content"] for each in messages(view)][::2] == ["First question", "Second question"]


def test_conversations_survive_a_reload_and_are_renamed_and_deleted(
    server: ClientServer, viewer: Viewer
) -> None:
    with chat(viewer, server) as view:
        page = view.page
        send(page, "About rivers")
        kept = ended(view)
        page.locator("#new").click()
        page.locator("#show-settings").click()
        page.locator("#system").fill("Answer in one word.")
        page.locator("#sampling-temperature").fill("0.5")
        page.keyboard.press("Escape")
        assert page.locator("#show-settings").inner_text() == "Settings (3)"
        send(page, "About hills")
        ended(view)
        page.locator("#list li", has_text="About rivers").hover()
        page.locator("#list button[aria-label='Rename About rivers']").click()
        page.locator("#list input").fill("Water")
        page.locator("#list input").press("Enter")
        page.reload()
        view.wait("paceline.server.state === 'ready'")
        assert page.locator("#list .title").all_inner_texts() == ["About hills", "Water"]
        settings = view.value("paceline.current().settings")
        assert settings["system"] == "Answer in one word."
        assert settings["sampling"] == {"max_tokens": SHORT, "temperature": 0.5}
        page.locator("#list .title", has_text="Water").click()
        assert messages(view) == kept
        assert page.locator(".message").count() == 2
        other = page.context.new_page()  # what one tab changes, the others show
        other.goto(page.url)
        other.locator("#list .title", has_text="About hills").hover()
        other.locator("#list button[aria-label='Delete About hills']").click()
        page.wait_for_selector("#list .title:has-text('About hills')", state="detached")
        other.locator("#toast button").click()
        page.wait_for_selector("#list .title:has-text('About hills')")
        other.close()
        page.locator("#list button[aria-label='Delete Water']").click()
        assert page.locator("#list .title").all_inner_texts() == ["About hills"]
        page.locator("#toast button").click()
        assert page.locator("#list .title").count() == 2
        page.locator("#list button[aria-label='Delete Water']").click()
        page.reload()
        view.wait("paceline.server.state === 'ready'")
        assert page.locator("#list .title").all_inner_texts() == ["About hills"]


def test_an_answer_under_way_is_kept_when_the_page_is_left(server: ClientServer, viewer: Viewer) -> None:
    with chat(viewer, server, max_tokens=None) as view:
        send(view.page, "Never stop")
        view.wait("paceline.current().messages[1].content.length > 20")
        view.page.reload()
        view.wait("paceline.server.state === 'ready'")
        answer = messages(view)[1]
        assert answer["state"] == "stopped" and len(answer["content"]) > 20
        server.wait_until(server.is_idle)


def test_hostile_text_is_shown_as_text(server: ClientServer, viewer: Viewer) -> None:
    with chat(viewer, server) as view:
        page = view.page
        page.on("dialog", lambda dialog: view.problems.append(dialog.message))
        scripted(page, [HOSTILE[at : at + 7] for at in range(0, len(HOSTILE), 7)])
        send(page, HOSTILE)
        assert [each["content"] for each in ended(view)] == [HOSTILE.strip(), HOSTILE]
        page.wait_for_selector(".assistant table")
        found = page.locator(".message *").evaluate_all(
            "(all) => all.map((each) => [each.tagName, each.getAttributeNames(), each.getAttribute('href')])"
        )
        tags = {tag for tag, _, _ in found}
        assert not tags & {"IMG", "SCRIPT", "SVG", "svg", "B", "I", "U", "IFRAME", "STYLE"}, tags
        assert not any(name.startswith("on") for _, names, _ in found for name in names)
        links = [href for _, _, href in found if href and not href.startswith("/ui")]
        assert links == ["https://example.org/?q=%3Ci%3E"]
        assert page.locator(".assistant .body a").get_attribute("rel") == "noopener noreferrer"
        shown = page.locator(".assistant .body").inner_text()
        assert "<img src=x onerror=alert(1)>" in shown and "[a](javascript:alert(3))" in shown
        assert page.locator(".user .body").inner_text() == HOSTILE.strip()
        view.shoot("chat-hostile")


def test_a_code_block_is_copied(server: ClientServer, viewer: Viewer) -> None:
    with chat(viewer, server) as view:
        page = view.page
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        scripted(page, ["Here:\n\n```python\n", "print(1)\n", "```\n"])
        send(page, "code")
        page.wait_for_selector(".assistant .code-head:has-text('python')")
        page.locator(".assistant .code-head button").click()
        page.wait_for_selector(".assistant .code-head button:has-text('Copied')")
        assert page.evaluate("navigator.clipboard.readText()") == "print(1)"


def test_a_refusal_for_now_is_tried_again_when_the_server_says(server: ClientServer, viewer: Viewer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"model": MODEL, "prompt": "on", "max_tokens": CONTEXT - 100, "ignore_eos": True, "stream": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {NARROW_KEY}"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    other = connection.getresponse()
    assert other.status == 200
    with chat(viewer, server, key=NARROW_KEY) as view:
        send(view.page, "May I?")
        view.page.wait_for_selector(".state:has-text('This key may have 1 request under way')")
        assert "Trying again in" in view.page.locator(".state.problem").inner_text()
        view.shoot("chat-limited")
        other.close()
        connection.close()
        server.wait_until(server.is_idle)
        view.page.locator(".state button", has_text="Try now").click()
        answer = ended(view)[1]
        assert answer["state"] == "done" and answer["content"]
        expect_status(view, 429)
        expect_status(view, 403)  # the live batch is not for this key


def test_what_went_wrong_is_said_with_what_to_do(server: ClientServer, viewer: Viewer) -> None:
    with chat(viewer, server) as view:
        page = view.page
        send(page, "much too long " * CONTEXT)
        failed = ended(view)[1]
        assert failed["problem"]["code"] == "context_length_exceeded"
        page.wait_for_selector(".state:has-text('Start a new chat, or edit an earlier message.')")
        expect_status(view, 400)
        page.locator("#new").click()
        scripted(page, [])
        send(page, "Say nothing")
        page.wait_for_selector(".state:has-text('The model gave an empty answer.')")
        scripted(page, ["half an ans"], finish=None)
        page.locator(".state button", has_text="Try again").click()
        page.wait_for_selector(".state:has-text('The server ended the answer early.')")
        assert messages(view)[1]["content"] == "half an ans"
        page.unroute("**/v1/chat/completions")
        page.locator(".state button", has_text="Continue").click()
        view.wait("paceline.running.size === 0 && paceline.current().messages[1].state === 'done'")
        assert messages(view)[1]["content"].startswith("half an ans")


def test_a_full_storage_is_told_and_the_chat_goes_on(server: ClientServer, viewer: Viewer) -> None:
    with chat(viewer, server) as view:
        view.page.evaluate(NO_STORAGE)
        send(view.page, "Is there room?")
        assert ended(view)[1]["content"]
        view.page.wait_for_selector("#notice:has-text('storage is full')")
        view.page.add_init_script(FORBIDDEN)
        view.page.reload()
        view.page.wait_for_selector("#notice:has-text('gives the page no storage')")
        view.page.locator("#key-text").fill(ADMIN)
        view.page.locator("#key-text").press("Enter")
        view.wait("paceline.server.state === 'ready'")
        send(view.page, "And now?")
        view.wait("paceline.current().messages[1]?.content.length > 0")
        view.page.keyboard.press("Escape")
        assert ended(view)[1]["content"]
        expect_status(view, 401)


def test_a_server_that_restarts_is_found_again(
    viewer: Viewer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("restarted")
    with client_server(folder, "--max-model-len", "4096", PACELINE_ADMIN_KEY=ADMIN) as server:
        server.wait_for(200)
        with chat(viewer, server, max_tokens=None) as view:
            page = view.page
            send(page, "Never stop")
            view.wait("paceline.current().messages[1].content.length > 20")
            server.process.kill()
            server.process.wait()
            answer = ended(view)[1]
            assert answer["state"] == "failed" and len(answer["content"]) > 20
            page.wait_for_selector(".state:has-text('The answer is incomplete.')")
            page.wait_for_selector("#link:has-text('offline')")
            view.shoot("chat-offline")
            server.process = subprocess.Popen(
                server.process.args,
                env=environment(folder, PACELINE_ADMIN_KEY=ADMIN),
                stderr=subprocess.DEVNULL,
            )
            server.wait_for(200)
            view.wait("paceline.server.state === 'ready'")
            page.evaluate(f"() => {{ paceline.current().settings.sampling = {sampling(SHORT)}; }}")
            page.locator(".state button", has_text="Continue").click()
            longer = ended(view)[1]
            assert longer["state"] == "done" and longer["content"].startswith(answer["content"])
            view.problems.clear()  # connections that were refused


LONG_TEXT = "\n\n".join(
    [
        "## A title\n\nText with `code`, **strong** words and a [link](https://example.org).",
        "- one\n- two\n  1. three\n  2. four",
        "```python\nprint('a very long line that does not fit into a narrow window at all, "
        + "x" * 90
        + "')\n```",
        "| name | value | note |\n|---|--:|---|\n| a | 1 | " + "wide " * 12 + "|",
        "w" * 200,
    ]
)


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_is_cut_at_any_width(server: ClientServer, viewer: Viewer, size: Any, dark: bool) -> None:
    name = f"chat-{'narrow' if size is NARROW else 'wide'}-{'dark' if dark else 'light'}"
    with chat(viewer, server, size=size, dark=dark) as view:
        page = view.page
        view.shoot(f"{name}-empty")
        scripted(page, [LONG_TEXT])
        send(page, "Show me everything " + "u" * 120)
        ended(view)
        page.wait_for_selector(".assistant table")
        assert view.fits()
        assert page.evaluate(
            "document.querySelector('#scroll').scrollWidth <= document.querySelector('#scroll').clientWidth"
        )
        view.shoot(name)
        for opener, drawer in (("#show-settings", "#settings"), ("#show-guide", "#guide")):
            page.locator(opener).click()
            page.wait_for_selector(f"{drawer}[open]")
            assert page.evaluate(f"document.querySelector('{drawer}').scrollWidth <= innerWidth")
            view.shoot(f"{name}-{drawer[1:]}")
            page.keyboard.press("Escape")
        if size is NARROW:
            page.locator("#show-list").click()
            page.wait_for_timeout(300)
            view.shoot(f"{name}-list")
        assert view.fits()
