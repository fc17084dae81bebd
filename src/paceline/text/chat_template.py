"""Chat messages to a prompt, by the template a model comes with.

Templates come from the operator only: from the model's files or named at start-up, never from a request. A template
runs in a sandbox and under limits; whatever goes wrong in it is answered with a fixed sentence, since its own words
and the messages it complains about may be anything. Contents are data: nothing in them is ever run as a template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from jinja2 import Template

from paceline.errors import InputError, InvalidRequest
from paceline.text.messages import normalize_messages, normalize_tools
from paceline.text.sandbox import (
    BUDGET,
    BoundedEnvironment,
    RenderBudget,
    RenderLimitExceeded,
    RenderLimits,
    TemplateRefused,
)
from paceline.text.tokenizer import RenderedPrompt, Tokenizer

# Keeps control tokens that message contents spell apart from those the chat template writes.
#
# Contents go into the template with a mark inside every control token they spell; in the rendered text an unbroken
# control token is therefore the template's own. The marks are then taken out again, so the text is what the
# template gives without them. A token that only forms where contents meet is found by a second, stricter marking.


_PRIVATE_USE = range(0xE000, 0xF900)


class ControlFinder:
    """Finds control tokens in text: leftmost first, the longest of those that begin there."""

    def __init__(self, texts: Iterable[str]) -> None:
        # One character cannot be broken by a mark; no vocabulary has such a control token.
        self._texts = frozenset(text for text in texts if len(text) > 1)
        self._lengths: dict[str, list[int]] = {}
        for text in self._texts:
            self._lengths.setdefault(text[0], []).append(len(text))
        for first, lengths in self._lengths.items():
            self._lengths[first] = sorted(set(lengths), reverse=True)
        self._first = _any_of(text[0] for text in self._texts)
        self._last = _any_of(text[-1] for text in self._texts)
        self._edge = _any_of(text[at] for text in self._texts for at in (0, -1))

    def find(self, text: str) -> list[tuple[int, int]]:
        """The places of control tokens, without overlap."""
        found: list[tuple[int, int]] = []
        for begin, end in self._starts(text):
            if not found or begin >= found[-1][1]:
                found.append((begin, end))
        return found

    def has_edge(self, text: str) -> bool:
        """Whether a text could be the beginning or the end of a control token."""
        return self._edge.search(text) is not None

    def broken(self, text: str, mark: str) -> str:
        """The text with a mark inside every control token."""
        pieces: list[str] = []
        done = 0
        for begin, _ in self._starts(text):
            pieces.append(text[done : begin + 1])
            done = begin + 1
        return mark.join([*pieces, text[done:]])

    def shattered(self, text: str, mark: str) -> str:
        """The text with a mark after everything that could begin a control token and before what could end one."""
        marked = self._first.sub(lambda match: match[0] + mark, text)
        return self._last.sub(lambda match: mark + match[0], marked)

    def _starts(self, text: str) -> Iterator[tuple[int, int]]:
        for match in self._first.finditer(text):
            begin = match.start()
            for length in self._lengths[match[0]]:
                candidate = text[begin : begin + length]  # shorter where the text ends
                if candidate in self._texts:
                    yield begin, begin + len(candidate)
                    break


def _mark_for(contents: object, finder: ControlFinder, *, template: str) -> str:
    """A mark that a request's contents do not hold; empty where they hold nothing that could be a control token."""
    strings = list(_strings(contents))
    if not any(finder.has_edge(text) for text in strings):
        return ""
    everything = "\0".join([template, *strings])
    for mark in map(chr, _PRIVATE_USE):
        if mark not in everything and json.dumps(mark)[1:-1] not in everything:
            return mark
    raise ValueError("the text uses every private-use character")


def _without_marks(text: str, mark: str, finder: ControlFinder) -> RenderedPrompt:
    """The rendered text without marks, and where the template wrote control tokens."""
    pieces: list[str] = []
    controls: list[tuple[int, int]] = []
    done = size = 0
    for begin, end in [*finder.find(text), (len(text), len(text))]:
        # As a character, or as JSON writes it where a template asks for ASCII.
        piece = text[done:begin].replace(mark, "").replace(json.dumps(mark)[1:-1], "")
        pieces += (piece, text[begin:end])
        size += len(piece)
        controls.append((size, size + end - begin))
        size += end - begin
        done = end
    return RenderedPrompt(text="".join(pieces), controls=tuple(controls[:-1]))


