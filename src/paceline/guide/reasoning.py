"""Free text that ends with a marker, before a structure or before more free text: reasoning, and its budget.

While the text goes on by itself, one grammar of all of it (text, marker, structure) decides. If it has to end, because
its budget is used up or its reader has asked for it, the marker's tokens are forced, and the structure begins anew
behind them.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.guide import Guide, Mask
from paceline.core.structure import Structure
from paceline.guide.matcher import Vocabulary


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
