"""Chat messages and templates: what is accepted, what they see and may not do, and which control tokens are theirs."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InputError, InvalidRequest
from paceline.text.chat_template import ChatTemplate, ControlFinder
from paceline.text.messages import MAX_MESSAGES, normalize_messages, normalize_tools
from paceline.text.sandbox import RenderLimits
from paceline.text.tokenizer import RenderedPrompt
from tests.pure.text.text_helpers import BYTE_KINDS, CHATML, CONTROLS, tokenizer

HELLO = [{"role": "user", "content": "Hello"}]
contents = st.lists(
    st.one_of(st.text(max_size=6), st.sampled_from([*CONTROLS, "<", "<|", "|>", "s>"])), max_size=6
)


def rendered(source: str, messages: object = HELLO, **options: Any) -> str:
    return ChatTemplate(source).render(messages, **options).text


def test_a_template_is_rendered_as_hugging_face_renders_it() -> None:
    """Blocks eat the line they stand on; loop controls, tojson and generation marks exist."""
    source = (
        "{% for message in messages %}\n"
        "    {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{% generation %}{{ message | tojson }}{% endgeneration %}\n"
        "{% endfor %}{{ undefined_name }}{{ bos_token }}"
    )
    made = ChatTemplate(source, tokens={"bos_token": "<s>"})
    text = made.render([{"role": "user", "content": "<ä>"}, *HELLO]).text
    assert text == '{"role": "user", "content": "<ä>"}<s>'


def test_contents_are_data() -> None:
    source = "{% for message in messages %}{{ message.content }}{% endfor %}"
    for content in (
        "{{7*7}}",
        "{% for x in y %}",
        "{# c #}",
        "{{ messages }}",
        "\\{{",
        "{{ raise_exception('x') }}",
    ):
        assert rendered(source, [{"role": "user", "content": content}]) == content


def test_the_clock_is_passed_in() -> None:
    made = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert made.render(HELLO).text == "26 Jul 2024"


CALLS = [{"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}}]
WITH_TOOLS: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c1", "content": "7"},
]


def test_a_history_with_tools_is_rendered_where_the_template_shows_calls() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %} {% endfor %}"
    )
    assert ChatTemplate(source).render(WITH_TOOLS).text == "user:hi assistant:find tool:7 "


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", r"^messages\[1\].tool_calls cannot be shown"),
        ("{{ raise_exception('x') }}{{ messages[0].tool_calls }}", r"; messages\[1\] has tool_calls: if"),
        ("{{ messages[1].content + messages[1].tool_calls }}", r"; messages\[1\] has tool_calls: if"),
    ],
)
def test_a_history_with_tools_that_cannot_be_shown_is_refused_by_name(source: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        ChatTemplate(source).render(WITH_TOOLS)
    assert "write calls and their results as content of assistant and user messages" in str(refused.value)


def test_tools_and_switches_reach_the_template() -> None:
    source = "{{ tools[0].function.name }} {{ enable_thinking }} {{ add_generation_prompt }} {{ documents is none }}"
    tools = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
    assert rendered(source, tools=tools, switches={"enable_thinking": False}) == "find False True True"
    assert rendered("{{ tools is none }}") == "True"


@pytest.mark.parametrize("switches", [{"a": 1}, {"a": "x"}, {"messages": True}, {"_a": True}, {"a b": True}])
def test_switches_are_booleans_under_names_of_their_own(switches: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="chat_template_kwargs") as caught:
        rendered("", switches=switches)
    assert caught.value.param == "chat_template_kwargs"


def test_a_final_message_can_be_continued() -> None:
    chat = [*HELLO, {"role": "assistant", "content": "Sure, "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    made = ChatTemplate(CHATML, control_tokens=CONTROLS).render(chat, **options)  # type: ignore[arg-type]
    assert made.text == "<|start|>user\nHello<|end|>\n<|start|>assistant\nSure, "
    assert [made.text[begin:end] for begin, end in made.controls] == ["<|start|>", "<|end|>", "<|start|>"]
    odd = [{"role": "user", "content": "\U000f0ffd \U000f0ffd"}, *chat]  # what marks the end, in a message
    again = ChatTemplate(CHATML, control_tokens=CONTROLS).render(odd, **options)  # type: ignore[arg-type]
    assert again.text.endswith("Sure, ") and "\U000f0ffd \U000f0ffd<|end|>" in again.text
    assert {again.text[begin:end] for begin, end in again.controls} == {"<|start|>", "<|end|>"}
    trimming = CHATML.replace("message['content']", "message['content'] | trim")
    assert rendered(trimming, chat, **options).endswith("assistant\nSure,")
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        rendered("nothing", chat, **options)
    with pytest.raises(InvalidRequest, match="exclude each other"):
        rendered(CHATML, chat, continue_final_message=True)


# -- control tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BYTE_KINDS)
@given(parts=contents)
def test_contents_never_become_control_tokens_and_the_template_s_do(kind: str, parts: list[str]) -> None:
    made = tokenizer(kind)
    chat = ChatTemplate.for_tokenizer(made)
    content = "".join(parts)
    prompt = chat.render([{"role": "user", "content": content}])
    assert prompt.text == f"<|start|>user\n{content}<|end|>\n<|start|>assistant\n"
    ids = made.encode_template(prompt)
    controls = Counter(index for index in ids if index in set(made.control_tokens.values()))
    start, end = made.control_tokens["<|start|>"], made.control_tokens["<|end|>"]
    assert controls == {start: 2, end: 1}
    assert ids[0] == start


@given(parts=contents)
def test_contents_without_control_tokens_are_encoded_as_the_whole_text(parts: list[str]) -> None:
    made = tokenizer("byte-level")
    content = "".join(part for part in parts if part not in CONTROLS)
    if ControlFinder(CONTROLS).find(content):
        return
    prompt = ChatTemplate.for_tokenizer(made).render([{"role": "user", "content": content}])
    whole = ControlFinder(made.control_tokens).find(prompt.text)
    assert made.encode_template(prompt) == made.encode_template(
        RenderedPrompt(text=prompt.text, controls=tuple(whole))
    )


@pytest.mark.parametrize(
    "hidden",
    [
        {"tools": [{"name": "<|start|>", "<|end|>": ["<s>"], "role": "<|start|>"}]},
        {"tools": [{"name": "x", "parameters": {"role": "</s>"}}]},
    ],
)
def test_tools_cannot_bring_control_tokens_either(hidden: dict[str, Any]) -> None:
    chat = ChatTemplate(
        "<s>{{ tools | tojson }}{{ tools | tojson(ensure_ascii=true) }}", control_tokens=CONTROLS
    )
    plain = ChatTemplate("<s>{{ tools | tojson }}{{ tools | tojson(ensure_ascii=true) }}")
    prompt = chat.render(HELLO, **hidden)
    assert prompt.controls == ((0, 3),)
    assert prompt.text == plain.render(HELLO, **hidden).text  # no trace of how it was done


def test_roles_may_build_the_template_s_markers() -> None:
    chat = ChatTemplate(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}", control_tokens=["<|user|>"]
    )
    prompt = chat.render([{"role": "user", "content": "<|user|>"}])
    assert prompt == RenderedPrompt(text="<|user|><|user|>", controls=((0, 8),))


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("{{ messages[0].content }}{{ messages[1].content }}", ["<|st", "art|>"]),
        ("<|{{ messages[0].content }}", ["start|>"]),
        ("{{ messages[0].content | trim }}|>", ["<|start "]),
        ("{{ messages[0].content | replace('x', '') }}", ["<|stxart|>"]),
    ],
)
def test_control_tokens_that_form_where_contents_meet_are_refused(source: str, messages: list[str]) -> None:
    chat = ChatTemplate(source, control_tokens=CONTROLS)
    with pytest.raises(InvalidRequest, match="spell a control token"):
        chat.render([{"role": "user", "content": content} for content in messages])


def test_the_longest_control_token_counts() -> None:
    finder = ControlFinder(["<a>", "<a>b", "b<"])
    assert finder.find("<a>b<a>") == [(0, 4), (4, 7)]
    assert "<a>" not in finder.broken("<a>b<a>", "#") and "b<" not in finder.broken("<a>b<a>", "#")


# -- what is refused ---------------------------------------------------------------------------------------


def test_without_a_template_the_answer_says_so() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplate(None).render(HELLO)


def test_a_refusal_of_the_template_has_a_fixed_text() -> None:
    with pytest.raises(InvalidRequest, match="does not accept these messages") as caught:
        rendered("{{ raise_exception('secret ' ~ messages[0].content) }}")
    assert "secret" not in str(caught.value) and "Hello" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.nothing.more }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}{{ x.y.z }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ (1).to_bytes(10) }}",
        "{{ 'a'.encode() }}",
        "{{ 'a'.translate({}) }}",
        "{{ lipsum() }}",
        "{% include 'x' %}",
        "{{ namespace(_x=1) }}",
        "{{ strftime_now('%100000d') }}",
        "{{ '{0.__class__.x.y}'.format(1) }}",
    ],
)
def test_what_a_template_may_not_do_fails_with_a_fixed_text(source: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot render these messages"):
        rendered(source)


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ x | pprint }}", "{{", "{% nothing %}", "(" * 3000 + "{{" + "(" * 3000]
)
def test_a_template_that_is_none_is_an_input_error(source: str) -> None:
    with pytest.raises(InputError, match="chat template"):
        ChatTemplate(source)


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
BOMBS = {
    "loops": LOOPS,
    "loops in a macro": f"{{% macro m() %}}{LOOPS}{{% endmacro %}}{{{{ m() }}}}",
    "filtered loops": "{% for a in range(9999) if range(99999) | list | length < 0 %}{% endfor %}",
    "recursion": "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "branching recursion": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "recursive loop": "{% for x in [[1]] recursive %}{{ loop([x]) }}{% endfor %}",
    "output": "{% for a in range(99999) %}xxxxxxxxxx{% endfor %}",
    "captured output": "{% set x %}{% for a in range(99999) %}xxxxxxxxxx{% endfor %}{% endset %}",
    "times": "{{ ('a' * 10**8) | length }}",
    "list times": "{{ ([0] * 10**8) | length }}",
    "power": "{{ (10 ** 100000000) % 7 }}",
    "products": "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "doubling": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "joining": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "capturing": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
    "{% set n.x = y %}{% endfor %}",
    "nested lists": "{% set n = namespace(x=['a']) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    "{{ n.x }}",
    "nested dicts": "{% set n = namespace(x={}) %}{% for i in range(60) %}{% set n.x = {'a': n.x, 'b': n.x} %}"
    "{% endfor %}{{ n.x | tojson }}",
    "nested arguments": "{% macro m(n) %}{% if n %}{{ m(n-1, varargs, varargs) }}{% else %}{{ varargs }}{% endif %}"
    "{% endmacro %}{{ m(60) }}",
    "nested calls": "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}"
    "{{ n.x }}",
    "replace": "{{ ('a' * 9999) | replace('a', 'a' * 9999) | length }}",
    "replace method": "{{ ('a' * 9999).replace('', 'a' * 9999) | length }}",
    "join": "{{ range(9999) | join('a' * 9999) | length }}",
    "join method": "{{ ('a' * 9999).join('b' * 9999) | length }}",
    "join of a generator": "{{ range(99999) | map('default', 'a') | map('replace', '', 'a' * 999) | join | length }}",
    "format": "{{ '%100000000d' % 1 }}",
    "format filter": "{{ '%*d' | format(100000000, 1) }}",
    "format method": "{{ '{:100000000}'.format(1) }}",
    "nested format": "{{ '{:{}}'.format(1, 100000000) }}",
    "many fields": "{{ ('{0}' * 9999).format('a' * 9999) }}",
    "columns": "{{ 'a'.center(10**9) }}",
    "zeros": "{{ '1'.zfill(10**9) }}",
    "indent": "{{ ('\n' * 9999) | indent(99999) }}",
    "batch": "{{ [1] | batch(10**9, 0) | list | length }}",
    "slice": "{{ [1] | slice(10**9) | list | length }}",
    "sum": "{{ ([[1]] * 999) | sum(start=[]) | length }}",
    "json": "{{ messages | tojson(indent=10**9) }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_wants_too_much_is_stopped(name: str) -> None:
    limits = RenderLimits(seconds=0.2, max_chars=200_000)
    chat = ChatTemplate(BOMBS[name], limits=limits)
    with pytest.raises(InvalidRequest, match="too much time or memory"):
        chat.render(HELLO)
    # And the next rendering starts afresh.
    assert ChatTemplate("{{ messages[0].content }}", limits=limits).render(HELLO).text == "Hello"


def test_ordinary_templates_are_far_from_the_limits() -> None:
    """Two thousand messages, gathered in lists as templates do, cost what they should."""
    source = (
        "{% set n = namespace(all=[]) %}{% for m in messages %}{% set n.all = n.all + [m.content ~ '!'] %}{% endfor %}"
        "{{ n.all | join(' ') }}{{ messages | map(attribute='role') | unique | list }}"
    )
    chat = ChatTemplate(source, limits=RenderLimits(seconds=10))
    assert chat.render(HELLO * 2000).text == " ".join(["Hello!"] * 2000) + "['user']"


# ----------------------------------------------------------------
# Chat messages: what is accepted, what it becomes, and how a mistake is named.


def test_text_parts_become_one_string() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    assert normalize_messages([{"role": "user", "content": parts}]) == [
        {"role": "user", "content": "a\nb\nc"}
    ]


def test_fields_that_are_not_read_are_dropped() -> None:
    message = {"role": "user", "content": "x", "name": "ann", "weight": 3, "audio": None}
    assert normalize_messages([message]) == [{"role": "user", "content": "x", "name": "ann"}]


def test_tool_calls_have_arguments_as_objects() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": [1, "x"]}'}}]
    (message,) = normalize_messages([{"role": "assistant", "content": None, "tool_calls": calls}])
    function = {"name": "find", "arguments": {"q": [1, "x"]}}
    assert message == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "id": "c1", "function": function}],
    }


def test_reasoning_goes_by_one_name() -> None:
    (message,) = normalize_messages([{"role": "assistant", "content": "x", "reasoning": "y"}])
    assert message["reasoning_content"] == "y"


def call(arguments: object) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (None, "a list"),
        ("text", "a list"),
        ([], "at least one"),
        ([{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1), "at most"),
        (["text"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\]\.role must be one of"),
        ([{"role": "endoftext", "content": "x"}], r"role must be one of"),
        ([{"role": ["user"], "content": "x"}], r"role must be one of"),
        ([{"role": "user"}], r"content must be a string"),
        ([{"role": "user", "content": 1}], r"content must be a string"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\].*type .text."),
        (
            [{"role": "user", "content": [{"type": "text", "text": 1}]}],
            r"content\[0\]\.text must be a string",
        ),
        ([{"role": "user", "content": "x", "name": 1}], r"name must be a string"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], "must be a list"),
        ([{"role": "assistant", "tool_calls": [1]}], "with a function"),
        ([call("{")], "not valid JSON"),
        ([call("[" * 100_000)], "not valid JSON"),
        ([call("[1]")], "must be a JSON object"),
        ([call({"a": object()})], "holds a object"),
    ],
)
def test_mistakes_are_named_by_their_place(messages: object, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as caught:
        normalize_messages(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("tools", "problem"), [({}, "a list"), ([1], "a list"), ([{1: 2}], "key"), ([{"a": {1}}], "set")]
)
def test_tools_are_json_objects(tools: object, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        normalize_tools(tools)


def test_deep_data_is_refused() -> None:
    deep: object = 1
    for _ in range(100):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested deeper"):
        normalize_tools([{"a": deep}])
