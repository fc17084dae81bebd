"""Reasoning apart from the answer: how models mark it, whether a prompt asks for it, and a splitter for answers that
arrive in pieces.

Reasoning comes first in an answer. Where a prompt ends with the marker that begins it, the answer is inside from its
first character. White space next to the markers belongs to neither part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from paceline.errors import ConfigError
from paceline.text.tools.formats import AUTO, NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a family of models marks its reasoning."""

    name: str
    aliases: tuple[str, ...] = ()  # other names of vLLM's --reasoning-parser
    begin: str
    end: str
    # Models reason unless the prompt ends with `end`; others where `begin` is in the prompt.
    is_usual: bool = False

    def expects(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins with reasoning."""
        tail = prompt.rstrip()
        if tail.endswith(self.end):
            return False
        return self.is_usual or self.begin in prompt

    def is_open(self, prompt: str) -> bool:
        """Whether the prompt has begun the reasoning already."""
        return prompt.rstrip().endswith(self.begin)


REASONING = (
    ReasoningFormat(
        name="deepseek_r1",
        aliases=("qwen3", "deepseek_v3", "glm45", "nemotron_v3", "ernie45", "think"),
        begin="<think>",
        end="</think>",
        is_usual=True,
    ),
    ReasoningFormat(name="mistral", begin="[THINK]", end="[/THINK]"),
    ReasoningFormat(name="granite", begin="Here is my thought process:", end="Here is my response:"),
)


def reasoning_names() -> tuple[str, ...]:
    """Every name of a format that `--reasoning-parser` takes."""
    return tuple(name for row in REASONING for name in (row.name, *row.aliases))


def named_reasoning(name: str, template: str) -> ReasoningFormat | None:
    """The format an operator chose, by default the one whose markers the chat template has; None for "none"."""
    if name == AUTO:
        return next((row for row in REASONING if row.end in template), None)
    if name == NONE:
        return None
    for row in REASONING:
        if name in (row.name, *row.aliases):
            return row
    known = ", ".join((AUTO, NONE, *reasoning_names()))
    raise ConfigError(f"--reasoning-parser: there is no {name!r}; there are {known}")


class Reasoned(NamedTuple):
    """Text of the reasoning."""

    text: str


class Split(NamedTuple):
    """What one piece of an answer brought of either part."""

    reasoning: str = ""
    content: str = ""


class ReasoningSplitter:
    """`push` every piece of an answer, `flush` at its end. No character of the reasoning is ever in the content."""

    def __init__(self, row: ReasoningFormat, *, is_open: bool) -> None:
        self._row = row
        self._held = ""
        self._is_undecided = not is_open  # whether it begins with reasoning
        self.is_reasoning = is_open
        self._is_fresh = True  # nothing of this part has come yet

    @property
    def may_reason(self) -> bool:
        """Whether the next piece can be of the reasoning."""
        return self.is_reasoning or self._is_undecided

    def push(self, text: str) -> Split:
        if not self.is_reasoning and not self._is_undecided and not self._is_fresh:
            return Split(content=text)
        self._held += text
        if self._is_undecided and not self._decides():
            return Split()
        reasoning = ""
        if self.is_reasoning:
            reasoning = self._reasoning()
            if self.is_reasoning:
                return Split(reasoning)
        return Split(reasoning, self._content())

    def flush(self) -> Split:
        """The answer is over."""
        text, self._held = self._held, ""
        if self.is_reasoning:
            return Split(reasoning=text.lstrip() if self._is_fresh else text)
        return Split(content=text)

    def _decides(self) -> bool:
        text, begin, end = self._held.lstrip(), self._row.begin, self._row.end
        if any(len(text) < len(marker) and marker.startswith(text) for marker in (begin, end)):
            return False
        self._is_undecided = False
        if text.startswith((begin, end)):  # an end at once: reasoning was not wanted
            self.is_reasoning = True
            self._held = text.removeprefix(begin)
        else:
            self._is_fresh = False  # white space at its beginning is the answer's own
        return True

    def _reasoning(self) -> str:
        end = self._row.end
        at = self._held.find(end)
        if at >= 0:
            text = self._held[:at].rstrip()
            self._held = self._held[at + len(end) :]
            self.is_reasoning = False
        else:
            # What may be the beginning of the marker, and white space before it, is kept back.
            known = len(self._held)
            size = next((n for n in range(len(end) - 1, 0, -1) if self._held.endswith(end[:n])), 0)
            known = len(self._held[: known - size].rstrip())
            text, self._held = self._held[:known], self._held[known:]
        if self._is_fresh:
            text = text.lstrip()
        self._is_fresh = not self.is_reasoning or (self._is_fresh and not text)
        return text

    def _content(self) -> str:
        text = self._held.lstrip() if self._is_fresh else self._held
        if text:
            self._is_fresh = False
        self._held = ""
        return text
