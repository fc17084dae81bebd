"""What an answer consists of: reasoning, text and tool calls, read as its text arrives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.text.reasoning import Reasoned, ReasoningFormat, ReasoningSplitter
from paceline.text.tools.formats import ToolFormat
from paceline.text.tools.scanner import Event, Said, Schemas, ToolScanner

AnswerEvent = Reasoned | Event


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """How the answer to one prompt is read."""

    tools: ToolFormat | None = None
    schemas: Schemas = field(default_factory=dict)  # of the tools that may be called
    reasoning: ReasoningFormat | None = None
    is_open: bool = False  # the prompt has begun the reasoning
    hides_reasoning: bool = False
    # Control tokens that stay in the text, because they mark these parts.
    shown_ids: frozenset[int] = frozenset()


class AnswerReader:
    """`push` every piece of an answer, `flush` at its end."""

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        row = form.reasoning
        self._splitter = None if row is None else ReasoningSplitter(row, is_open=form.is_open)
        self._scanner = None if form.tools is None else ToolScanner(form.tools, form.schemas)

    @property
    def is_reasoning(self) -> bool:
        return self._splitter is not None and self._splitter.is_reasoning

    @property
    def call_outcomes(self) -> Mapping[str, int]:
        """How many tool calls came to what; empty where there are no tools."""
        return {} if self._scanner is None else self._scanner.outcomes

    @property
    def may_reason(self) -> bool:
        """Whether the next piece can be of the reasoning."""
        return self._splitter is not None and self._splitter.may_reason

    def push(self, text: str) -> list[AnswerEvent]:
        if self._splitter is None:
            return self._read("", text)
        return self._read(*self._splitter.push(text))

    def flush(self) -> list[AnswerEvent]:
        found = [] if self._splitter is None else self._read(*self._splitter.flush())
        if self._scanner is not None:
            found += self._scanner.flush()
        return found

    def _read(self, reasoning: str, content: str) -> list[AnswerEvent]:
        found: list[AnswerEvent] = []
        if reasoning and not self._form.hides_reasoning:
            found.append(Reasoned(reasoning))
        if content:
            found += [Said(content)] if self._scanner is None else self._scanner.push(content)
        return found
