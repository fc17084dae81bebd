"""Guides by arithmetic: nothing needs to be compiled, and every token tells its place.

`ScriptedGuide` has masks of any vocabulary. Its structure is a pattern "salt:length". At place `count` it allows the
tokens of one class modulo 3, but leaves one only where `count % 5` is 1 or 2; after `length` tokens it is over.
`FakeGuide` is for runners of integers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from paceline.core.guide import Mask
from paceline.core.sampling import SamplingParams
from paceline.core.structure import Structure

VOCAB = 1 << 20  # of runners of integers
PRIME = 0x9E3779B97F4A7C15


def structure(salt: int, length: int) -> Structure:
    return Structure(kind="regex", source=f"{salt}:{length}")


class ScriptedGuide:
    """The guide of one branch."""

    error = ""

    def __init__(self, source: str, vocab_size: int, count: int = 0) -> None:
        self._source, self._vocab_size = source, vocab_size
        self._salt, self._length = map(int, source.split(":"))
        self.count = count

    @property
    def is_over(self) -> bool:
        return self.count >= self._length

    @property
    def only(self) -> int | None:
        return (self._salt * 7 + self.count) % self._vocab_size if self.count % 5 in (1, 2) else None

    def allows(self, token: int) -> bool:
        return token == self.only if self.only is not None else token % 3 == (self._salt + self.count) % 3

    def consume(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            assert self.is_over or self.allows(token), f"token {token} is not allowed at place {self.count}"
            self.count += 1

    def mask(self) -> Mask:
        allowed = [self.allows(token) for token in range(self._vocab_size)]
        bits = np.packbits(np.pad(allowed, (0, -self._vocab_size % 32)), bitorder="little")
        mask: Mask = bits.view(np.uint32)
        return mask

    def forced(self) -> list[int]:
        guide, found = self.copy(), []
        while guide.only is not None and not guide.is_over:
            found.append(guide.only)
            guide.count += 1
        return found

    def accepts(self, tokens: Sequence[int]) -> int:
        guide = self.copy()
        for token in tokens:
            if guide.is_over or not guide.allows(token):
                break
            guide.count += 1
        return guide.count - self.count

    def copy(self) -> ScriptedGuide:
        return ScriptedGuide(self._source, self._vocab_size, self.count)

    def end_reasoning(self) -> bool:
        return False


class ScriptedMaker:
    """Makes guides at once."""

    objection = ""
    compiled = (0, 0.0)

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def take(self, structure: Structure) -> ScriptedGuide | None:
        return ScriptedGuide(structure.source, self._vocab_size)


class FakeGuide:
    """Allows one token of sixteen, at some places one only, and is over after a number of tokens.

    Its structure is a pattern "salt:length"; one whose salt is a multiple of 8 breaks at its fourth token.
    """

    def __init__(self, source: str, count: int = 0) -> None:
        self._source = source
        self._salt, self._length = map(int, source.split(":"))
        self.count = count  # tokens so far
        self.error = ""

    @classmethod
    def of(cls, sampling: SamplingParams, count: int = 0) -> FakeGuide | None:
        structure = sampling.structured_outputs
        return None if structure is None else cls(structure.source, count)

    @property
    def is_over(self) -> bool:
        return self.count >= self._length

    @property
    def left(self) -> int:
        return self._length - self.count

    @property
    def breaks(self) -> bool:
        return self._salt % 8 == 0 and self.count == 3

    def choose(self, token: int) -> int:
        """The token that is drawn where this one would be without a guide."""
        if self.breaks:
            self.error = "grammar_error"
        if self.count % 8 < 3:
            return (self._salt * 31 + self.count * PRIME) % VOCAB
        return token - token % 16 + (self._salt + self.count) % 16

    def consume(self, tokens: Sequence[int]) -> None:
        self.count += len(tokens)

    def mask(self) -> None:
        raise AssertionError("integers have no masks")

    def forced(self) -> list[int]:
        guide, found = self.copy(), []
        while guide.count % 8 < 3 and not guide.breaks:
            found.append(guide.choose(0))
            guide.consume((0,))
        return found

    def accepts(self, tokens: Sequence[int]) -> int:
        guide = self.copy()
        for token in tokens:
            if guide.breaks or guide.choose(token) != token:
                break
            guide.consume((token,))
        return guide.count - self.count

    def copy(self) -> FakeGuide:
        return FakeGuide(self._source, self.count)

    def end_reasoning(self) -> bool:
        return False


class FakeGuideMaker:
    """Makes guides, sometimes only when it has been asked again."""

    objection = ""
    compiled = (0, 0.0)

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def take(self, structure: Structure) -> FakeGuide | None:
        return None if self._rng.random() < 0.3 else FakeGuide(structure.source)
