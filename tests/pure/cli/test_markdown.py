"""An answer on a terminal: Markdown that grows in place."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cli.chat.conversation import answer_printer
from paceline.cli.markdown import MarkdownPrinter
from paceline.cli.terminal import Printer

ANSWER = """\
# Rivers

Three **long** ones, with `code`, *style* and <b>tags</b>.
A second line of the paragraph.

- the Nile
- the Amazon, a name that is followed by so many words that the line has to be wrapped somewhere on the way

1. first
2. second

3. after an empty line

```python
def length(river):
    return river.km  # <- **not** bold

print(length(nile))
```

| river | km |
|---|---|
| Nile | 6650 |
| Amazon | 6400 |

> a quotation

<think>
kept as it is
</think>

The [end](https://example.org/a).
"""


class Screen:
    """As much of a terminal as an answer uses: it wraps nothing and knows no colours."""

    def __init__(self) -> None:
        self.rows: list[str] = [""]
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        for part in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|[^\x1b]", text):
            self._take(part)

    def _take(self, part: str) -> None:
        row = self.rows[self._row]
        if part == "\n":
            self._row, self._column = self._row + 1, 0
            self.rows += [""] * (self._row == len(self.rows))
        elif part == "\r":
            self._column = 0
        elif part.endswith("A") and part.startswith("\x1b"):
            self._row -= int(part[2:-1])
            assert self._row >= 0
        elif part in ("\x1b[K", "\x1b[J"):
            self.rows[self._row] = row[: self._column]
            if part.endswith("J"):
                del self.rows[self._row + 1 :]
        elif not part.startswith("\x1b"):
            self.rows[self._row] = row[: self._column] + part + row[self._column + 1 :]
            self._column += 1
            assert self._column < 80, "a line that fills the terminal wraps"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(*pieces: str) -> tuple[list[str], str]:
    """The screen after an answer that came in pieces, and everything that was sent to it."""
    stream = Terminal()
    printer = MarkdownPrinter(stream, interval_s=0.0)
    for piece in pieces:
        printer._next_s = 0.0  # drawn with every piece
        printer.show(piece)
    printer.end_line()
    screen = Screen()
    screen.feed(stream.getvalue())
    return screen.rows, stream.getvalue()


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("COLUMNS", "80"), ("LINES", "100"), ("TERM", "xterm-256color"), ("NO_COLOR", "")):
        monkeypatch.setenv(name, value)


def test_markdown_is_drawn_and_nothing_of_it_is_lost() -> None:
    rows, sent = drawn(ANSWER)
    text = "\n".join(row.rstrip() for row in rows)
    for part in (
        "Rivers\n\nThree long ones, with code, style and <b>tags</b>.\nA second line of the paragraph.\n",
        " • the Nile\n",
        " 2 second\n",
        "def length(river):\n      return river.km  # <- **not** bold\n\n  print(length(nile))\n",
        "  <think>\n  kept as it is\n  </think>\n",
        "The end (https://example.org/a).\n",
    ):
        assert part in text, part
    assert "\x1b[1mlong\x1b[0m" in sent and "\x1b[36mcode\x1b[0m" in sent


def test_an_answer_in_single_characters_looks_like_the_whole() -> None:
    assert drawn(*ANSWER)[0] == drawn(ANSWER)[0]


@settings(max_examples=25)
@given(st.lists(st.integers(0, len(ANSWER)), max_size=12))
def test_it_does_not_matter_where_an_answer_is_cut(cuts: list[int]) -> None:
    ends = sorted({*cuts, len(ANSWER)})
    pieces = [ANSWER[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    assert drawn(*pieces)[0] == drawn(ANSWER)[0]


@pytest.mark.slow
def test_a_growing_answer_rewrites_only_lines_that_change() -> None:
    _, sent = drawn(*(f"line {number}  \n" for number in range(200)))
    ups = [int(count) for count in re.findall(r"\x1b\[(\d+)A", sent)]
    assert len(ups) == 0 and "\x1b[J" not in sent and "\x1b[2J" not in sent
    assert sent.count("line 7\x1b") == 1


def test_what_has_left_the_screen_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "10")
    table = "| a |\n|---|\n" + "".join(f"| {'x' * number} |\n" for number in range(1, 30))
    _, sent = drawn(*table.splitlines(keepends=True))
    assert max(int(count) for count in re.findall(r"\x1b\[(\d+)A", sent)) < 10


def test_a_model_cannot_steer_the_terminal() -> None:
    _, sent = drawn("a\x1b]0;title\x07b \x1b[2Jc `\x1b[31m`")
    assert "\x1b]" not in sent and "\x1b[2J" not in sent and "\x1b[31m" not in sent


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_without_colour_it_is_plain_text(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    assert isinstance(answer_printer(Terminal()), MarkdownPrinter)
    assert isinstance(answer_printer(io.StringIO()), Printer), "a pipe"
    monkeypatch.setenv(name, value)
    assert isinstance(answer_printer(Terminal()), Printer)