def marked(value: object, mark_value: Callable[[str], str], mark_key: Callable[[str], str]) -> object:
    """JSON data with every string in it marked."""
    if isinstance(value, str):
        return mark_value(value)
    if isinstance(value, dict):
        return {mark_key(key): marked(item, mark_value, mark_key) for key, item in value.items()}
    if isinstance(value, list):
        return [marked(item, mark_value, mark_key) for item in value]
    return value


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _any_of(characters: Iterable[str]) -> re.Pattern[str]:
    found = "".join(sorted(set(characters)))
    return re.compile(f"[{re.escape(found)}]" if found else r"(?!)")


MAX_SOURCE_CHARS = 1_000_000
# What a request may not set through its switches: the template's other inputs.
RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"))
TOOL_ROLES = ("tool", "function")
CALLS_AS_TEXT = "write calls and their results as content of assistant and user messages"
# Where the last message ends, for a prompt that continues it. The space tells whether the template trims.
_END, _TRIMMED_END = "\U000f0ffd ", "\U000f0ffd"


class ChatTemplate:
    """One compiled template; without a source every rendering is refused. Used from any thread."""

    def __init__(
        self,
        source: str | None,
        *,
        tokens: Mapping[str, str] | None = None,
        control_tokens: Iterable[str] = (),
        limits: RenderLimits | None = None,
        now: Callable[[], datetime] = datetime.now,
        takes_pictures: bool = False,
    ) -> None:
        """`takes_pictures`: contents reach the template as lists of parts."""
        self._source = source or ""
        self._tokens = dict(tokens or {})  # bos_token, eos_token, ...
        self._finder = ControlFinder(control_tokens)
        self._limits = limits or RenderLimits()
        self.takes_pictures = takes_pictures
        self._template = None if source is None else _compiled(source, BoundedEnvironment(self._limits, now))

    @classmethod
    def for_tokenizer(
        cls,
        tokenizer: Tokenizer,
        *,
        source: str | None = None,
        limits: RenderLimits | None = None,
        takes_pictures: bool = False,
    ) -> ChatTemplate:
        """The template of a tokenizer, or another one for it that the operator named."""
        return cls(
            tokenizer.chat_template if source is None else source,
            tokens=tokenizer.template_tokens,
            control_tokens=tokenizer.control_tokens,
            limits=limits,
            takes_pictures=takes_pictures,
        )

    def render(
        self,
        messages: object,
        *,
        tools: object = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        switches: Mapping[str, object] | None = None,
    ) -> RenderedPrompt:
        """The prompt for a conversation. `switches` are a request's own settings for the template: booleans.

        Raises InvalidRequest for messages that are malformed, or that the template does not accept.
        """
        if self._template is None:
            message = (
                "this model has no chat template; send a plain prompt, or start the server with a template"
            )
            raise InvalidRequest(message, param="messages")
        if continue_final_message and add_generation_prompt:
            message = "continue_final_message and add_generation_prompt exclude each other"
            raise InvalidRequest(message, param="continue_final_message")
        shown = normalize_messages(messages, takes_pictures=self.takes_pictures)
        data: dict[str, Any] = {"messages": shown, "tools": normalize_tools(tools)}
        self._check_calls(data["messages"])
        if self.takes_pictures:
            for each in shown:
                if isinstance(each["content"], str):
                    each["content"] = [{"type": "text", "text": each["content"]}]
        if continue_final_message:
            _mark_end(data["messages"][-1])
        settings = {
            **self._tokens,
            **_switches(switches or {}),
            "add_generation_prompt": add_generation_prompt,
        }
        prompt = self._with_controls(self._template, data, {**settings, "documents": None})
        return _cut_at_end(prompt) if continue_final_message else prompt

    def _check_calls(self, messages: list[dict[str, object]]) -> None:
        """A call that the template does not show would be lost: refuse a message that consists of nothing else."""
        if "tool_calls" in self._source:
            return
        for index, message in enumerate(messages):
            if message["content"] is None:
                place = f"messages[{index}].tool_calls cannot be shown: this model's chat template has no place for it"
                raise InvalidRequest(f"{place}; {CALLS_AS_TEXT}", param="messages")

    def _with_controls(
        self, template: Template, data: dict[str, Any], settings: Mapping[str, object]
    ) -> RenderedPrompt:
        """Render with marked contents. See `controls` for why twice."""
        finder = self._finder
        try:
            mark = _mark_for([data["messages"], data["tools"]], finder, template=self._source)
        except ValueError as error:
            raise InvalidRequest(f"the messages cannot be rendered: {error}", param="messages") from None
        if not mark:
            text = self._run(template, {**settings, **data})
            return RenderedPrompt(text=text, controls=tuple(finder.find(text)))
        broken = partial(finder.broken, mark=mark)
        text = self._run(template, {**settings, **_marked(data, broken, broken)})
        prompt = _without_marks(text, mark, finder)
        shattered = partial(finder.shattered, mark=mark)
        strict = self._run(template, {**settings, **_marked(data, shattered, broken)})
        own = [strict[begin:end] for begin, end in finder.find(strict)]
        if own != [prompt.text[begin:end] for begin, end in prompt.controls]:
            message = "the messages spell a control token of the model together with their surroundings; change them"
            raise InvalidRequest(message, param="messages")
        return prompt

    def _run(self, template: Template, variables: Mapping[str, Any]) -> str:
        """One rendering. Whatever the template raises becomes one of three fixed sentences."""
        budget = RenderBudget(self._limits, num_messages=len(variables["messages"]))
        pieces: list[str] = []
        total = 0
        try:
            for piece in template.root_render_func(template.new_context({**variables, BUDGET: budget})):
                budget.work()
                total += len(piece)
                budget.grow(total)
                pieces.append(piece)
        except TemplateRefused:
            message = "the model's chat template does not accept these messages (roles or their order)"
            raise InvalidRequest(message + _tool_hint(variables["messages"]), param="messages") from None
        except (RenderLimitExceeded, RecursionError, MemoryError):
            message = "rendering the model's chat template for these messages took too much time or memory"
            raise InvalidRequest(message, param="messages") from None
        except Exception:  # a template can fail in any way; none of them may reach the caller
            message = "the model's chat template cannot render these messages"
            raise InvalidRequest(message + _tool_hint(variables["messages"]), param="messages") from None
        return "".join(pieces)


