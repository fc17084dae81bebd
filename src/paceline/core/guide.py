"""Guides: which tokens may come next in an answer that has to keep a structure.

A guide belongs to one branch and stands behind its last delivered token. What it allows is needed only when a token is
drawn, so it is an input that a step gets last: the engine hands the guides of a step's rows to the runner after it has
taken in the step before (`Pending.supply`). Decision: docs/decisions/0037-guides.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core.structure import Structure

Mask = NDArray[np.uint32]  # a bit for each token of the vocabulary, lowest first


class Guide(Protocol):
    """The rules of one branch. Never raises for a token; what went wrong is in `error`."""

    @property
    def is_over(self) -> bool:
        """The structure is complete, and nothing may follow."""
        ...

    @property
    def error(self) -> str:
        """Why the guide cannot continue: a word for the client, or empty."""
        ...

    def consume(self, tokens: Sequence[int]) -> None:
        """The branch has got these tokens."""
        ...

    def mask(self) -> Mask | None:
        """Which tokens may come next; None: all of them."""
        ...

    def forced(self) -> list[int]:
        """Tokens that are certain to come next, as far as that is known."""
        ...

    def accepts(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first on, may come next."""
        ...

    def copy(self) -> Guide: ...

    def end_reasoning(self) -> bool:
        """Let free text that comes before the structure end now. False: there is none, or no more."""
        ...


class GuideMaker(Protocol):
    """Makes guides of structures."""

    @property
    def objection(self) -> str:
        """Why no guides can be made here, in a sentence with what to do about it; empty: they can."""
        ...

    @property
    def compiled(self) -> tuple[int, float]:
        """How many structures have been compiled, and in how many seconds."""
        ...

    def take(self, structure: Structure) -> Guide | None:
        """A new guide; None while it is being compiled. Raises InvalidRequest for a structure that cannot be."""
        ...


def masks_along(guide: Guide, drafts: Sequence[int]) -> list[Mask | None]:
    """What may come next, and what may come behind each of these drafts in turn."""
    masks = [guide.mask()]
    if len(drafts):
        guide = guide.copy()
        for draft in drafts:
            guide.consume((draft,))
            masks.append(guide.mask())
    return masks
