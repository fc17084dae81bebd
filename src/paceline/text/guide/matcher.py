"""The one file that knows llguidance: a vocabulary as its trie, and a grammar that follows an answer token by token.

llguidance never raises for a grammar or a token: a matcher that cannot continue says so when asked.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from operator import methodcaller
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.core.guide import Guide, Mask
from paceline.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MISSING = "this needs the package llguidance, which is not installed here: pip install llguidance"
GRAMMAR_ERROR, TOO_COMPLEX = "grammar_error", "grammar_too_complex"
LONGEST_REASON = 300
Masks = NDArray[np.uint32]  # [guides, words]
_EVERYTHING = 0xFFFFFFFF
MOST_THREADS = 32
# Waking a thread takes longer than a few masks, and than moving hundreds of guides on.
FEWEST, FEW = 48, 8  # guides from which on threads are woken for masks, and guides of each
MANY = 512  # guides that are moved on by threads
_IS_ERROR, _IS_STOPPED = methodcaller("is_error"), methodcaller("is_stopped")
_LIMITS = ("ParserTooComplex", "LexerTooComplex")
TOO_MANY = "Too many items"  # said of a rule that needs itself without end, or of very many


def is_installed() -> bool:
    return find_spec("llguidance") is not None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Vocabulary:
    """What a grammar needs to know of a tokenizer."""

    bytes_of: Sequence[bytes]
    control: Mapping[str, int]  # tokens that text never spells
    special_ids: frozenset[int]  # these and others without text
    eos_token_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]  # of text, never giving a control token

    @property
    def num_words(self) -> int:
        """Of a mask."""
        return (len(self.bytes_of) + 31) // 32

    def only(self, token: int) -> Mask:
        """The mask that leaves one token."""
        mask: Mask = np.zeros(self.num_words, np.uint32)
        mask[token // 32] = 1 << (token % 32)
        return mask


class GrammarCompiler:
    """Grammars of one vocabulary. Making its trie takes a second for a large one: call from a thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        ends = [token for token in vocabulary.eos_token_ids if token < len(vocabulary.bytes_of)]
        self._vocabulary = vocabulary
        self._originals = itertools.count()
        self._tokenizer: LLTokenizer = LLTokenizer(
            TokenizerWrapper(_Encoder(vocabulary, ends[0] if ends else 0)),
            n_vocab=len(vocabulary.bytes_of),
            eos_token=ends or None,
        )

    def compile(self, grammar: str) -> Matcher:
        """Raises InvalidRequest for a grammar that is none."""
        from llguidance import LLMatcher

        found = LLMatcher(self._tokenizer, grammar, log_level=0)
        matcher = Matcher(found, self._vocabulary, next(self._originals))
        if not matcher.error:
            matcher.mask()  # the first takes longest: what it finds out serves all copies
        if matcher.error:
            raise InvalidRequest(f"structured_outputs: {reason_of(found)}", param="structured_outputs")
        return matcher


def reason_of(matcher: LLMatcher) -> str:
    """What llguidance says of an error, on one line of bounded length."""
    first = matcher.get_error().split("\n<state>")[0]
    return " ".join(first.split())[:LONGEST_REASON]


class Matcher:
    """A grammar, as far as an answer has followed it."""

    __slots__ = ("_vocabulary", "error", "matcher", "original")

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, original: int = 0) -> None:
        """`original`: a number that only its copies share."""
        self.matcher, self.original = matcher, original
        self._vocabulary = vocabulary
        self.error = ""
        self.look()

    @property
    def is_over(self) -> bool:
        return not self.error and self.matcher.is_stopped()

    def look(self) -> bool:
        """Whether it has failed, after something was asked of `matcher`."""
        if not self.error and self.matcher.is_error():
            is_limit = self.matcher.stop_reason() in _LIMITS or TOO_MANY in self.matcher.get_error()
            self.error = TOO_COMPLEX if is_limit else GRAMMAR_ERROR
        return bool(self.error)

    def consume(self, tokens: Sequence[int]) -> None:
        """Nothing can be consumed behind the end: what was on its way there is dropped."""
        for token in tokens:
            if self.error or self.matcher.is_stopped():
                return
            if not self.matcher.consume_token(token):
                self.look()

    def mask(self) -> Mask:
        mask: Mask = np.zeros(self._vocabulary.num_words, np.uint32)
        if not self.error:
            self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self.look():
                mask[:] = 0
        return mask

    def forced(self) -> list[int]:
        if self.error or self.matcher.is_stopped():
            return []
        return list(self.matcher.compute_ff_tokens())

    def accepts(self, tokens: Sequence[int]) -> int:
        return 0 if self.error else int(self.matcher.validate_tokens(list(tokens)))

    def copy(self) -> Matcher:
        return Matcher(self.matcher.deep_copy(), self._vocabulary, self.original)

    def end_reasoning(self) -> bool:
        return False


