"""Turns the output of one request into text while it is being generated.

The final text is what decoding the output's own tokens behind the prompt gives: the prompt's bytes never appear in
it. Where a prompt ends inside a character, the output's continuation bytes have lost their beginning and become
replacement characters, as in `Tokenizer.decode(output)`. A space that the decoder strips from the beginning of a
text is stripped only where the prompt shows no text. Each `push` costs what its own tokens cost.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from paceline.text.byte_table import ByteTable
from paceline.text.tokenizer import Tokenizer

# Tokens of the prompt a decoder without a table of bytes sees as context.
CONTEXT_TOKENS = 6
# A decoder that still gives an unfinished character after so many tokens means it.
MAX_HELD_TOKENS = 16

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Incremental decoding of one request: `push` every new token once, `flush` at the end.

    Joined, the results are the final text. No result ends inside a character, and nothing is taken back.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        table = tokenizer.table
        self._steps: _Bytes | _Window
        if table is not None:
            at_start = table.strips_space and not self._shows_text(table, prompt_ids)
            self._steps = _Bytes(table, strips_space=at_start)
        else:
            context = [index for index in prompt_ids[-CONTEXT_TOKENS:] if index not in self._hidden]
            joined = not spaces_between_special_tokens
            self._steps = _Window(tokenizer, context, tokenizer.added_ids if joined else frozenset())

    def push(self, ids: Sequence[int]) -> str:
        """The text that became certain with these tokens; "" while a character is unfinished.

        Raises InvalidRequest for an id that is not in the vocabulary, before taking any of them in.
        """
        self._tokenizer.check_ids(ids, param="output")
        return self._steps.push([index for index in ids if index not in self._hidden])

    def flush(self) -> str:
        """What was held back: an unfinished character at the end becomes a replacement character."""
        return self._steps.flush()

    def _shows_text(self, table: ByteTable, prompt_ids: Sequence[int]) -> bool:
        return any(table.bytes_of[index] for index in prompt_ids if index not in self._hidden)


class _Bytes:
    """Concatenated bytes, read as UTF-8 as they come. `strips_space`: the text loses one leading space."""

    def __init__(self, table: ByteTable, *, strips_space: bool) -> None:
        self._bytes_of = table.bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips_space = strips_space
        self._is_inside = False  # a character has begun and is not complete

    def push(self, ids: Sequence[int]) -> str:
        data = b"".join([self._bytes_of[index] for index in ids])
        if self._strips_space and data:
            self._strips_space = False
            data = data.removeprefix(b" ")
        if data.isascii() and not self._is_inside:  # most of most texts; the decoder is Python code
            return data.decode("ascii")
        text = self._decoder.decode(data)
        self._is_inside = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._is_inside = False
        return text


class _Window:
    """Any other decoder: a few tokens are decoded with and without the new ones, and the difference is new.

    Exact for decoders in which a token's text depends on its neighbours only.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], joined: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._joined = joined  # added tokens written without a space between two of them
        self._known = list(context)  # decoded before, kept as context
        self._held: list[int] = []  # not decoded for good

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._push_one(index) for index in ids])

    def _push_one(self, index: int) -> str:
        if index in self._joined and self._known and self._known[-1] in self._joined:
            text = self.flush() + (self._tokenizer.token_name(index) or "")
            self._known = [index]
            return text
        self._held.append(index)
        text = self._new_text()
        unfinished = text.endswith(_REPLACEMENT) and len(self._held) < MAX_HELD_TOKENS
        if not text or unfinished:
            return ""
        self._settle()
        return text

    def flush(self) -> str:
        if not self._held:
            return ""
        text = self._new_text()
        self._settle()
        return text

    def _new_text(self) -> str:
        before = self._text(self._known)
        after = self._text([*self._known, *self._held])
        return after[len(before) :]

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode_tokens([self._tokenizer.token_name(index) for index in ids])

    def _settle(self) -> None:
        self._known = [*self._known, *self._held][-CONTEXT_TOKENS:]
        self._held = []
