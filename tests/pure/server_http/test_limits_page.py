"""The page of limits says what the code says, and names tests that exist."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from paceline.config.options import flag_of
from paceline.config.server import ApiConfig, BatchConfig, ServerConfig
from paceline.server.api.route import SERVER_LIMITS

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "reference" / "limits.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("| ").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| limit |")
]
FLAGS = {
    flag_of(spec): getattr(config, spec.name)
    for config in (ServerConfig(), ApiConfig(), BatchConfig())
    for spec in fields(config)
    if "help" in spec.metadata
}
# Options that say how much or how long, but are no bounds on what a client can do.
NO_LIMITS = {"--backlog", "--stream-keep-alive", "--port", "--metrics-port"}
NO_LIMITS |= {"--drain-delay", "--drain-timeout", "--log-stats-interval"}
WORDS = ("the model's context", "a quarter of", "none")


def defaults(name: str) -> list[str]:
    """What the page gives as the default of whatever is set by `name`."""
    return [row[1] for row in ROWS if f"`{name}`" in row[2]]


def test_every_limit_of_a_request_is_there_with_its_default() -> None:
    for spec in fields(SERVER_LIMITS):
        assert defaults(spec.name) == [str(getattr(SERVER_LIMITS, spec.name))], spec.name


def test_every_option_that_limits_is_there_with_its_default() -> None:
    for flag, value in FLAGS.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and flag not in NO_LIMITS:
            assert defaults(flag) == [str(value)], flag


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:30])
def test_a_row_names_what_there_is(row: list[str]) -> None:
    assert len(row) == 5
    _, default, set_by, _, shown_by = row
    assert default.startswith(WORDS) or re.fullmatch(r"[0-9]+(\.[0-9]+)?", default)
    found = re.search(r"`(M(?:AX|IN)_[A-Z_]+)` in `(server/[a-z_/]+)\.py`", set_by)
    if found is not None:
        module = import_module("paceline." + found.group(2).replace("/", "."))
        assert str(getattr(module, found.group(1))) == default
    for flag in re.findall(r"`(--[a-z-]+)`", set_by):
        assert flag in FLAGS or flag == "--max-model-len"
    tests = re.findall(r"`(test_[a-z0-9_]+)`", shown_by)
    sources = (
        [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")] if tests else []
    )
    for name in tests:
        assert any(f"def {name}(" in source for source in sources), name
    assert tests or re.search(r"\d|all refusals", shown_by)
