"""Commands as results show them."""

from __future__ import annotations

import pytest

from paceline.cli.flags import command_line


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("redis://:hunter2@store:6379/0", "redis://:...@store:6379/0"),
        ("rediss://me:hunter2@store", "rediss://me:...@store"),
        ("--kv-store=redis://:hunter2@store", "--kv-store=redis://:...@store"),
        ("http://me@host:80/a@b:c@d", "http://me@host:80/a@b:c@d"),
        ("two words", "'two words'"),
    ],
)
def test_a_password_is_not_shown(monkeypatch: pytest.MonkeyPatch, given: str, shown: str) -> None:
    monkeypatch.setattr("sys.argv", ["paceline", "bench", given])
    assert command_line() == f"paceline bench {shown}"
