"""Texts and prompts out of files: plain text, JSON, or JSON lines.

An entry of JSON is a text, a list of token ids, or an object: a conversation (`messages`, `conversations`), or fields
such as `prompt`, `question`, `turns` and `text`, `input`, `output`, `answer`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.errors import InputError

CONVERSATION = ("messages", "conversations")
ASKED = ("prompt", "question", "instruction", "input", "text")
SAID = ("output", "answer", "response", "completion")

Text = str | list[int]


def read_texts(path: Path) -> list[Text]:
    """Texts to learn from, each whole."""
    return [text for entry in _entries(path) if (text := _text_of(entry))]


def read_prompts(path: Path) -> list[Text]:
    """What is asked first in each entry."""
    return [prompt for entry in _entries(path) if (prompt := _prompt_of(entry))]


def _entries(path: Path) -> list[Any]:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    found = list(_parsed(path, content))
    if not found:
        raise InputError(f"{path}: there is no text in it")
    return found


def _parsed(path: Path, content: str) -> Iterator[Any]:
    if path.suffix == ".json":
        try:
            value = json.loads(content)
        except ValueError as error:
            raise InputError(f"{path}: is not JSON: {error}") from error
        yield from value if isinstance(value, list) else [value]
    elif path.suffix == ".jsonl":
        for number, line in enumerate(content.splitlines(), 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise InputError(f"{path}: line {number} is not JSON: {error}") from error
    else:  # paragraphs
        yield from (part.strip() for part in content.split("\n\n") if part.strip())


def _is_ids(entry: Any) -> bool:
    return isinstance(entry, list) and bool(entry) and all(type(item) is int and item >= 0 for item in entry)


def _said(entry: Any) -> list[str]:
    """The turns of a conversation."""
    if not isinstance(entry, dict):
        return []
    for name in CONVERSATION:
        if isinstance(entry.get(name), list):
            turns = [turn.get("content", turn.get("value")) for turn in entry[name] if isinstance(turn, dict)]
            return [turn for turn in turns if isinstance(turn, str)]
    asked = entry.get("turns")
    return [turn for turn in asked if isinstance(turn, str)] if isinstance(asked, list) else []


def _fields(entry: Any, names: tuple[str, ...]) -> list[str]:
    return (
        [entry[name] for name in names if isinstance(entry.get(name), str)] if isinstance(entry, dict) else []
    )


def _text_of(entry: Any) -> Text:
    if isinstance(entry, str) or _is_ids(entry):
        return entry  # type: ignore[no-any-return]
    return "\n".join(_said(entry) or _fields(entry, ASKED + SAID))


def _prompt_of(entry: Any) -> Text:
    if isinstance(entry, str) or _is_ids(entry):
        return entry  # type: ignore[no-any-return]
    return next(iter(_said(entry) or _fields(entry, ASKED)), "")
