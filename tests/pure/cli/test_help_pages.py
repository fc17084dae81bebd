"""Help pages as a user sees them on a terminal of 80 columns."""

from __future__ import annotations

import re

import pytest

from paceline.cli.command import first_line
from paceline.cli.main import PACELINE, run
from paceline.config.options import flag_of
from tools.option_pages import COMMANDS

COLUMNS = 80
SCREEN = 55  # lines of a tall terminal window
QUAINT = re.compile(
    r"\b(whoever|nobody|somebody|everybody|so many|gives? way|gave way|by itself|of its own)\b",
    re.I,
)
LONG = [name for name, command in COMMANDS.items() if command.is_long]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))


def page(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(arguments) == 0
    return capsys.readouterr().out


def flags_of(command: str, *, basic: bool) -> set[str]:
    return {
        flag_of(each.spec).removeprefix("--")
        for each in COMMANDS[command].options
        if not each.is_argument and (not basic or each.is_basic)
    }


def shown(text: str) -> set[str]:
    """Flags that have a row on a help page."""
    rows = re.findall(r"^  (?:-\w, )?(--.*?)(?:  |$)", text, re.M)
    return {name for row in rows for name in re.findall(r"--(?:\[no-\])?([a-z0-9][a-z0-9-]*)", row)}


def test_commands_are_listed_in_groups_with_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys)
    assert text == page(capsys, "--help")
    lines = text.splitlines()
    for name, command in PACELINE.commands.items():
        line = next(line for line in lines if line.startswith(f"  {name} "))
        assert line.endswith(first_line(command.help)) and line.endswith(".")
    for title in PACELINE.headings:
        assert f"{title}:" in lines
    assert len(lines) <= SCREEN


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_a_row_and_no_line_is_too_long(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = [page(capsys, *command.split(), "--help")]
    if command in LONG:
        pages.append(page(capsys, *command.split(), "--help-all"))
    assert shown(pages[-1]) >= flags_of(command, basic=False)
    for text in pages:
        assert max(map(len, text.splitlines())) <= COLUMNS


@pytest.mark.parametrize("command", LONG)
def test_a_long_command_shows_its_basic_options_first(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page(capsys, *command.split(), "--help")
    assert shown(text) == flags_of(command, basic=True) | {"help", "help-all"}
    assert f"shows all {len(flags_of(command, basic=False))} options" in text
    assert len(flags_of(command, basic=True)) <= 26


def test_the_page_of_serve_fits_on_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(page(capsys, "serve", "--help").splitlines()) <= SCREEN
    assert 18 <= len(flags_of("serve", basic=True)) <= 24


def test_a_command_without_many_options_has_one_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "--help-all"]) == 2
    assert "No such option" in capsys.readouterr().err


def test_a_group_without_a_command_shows_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert page(capsys, "bench") == page(capsys, "bench", "--help")


def test_help_texts_name_their_subject() -> None:
    texts = {
        f"{name} {each.name}": f"{each.help} {each.default_text}"
        for name, command in COMMANDS.items()
        for each in command.options
    }
    assert {name: text for name, text in texts.items() if QUAINT.search(text)} == {}
