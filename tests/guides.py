"""A guide by arithmetic, with masks of any vocabulary: nothing needs to be compiled, and every token tells its place.

Its structure is a pattern "salt:length". At place `count` it allows the tokens of one class modulo 3, but leaves one
only where `count % 5` is 1 or 2; after `length` tokens it is over.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.core.guide import Mask
from paceline.core.structure import Structure


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

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def take(self, structure: Structure) -> ScriptedGuide | None:
        return ScriptedGuide(structure.source, self._vocab_size)
