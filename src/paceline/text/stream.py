"""The text side of one request: tokens go in, text that is safe to show comes out.

Combines incremental decoding and stop strings, and says at which output token a stop string ended, so that the
engine can end the request there. Holds no text that was already given out.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.sampling import SamplingParams
from paceline.text.tokenizer import ByteTable, Tokenizer

# Turns the output of one request into text while it is being generated.
#
# The final text is what decoding the output's own tokens behind the prompt gives: the prompt's bytes never appear
# in it. Where a prompt ends inside a character, the output's continuation bytes have lost their beginning and
# become replacement characters, as in `Tokenizer.decode(output)`. A space that the decoder strips from the
# beginning of a text is stripped only where the prompt shows no text. Each `push` costs what its own tokens cost.


# Tokens of the prompt a decoder without a table of bytes sees as context.
CONTEXT_TOKENS = 6
# A decoder that still gives an unfinished character after this number of tokens means it.
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
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`shown_ids`: special tokens that are text nonetheless."""
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids - shown_ids if skip_special_tokens else frozenset()
        table = tokenizer.table
        self._steps: _Bytes | _Window
        if table is not None:
            strips = table.strips_space and not any(
                table.bytes_of[index] for index in prompt_ids if index not in self._hidden
            )
            self._steps = _Bytes(table, strips_space=strips)
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


# Finds stop strings in a text that arrives in pieces, without ever showing a part of one.
#
# Only a suffix that could still become a stop string is held back; everything before it is certain. The first stop
# to end wins, the longest of those ending there; the text is cut where it begins. Works on characters, in one pass
# (all stop strings are followed at once); knows nothing of tokens.


class StopResult(NamedTuple):
    """What one piece brought: text to show, and the stop string that ended it, if any."""

    emit: str
    stop: str | None = None
    withheld: str = ""  # the stop string, unless it is shown, and what stood behind it


class StopMatcher:
    """Watches one text. After a stop string was found, nothing more is emitted."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._root = _automaton(stops)
        self._state = self._root
        self._include_stop = include_stop
        self._held = ""  # could become a stop string
        self._stopped = False

    def push(self, text: str, *, may_stop: bool = True) -> StopResult:
        """Take the next piece in. With `may_stop=False` a stop string that ends in this piece is let through."""
        if self._stopped:
            return StopResult("")
        state = self._state
        for index, character in enumerate(text):
            state = _following(state, character, self._root)
            if state.stop and may_stop:
                self._stopped = True
                shown, self._held = self._held + text[: index + 1], ""
                end = len(shown) if self._include_stop else len(shown) - len(state.stop)
                return StopResult(shown[:end], state.stop, shown[end:] + text[index + 1 :])
        self._state = state
        known = self._held + text
        certain = len(known) - state.partial
        self._held = known[certain:]
        return StopResult(known[:certain])

    def flush(self) -> str:
        """What was held back; the text is over."""
        text, self._held = self._held, ""
        self._state = self._root
        return "" if self._stopped else text

    def restart(self) -> str:
        """Look for stop strings that begin from here on; returns what was held back."""
        self._stopped = False
        return self.flush()


@dataclass(slots=True, eq=False)
class _State:
    """A prefix of some stop string that the text ends with; no longer prefix fits."""

    depth: int = 0
    next: dict[str, _State] = field(default_factory=dict)
    fallback: _State | None = None  # the longest shorter prefix the text ends with too
    stop: str = ""  # the longest stop string that ends here
    partial: int = 0  # characters at the end of the text that may still grow into a stop string


def _automaton(stops: Sequence[str]) -> _State:
    """All stop strings as one automaton (Aho and Corasick)."""
    root = _State()
    for stop in stops:
        assert stop, "an empty stop string is refused by SamplingParams"
        state = root
        for character in stop:
            state = state.next.setdefault(character, _State(depth=state.depth + 1))
        state.stop = stop
    waiting = deque([root])
    while waiting:  # breadth first: a fallback is shorter, so it is complete already
        state = waiting.popleft()
        for character, child in state.next.items():
            child.fallback = _following(state.fallback, character, root)
            child.stop = child.stop or child.fallback.stop
            child.partial = child.depth if child.next else child.fallback.partial
            waiting.append(child)
    return root


def _following(state: _State | None, character: str, root: _State) -> _State:
    """The longest prefix that the text ends with once it has this character too."""
    while state is not None and character not in state.next:
        state = state.fallback
    return root if state is None else state.next[character]


class TextStream:
    """One request's output as text. `push` every token once, in order; `finish` when the request has ended."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt_ids,
            skip_special_tokens=sampling.skip_special_tokens,
            spaces_between_special_tokens=sampling.spaces_between_special_tokens,
            shown_ids=shown_ids,
        )
        stops, include = sampling.stop, sampling.include_stop_str_in_output
        self._matcher = StopMatcher(stops, include_stop=include) if stops else None
        self._shows_stop_token = include
        self._min_tokens = sampling.min_tokens
        self.num_output = 0  # tokens taken in, none past the end of a stop string
        self.stopped_at: int | None = None  # tokens up to and with the one that completed a stop string
        self.stop_reason: str | None = None  # that stop string
        self._withheld = ""  # text that its end has hidden
        self._hidden_ids: Sequence[int] = ()  # the same for a token

    def push(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> str:
        """The text these tokens made certain. Tokens behind a stop string are ignored.

        `ends_with_stop_token`: the last of them is the token that ended the request (end of text or one of
        `stop_token_ids`); it is counted, but shown only where stop strings are.
        """
        if self.stopped_at is not None:
            return ""
        hidden = ends_with_stop_token and not self._shows_stop_token
        if hidden:
            self._hidden_ids = token_ids[-1:]
        if self._matcher is None:
            self.num_output += len(token_ids)
            return self._detokenizer.push(token_ids[:-1] if hidden else token_ids)
        found: list[str] = []
        last = len(token_ids) - 1
        for position, token in enumerate(token_ids):
            text = "" if hidden and position == last else self._detokenizer.push((token,))
            self.num_output += 1
            found.append(self._match(self._matcher, text))
            if self.stopped_at is not None:
                break
        return "".join(found)

    def inject(self, token_ids: Sequence[int]) -> str:
        """The text of tokens that were put in from outside: no stop string is looked for in it.

        Where the output had ended, it goes on: what its end has hidden is part of the text now.
        """
        hidden, self._hidden_ids = self._hidden_ids, ()
        text, self._withheld = self._withheld, ""
        if self._matcher is not None and (token_ids or hidden or self.stopped_at is not None):
            text = self._matcher.restart() + text
        self.stopped_at = self.stop_reason = None
        self.num_output += len(token_ids)
        return text + self._detokenizer.push([*hidden, *token_ids])

    def repeat(self, token_ids: Sequence[int]) -> str:
        """The text of tokens that another output had, and that did not end it: none of them ends this one."""
        self.num_output += len(token_ids)
        text = self._detokenizer.push(token_ids)
        return text if self._matcher is None else self._matcher.push(text, may_stop=False).emit

    def finish(self) -> str:
        """What was held back, once no more tokens come."""
        if self.stopped_at is not None:
            return ""
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return rest
        return self._match(self._matcher, rest) + self._matcher.flush()

    def _match(self, matcher: StopMatcher, text: str) -> str:
        """A stop string counts when it ends behind the first `min_tokens` tokens."""
        result = matcher.push(text, may_stop=self.num_output > self._min_tokens)
        if result.stop is not None:
            self.stopped_at, self.stop_reason = self.num_output, result.stop
            self._withheld = result.withheld
        return result.emit