def _compiled(source: str, environment: BoundedEnvironment) -> Template:
    if len(source) > MAX_SOURCE_CHARS:
        raise InputError(f"the chat template is longer than {MAX_SOURCE_CHARS} characters")
    try:
        return environment.from_string(source)
    except Exception as error:  # Jinja's own errors, and what Python says of the code it makes
        raise InputError(f"the chat template cannot be used: {error}") from error


def _tool_hint(messages: Sequence[Mapping[str, object]]) -> str:
    """What to do about a conversation with tools that a template fails on; names the first message it can be."""
    for index, message in enumerate(messages):
        if message["role"] in TOOL_ROLES or "tool_calls" in message:
            what = f"role {message['role']}" if message["role"] in TOOL_ROLES else "tool_calls"
            return f"; messages[{index}] has {what}: if this model knows no tools, {CALLS_AS_TEXT}"
    return ""


def _switches(switches: Mapping[str, object]) -> Mapping[str, object]:
    for name, value in switches.items():
        if name in RESERVED or not name.isidentifier() or name.startswith("_") or not isinstance(value, bool):
            message = "chat_template_kwargs takes true or false for names the template knows"
            raise InvalidRequest(message, param="chat_template_kwargs")
    return switches


def _marked(
    data: Mapping[str, Any], mark_value: Callable[[str], str], mark_key: Callable[[str], str]
) -> dict[str, object]:
    """Everything a request brought, marked; roles are from a fixed list, and templates build markers of them. Types
    of parts are from one too."""
    messages = []
    for message in data["messages"]:
        found: Any = marked({**message, "role": ""}, mark_value, mark_key)
        content = message.get("content")
        if isinstance(content, list):
            pairs = zip(found["content"], content, strict=True)
            found["content"] = [{**part, "type": given["type"]} for part, given in pairs]
        messages.append({**found, "role": message["role"]})
    return {"messages": messages, "tools": marked(data["tools"], mark_value, mark_key)}


def _mark_end(message: dict[str, object]) -> None:
    content = message["content"]
    if isinstance(content, list) and content[-1]["type"] == "text":
        message["content"] = [*content[:-1], {"type": "text", "text": content[-1]["text"] + _END}]
        return
    if not isinstance(content, str):
        raise InvalidRequest("the final message has no text to continue", param="continue_final_message")
    message["content"] = content + _END


def _cut_at_end(prompt: RenderedPrompt) -> RenderedPrompt:
    """The prompt up to where the last message ends."""
    at = prompt.text.rfind(_TRIMMED_END)
    if at < 0:
        message = (
            "the model's chat template does not show the final message as it is, so it cannot be continued"
        )
        raise InvalidRequest(message, param="continue_final_message")
    text = prompt.text[:at]
    if not prompt.text.startswith(_END, at):
        text = text.rstrip()
    controls = tuple((begin, end) for begin, end in prompt.controls if end <= len(text))
    return RenderedPrompt(text=text, controls=controls)
