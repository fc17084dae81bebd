"""What an answer on the chat page has beside its text: reasoning, JSON by a schema, tool calls and probabilities.

The model is made up and says nothing of sense, but its server is real: reasoning ends by its budget, JSON follows its
schema and calls are valid. What such a model would not say is scripted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from playwright.sync_api import Page

from tests.browser.chatting import chat, ended, expect_status, messages, scripted, send
from tests.browser.viewing import NARROW, WIDE, View, Viewer
from tests.e2e.client_server import ADMIN, ClientServer
from tests.model_folder import END_OF_TURN, EOS

pytestmark = pytest.mark.campaign
# A chat that reasons where a request switches it on.
TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\\n' }}"
    "{% if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ message['content'] + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n<think>\\n' }}"
    "{% if not enable_thinking %}{{ '\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}]
EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"
MOST = 200


class ThinkingServer(ClientServer):
    template = TEMPLATE


@pytest.fixture(scope="module")
def server(viewer: Viewer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    flags = ("--max-num-seqs", "8", "--disable-log-requests")
    running = ThinkingServer(tmp_path_factory.mktemp("server"), *flags, PACELINE_ADMIN_KEY=ADMIN)
    try:
        running.wait_for(200)
        yield running
    finally:
        running.close()


def bodies_of(page: Page) -> list[dict[str, Any]]:
    """What is asked of the model from now on."""
    found: list[dict[str, Any]] = []
    page.on(
        "request",
        lambda request: (
            found.append(request.post_data_json) if request.url.endswith("/completions") else None
        ),
    )
    return found


def use_settings(view: View, **settings: Any) -> None:
    view.page.evaluate("(given) => { Object.assign(paceline.current().settings, given); }", settings)


def reload(view: View) -> None:
    view.page.reload()
    view.wait("paceline.server.state === 'ready'")


def fill_settings(page: Page, **fields: str) -> None:
    page.locator("#show-settings").click()
    for name, text in fields.items():
        page.locator(f"#{name}").fill(text)


def test_reasoning_is_folded_above_the_answer(server: ClientServer, viewer: Viewer) -> None:
    with chat(viewer, server) as view:
        page, asked = view.page, bodies_of(view.page)
        thinks = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 10}
        # A budget and ignore_eos exclude each other.
        endless = {"logit_bias": {str(END_OF_TURN): -100, str(EOS): -100}}
        use_settings(view, sampling={"max_tokens": 40, **endless, **thinks})
        send(page, "Think about it")
        answer = ended(view)[1]
        assert 0 < len(answer["reasoning"]) <= 10 and answer["content"] and answer["finish"] == "length"
        page.wait_for_selector(".thinking summary:has-text('Thought for')")
        assert page.locator(".thought").is_hidden()
        assert page.locator(".assistant .body").inner_text().strip()
        page.locator(".thinking summary").click()
        assert page.locator(".thought").is_visible()
        reload(view)
        assert messages(view)[1] == answer
        page.locator(".state button", has_text="Continue").click()
        longer = ended(view)[1]
        assert longer["content"].startswith(answer["content"]) and len(longer["content"]) > len(
            answer["content"]
        )
        assert asked[1]["messages"][1]["reasoning_content"] == answer["reasoning"]
        send(page, "And now?")
        ended(view)
        assert all("reasoning_content" not in turn for turn in asked[2]["messages"])


def test_reasoning_under_way_says_so(server: ClientServer, viewer: Viewer) -> None:
    with chat(viewer, server) as view:
        thinks = {"chat_template_kwargs": {"enable_thinking": True}, "ignore_eos": True}
        use_settings(view, sampling=thinks)
        send(view.page, "Think for ever")
        view.page.wait_for_selector(".thinking summary:has-text('Thinking…')")
        view.page.keyboard.press("Escape")
        answer = ended(view)[1]
        assert answer["reasoning"] and not answer["content"]
        view.page.wait_for_selector(".thinking summary:has-text('Thought for')")
        view.page.wait_for_selector(".state:has-text('Stopped before the answer.')")


def test_an_answer_by_a_schema_is_laid_out(server: ClientServer, viewer: Viewer) -> None:
    with chat(viewer, server) as view:
        page = view.page
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        use_settings(view, sampling={"max_tokens": MOST})
        fill_settings(page, schema=json.dumps(SCHEMA))
        page.keyboard.press("Escape")
        send(page, "Where to?")
        answer = ended(view)[1]
        found = json.loads(answer["content"])
        jsonschema.validate(found, SCHEMA)
        page.wait_for_selector(".assistant .code-head:has-text('json')")
        laid_out = page.locator(".assistant pre code").inner_text()
        assert json.loads(laid_out) == found and laid_out.startswith('{\n  "city": ')
        page.locator(".assistant .code-head button").click()
        page.wait_for_selector(".assistant .code-head button:has-text('Copied')")
        assert json.loads(page.evaluate("navigator.clipboard.readText()")) == found
        page.locator(".views button", has_text="Raw text").click()
        page.wait_for_selector(".spelled:visible")
        assert page.locator(".spelled").text_content() == answer["content"]
        reload(view)
        assert page.locator(".spelled").text_content() == answer["content"]
        assert page.locator(".assistant .body").is_hidden()
        assert json.loads(view.value("paceline.current().settings.schema")) == SCHEMA


def test_a_schema_that_is_refused_is_told_beside_its_field(server: ClientServer, viewer: Viewer) -> None:
    with chat(viewer, server) as view:
        page = view.page
        use_settings(view, sampling={"max_tokens": MOST})
        fill_settings(page, schema="{not json")
        assert "is not JSON" in page.locator("#schema-note").inner_text()
        page.keyboard.press("Escape")
        send(page, "Where to?")  # never without the form that was asked for
        assert ended(view)[1]["problem"]["code"] == "invalid_settings"
        page.locator(".state button", has_text="Settings").click()
        page.locator("#schema").fill('{"type": "objekt"}')
        assert page.locator("#schema-note").inner_text() == ""
        page.keyboard.press("Escape")
        page.locator(".state button", has_text="Try again").click()
        problem = ended(view)[1]["problem"]
        assert problem["param"] == "response_format" and problem["status"] == 400
        page.locator(".state button", has_text="Settings").click()
        assert page.locator("#schema-note").inner_text() == problem["message"]
        view.shoot("chat-schema-refused")
        page.locator("#schema").fill(json.dumps({"name": "trip", "strict": True, "schema": SCHEMA}))
        assert page.locator("#schema-note").inner_text() == ""
        page.keyboard.press("Escape")
        page.locator(".state button", has_text="Try again").click()
        view.wait("paceline.running.size === 0 && paceline.current().messages[1].state === 'done'")
        jsonschema.validate(json.loads(messages(view)[1]["content"]), SCHEMA)
        expect_status(view, 400)


def test_a_call_gets_its_result_and_the_conversation_goes_on(server: ClientServer, viewer: Viewer) -> None:
    with chat(viewer, server) as view:
        page, asked = view.page, bodies_of(view.page)
        fill_settings(page, tools=json.dumps(TOOLS))
        page.locator("#tool_choice").select_option("required")
        page.keyboard.press("Escape")
        use_settings(view, sampling={"max_tokens": MOST, "parallel_tool_calls": False})
        send(page, "What is the weather?")
        answer = ended(view)[1]
        (call,) = answer["calls"]
        assert call["name"] == "weather" and answer["finish"] == "tool_calls"
        jsonschema.validate(json.loads(call["arguments"]), SCHEMA)
        page.wait_for_selector(".call summary code:has-text('weather')")
        assert page.locator(".call .code").is_hidden()
        page.locator(".call summary").click()
        assert json.loads(page.locator(".call .code pre").inner_text()) == json.loads(call["arguments"])
        reload(view)
        page.locator(".calls button", has_text="Send result").click()
        assert page.evaluate("document.activeElement.ariaLabel") == "Result of weather"
        page.locator(".call textarea").fill("sunny, 21 degrees")
        page.locator(".calls button", has_text="Send result").click()
        view.wait("paceline.current().messages.length === 3 && paceline.running.size === 0")
        assert messages(view)[1]["calls"] == [{**call, "result": "sunny, 21 degrees"}]
        assert messages(view)[2]["state"] == "done", messages(view)[2]
        assert [turn["role"] for turn in asked[1]["messages"]] == ["user", "assistant", "tool"]
        assert asked[1]["messages"][2]["content"] == "sunny, 21 degrees"
        assert asked[1]["messages"][2]["tool_call_id"] == call["id"]
        assert asked[0]["tool_choice"] == "required" and "tool_choice" not in asked[1]
        reload(view)
        assert page.locator(".call .result").inner_text() == "sunny, 21 degrees"
        page.locator(".calls button", has_text="Edit result").click()
        page.locator(".call textarea").fill("rain")
        page.locator(".calls button", has_text="Send result").click()
        view.wait("paceline.current().messages[1].calls[0].result === 'rain' && paceline.running.size === 0")
        page.locator("#toast button").click()
        assert page.locator(".call .result").inner_text() == "sunny, 21 degrees"
        page.locator("#text").fill("Thanks")
        page.locator("#text").press("Enter")
        view.wait("paceline.current().messages.length === 5 && paceline.running.size === 0")


def call_delta(index: int, name: str = "", arguments: str = "", id: str | None = None) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments} if name else {"arguments": arguments}
    return {"delta": {"tool_calls": [{"index": index, "id": id, "function": function}]}}


def test_hostile_parts_are_shown_as_text(server: ClientServer, viewer: Viewer) -> None:
    with chat(viewer, server) as view:
        page = view.page
        page.on("dialog", lambda dialog: view.problems.append(dialog.message))
        given = json.dumps({EVIL: EVIL})
        pieces = [{"delta": {"reasoning_content": EVIL}}, call_delta(0, EVIL, id=EVIL)]
        pieces += [call_delta(0, arguments=given[at : at + 5]) for at in range(0, len(given), 5)]
        pieces.append(call_delta(1, "second", "{}", id="b"))
        asked = scripted(page, pieces, finish="tool_calls")
        send(page, "Call")
        ended(view)
        page.wait_for_selector(".call")
        for summary in page.locator("summary").all():
            summary.click()
        assert page.locator(".thought").inner_text() == EVIL
        assert page.locator(".call summary code").first.inner_text() == EVIL
        assert json.loads(page.locator(".call .code pre").first.inner_text()) == {EVIL: EVIL}
        for area in page.locator(".call textarea").all():
            area.fill(EVIL)
        logprobs = [{"token": EVIL, "logprob": -0.1, "top_logprobs": [{"token": EVIL, "logprob": -0.1}]}]
        asked = scripted(page, [{"delta": {"content": EVIL}, "logprobs": {"content": logprobs}}])
        page.locator(".calls button", has_text="Send results").click()
        view.wait("paceline.current().messages.length === 3 && paceline.running.size === 0")
        assert [turn["role"] for turn in asked[0]["messages"]] == ["user", "assistant", "tool", "tool"]
        assert page.locator(".call .result").all_inner_texts() == [EVIL, EVIL]
        page.locator(".token").hover()
        assert EVIL in page.locator("#alternatives").inner_text().replace("␣", " ")
        tags = set(
            page.locator("#messages *, #alternatives *").evaluate_all(
                "(all) => all.map((each) => each.tagName)"
            )
        )
        assert not tags & {"IMG", "SCRIPT"}, tags


def test_a_call_that_was_cut_off_is_not_sent_on(server: ClientServer, viewer: Viewer) -> None:
    with chat(viewer, server) as view:
        page = view.page
        asked = scripted(
            page, ["Let me see.", call_delta(0, "weather", '{"city": "Pa', id="a")], finish="length"
        )
        send(page, "Call")
        ended(view)
        page.wait_for_selector(".state:has-text('reached the maximum length')")
        assert page.locator(".call textarea").is_hidden()
        assert page.locator(".state button").all_inner_texts() == ["Try again"]
        send(page, "Then without")
        view.wait("paceline.current().messages.length === 4 && paceline.running.size === 0")
        assert asked[1]["messages"][1] == {"role": "assistant", "content": "Let me see."}


def test_tokens_are_coloured_and_show_what_else_was_likely(server: ClientServer, viewer: Viewer) -> None:
    with chat(viewer, server, max_tokens=30) as view:
        page, asked = view.page, bodies_of(view.page)
        page.locator("#show-settings").click()
        page.locator("#logprobs").check()
        page.keyboard.press("Escape")
        use_settings(view, sampling={"ignore_eos": True, "max_tokens": 30})
        send(page, "How sure are you?")
        answer = ended(view)[1]
        assert asked[0]["logprobs"] is True and asked[0]["top_logprobs"] == 5
        page.wait_for_selector(".token")
        for _ in range(2):
            assert page.locator(".spelled").text_content() == answer["content"]
            spelled = page.locator(".token").evaluate_all(
                "(all) => all.map((each) => each.textContent).join('')"
            )
            assert spelled == answer["content"]
            page.locator(".token").nth(3).hover()
            assert 5 <= page.locator("#alternatives > div").count() <= 6
            assert page.locator("#alternatives .chosen").count() == 1
            page.locator("#text").hover()
            assert page.locator("#alternatives").is_hidden()
            reload(view)
        page.locator(".spelled").focus()
        page.keyboard.press("ArrowRight")
        assert page.locator("#alternatives").is_visible()
        page.locator(".views button", has_text="Text").click()
        page.wait_for_selector(".assistant .body:visible")
        assert page.locator(".spelled").is_hidden()


def test_tokens_that_end_within_a_letter_are_put_together(server: ClientServer, viewer: Viewer) -> None:
    def token(value: bytes) -> dict[str, Any]:
        return {"token": "?", "bytes": list(value), "logprob": -0.5, "top_logprobs": []}

    with chat(viewer, server) as view:
        first, second = "é".encode()[:1], "é".encode()[1:]
        held = {"delta": {}, "logprobs": {"content": [token(b"</think>"), token(b"caf"), token(first)]}}
        rest = {
            "delta": {"content": "café!"},
            "logprobs": {"content": [token(second), token(b"!"), token(b"<|end|>")]},
        }
        scripted(view.page, [held, rest])
        send(view.page, "Coffee?")
        ended(view)
        view.page.wait_for_selector(".token")
        assert view.page.locator(".token").all_inner_texts() == ["caf", "é", "!"]


def test_tokens_that_came_as_drafts_are_underlined(server: ClientServer, viewer: Viewer) -> None:
    def token(text: str, is_drafted: bool) -> dict[str, Any]:
        return {"token": text, "logprob": -0.5, "top_logprobs": [], "drafted": is_drafted}

    with chat(viewer, server) as view:
        use_settings(view, logprobs=True)
        tokens = [token("one", True), token(" two", True), token(" three", False)]
        said = [{"delta": {"content": "one two three"}, "logprobs": {"content": tokens}}]
        asked = scripted(view.page, said)
        send(view.page, "Count")
        ended(view)
        assert asked[0]["return_drafted"] is True
        for _ in range(2):
            view.page.wait_for_selector(".token")
            assert view.page.locator(".token.drafted").all_inner_texts() == ["one", " two"]
            view.page.locator(".token").nth(0).hover()
            assert "came as a draft" in view.page.locator("#alternatives").inner_text()
            view.page.locator(".token").nth(2).hover()
            assert "draft" not in view.page.locator("#alternatives").inner_text()
            reload(view)


def test_json_is_laid_out_without_a_loss(viewer: Viewer) -> None:
    texts = {
        '{"a":123456789012345678901,"a":1e400}': '{\n  "a": 123456789012345678901,\n  "a": 1e400\n}',
        '{"2":[],"1":{ }}': '{\n  "2": [],\n  "1": {}\n}',
        '[-1.5,true , null,"{[,:]} \\" \\\\"]': '[\n  -1.5,\n  true,\n  null,\n  "{[,:]} \\" \\\\"\n]',
        "7": "7",
        '{"cut': '{"cut',
    }
    with viewer.modules() as page:
        code = "async (text) => (await import('/ui/chat/json.js')).indented(text)"
        for text, laid_out in texts.items():
            assert page.evaluate(code, text) == laid_out


def test_stored_parts_that_are_damaged_are_left_out(viewer: Viewer) -> None:
    damaged = {
        "role": "assistant",
        "content": "kept",
        "reasoning": 1,
        "calls": [{"id": "x"}],
        "logprobs": [1],
    }
    whole = {
        "role": "assistant",
        "content": "",
        "reasoning": "r",
        "calls": [{"id": "a", "name": "n", "arguments": "{}", "result": "s"}],
        "logprobs": [["t", -1, []]],
    }
    settings = {"system": 3, "schema": "{}", "logprobs": "yes"}
    with viewer.modules() as page:
        code = "async (found) => (await import('/ui/chat/conversation.js')).restored(found)"
        found = page.evaluate(code, {"id": "x", "messages": [damaged, whole], "settings": settings})
    assert found["messages"] == [{"role": "assistant", "content": "kept"}, whole]
    kept = {"system": "", "sampling": {}, "schema": "{}", "tools": "", "tool_choice": "", "logprobs": False}
    assert found["settings"] == kept


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_part_is_cut_at_any_width(server: ClientServer, viewer: Viewer, size: Any, dark: bool) -> None:
    name = f"chat-parts-{'narrow' if size is NARROW else 'wide'}-{'dark' if dark else 'light'}"
    with chat(viewer, server, size=size, dark=dark) as view:
        page = view.page
        given = json.dumps({"city": "Paris", "note": "w" * 200, "days": 3})
        thought = "The user asks for the weather, so I call the tool. " * 6
        scripted(
            page,
            [
                {"delta": {"reasoning_content": thought}},
                "I will look.",
                call_delta(0, "weather" * 12, given, id="a"),
            ],
            finish="tool_calls",
        )
        send(page, "What is the weather in Paris?")
        ended(view)
        page.wait_for_selector(".call")
        view.shoot(f"{name}-folded")
        for summary in page.locator("summary").all():
            summary.click()
        assert view.fits()
        inside = "(all) => all.every((each) => each.getBoundingClientRect().right <= innerWidth)"
        assert page.locator(".call, .thinking, .call textarea").evaluate_all(inside)
        view.shoot(name)
        fill_settings(page, schema=json.dumps(SCHEMA, indent=2), tools=json.dumps(TOOLS, indent=2))
        assert page.evaluate("document.querySelector('#settings').scrollWidth <= innerWidth")
        view.shoot(f"{name}-settings")
        assert view.fits()
