"""Texts that are tokenised alone, so that their tokens are the same wherever they stand in a prompt.

In a conversation a mark stands for each, a word that no text from outside can spell. The rendered prompt is cut at the
marks; what lies between them is tokenised as ever.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.stretch import ModulePart
from paceline.errors import InvalidRequest
from paceline.text.tokenizer import RenderedPrompt, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTexts:
    """Those of one conversation, in the order of their marks."""

    secret: str
    texts: tuple[str, ...]

    @property
    def num_chars(self) -> int:
        return sum(map(len, self.texts))

    def put_into(self, text: str) -> str:
        """A text with those that its marks stand for."""
        return _marks(self.secret).sub(lambda mark: self.texts[int(mark[1])], text)


class PlacedPrompt(NamedTuple):
    """Token ids, and which of them are placed texts."""

    ids: list[int]
    modules: tuple[ModulePart, ...]


def new_secret() -> str:
    return secrets.token_hex(12)


def mark_of(secret: str, index: int) -> str:
    return f"[{secret}:{index}]"


def _marks(secret: str) -> re.Pattern[str]:
    return re.compile(rf"\[{secret}:(\d+)\]")


def encode_placed(tokenizer: Tokenizer, prompt: RenderedPrompt, placed: PlacedTexts) -> PlacedPrompt:
    """A rendered prompt with texts in the place of their marks. Raises InvalidRequest where one is not shown once."""
    marks = list(_marks(placed.secret).finditer(prompt.text))
    if sorted(int(mark[1]) for mark in marks) != list(range(len(placed.texts))):
        message = "the model's chat template does not show each context once; use context_reuse exact"
        raise InvalidRequest(message, param="messages")
    ids: list[int] = []
    modules: list[ModulePart] = []
    done = 0
    for mark in marks:
        ids += tokenizer.encode_template(_part(prompt, done, mark.start()))
        alone = tokenizer.encode(placed.texts[int(mark[1])], add_special_tokens=False, param="messages")
        if alone:
            modules.append(ModulePart(len(ids), len(alone)))
        ids += alone
        done = mark.end()
    ids += tokenizer.encode_template(_part(prompt, done, len(prompt.text)))
    return PlacedPrompt(ids, tuple(modules))


def joined(tokenizer: Tokenizer, parts: Sequence[tuple[str, bool]], between: str) -> PlacedPrompt:
    """Texts one behind the other, of which some are placed."""
    ids: list[int] = []
    modules: list[ModulePart] = []
    waiting = ""  # for a text to be tokenised with
    for number, (text, is_placed) in enumerate(parts):
        waiting += between if number else ""
        if not is_placed:
            waiting += text
            continue
        ids += tokenizer.encode(waiting, add_special_tokens=False) if waiting else []
        alone, waiting = tokenizer.encode(text, add_special_tokens=False), ""
        if alone:
            modules.append(ModulePart(len(ids), len(alone)))
        ids += alone
    ids += tokenizer.encode(waiting, add_special_tokens=False) if waiting else []
    return PlacedPrompt(ids, tuple(modules))


def _part(prompt: RenderedPrompt, begin: int, end: int) -> RenderedPrompt:
    controls = tuple((a - begin, b - begin) for a, b in prompt.controls if begin <= a and b <= end)
    return RenderedPrompt(text=prompt.text[begin:end], controls=controls)
