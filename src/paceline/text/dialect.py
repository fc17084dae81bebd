"""How one model reasons and calls tools: what its chat template gets, what its answers must look like, how they are
read. Follows from the chat template, unless an operator says otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.structure import Structure
from paceline.errors import InvalidRequest
from paceline.text.answer import AnswerForm
from paceline.text.chat_template import ChatTemplate
from paceline.text.guide.matcher import is_installed
from paceline.text.messages import Message, normalize_messages
from paceline.text.reasoning import named_reasoning
from paceline.text.tokenizer import RenderedPrompt, Tokenizer
from paceline.text.tools.call_grammar import behind_reasoning, tool_structure
from paceline.text.tools.formats import AUTO, Shape, ToolFormat, detected_format, marker_ids, named_format
from paceline.text.tools.use import Tool, ToolUse

# What chat templates call the switch.
THINKING_SWITCHES = ("enable_thinking", "thinking")
_PROBE = "paceline_probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """What a request says about reasoning."""

    wanted: bool | None = None  # None: as the model does
    budget: int | None = None  # in tokens; None: no limit
    hidden: bool = False  # left out of the answer

    def within(self, most: int | None) -> int | None:
        """The budget under an operator's limit; None where there is none."""
        if self.wanted is False:
            return 0
        return min((each for each in (self.budget, most) if each is not None), default=None)


