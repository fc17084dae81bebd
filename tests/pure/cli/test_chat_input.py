"""Where messages come from: quoted blocks, pastes, and the history of whole messages."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli.chat.conversation import HISTORY_MESSAGES, ChatHistory, LineSource, _pasted


def lines(*given: str) -> Callable[[str], str | None]:
    left = iter(given)
    return lambda prompt: next(left, None)


def test_messages_are_lines_pastes_and_quoted_blocks() -> None:
    kept: list[str] = []
    source = LineSource(lines("one", '"""two', "", 'three"""', '"""a paste\nwith quotes', "  "), kept.append)
    read = [source.read() for _ in range(5)]
    assert read == ["one", "two\n\nthree", '"""a paste\nwith quotes', "  ", None]
    assert kept == ["one", "two\n\nthree", '"""a paste\nwith quotes'], "whole messages, and no empty ones"


@pytest.mark.parametrize(
    "message", ["plain", "two\nlines", '"quoted"', "back\\nslash", "tab\there", "a\u2028b", "é"]
)
def test_a_message_is_remembered_as_it_was(message: str, tmp_path: Path) -> None:
    path = tmp_path / "cache" / "chat_history"
    history = ChatHistory(path)
    assert history.add("before") and history.add(message) and not history.add(message)
    assert ChatHistory(path).messages == ["before", message]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_history_of_lines_is_still_read_and_does_not_grow_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "chat_history"
    path.write_text('"not json\n' + "".join(f"{number}\n" for number in range(2 * HISTORY_MESSAGES)))
    last = [str(number) for number in range(HISTORY_MESSAGES, 2 * HISTORY_MESSAGES)]
    assert ChatHistory(path).messages == last
    assert path.read_text().split() == last
    path.write_text('"not json\n')
    assert ChatHistory(path).messages == ['"not json']


def test_lines_that_come_at_once_are_a_paste_where_the_terminal_does_not_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end, start = os.pipe()
    with open(end, "rb", buffering=0) as stdin, open(start, "wb", buffering=0) as keys:
        monkeypatch.setattr("sys.stdin", stdin)
        read = _pasted(lambda prompt: stdin.readline().decode().removesuffix("\n"))
        keys.write(b"first\n\nthird\n")
        assert read(">>> ") == "first\n\nthird"
        keys.write(b"typed\n")
        assert read(">>> ") == "typed"
