"""Branches of an answer on the chat page, on a real server: fork, prune, continue, inject, choose, reload."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, Route

from tests.browser.chatting import chat, ended, expect_status, messages, send
from tests.browser.viewing import NARROW, WIDE, View, Viewer
from tests.e2e.client_server import ADMIN, ENDLESS, ClientServer, client_server

pytestmark = pytest.mark.campaign
EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"
COLUMNS = "[...document.querySelectorAll('.branch .body')].map((each) => each.textContent)"
WIDEST = """[...document.querySelectorAll('*')].filter((each) => each.getBoundingClientRect().right > innerWidth)
  .map((each) => `${each.tagName}.${each.className} ${Math.round(each.getBoundingClientRect().right)}`)"""
LAST = "paceline.current().messages.at(-1)"


@pytest.fixture(scope="module")
def server(viewer: Viewer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    flags = ("--max-num-seqs", "8", "--disable-log-requests")
    with client_server(tmp_path_factory.mktemp("server"), *flags, PACELINE_ADMIN_KEY=ADMIN) as running:
        running.wait_for(200)
        yield running


def branches(view: View) -> list[dict[str, Any]]:
    """From left to right."""
    last = messages(view)[-1]
    others = last.get("branches", [])
    return [*others[: last.get("place", 0)], last, *others[last.get("place", 0) :]]


def fork(view: View, count: int = 3) -> None:
    """The answer under way, into branches that all have grown."""
    view.wait(f"{LAST}.content.length > 20")
    view.page.locator(".fork input").first.fill(str(count))
    view.page.locator(".fork button").first.click()
    view.wait(f"{LAST}.branches?.length === {count - 1}")
    grow(view)


def grow(view: View) -> None:
    """Until every branch that is being written has some tokens more."""
    lengths = [len(each["content"]) for each in branches(view)]
    all_of_them = f"{LAST}.branches.toSpliced({LAST}.place, 0, {LAST})"
    grown = "each.state === 'done' || each.content.length > lengths[at] + 5"
    view.wait(f"((lengths) => {all_of_them}.every((each, at) => {grown}))({json.dumps(lengths)})")


def column(page: Page, number: int) -> Any:
    return page.locator(".branch").nth(number - 1)


def live(server: ClientServer, request: str) -> dict[str, str]:
    found = server.ask("GET", f"/v1/requests/{request}/tree", key=ADMIN).json
    return {each["id"].split("/")[1]: each["state"] for each in found["branches"]}


def test_a_running_answer_is_forked_pruned_continued_and_put_text_into(
    server: ClientServer, viewer: Viewer
) -> None:
    with chat(viewer, server, max_tokens=ENDLESS) as view:
        page = view.page
        send(page, "Tell me three stories")
        assert page.locator(".fork input").input_value() == "3"
        fork(view)
        assert page.locator(".branch").count() == 3
        assert "the answer" in column(page, 1).inner_text()
        first, second, third = branches(view)
        assert [each.get("branch", 0) for each in (first, second, third)] == [0, 1, 2]
        assert second["request"] == third["request"] == first["request"]
        assert live(server, first["request"]) == {"0": "running", "1": "running", "2": "running"}
        texts = [each["content"] for each in (first, second, third)]
        common = min(map(len, texts))
        assert len({text[:common] for text in texts}) == 3, "branches are drawn, not copied"
        assert len({text[:15] for text in texts}) == 1
        # Each has a lane of one's own.
        view.wait("paceline.strip.own.size === 3")
        # Prune one: it ends on the server, the others go on.
        column(page, 2).locator("button", has_text="Prune").click()
        view.wait(f"{LAST}.branches.length === 1")
        assert page.locator(".branch").count() == 2
        server.wait_until(lambda: live(server, first["request"]) == {"0": "running", "2": "running"})
        grow(view)
        # Put text into another one that runs.
        column(page, 2).locator("button", has_text="Inject").click()
        column(page, 2).locator("textarea").fill("Meanwhile, ")
        column(page, 2).locator("textarea").press("Enter")
        view.wait(f"{LAST}.branches[0].content.includes('Meanwhile, ')")
        grow(view)
        assert "Meanwhile, " not in branches(view)[0]["content"]
        assert not branches(view)[1]["content"].endswith("Meanwhile, ")
        # The conversation goes on with it.
        column(page, 2).locator("button", has_text="Use this").click()
        assert "the answer" in column(page, 2).inner_text()
        assert "Meanwhile, " in messages(view)[1]["content"]
        # Leaving ends all of it; a reload has what came.
        page.reload()
        view.wait("paceline.server.state === 'ready'")
        server.wait_until(server.is_idle)
        kept = branches(view)
        assert [each["state"] for each in kept] == ["stopped", "stopped"]
        assert "Meanwhile, " in kept[1]["content"] and kept[1] == messages(view)[1]
        assert view.value(COLUMNS)[1].startswith(kept[1]["content"][:15].strip())
        assert page.locator(".branch.chosen").count() == 1 and "the answer" in column(page, 2).inner_text()
        # Continue the other one, and fork it again from there.
        page.evaluate("paceline.current().settings.sampling.max_tokens = 12")
        column(page, 1).locator("button", has_text="Continue").click()
        view.wait("paceline.running.size === 0")
        longer = branches(view)[0]
        assert longer["content"].startswith(kept[0]["content"]) and longer["finish"] == "length"
        assert branches(view)[1]["content"] == kept[1]["content"]
        asked: list[Any] = []
        page.on(
            "request",
            lambda request: asked.append(request.post_data_json) if request.method == "POST" else None,
        )
        send(page, "Thank you")
        ended(view)
        assert asked[0]["messages"][1]["content"] == kept[1]["content"]
        assert page.locator(".branch").count() == 2 and page.locator(".branch-head button").count() == 0


def test_a_branch_that_reached_its_length_is_held_and_goes_on(server: ClientServer, viewer: Viewer) -> None:
    with chat(viewer, server, max_tokens=ENDLESS) as view:
        page = view.page

        def shorten(route: Route) -> None:
            route.continue_(post_data=json.dumps({**route.request.post_data_json, "max_tokens": 30}))

        page.route("**/fork", shorten)
        send(page, "Go on")
        fork(view, 2)
        view.wait(f"{LAST}.branches[0].held")
        held = branches(view)[1]
        assert (held["state"], held["finish"]) == ("done", "length")
        assert live(server, held["request"]) == {"0": "running", "1": "held"}
        # Without the branch that runs, the held one is the answer, and a message could be sent.
        column(page, 1).locator("button", has_text="Prune").click()
        view.wait("document.querySelector('#send').textContent === 'Send'")
        assert page.locator(".branch").count() == 0 and branches(view) == [held]
        server.wait_until(lambda: live(server, held["request"]) == {"1": "held"})
        page.evaluate("paceline.current().settings.sampling.max_tokens = 20")
        page.locator(".state button", has_text="Continue").click()
        view.wait(f"{LAST}.content.length > {len(held['content'])} && {LAST}.held")
        (longer,) = branches(view)
        assert longer["content"].startswith(held["content"]) and longer["request"] == held["request"]
        page.locator(".foot button", has_text="Inject").click()
        page.locator(".inject textarea").fill("Then ")
        page.locator(".inject button", has_text="Put in").click()
        view.wait(f"{LAST}.content.length > {len(longer['content'])} + 5 && {LAST}.held")
        (injected,) = branches(view)
        assert injected["content"].startswith(longer["content"] + "Then ")
        # A held one is forked like any other.
        page.locator(".fork button").click()
        view.wait(f"{LAST}.branches?.length === 2 && {LAST}.branches.every((each) => each.held)")
        assert all(each["content"].startswith(injected["content"]) for each in branches(view))
        assert sorted(live(server, held["request"])) == ["1", "2", "3"]
        # What was pruned can be had back, as text.
        column(page, 3).locator("button", has_text="Prune").click()
        assert page.locator(".branch").count() == 2
        page.locator("#toast button").click()
        assert page.locator(".branch").count() == 3
        view.wait(f"{LAST}.branches[1].state === 'stopped'")
        # With the next message the server keeps nothing of it any more.
        send(page, "Thank you")
        ended(view)
        assert [each["state"] for each in messages(view)[1::2]] == ["done", "done"]
        assert not any(each.get("held") for each in (messages(view)[1], *messages(view)[1]["branches"]))
        server.wait_until(server.is_idle)


def test_what_the_server_refuses_is_said(server: ClientServer, viewer: Viewer) -> None:
    with chat(viewer, server, max_tokens=ENDLESS) as view:
        page = view.page
        send(page, "Hello")
        view.wait(f"{LAST}.content.length > 20")
        page.route(
            "**/fork",
            lambda route: route.fulfill(
                status=429, json={"error": {"message": "too many branches", "code": "x"}}
            ),
        )
        page.locator(".fork button").click()
        page.wait_for_selector("#toast:has-text('Too many branches.')")
        assert page.locator(".branch").count() == 0
        page.keyboard.press("Escape")
        assert ended(view)[1]["state"] == "stopped"
        expect_status(view, 429)


def forked(page: Page, begin: str, texts: list[str]) -> None:
    """The server says this of a fork: branches that begin with a text and go on with another."""

    def fulfil(route: Route) -> None:
        names = [f"x/{number + 1}" for number in range(len(texts))]
        made = {"parent": "x/0", "at": 1, "branches": names, "text": begin}
        chunks: list[dict[str, Any]] = [{"id": "chatcmpl-x", "choices": [], "fork": made}]
        for number, text in enumerate(texts):
            choice = {"index": number + 1, "delta": {"content": text}, "finish_reason": None}
            chunks.append({"id": "chatcmpl-x", "choices": [choice]})
            chunks.append({"id": "chatcmpl-x", "choices": [{**choice, "delta": {}, "finish_reason": "stop"}]})
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/fork", fulfil)
    page.route("**/chatcmpl-x/explain", lambda route: route.fulfill(json={"branches": []}))


def test_hostile_branches_are_text(server: ClientServer, viewer: Viewer) -> None:
    with chat(viewer, server, max_tokens=ENDLESS) as view:
        page = view.page
        send(page, "Hello")
        view.wait(f"{LAST}.content.length > 20")
        forked(page, EVIL, [EVIL, EVIL * 2])
        page.locator(".fork button").click()
        view.wait(f"{LAST}.branches?.length === 2 && {LAST}.branches[1].state === 'done'")
        assert column(page, 2).locator(".body").inner_text() == EVIL * 2
        column(page, 1).locator("button", has_text="Inject").click()
        column(page, 1).locator("textarea").fill(EVIL)
        column(page, 1).locator("textarea").press("Enter")
        view.wait(f"{LAST}.content.includes('onerror')")
        page.keyboard.press("Escape")
        view.wait("paceline.running.size === 0")
        tags = set(page.locator("#messages *").evaluate_all("(all) => all.map((each) => each.tagName)"))
        assert not tags & {"IMG", "SCRIPT"}, tags


def test_probabilities_go_on_behind_a_fork_and_what_was_put_in(server: ClientServer, viewer: Viewer) -> None:
    with chat(viewer, server, max_tokens=ENDLESS) as view:
        page = view.page
        page.evaluate("paceline.current().settings.logprobs = true")
        send(page, "How sure are you?")
        fork(view, 2)
        column(page, 2).locator("button", has_text="Inject").click()
        column(page, 2).locator("textarea").fill("certainly ")
        column(page, 2).locator("textarea").press("Enter")
        view.wait(f"{LAST}.branches[0].content.includes('certainly ')")
        grow(view)
        page.keyboard.press("Escape")
        view.wait("paceline.running.size === 0")
        branch = branches(view)[1]
        behind = branch["content"].split("certainly ", 1)[1]
        spelled = column(page, 2).locator(".token").all_text_contents()
        assert behind and "".join(spelled).endswith(behind)
        assert column(page, 2).locator(".spelled").text_content() == branch["content"]
        column(page, 2).locator(".token").first.hover()
        assert page.locator("#alternatives").is_visible()


def test_stored_branches_that_are_damaged_are_left_out(viewer: Viewer) -> None:
    whole = {"role": "assistant", "content": "b", "state": "done"}
    messages = [
        {"role": "assistant", "content": "a", "branches": [whole, {"role": "assistant"}], "place": 1},
        {"role": "assistant", "content": "a", "branches": [{**whole, "branches": [whole]}], "place": "1"},
    ]
    with viewer.modules() as page:
        code = "async (found) => (await import('/ui/chat/conversation.js')).restored(found)"
        found = page.evaluate(code, {"id": "x", "messages": messages})["messages"]
    assert found[0] == {"role": "assistant", "content": "a"}
    assert found[1] == {"role": "assistant", "content": "a", "branches": [whole], "place": 1}


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_branches_stay_inside_the_page(server: ClientServer, viewer: Viewer, size: Any) -> None:
    with chat(viewer, server, size=size, dark=size is NARROW, max_tokens=ENDLESS) as view:
        page = view.page
        send(page, "Tell me a story about the sea, please.")
        view.wait(f"{LAST}.content.length > 20")
        table = "\n\n| a | b |\n|---|---|\n| c | d |"
        forked(page, "Once ", ["w" * 300, "One more **story**, in three sentences. " * 9, table])
        page.locator(".fork input").fill("4")
        page.locator(".fork button").click()
        view.wait(f"{LAST}.branches?.length === 3 && {LAST}.branches[2].state === 'done'")
        page.keyboard.press("Escape")
        view.wait("paceline.running.size === 0")
        assert view.fits(), page.evaluate(WIDEST)
        view.shoot(f"chat-branches-{'narrow' if size is NARROW else 'wide'}")
