"""Keeps control tokens that message contents spell apart from those the chat template writes.

Contents go into the template with a mark inside every control token they spell; in the rendered text an unbroken
control token is therefore the template's own. The marks are then taken out again, so the text is what the template
gives without them. A token that only forms where contents meet is found by a second, stricter marking.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from paceline.text.tokenizer import RenderedPrompt

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """How the contents of one request are marked. An empty mark: they hold nothing that could be a control token."""

    mark: str = ""

    @classmethod
    def for_contents(cls, value: object, finder: ControlFinder, *, template: str) -> Marks:
        strings = list(_strings(value))
        if not any(finder.has_edge(text) for text in strings):
            return cls()
        everything = "\0".join([template, *strings])
        for code in _PRIVATE_USE:
            mark = chr(code)
            if mark not in everything and json.dumps(mark)[1:-1] not in everything:
                return cls(mark=mark)
        raise ValueError("the text uses every private-use character")

    def clean(self, text: str, finder: ControlFinder) -> RenderedPrompt:
        """The rendered text without marks, and where the template wrote control tokens."""
        places = finder.find(text)
        if not self.mark:
            return RenderedPrompt(text=text, controls=tuple(places))
        pieces: list[str] = []
        controls: list[tuple[int, int]] = []
        done = size = 0
        for begin, end in places:
            piece = self._without(text[done:begin])
            size += len(piece)
            controls.append((size, size + end - begin))
            size += end - begin
            pieces.extend((piece, text[begin:end]))
            done = end
        pieces.append(self._without(text[done:]))
        return RenderedPrompt(text="".join(pieces), controls=tuple(controls))

    def _without(self, text: str) -> str:
        # As a character, or as JSON writes it where a template asks for ASCII.
        return text.replace(self.mark, "").replace(json.dumps(self.mark)[1:-1], "")


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
