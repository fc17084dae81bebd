"""Finds tool calls in an answer that arrives in pieces.

The parser is written as if all of the text were there: it is a generator that yields where it needs more, so that a cut
anywhere changes nothing. Arguments are slices of the model's own text as they come; where they are not JSON, each
becomes JSON when it is complete. Text that is no call comes out as it is, and so does a call that goes wrong before its
arguments begin; later than that it ends there, as not complete. White space around calls is dropped. One pass: no
character is read twice.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.text.tools.formats import Shape, ToolFormat

MAX_NAME_CHARS = 256  # of names and keys
MAX_DEPTH = 128  # of arguments
ARGUMENT_KEYS = ("arguments", "parameters")  # models take one for the other


@dataclass(frozen=True, slots=True)
class Said:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of a call's arguments, which together are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """`is_complete`: the arguments are a JSON object."""

    index: int
    is_complete: bool


# What a call, or what looked like one, came to.
COMPLETE, INCOMPLETE, TEXT = CALL_OUTCOMES = ("complete", "incomplete", "text")

Event = Said | CallBegin | CallArguments | CallEnd
Steps = Generator[None, None, None]
Schemas = Mapping[str, Mapping[str, Any]]  # of arguments, by the name of the tool

_BLANK = re.compile(r"\s*")
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_WORD = re.compile(r"[\w.-]*")
_SCALAR = re.compile(r"[^\s,\]}\"{\[]*")
_IN_STRING = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}
_IN_JSON = re.compile(r'[^"{}\[\]]*')
_IN_PYTHON = re.compile(r"[^\"'{}\[\](),]*")
_CLOSED_BY = {"{": "}", "[": "]", "(": ")"}


class _NotACall(Exception):
    """What was read so far is text."""


class ToolScanner:
    """`push` every piece of an answer, `flush` at its end."""

    def __init__(
        self, row: ToolFormat, schemas: Schemas, new_id: Callable[[], str] | None = None, *, index: int = 0
    ) -> None:
        self._row = row
        self._schemas = schemas
        self._new_id = new_id or (lambda: call_id(row))
        self._next_index = index
        self._buffer = ""
        self._start = 0  # everything before has become events
        self._at = 0  # everything before has been read
        self._is_over = False
        self._found: list[Event] = []
        self._open: list[str] | None = None  # the arguments of the call that has begun
        self._blank: str | None = ""  # white space at the beginning or behind a call; None within a text
        self._steps = self._answer()
        self.outcomes = dict.fromkeys(CALL_OUTCOMES, 0)

    def push(self, text: str) -> list[Event]:
        self._buffer = self._buffer[self._start :] + text
        self._at -= self._start
        self._start = 0
        return self._advance()

    def flush(self) -> list[Event]:
        """The answer is over."""
        self._is_over = True
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._steps, None)
        found, self._found = self._found, []
        return found

    # -- the answer: text and calls ------------------------------------------------------------------------

    def _answer(self) -> Steps:
        if self._row.is_bare and (yield from self._begins_bare()):
            yield from self._calls(has_marker=False)
        while (yield from self._text()):
            yield from self._calls(has_marker=True)
        if self._blank and not self._next_index:
            self._found.append(Said(self._blank))

    def _begins_bare(self) -> Generator[None, None, bool]:
        try:
            yield from self._skip_blank()
            found = yield from self._sees(self._row.first)
        except _NotACall:
            found = False
        self._say()
        return found

    def _text(self) -> Generator[None, None, bool]:
        """Text up to the marker of calls; False at the end of the answer."""
        marker = self._row.marker
        while True:
            at = self._buffer.find(marker, self._at) if marker else -1
            if at >= 0:
                self._at = at
                self._say()
                self._at = at + len(marker)
                return True
            held = 0 if self._is_over else _partial(self._buffer, marker, self._at)
            self._at = len(self._buffer) - held
            self._say()
            if self._is_over:
                return False
            yield

    def _calls(self, *, has_marker: bool) -> Steps:
        row, first = self._row, self._next_index
        try:
            yield from self._expect(row.opens)
            yield from self._call()
            while row.is_shared and (yield from self._goes_on()):
                yield from self._call()
            yield from self._expect(row.closes)
            if has_marker:
                yield from self._expect(row.end)
            self._start = self._at
        except _NotACall:
            if self._open is not None:
                self._end_call()
            elif self._next_index == first:
                self.outcomes[TEXT] += 1
            rest = self._buffer[self._start :].strip()
            ends = row.closes.strip() + row.end.strip()
            if rest and self._is_over and self._next_index and ends.startswith(rest):
                self._start = self._at = len(self._buffer)  # the answer was cut off inside the marker
            self._say()

    def _goes_on(self) -> Generator[None, None, bool]:
        """Whether another call follows inside the same markers."""
        separator = self._row.separator.strip()
        try:
            yield from self._skip_blank()
            found = yield from self._sees(separator or self._row.call_begin)
        except _NotACall:  # the answer is over
            found = False
        # White space that no call follows may belong to a text.
        self._at = self._at + len(separator) if found else self._start
        return found

    def _call(self) -> Steps:
        read = {
            Shape.JSON: self._json_call,
            Shape.NAME_THEN_JSON: self._named_call,
            Shape.PYTHONIC: self._python_call,
            Shape.XML: self._xml_call,
        }[self._row.shape]
        yield from read()
        self._end_call()
        self._start = self._at

    # -- the four shapes -----------------------------------------------------------------------------------

    def _json_call(self) -> Steps:
        yield from self._expect("{")
        name, held, has_more = "", "", True
        while has_more:
            key = yield from self._string()
            yield from self._expect(":")
            yield from self._skip_blank()
            if key == "name" and not name:
                name = yield from self._string()
                self._check_name(name)
            elif key in ARGUMENT_KEYS and self._open is None and not held:
                if not (yield from self._sees("{")):
                    raise _NotACall
                if name:
                    self._begin_call(name)
                    yield from self._brackets(streams=True)
                else:
                    begin = self._at - self._start
                    yield from self._brackets()
                    held = self._buffer[self._start + begin : self._at]
            else:
                yield from self._any_value()
            yield from self._skip_blank()
            has_more = yield from self._sees(",")
            if has_more:
                self._at += 1
        yield from self._expect("}")
        if self._open is None:
            self._check_name(name)
            self._begin_call(name)
            self._argue(held or "{}")

    def _named_call(self) -> Steps:
        row = self._row
        yield from self._expect(row.call_begin)
        yield from self._skip_blank()
        name = yield from self._word()
        self._check_name(name)
        yield from self._expect(row.between)
        yield from self._skip_blank()
        if not (yield from self._sees("{")):
            raise _NotACall
        self._begin_call(name)
        yield from self._brackets(streams=True)
        yield from self._expect(row.call_end)

    def _python_call(self) -> Steps:
        yield from self._skip_blank()
        name = yield from self._word()
        self._check_name(name)
        yield from self._expect("(")
        self._begin_call(name)
        self._argue("{")
        yield from self._skip_blank()
        is_first = True
        while not (yield from self._sees(")")):
            key = yield from self._word()
            yield from self._expect("=")
            yield from self._skip_blank()
            begin = self._at - self._start
            yield from self._python_value()
            value = python_to_json(self._buffer[self._start + begin : self._at])
            if not key or value is None:
                raise _NotACall
            self._argue(f"{'' if is_first else ', '}{json.dumps(key)}: {value}")
            is_first = False
            if (yield from self._sees(",")):
                self._at += 1
                yield from self._skip_blank()
        self._at += 1
        self._argue("}")

    def _xml_call(self) -> Steps:
        yield from self._expect("<function=")
        name = (yield from self._until(">", MAX_NAME_CHARS)).strip()
        self._check_name(name)
        self._begin_call(name)
        self._argue("{")
        known = self._schemas[name].get("properties")
        properties = known if isinstance(known, Mapping) else {}
        is_first = True
        yield from self._skip_blank()
        while (yield from self._sees("<parameter=")):
            self._at += len("<parameter=")
            key = (yield from self._until(">", MAX_NAME_CHARS)).strip()
            text = yield from self._until("</parameter>")
            value = _typed(text.removeprefix("\n").removesuffix("\n"), properties.get(key))
            self._argue(f"{'' if is_first else ', '}{json.dumps(key, ensure_ascii=False)}: {value}")
            is_first = False
            yield from self._skip_blank()
        yield from self._expect("</function>")
        self._argue("}")

    # -- reading -------------------------------------------------------------------------------------------

    def _more(self) -> Steps:
        if self._is_over:
            raise _NotACall
        yield

    def _skip_blank(self) -> Steps:
        """Up to a character that is none; raises where the answer ends instead."""
        while True:
            match = _BLANK.match(self._buffer, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._buffer):
                return
            yield from self._more()

    def _sees(self, literal: str) -> Generator[None, None, bool]:
        """Whether this text comes next."""
        while True:
            if self._buffer.startswith(literal, self._at):
                return True
            if self._is_over or not literal.startswith(self._buffer[self._at :]):
                return False
            yield

    def _expect(self, literal: str) -> Steps:
        """Read this text and white space before it; its own white space at the edges does not count."""
        wanted = literal.strip()
        if not wanted:
            return
        yield from self._skip_blank()
        if not (yield from self._sees(wanted)):
            raise _NotACall
        self._at += len(wanted)

    def _matched(self, pattern: re.Pattern[str], most: int) -> Generator[None, None, str]:
        """What a pattern that fits any text matches next; more text could make it longer."""
        while True:
            match = pattern.match(self._buffer, self._at)
            assert match is not None
            if len(match[0]) > most:
                raise _NotACall
            if match.end() < len(self._buffer):
                self._at = match.end()
                return match[0]
            yield from self._more()

    def _word(self) -> Generator[None, None, str]:
        return (yield from self._matched(_WORD, MAX_NAME_CHARS))

    def _string(self) -> Generator[None, None, str]:
        """A short JSON string."""
        yield from self._skip_blank()
        if not (yield from self._sees('"')):
            raise _NotACall
        while (match := _STRING.match(self._buffer, self._at)) is None:
            if len(self._buffer) - self._at > MAX_NAME_CHARS:
                raise _NotACall
            yield from self._more()
        if len(match[0]) > MAX_NAME_CHARS:
            raise _NotACall
        try:
            value: str = json.loads(match[0])
        except ValueError:
            raise _NotACall from None
        self._at = match.end()
        return value

    def _until(self, literal: str, most: int | None = None) -> Generator[None, None, str]:
        """What stands before this text, which is read too."""
        begin = searched = self._at - self._start
        while True:
            at = self._buffer.find(literal, self._start + searched)
            if (at if at >= 0 else len(self._buffer)) - self._start - begin > (most or len(self._buffer)):
                raise _NotACall
            if at >= 0:
                self._at = at + len(literal)
                return self._buffer[self._start + begin : at]
            searched = max(begin, len(self._buffer) - self._start - len(literal) + 1)
            yield from self._more()

    def _any_value(self) -> Steps:
        """A JSON value whose content does not matter."""
        character = self._buffer[self._at]
        if character in "{[":
            yield from self._brackets()
        elif character == '"':
            self._at += 1
            yield from self._rest_of_string('"')
        elif not (yield from self._matched(_SCALAR, MAX_NAME_CHARS)):
            raise _NotACall

    def _brackets(self, *, streams: bool = False) -> Steps:
        """A JSON object or list, from its first character on; `streams`: as the arguments of the open call."""
        stack: list[str] = []
        if streams:
            self._start = self._at
        while True:
            match = _IN_JSON.match(self._buffer, self._at)
            assert match is not None
            self._at = match.end()
            if self._at == len(self._buffer):
                if streams:
                    self._argue(self._buffer[self._start : self._at])
                yield from self._more()
                continue
            character = self._buffer[self._at]
            if character == '"':
                self._at += 1
                yield from self._rest_of_string('"', streams=streams)
                continue
            if streams and not _fits(stack, character):
                self._argue(self._buffer[self._start : self._at])
            _nest(stack, character)
            self._at += 1
            if not stack:
                break
        if streams:
            self._argue(self._buffer[self._start : self._at])

    def _rest_of_string(self, quote: str, *, streams: bool = False) -> Steps:
        """Up to the end of a string whose quote has been read."""
        while True:
            match = _IN_STRING[quote].match(self._buffer, self._at)
            assert match is not None
            self._at = match.end()
            if self._buffer.startswith(quote, self._at):
                self._at += 1
                return
            if self._at + 1 < len(self._buffer):  # a backslash, and what it escapes
                self._at += 2
                continue
            if streams:
                self._argue(self._buffer[self._start : self._at])
            yield from self._more()

    def _python_value(self) -> Steps:
        """Up to the comma or the bracket behind a value."""
        stack: list[str] = []
        while True:
            match = _IN_PYTHON.match(self._buffer, self._at)
            assert match is not None
            self._at = match.end()
            if self._at == len(self._buffer):
                yield from self._more()
                continue
            character = self._buffer[self._at]
            if not stack and character in ",)":
                return
            self._at += 1
            if character in "\"'":
                yield from self._rest_of_string(character)
            elif character != ",":
                _nest(stack, character)

    # -- events --------------------------------------------------------------------------------------------

    def _say(self) -> None:
        """What has been read and is no call is text."""
        text = self._buffer[self._start : self._at]
        self._start = self._at
        if self._blank is not None:
            if text.isspace() or not text:
                self._blank += text
                return
            text, self._blank = self._blank + text, None
        if text:
            self._found.append(Said(text))

    def _check_name(self, name: str) -> None:
        if name not in self._schemas:
            raise _NotACall

    def _begin_call(self, name: str) -> None:
        self._found.append(CallBegin(self._next_index, self._new_id(), name))
        self._open = []

    def _argue(self, text: str) -> None:
        assert self._open is not None
        self._start = self._at
        if text:
            self._open.append(text)
            self._found.append(CallArguments(self._next_index, text))

    def _end_call(self) -> None:
        assert self._open is not None
        is_complete = is_object("".join(self._open))
        self.outcomes[COMPLETE if is_complete else INCOMPLETE] += 1
        self._found.append(CallEnd(self._next_index, is_complete))
        self._next_index += 1
        self._open, self._blank = None, ""


def call_id(row: ToolFormat) -> str:
    """A new id of a call; some chat templates insist on a form of their own."""
    if not row.id_chars:
        return f"call_{secrets.token_hex(12)}"
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(row.id_chars))


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


_PYTHON_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"""
    r"""|(?P<word>[A-Za-z]+)|(?P<mark>[\[\]{}(),:]))\s*""",
    re.DOTALL,
)
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false"}


