"""An answer as Markdown on a terminal, drawn while it comes.

Text is split into blocks (paragraphs, lists, code, tables). A finished block is printed once and never touched again;
only the last block is drawn anew when more of it comes, and of that only the lines that changed, each overwritten in
place and none erased first. So nothing flickers, and answers of any length scroll as usual.
"""

from __future__ import annotations

import io
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.syntax import Syntax
from rich.theme import Theme

from paceline.cli.terminal import shown

INTERVAL_S = 0.05  # between two drawings of a block
LEAST_REST = 5  # times longer than a drawing takes: a model may run on the same cores
UP, TO_LINE_END, BELOW = "\x1b[{}A", "\x1b[K", "\x1b[J"
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
# The beginning of an item of a list, perhaps.
_UNDECIDED = re.compile(r" {0,3}(?:[0-9]{1,9}[.)]?|[-*+])? *\n?")
_LINE_END = re.compile(r"(?:\x1b\[[0-9;]*m| )+$")  # padding, which would be copied with the text
_THEME = Theme(
    {"markdown.code": "cyan", "markdown.h1": "bold underline", "markdown.h2": "bold", "markdown.hr": "dim"}
)


class MarkdownPrinter:
    """Shows an answer piece by piece; `end_line` ends it. The terminal obeys no character of the model's."""

    def __init__(self, stream: TextIO, interval_s: float = INTERVAL_S) -> None:
        self._stream = stream
        self._interval_s = interval_s
        self._text = ""  # of the last block
        self._lines: list[str] = []  # the last block as it stands on the terminal
        self._next_s = 0.0  # when to draw again
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a character this terminal does not have ends nothing

    def show(self, text: str) -> None:
        self._text += shown(text)
        if time.monotonic() >= self._next_s:
            self._draw()

    def end_line(self) -> None:
        self._draw()
        if self._lines:
            self._write("\n")
        self._text, self._lines, self._next_s = "", [], 0.0
        self._stream.flush()

    def _draw(self) -> None:
        start_s = time.monotonic()
        size = shutil.get_terminal_size()
        # A line as wide as the terminal would leave the cursor where terminals disagree about it.
        console = Console(
            file=io.StringIO(), force_terminal=True, width=max(size.columns - 1, 20), theme=_THEME
        )
        text = self._text.split("\n")
        blocks = _blocks(Markdown(self._text).parsed)
        num_done = len(blocks) - 1
        if num_done > 0 and _UNDECIDED.fullmatch("\n".join(text[blocks[-1][0] :])):
            num_done -= 1  # what looks like a separate block may become the next item of the one before
        drawings = [_rendered(console, tokens) for _, tokens in blocks]
        for lines in drawings[: max(num_done, 0)]:
            self._replace(lines, size.lines)
            if lines:
                self._write("\n\n")
                self._lines = []
        self._replace(_joined(drawings[max(num_done, 0) :]), size.lines)
        if num_done > 0:
            self._text = "\n".join(text[blocks[num_done][0] :])
        self._stream.flush()
        end_s = time.monotonic()
        self._next_s = end_s + max(self._interval_s, LEAST_REST * (end_s - start_s))

    def _replace(self, lines: list[str], height: int) -> None:
        """Put `lines` in place of those of the last block, from the first that differs on."""
        old, num_same = self._lines, 0
        while num_same < min(len(old), len(lines)) and old[num_same] == lines[num_same]:
            num_same += 1
        if num_same == len(old) == len(lines):
            return
        if len(lines) < len(old):  # the cursor must come to stand in the last line
            num_same = min(num_same, max(len(lines) - 1, 0))
        first = max(num_same, len(old) - height + 1)  # what has left the screen stays as it is
        if first < len(old):
            num_up = len(old) - 1 - first
            self._write("\r" + (UP.format(num_up) if num_up else ""))
        elif old:
            self._write("\n")
        self._write("\n".join(line + TO_LINE_END for line in lines[first:]))
        if len(lines) < len(old):
            self._write(BELOW)
        self._lines = lines

    def _write(self, text: str) -> None:
        self._stream.write(text)


def _joined(blocks: Iterable[list[str]]) -> list[str]:
    lines: list[str] = []
    for block in blocks:
        lines += ["", *block] if lines and block else block
    return lines


class _LeftHeading(Heading):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = self.text.copy()
        text.justify = "left"
        yield text


class _Code(CodeBlock):
    """Code in the terminal's own colours, without a background, so that it suits light and dark ones."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        yield Syntax(
            code,
            self.lexer_name,
            theme="ansi_dark",
            background_color="default",
            word_wrap=True,
            padding=(0, 2),
        )


class _Block(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _LeftHeading,
        "fence": _Code,
        "code_block": _Code,
    }

    def __init__(self, tokens: list[Any]) -> None:
        super().__init__("", hyperlinks=False)  # an address is shown, never hidden behind a text
        self.parsed = tokens


def _blocks(tokens: Iterable[Any]) -> list[tuple[int, list[Any]]]:
    """The blocks of a text: the line each begins with, and its tokens."""
    blocks: list[tuple[int, list[Any]]] = []
    for token in tokens:
        if token.level == 0 and token.nesting >= 0:
            blocks.append((token.map[0], []))
        blocks[-1][1].append(token)
    return blocks


def _rendered(console: Console, tokens: list[Any]) -> list[str]:
    with console.capture() as capture:
        console.print(_Block(list(_as_written(tokens))))
    lines = [_LINE_END.sub(_reset, line) for line in capture.get().split("\n")]
    filled = [index for index, line in enumerate(lines) if _STYLE.sub("", line).strip()]
    return lines[filled[0] : filled[-1] + 1] if filled else []


def _reset(padding: re.Match[str]) -> str:
    return "\x1b[0m" if "\x1b" in padding[0] else ""


def _as_written(tokens: Iterable[Any]) -> Iterator[Any]:
    """Tokens that keep what Markdown would drop: HTML is shown as text, and lines end where the model ended them."""
    for token in tokens:
        if token.type == "html_block":
            token.type, token.info = "fence", "html"
        elif token.type == "html_inline":
            token.type = "text"
        elif token.type == "softbreak":
            token.type = "hardbreak"
        if token.children:
            token.children = list(_as_written(token.children))
        yield token
