"""Guides of structures: compiled once each, in a thread of their own, and kept.

Compiling takes a millisecond or two, for a large schema fifty, and the vocabulary's trie up to a second when the first
structure comes; the engine goes on meanwhile. What is kept is a guide that has seen no token: each branch gets a copy.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from paceline.core.guide import Guide
from paceline.core.structure import Structure
from paceline.errors import InvalidRequest
from paceline.guide import matcher
from paceline.guide.grammar import grammar_of
from paceline.guide.matcher import GrammarCompiler, Vocabulary
from paceline.guide.reasoning import Reasoning

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