def python_to_json(text: str) -> str | None:
    """A Python literal as JSON; None where it is none."""
    pieces: list[str] = []
    at = 0
    while at < len(text):
        match = _PYTHON_TOKEN.match(text, at)
        if match is None:
            return None
        at = match.end()
        kind, token = match.lastgroup, match[match.lastgroup or 0]
        if kind == "string":
            try:
                token = json.dumps(ast.literal_eval(token), ensure_ascii=False)
            except (ValueError, SyntaxError):
                return None
        elif kind == "word":
            token = _PYTHON_WORDS.get(token, "null" if token == "null" else "?")
        elif kind == "mark":
            token = {"(": "[", ")": "]", ",": ", ", ":": ": "}.get(token, token)
        pieces.append(token)
    made = "".join(pieces)
    try:
        json.loads(made)
    except (ValueError, RecursionError):
        return None
    return made


def _typed(text: str, schema: object) -> str:
    """The value of a parameter that is written without quotes, as JSON."""
    kinds = _kinds(schema)
    if "string" in kinds and not (text.strip() == "null" and "null" in kinds):
        return json.dumps(text, ensure_ascii=False)
    try:
        json.loads(text, parse_constant=_refuse)
        return text.strip()
    except (ValueError, RecursionError):
        return python_to_json(text) or json.dumps(text, ensure_ascii=False)


def _kinds(schema: object) -> set[str]:
    """The JSON types a schema speaks of."""
    if not isinstance(schema, Mapping):
        return set()
    kind, enum = schema.get("type"), schema.get("enum")
    found = {each for each in (kind if isinstance(kind, list) else [kind]) if isinstance(each, str)}
    for name in ("anyOf", "oneOf"):
        either = schema.get(name)
        found = found.union(*map(_kinds, either if isinstance(either, list) else ()))
    if isinstance(enum, list) and all(isinstance(each, str) for each in enum):
        found.add("string")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _fits(stack: list[str], bracket: str) -> bool:
    return len(stack) < MAX_DEPTH if bracket in _CLOSED_BY else stack[-1:] == [bracket]


def _nest(stack: list[str], bracket: str) -> None:
    if not _fits(stack, bracket):
        raise _NotACall
    if bracket in _CLOSED_BY:
        stack.append(_CLOSED_BY[bracket])
    else:
        stack.pop()


def _partial(text: str, marker: str, begin: int) -> int:
    """How many characters at the end of a text may be the beginning of the marker."""
    longest = min(len(marker) - 1, len(text) - begin)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