class GuideBatch:
    """Guides that are asked and moved on together, by one call for all grammars among them, which are followed side by
    side and without Python's lock. Serves any number of steps: what is the same in each is made once."""

    def __init__(self, guides: Sequence[Guide], threads: int | None = None) -> None:
        """`threads` that follow grammars, by default as many as it pays to wake; 1: this one."""
        places = [at for at, guide in enumerate(guides) if type(guide) is Matcher]
        # Copies of an original share a lock. Threads take neighbours, so that few of them wait for each other.
        places.sort(key=lambda at: guides[at].original)  # type: ignore[attr-defined]
        self._grammars = [guide for at in places if isinstance(guide := guides[at], Matcher)]
        self._matchers = [guide.matcher for guide in self._grammars]
        self._asked = list(zip(self._matchers, places, strict=True))
        self._places: NDArray[np.int64] = np.array(places, np.int64)
        self._others = [(at, guide) for at, guide in enumerate(guides) if type(guide) is not Matcher]
        if threads is None:
            threads = min(len(places) // FEW, mask_threads()) if len(places) >= FEWEST else 1
        self._pool = _pool(threads) if threads > 1 else None
        self._may_be_over = True  # not known yet

    def fill_masks(self, into: Masks) -> None:
        """What each guide allows now, a row each."""
        first, size = into.ctypes.data, into.strides[0]
        if self._pool is not None:
            self._pool.unsafe_compute_mask_ptr(self._asked, first, size, len(into))
        else:
            for matcher, at in self._asked:
                matcher.unsafe_compute_mask_ptr(first + at * size, size)
        if any(map(_IS_ERROR, self._matchers)):
            for at, grammar in zip(self._places.tolist(), self._grammars, strict=True):
                if grammar.look():
                    into[at] = 0
        for at, guide in self._others:
            mask = guide.mask()
            into[at] = _EVERYTHING if mask is None else mask

    def consume(self, tokens: NDArray[np.int32]) -> bool:
        """Each guide has got a token; whether one of them may be over, or have failed."""
        for at, guide in self._others:
            guide.consume((tokens.item(at),))
        own: list[int] = tokens[self._places].tolist()
        if self._may_be_over:  # then some tokens are dropped
            for grammar, token in zip(self._grammars, own, strict=True):
                grammar.consume((token,))
        elif own and not self._all_consume(own):
            for grammar in self._grammars:
                grammar.look()
        self._may_be_over = any(map(_IS_STOPPED, self._matchers))
        return self._may_be_over or any(guide.is_over or guide.error for _, guide in self._others)

    def _all_consume(self, tokens: list[int]) -> bool:
        """Without a call of Python's for each of them."""
        if self._pool is not None and len(tokens) >= MANY:
            return all(self._pool.consume_token_par(list(zip(self._matchers, tokens, strict=True))))
        return all(list(map(type(self._matchers[0]).consume_token, self._matchers, tokens)))


@cache
def _pool(threads: int) -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor(threads)


def mask_threads() -> int:
    """Cores that make masks side by side; two are left to the engine and to the server."""
    return max(1, min((os.cpu_count() or 1) - 2, MOST_THREADS))


class _Encoder:
    """A tokenizer as llguidance wants it."""

    def __init__(self, vocabulary: Vocabulary, eos_token_id: int) -> None:
        self.tokens = list(vocabulary.bytes_of)
        self.special_token_ids = sorted({*vocabulary.special_ids, *vocabulary.control.values()})
        self.eos_token_id, self.bos_token_id = eos_token_id, None
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # asked whether bytes will do
            raise TypeError("text is wanted")
        return self._encode(text)
