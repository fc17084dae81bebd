"""Files with prompts: plain text, JSON lines, ShareGPT conversations.

Owns how such a file is told from a trace and what its entries mean. Every mistake in one is an `InputError` that names
the place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.bench.load.source import LoadRequest
from paceline.errors import InputError
from paceline.workload.fields import shown
from paceline.workload.traces import CSV_FORMATS, read_text

CHARACTERS_PER_TOKEN = 4  # for the length of a recorded answer, where no tokenizer says better
FORMS = (
    'plain text (a prompt a line), JSON lines with "prompt", "messages", "question" or "turns" (optionally '
    '"max_tokens", "tenant"), ShareGPT JSON'
)


def is_trace(path: Path) -> bool:
    """Whether the file holds lengths and times rather than prompts."""
    text = read_text(path)
    first = text.lstrip().partition("\n")[0]
    if first.startswith("{"):
        return '"timestamp"' in first and '"prompt"' not in first and '"messages"' not in first
    columns = {name.strip().casefold() for name in first.split(",")}
    return path.suffix.lower() == ".csv" or any(
        columns.issuperset(name.casefold() for name in layout.required) for layout in CSV_FORMATS
    )


def read_prompts(path: Path) -> list[LoadRequest]:
    """The prompts of a file, in its order."""
    text = read_text(path)
    start = text.lstrip()[:1]
    if start == "[":
        found = list(_share_gpt(path, text))
    elif start == "{":
        found = [_entry(path, line, content) for line, content in _lines(text)]
    else:
        found = [LoadRequest(prompt=content.strip()) for _, content in _lines(text)]
    if not found:
        raise InputError(f"{path}: has no prompts; it may hold {FORMS}")
    return found


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, content in enumerate(text.split("\n"), start=1):
        if content.strip():
            yield number, content


def _entry(path: Path, line: int, content: str) -> LoadRequest:
    try:
        entry = json.loads(content)
    except ValueError as error:
        raise InputError(f"{path}:{line}: is not valid JSON ({error})") from None
    if isinstance(entry, dict) and isinstance(entry.get("body"), dict):  # a line of an OpenAI batch
        entry = entry["body"]
    if not isinstance(entry, dict):
        raise InputError(f"{path}:{line}: is not a JSON object: {shown(entry)}")
    if "conversations" in entry:
        return _conversation(f"{path}:{line}", entry)
    prompt = _prompt(entry)
    is_text = isinstance(prompt, str) and prompt
    is_chat = isinstance(prompt, list) and prompt and all(isinstance(part, dict) for part in prompt)
    if not (is_text or is_chat):
        raise InputError(
            f'{path}:{line}: needs "prompt" (text) or "messages" (a list); a file may hold {FORMS}'
        )
    return LoadRequest(
        prompt=prompt,
        num_output=_tokens(f"{path}:{line}", entry),
        tenant=str(entry.get("tenant") or ""),
    )


def _prompt(entry: Mapping[str, Any]) -> Any:
    """Where files of prompts keep them; of several turns the first is asked."""
    turns = entry.get("turns")
    if isinstance(turns, list) and turns:
        return turns[0].get("content") if isinstance(turns[0], dict) else turns[0]
    return next((entry[name] for name in ("prompt", "messages", "question") if name in entry), None)


def _tokens(place: str, entry: Mapping[str, Any]) -> int | None:
    wanted = entry.get("max_tokens", entry.get("max_completion_tokens"))
    if wanted is None:
        return None
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise InputError(f'{place}: "max_tokens" is {shown(wanted)}; it must be a whole number of at least 1')
    return wanted


def _share_gpt(path: Path, text: str) -> Iterator[LoadRequest]:
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise InputError(f"{path}: is not valid JSON ({error})") from None
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict) or not isinstance(entry.get("conversations"), list):
            raise InputError(f"{path}: entry {number} has no conversations, as ShareGPT files do")
        if len(entry["conversations"]) >= 2:  # some hold half a conversation
            yield _conversation(f"{path}: entry {number}", entry)


def _conversation(place: str, entry: Mapping[str, Any]) -> LoadRequest:
    """The first turn is asked; the answer is at most about as long as the recorded one."""
    turns = entry["conversations"]
    values: list[Any] = [turn.get("value") for turn in turns[:2] if isinstance(turn, dict)]
    if len(values) < 2 or not all(isinstance(value, str) for value in values):
        raise InputError(f"{place}: needs two turns with a value each")
    return LoadRequest(prompt=values[0], num_output=max(1, len(values[1]) // CHARACTERS_PER_TOKEN))