DEFAULT_THINKING = Thinking()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A rendered conversation, with the form of its answer and how that is read."""

    prompt: RenderedPrompt
    structure: Structure | None
    form: AnswerForm | None


class Dialect:
    """One model's chat template, and what belongs to it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        source: str | None = None,
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        max_thinking_tokens: int | None = None,
        takes_pictures: bool = False,
    ) -> None:
        """Raises ConfigError for a parser that there is not."""
        self.template = ChatTemplate.for_tokenizer(tokenizer, source=source, takes_pictures=takes_pictures)
        self._source = source or tokenizer.chat_template or ""
        self.tools = named_format(tool_call_parser, self._source)
        self.reasoning = named_reasoning(reasoning_parser, self._source)
        self._control = tokenizer.control_tokens
        self._most = max_thinking_tokens
        self._shows_tools = self._renders(_PROBE, tools=[_probe().for_template()])
        self._takes_system = self._renders(_PROBE, system=_PROBE)

    def read(
        self,
        messages: object,
        use: ToolUse | None = None,
        *,
        thinking: Thinking | None = None,
        structure: Structure | None = None,
        switches: Mapping[str, object] | None = None,
        **options: bool,
    ) -> ChatRequest:
        """Render a conversation. `structure` is what the request asks of its answer, `options` as in `ChatTemplate`.

        Without tools and without a word about thinking, the answer is one text, with the model's own marks in it.
        """
        if use is not None and self.tools is None:
            raise InvalidRequest("tool calls are switched off on this server; leave tools out", param="tools")
        wanted = thinking or DEFAULT_THINKING
        known = self._switches(wanted, switches)
        prompt = self.template.render(
            self._conversation(messages, use), tools=self._shown_tools(use), switches=known, **options
        )
        form = None
        if thinking is not None or use is not None:
            form = self._form(use, prompt.text, hides_reasoning=wanted.hidden)
        made = self._structure(structure, use, prompt.text, wanted)
        return ChatRequest(prompt=prompt, structure=made, form=form)

    def _conversation(self, messages: object, use: ToolUse | None) -> object:
        shows_calls = "tool_calls" in self._source
        if shows_calls and (use is None or self._shows_tools):
            return messages
        found = normalize_messages(messages, takes_pictures=self.template.takes_pictures)
        # Calls of earlier turns are shown in the form that the model is asked to use.
        row = self.tools or detected_format(self._source)
        if not shows_calls:
            found = without_calls(found, row)
        if use is not None and not self._shows_tools:
            text = tool_instructions(row, use)
            found = with_instructions(found, text, takes_system=self._takes_system)
        return found

    def _shown_tools(self, use: ToolUse | None) -> list[object] | None:
        if use is None or not self._shows_tools:
            return None
        return [tool.for_template() for tool in use.tools]

    def _switches(
        self, thinking: Thinking, given: Mapping[str, object] | None
    ) -> Mapping[str, object] | None:
        if thinking.wanted is None:
            return given
        known = {name: thinking.wanted for name in THINKING_SWITCHES if name in self._source}
        return {**known, **(given or {})}

    def _structure(
        self, answer: Structure | None, use: ToolUse | None, prompt: str, thinking: Thinking
    ) -> Structure | None:
        made = answer
        # Calls that need not come, to tools whose schemas are not followed, can do without a grammar.
        can_do_without = use is None or (not use.follows_schemas and answer is None and not is_installed())
        if use is not None and self.tools is not None and not can_do_without:
            made = tool_structure(self.tools, use, self._control, answer)
        row = self.reasoning
        if row is None or not row.expects(prompt):
            return made
        return behind_reasoning(made, row.end, thinking.within(self._most))

    def _form(self, use: ToolUse | None, prompt: str, *, hides_reasoning: bool) -> AnswerForm | None:
        row = self.reasoning
        if use is None and row is None:
            return None
        tools = None if use is None else self.tools
        texts = [*(tools.texts() if tools else ()), *((row.begin, row.end) if row else ())]
        return AnswerForm(
            tools=tools,
            schemas={} if use is None else {tool.name: tool.parameters for tool in use.callable_tools},
            reasoning=row,
            is_open=row is not None and row.is_open(prompt),
            hides_reasoning=hides_reasoning,
            shown_ids=marker_ids(iter(texts), self._control),
        )

    def _renders(self, text: str, *, system: str = "", tools: list[object] | None = None) -> bool:
        """Whether the template shows this, tried once."""
        messages = [{"role": "user", "content": "x"}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        try:
            return text in self.template.render(messages, tools=tools).text
        except InvalidRequest:
            return False


def _probe() -> Tool:
    return Tool(name=_PROBE, parameters={"type": "object", "properties": {}})


# Calls and tools as text for models whose chat template has no place for them.
#
# The tools are described in the system message, with the form of a call by the model's row of the table; calls and
# results of earlier turns become content of ordinary messages.


RESULT_ROLES = ("tool", "function")


def written_calls(row: ToolFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Calls as a model of this family writes them."""
    texts = [_call(row, name, arguments) for name, arguments in calls]
    if row.is_shared:
        return f"{row.begin}{row.opens}{row.separator.join(texts)}{row.closes}{row.end}"
    return row.separator.join(f"{row.begin}{text}{row.end}" for text in texts)


def _call(row: ToolFormat, name: str, arguments: Mapping[str, Any]) -> str:
    if row.shape is Shape.JSON:
        return json.dumps({"name": name, row.arguments: arguments}, ensure_ascii=False)
    if row.shape is Shape.NAME_THEN_JSON:
        written = json.dumps(arguments, ensure_ascii=False)
        return f"{row.call_begin}{name}{row.between}{written}{row.call_end}"
    if row.shape is Shape.PYTHONIC:
        pairs = (f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
        return f"{name}({', '.join(pairs)})"
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<function={name}>\n{parameters}</function>"


def tool_instructions(row: ToolFormat, use: ToolUse) -> str:
    """What a model is told about its tools."""
    tools = "\n".join(json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in use.tools)
    example = written_calls(row, [("function_name", {"argument": "value"})])
    return (
        "You can call functions. They are, as JSON with a schema of their arguments:\n"
        f"<tools>\n{tools}\n</tools>\n"
        f"To call one, write exactly this with the function's own name and arguments:\n{example}"
    )


def with_instructions(messages: Sequence[Message], text: str, *, takes_system: bool) -> list[Message]:
    """The conversation with the text in its system message, or in its first one where there is no such role."""
    found = list(messages)
    first = found[0] if found else {}
    if first.get("role") in ("system", "developer") or not takes_system:
        content = first.get("content") or ""
        joined = _joined(content, "\n\n", text) if takes_system else _joined(text, "\n\n", content)
        found[:1] = [{**first, "content": joined}]
        return found
    return [{"role": "system", "content": text}, *found]


def without_calls(messages: Sequence[Message], row: ToolFormat) -> list[Message]:
    """The conversation with calls and their results as content; results of one turn become one message."""
    found: list[Message] = []
    is_result = False
    for message in messages:
        was_result, is_result = is_result, message["role"] in RESULT_ROLES
        if is_result:
            content = _joined("<tool_response>\n", message["content"], "\n</tool_response>")
            if was_result:
                found[-1]["content"] = _joined(found[-1]["content"], "\n", content)
            else:
                found.append({"role": "user", "content": content})
        elif "tool_calls" in message:
            found.append({"role": message["role"], "content": _with_calls(message, row)})
        else:
            found.append(message)
    return found


def _joined(*contents: object) -> object:
    """Contents behind one another: a text, or a list of parts where one of them is."""
    if not any(isinstance(content, list) for content in contents):
        return "".join(map(str, contents))
    parts: list[object] = []
    for content in contents:
        parts += content if isinstance(content, list) else [{"type": "text", "text": str(content)}]
    return parts


def _with_calls(message: Message, row: ToolFormat) -> object:
    calls: Any = message["tool_calls"]
    pairs = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    content, written = message["content"], written_calls(row, pairs)
    return written if content is None else _joined(content, "\n", written)
