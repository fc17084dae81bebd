"""Guides of structures: compiled once each, in a thread of their own, and kept.

Compiling takes a millisecond or two, for a large schema fifty, and the vocabulary's trie up to a second when the first
structure comes; the engine goes on meanwhile. What is kept is a guide that has seen no token: each branch gets a copy.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from paceline.core.guide import Guide, Mask
from paceline.core.structure import Structure
from paceline.errors import InvalidRequest
from paceline.text.guide import matcher
from paceline.text.guide.grammar import grammar_of
from paceline.text.guide.matcher import GrammarCompiler, Vocabulary

KEPT_BYTES = 8 << 20  # of sources; what is compiled takes several times that


@dataclass(slots=True)
class _Kept:
    """A structure that is being compiled, or has been."""

    originals: list[Future[Guide]]  # guides that have seen no token
    taken: int = 0


class GuideCompiler:
    """Makes guides for one vocabulary."""

    def __init__(
        self, read_vocabulary: Callable[[], Vocabulary], objection: str = "", *, originals: int = 1
    ) -> None:
        """`objection`: why structured answers are not possible here, whatever is installed. `originals`: how often a
        structure is compiled if many branches follow it, because copies of one original cannot be asked at once."""
        self.objection = objection or (
            "" if matcher.is_installed() else f"structured_outputs: {matcher.MISSING}"
        )
        self._read_vocabulary = read_vocabulary
        self._most = originals
        self._kept: OrderedDict[Structure, _Kept] = OrderedDict()
        self._bytes = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-grammar")
        self._compiler: GrammarCompiler | None = None  # the thread's
        self._vocabulary: Vocabulary | None = None
        self.compiled = (0, 0.0)  # the thread's

    def take(self, structure: Structure) -> Guide | None:
        if self.objection:
            raise InvalidRequest(self.objection, param="structured_outputs")
        known = self._kept.get(structure)
        if known is None:
            self._keep(structure)
            return None
        self._kept.move_to_end(structure)
        if not known.originals[0].done():
            return None
        known.taken += 1
        number = known.taken % len(known.originals)
        if number == 0 and len(known.originals) < self._most and known.taken >= 4:
            known.originals.append(self._thread.submit(self._make, structure))
        original = known.originals[number] if known.originals[number].done() else known.originals[0]
        return original.result().copy()

    def _keep(self, structure: Structure) -> None:
        self._kept[structure] = _Kept([self._thread.submit(self._make, structure)])
        self._bytes += len(structure.source)
        while self._bytes > KEPT_BYTES and len(self._kept) > 1:
            oldest, _ = self._kept.popitem(last=False)
            self._bytes -= len(oldest.source)

    def _make(self, structure: Structure) -> Guide:
        """In the thread."""
        started_s = time.perf_counter()
        try:
            return self._made(structure)
        finally:
            number, total_s = self.compiled
            self.compiled = (number + 1, total_s + time.perf_counter() - started_s)

    def _made(self, structure: Structure) -> Guide:
        if self._vocabulary is None:
            self._vocabulary = self._read_vocabulary()
        vocabulary = self._vocabulary
        guide = None if structure.kind == "text" else self._compile(structure, vocabulary)
        if not structure.after:
            if guide is None:
                raise InvalidRequest(
                    "structured_outputs: text has no rules without after", param="structured_outputs"
                )
            return guide
        control = vocabulary.control.get(structure.after)
        marker = vocabulary.encode(structure.after) if control is None else [control]
        behind = None
        if guide is not None:
            behind = self._compile(replace(structure, after="", within=None), vocabulary)
        return Reasoning(structure, marker, vocabulary, guide, behind)

    def _compile(self, structure: Structure, vocabulary: Vocabulary) -> Guide:
        if self._compiler is None:
            self._compiler = GrammarCompiler(vocabulary)
        return self._compiler.compile(grammar_of(structure, vocabulary.control.get))


# Free text that ends with a marker, before a structure or before more free text: reasoning, and its budget.
#
# While the text goes on by itself, one grammar of all of it (text, marker, structure) decides. If it has to end,
# because its budget is used up or its reader has asked for it, the marker's tokens are forced, and the structure
# begins anew behind them.


class Reasoning:
    """A guide of free text up to a marker, and of what follows."""

    __slots__ = ("_behind", "_budget", "_forced", "_guide", "_marker", "_tail", "_vocabulary", "is_thinking")

    def __init__(
        self,
        structure: Structure,
        marker: list[int],
        vocabulary: Vocabulary,
        whole: Guide | None,
        behind: Guide | None,
    ) -> None:
        """`whole` is the guide of text, marker and structure, `behind` that of the structure; None: free text."""
        self._vocabulary = vocabulary
        self._marker, self._tail = marker, b""
        self._budget = structure.within
        self._guide, self._behind = whole, behind
        self._forced: list[int] = []  # what is left of a marker that was forced
        self.is_thinking = True
        if self._budget == 0:
            self.end_reasoning()

    @property
    def is_over(self) -> bool:
        return not self._forced and self._guide is not None and self._guide.is_over

    @property
    def error(self) -> str:
        return "" if self._forced or self._guide is None else self._guide.error

    def consume(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._consume(token)

    def _consume(self, token: int) -> None:
        if self._forced and token == self._forced[0]:
            self._forced.pop(0)
            if not self._forced:
                self.is_thinking = False
            return
        # A token that was on its way when the end was asked for is one of the text still.
        if self._guide is not None and not self._forced:
            self._guide.consume((token,))
        if not self.is_thinking:
            return
        bytes_of = self._vocabulary.bytes_of
        end = b"".join([bytes_of[each] for each in self._marker])
        self._tail = self._tail[1 - len(end) :] + bytes_of[token]
        if end in self._tail:
            self.is_thinking, self._forced = False, []
        elif self._budget is not None:
            self._budget -= 1
            if self._budget <= 0:
                self.end_reasoning()

    def mask(self) -> Mask | None:
        if self._forced:
            return self._vocabulary.only(self._forced[0])
        return None if self._guide is None else self._guide.mask()

    def forced(self) -> list[int]:
        if self._forced:
            return list(self._forced)
        return [] if self._guide is None else self._guide.forced()

    def accepts(self, tokens: Sequence[int]) -> int:
        if self._forced:
            return next(
                (place for place, (a, b) in enumerate(zip(tokens, self._forced, strict=False)) if a != b),
                min(len(tokens), len(self._forced)),
            )
        if self.is_thinking and self._budget is not None:
            tokens = tokens[: self._budget]
        return len(tokens) if self._guide is None else self._guide.accepts(tokens)

    def copy(self) -> Reasoning:
        twin = Reasoning.__new__(Reasoning)
        twin._vocabulary, twin._marker, twin._tail = self._vocabulary, self._marker, self._tail
        twin._budget, twin.is_thinking = self._budget, self.is_thinking
        twin._guide = None if self._guide is None else self._guide.copy()
        twin._behind = self._behind  # copied when it is its turn
        twin._forced = list(self._forced)
        return twin

    def end_reasoning(self) -> bool:
        if not self.is_thinking or self._forced:
            return False
        self._forced = list(self._marker)
        self._guide = None if self._behind is None else self._behind.copy()
        return True
