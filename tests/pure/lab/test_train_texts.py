"""Texts and prompts for training, out of plain text, JSON and JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import InputError
from paceline.lab.train.head import read_prompts, read_texts

ENTRIES = [
    "just a text",
    [3, 4, 5],
    {"turns": ["first", "second"]},
    {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]},
    {"messages": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "answer"}]},
    {"question": "how many", "answer": "seven"},
    {"input": "a prompt", "output_length": 7},
    {"id": 3},
    [],
    ["no", "ids"],
]
TEXTS = ["just a text", [3, 4, 5], "first\nsecond", "hello\nhi", "ask\nanswer", "how many\nseven", "a prompt"]
PROMPTS = ["just a text", [3, 4, 5], "first", "hello", "ask", "how many", "a prompt"]


@pytest.mark.parametrize("name", ["texts.json", "texts.jsonl"])
def test_entries_of_all_kinds(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    lines = "\n".join(map(json.dumps, ENTRIES)) + "\n\n"
    path.write_text(json.dumps(ENTRIES) if name.endswith(".json") else lines)
    assert read_texts(path) == TEXTS
    assert read_prompts(path) == PROMPTS


def test_plain_text_is_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("one\nof two lines\n\n\ntwo\n")
    assert read_texts(path) == read_prompts(path) == ["one\nof two lines", "two"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", b"{", "is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n{', "line 2 is not JSON"),
        ("a.txt", b"\xff\xfe", "cannot be read"),
        ("a.txt", b" \n", "there is no text in it"),
    ],
)
def test_files_that_are_none(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=says):
        read_texts(path)
