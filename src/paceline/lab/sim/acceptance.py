"""Which drafts are right in a simulated run: chances of kinds of draft, drawn by hash.

Tokens are never made here, so that whether a draft is right is drawn: from one chance for all, from a distribution over
requests, or from how drafts fared in a recorded run. The same seed, row and position give the same draw, however steps
are composed. Whole columns at once; nothing is kept from step to step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.audit.codec import Generations, decode_result
from paceline.audit.runlog import BROKEN, read_run_log, reason
from paceline.core.plan import DRAFT_KINDS
from paceline.errors import InputError

Column = NDArray[np.int64]
Chances = NDArray[np.float64]

_POINTS = 64  # of a distribution, in each of its parts
_SCALE = 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Acceptance:
    """Chances of drafts by kind, and how often there is a draft of each kind."""

    text: str  # as it was given
    chances: Chances  # of one draft to be right, by kind
    shares: Chances  # of places that have a draft of this kind; the rest has none
    by_request: bool = False  # a request keeps its kind; else each place has its own

    @classmethod
    def read(cls, text: str) -> Acceptance:
        """What --acceptance says: a chance, beta:A,B, or a run log."""
        if text.startswith("beta:"):
            return _beta(text)
        try:
            chance = float(text)
        except ValueError:
            return _of_log(text)
        if not 0.0 <= chance <= 1.0:
            raise InputError(f"--acceptance {text}: a chance lies between 0 and 1")
        chances, shares = np.zeros(DRAFT_KINDS), np.zeros(DRAFT_KINDS)
        chances[0], shares[0] = chance, 1.0
        return cls(text=text, chances=chances, shares=shares)

    def kinds(self, seed: int, owner: Column, position: Column) -> Column:
        """The kind of draft that each row has; -1: none."""
        place = np.zeros_like(position) if self.by_request else position
        drawn = _uniform(seed, 1, owner, place)
        kind: Column = np.searchsorted(np.cumsum(self.shares), drawn, side="right")
        kind[kind >= DRAFT_KINDS] = -1
        return kind

    def right(self, seed: int, owner: Column, position: Column, kind: Column) -> Column:
        """How many drafts of each row would be right in a row, if there were any number of them."""
        chance = np.where(kind >= 0, self.chances[kind], 0.0)
        with np.errstate(divide="ignore"):
            run = np.log(_uniform(seed, 2, owner, position)) / np.log(chance)
        found: Column = np.minimum(np.where(chance >= 1.0, np.inf, run), 1 << 20).astype(np.int64)
        return found


def _beta(text: str) -> Acceptance:
    """Requests differ: some repeat what is known, some do not."""
    try:
        a, b = (float(part) for part in text.removeprefix("beta:").split(","))
    except ValueError:
        a = b = 0.0
    if not (0.0 < a < math.inf and 0.0 < b < math.inf):
        raise InputError(f"--acceptance {text}: give two numbers above 0, as in beta:2,1")
    points = (np.arange(DRAFT_KINDS * _POINTS) + 0.5) / (DRAFT_KINDS * _POINTS)
    density = (points ** (a - 1.0) * (1.0 - points) ** (b - 1.0)).reshape(DRAFT_KINDS, _POINTS)
    mass = density.sum(1)
    chances = (density * points.reshape(DRAFT_KINDS, _POINTS)).sum(1) / np.maximum(mass, 1e-300)
    return Acceptance(text=text, chances=chances, shares=mass / mass.sum(), by_request=True)


def _of_log(text: str) -> Acceptance:
    """Every draft that was compared belongs to a token that came; tokens without one had no draft."""
    if not Path(text).is_file():
        raise InputError(f"--acceptance {text}: give a chance, beta:A,B, or the run log of a run with drafts")
    compared, equal, tokens = np.zeros(DRAFT_KINDS), np.zeros(DRAFT_KINDS), 0
    generations = Generations()
    for logged in read_run_log(text):
        if logged.result is None:
            continue
        try:
            result = decode_result(logged.result, 0, generations)
        except (*BROKEN, AttributeError) as problem:
            raise InputError(f"{text}: line {logged.line} is broken: {reason(problem)}") from problem
        tokens += int(result.count.sum())
        if result.drafts is not None:
            compared += result.drafts.compared
            equal += result.drafts.equal
    if not compared.any():
        raise InputError(
            f"--acceptance {text}: this run made no drafts; record one with --speculative-config"
        )
    return Acceptance(
        text=text, chances=equal / np.maximum(compared, 1), shares=compared / max(tokens, compared.sum())
    )


def _uniform(seed: int, draw: int, owner: Column, position: Column) -> Chances:
    """Numbers in (0, 1), one for each row: the finaliser of splitmix64."""
    with np.errstate(over="ignore"):
        value = owner.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        value += position.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
        value += np.uint64((seed * 4 + draw) * 0xD6E8FEB86659FD93 & (1 << 64) - 1)
        value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        value ^= value >> np.uint64(31)
    return ((value >> np.uint64(11)).astype(np.float64) + 0.5) * _SCALE
