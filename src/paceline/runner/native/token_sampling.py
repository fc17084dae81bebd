"""Samples the tokens of a native step: what its kernels are asked for, and the token of each row from what they list.

The kernels list the tokens of a row that can be drawn (`kernels.draw`); here one of them is drawn by the definition, in
float64, for all rows at once. Where the last bits of a sum decide, or a list was too short, the row is left to the
sampler.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.runner.native.checks import aligned
from paceline.runner.native.layout import (
    BLOCK,
    DRAW,
    GREEDY,
    LISTED,
    LISTED_BYTES,
    NEAR_TOP,
    NO_DRAW,
    PART,
    RACE,
    STRETCH,
)
from paceline.runner.native.team import Parameters
from paceline.runner.sampling.noise import gumbel
from paceline.runner.sampling.processors import HEAD, smallest_from
from paceline.runner.sampling.sampler import Settled, Wanted

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Bool = NDArray[np.bool_]

HOTTEST = 1e4  # a temperature above it is left to the sampler: float32 may not hold a difference of logits
MASS_ERROR = 2e-5  # of a mass that the kernels summed: more than what their float32 rounds away
EPSILON = 2.0**-52


class TokenSampling:
    """Memory for the draws of a step; grows with the rows."""

    def __init__(self, parameters: Parameters, vocab_size: int) -> None:
        self._parameters = parameters
        self._vocab_size = vocab_size
        self._stretches = -(-vocab_size // STRETCH)
        self._grow(1)
        parameters.set(vocab_size=vocab_size, num_stretches=self._stretches)

    def _grow(self, rows: int) -> None:
        p, pieces = self._parameters, rows * self._stretches
        self._cuts: _Cuts | None = None
        self._draws: I64 = np.zeros((rows, len(DRAW)), np.int64)
        self._parts: I64 = np.zeros((pieces, len(PART)), np.int64)
        self._firsts = np.arange(0, pieces * LISTED, LISTED)
        self._listed = aligned(pieces * LISTED * LISTED_BYTES).view(np.int32).reshape(-1, LISTED_BYTES // 4)
        p.point("draws", self._draws)
        p.point("draw_parts", self._parts)
        p.point("listed", self._listed)
        p.point("maxima", aligned(rows * -(-self._vocab_size // BLOCK) * 64))

    def load(self, wanted: Wanted) -> None:
        """Ask the next step for these draws."""
        rows = len(wanted.position)
        if rows > len(self._draws):
            self._grow(rows)
        draws = self._draws[:rows]
        # Columns are the same arrays as long as the rows and what they ask for are the same.
        if self._cuts is None or self._cuts.wanted.temperature is not wanted.temperature:
            self._cuts = _Cuts(wanted, self._vocab_size)
            self._cuts.write(draws)
        draws[:, DRAW["position"]] = wanted.position
        self._parameters.set(num_draws=rows, has_lists=int(self._cuts.has_lists))

    def clear(self) -> None:
        """The next step draws nothing."""
        self._parameters.set(num_draws=0)

    def settle(self) -> Settled:
        """The tokens of the step that was computed since `load`."""
        cuts = self._cuts
        assert cuts is not None
        draws = self._draws[: len(cuts.kind)]
        top = draws[:, DRAW["top"]].astype(np.uint32).view(np.float32)
        tokens = draws[:, DRAW["best"]].copy()
        is_settled = cuts.is_draw & np.isfinite(top)
        if not cuts.has_lists:
            return Settled(tokens=tokens, is_settled=is_settled)
        sizes = self._parts[: len(draws) * self._stretches, PART["count"]].copy()
        if sizes.max() > LISTED:
            lacking = (sizes > LISTED).reshape(len(draws), -1).any(axis=1)
            is_settled[lacking] = False
            sizes[np.repeat(lacking, self._stretches)] = 0
        lengths = sizes.reshape(len(draws), -1).sum(axis=1)
        drawn = np.flatnonzero(lengths)  # the best token of every row that draws is listed
        if not len(drawn):
            return Settled(tokens=tokens, is_settled=is_settled)
        ends = np.cumsum(sizes)
        places = np.repeat(self._firsts[: len(sizes)] - ends + sizes, sizes) + np.arange(ends[-1])
        entries = self._listed[places]
        if len(entries) == len(drawn) and not cuts.any:  # in every row one token alone can win
            tokens[drawn] = entries[:, 0]
            return Settled(tokens=tokens, is_settled=is_settled)
        listed = _Listed(entries, drawn, lengths[drawn], top, cuts.wanted.temperature)
        floor = None
        if cuts.any:
            masses = self._parts[: len(sizes), PART["mass"]].view(np.float64).reshape(len(draws), -1)
            floor, is_sure = cuts.floors(listed, np.where(cuts.has_mass, masses.sum(axis=1), 0.0)[drawn])
            is_settled[drawn] &= is_sure
        tokens[drawn] = listed.winners(floor)
        return Settled(tokens=tokens, is_settled=is_settled)


class _Listed:
    """The listed tokens of drawn rows, one row after the other. A row's number is its place among the drawn."""

    def __init__(
        self, entries: NDArray[np.int32], drawn: I64, lengths: I64, top: F32, temperature: F64
    ) -> None:
        self.drawn = drawn
        self.lengths = lengths
        self.starts = np.cumsum(lengths) - lengths
        self.top = top[drawn].astype(np.float64)
        self.temperature = temperature[drawn]
        self.tokens = entries[:, 0]
        self.values = entries.view(np.float32)[:, 1]
        self.words = entries.view(np.uint32)[:, 2]
        self.row = entries[:, 3] if len(drawn) == len(top) else np.searchsorted(drawn, entries[:, 3])

    def offsets(self, values: F32) -> F64:
        """(logit - top) / temperature, where each row has as many values as it lists."""
        found: F64 = (values - self.top[self.row]) / self.temperature[self.row]
        return found

    def descending(self) -> F32:
        """The logits of each row, the largest first."""
        bits = self.values.view(np.int32).astype(np.int64)
        ordered = np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # integers in the order of the floats
        row = self.row.astype(np.int64) << 33
        ordered = row - np.sort(row - ordered)
        return np.where(ordered < 0, 0x80000000 - ordered, ordered).astype(np.uint32).view(np.float32)

    def winners(self, floor: F32 | None) -> I64:
        """The token with the largest score of each row, the lowest id among equals; none that is below the floor."""
        scores = self.offsets(self.values) + gumbel(self.words)
        if floor is not None:
            scores[self.values < floor[self.row]] = -np.inf
        best = np.maximum.reduceat(scores, self.starts)
        ids = np.where(scores == best[self.row], self.tokens, np.iinfo(np.int32).max)
        found: I64 = np.minimum.reduceat(ids, self.starts).astype(np.int64)
        return found


class _Cuts:
    """How each row of a step is drawn, and which tokens stay in its draw: `processors.floors`, from what is listed."""

    def __init__(self, wanted: Wanted, vocab_size: int) -> None:
        self.wanted = wanted
        self._vocab_size = vocab_size
        self._by_k = (wanted.top_k > 0) & (wanted.top_k < vocab_size)
        self._by_p, self._by_min = wanted.top_p < 1, wanted.min_p > 0
        is_cut = self._by_k | self._by_p | self._by_min
        self.any = bool(is_cut.any())
        self.kind = np.where(is_cut, NEAR_TOP, RACE)
        self.kind[~wanted.random] = GREEDY
        self.kind[~wanted.is_plain | (wanted.random & (wanted.temperature > HOTTEST))] = NO_DRAW
        self.is_draw = self.kind != NO_DRAW
        self.has_lists = bool((self.kind >= RACE).any())
        self.has_mass = self._by_p & ~self._by_k & ~self._by_min
        self._log_min_p = np.log(wanted.min_p, out=np.full(len(is_cut), -np.inf), where=self._by_min)

    def write(self, draws: I64) -> None:
        """The rows of a step's draws, but for their positions."""
        wanted = self.wanted
        temperature = np.where(wanted.random, wanted.temperature, 1.0)
        # How far below the top a token may be kept: all of min-p; of top-p alone the part that it rarely goes beyond.
        reach = np.where(self.has_mass, HEAD * temperature, np.inf)
        reach = np.where(self._by_min, -temperature * self._log_min_p, reach)
        draws[:, DRAW["kind"]] = self.kind
        draws[:, DRAW["key"]] = wanted.key.view(np.int64)
        draws[:, DRAW["inverse"]] = _bits(1 / temperature)
        draws[:, DRAW["reach"]] = _bits(smallest_from(reach))
        draws[:, DRAW["top_k"]] = np.where(self._by_k, wanted.top_k, 0)
        draws[:, DRAW["has_mass"]] = self.has_mass

    def floors(self, listed: _Listed, rest: F64) -> tuple[F32, Bool]:
        """The lowest logit kept in each drawn row, and whether it is certain; `rest`: the mass of unlisted tokens."""
        drawn, start, lengths = listed.drawn, listed.starts, listed.lengths
        floor = smallest_from(listed.top + listed.temperature * self._log_min_p[drawn])
        values = listed.descending()
        by_k, by_p, top_k = self._by_k[drawn], self._by_p[drawn], self.wanted.top_k[drawn]
        if by_k.any():
            # Fewer than k are listed only where min-p drops the k-th.
            kth = values[start + np.minimum(top_k, lengths) - 1]
            floor = np.where(by_k & (top_k <= lengths), np.maximum(floor, kth), floor)
        if not by_p.any():
            return floor, np.ones(len(drawn), np.bool_)
        weights = np.exp(listed.offsets(values))
        sums = np.cumsum(weights)
        before = sums[start] - weights[start]
        end = start + np.add.reduceat(values >= floor[listed.row], start, dtype=np.int64)
        needed = before + self.wanted.top_p[drawn] * (sums[end - 1] - before + rest)
        # The mass that the definition finds, however it rounds, lies within the slack.
        slack = MASS_ERROR * rest + 8 * EPSILON * (len(sums) + self._vocab_size) * sums[-1]
        first, last = np.searchsorted(sums, (needed - slack, needed + slack))
        nucleus = values[np.clip(first, start, end - 1)]
        is_sure = (last < end) & (nucleus == values[np.minimum(last, end - 1)])
        return np.where(by_p, nucleus, floor), is_sure | ~by_p


def _bits(values: NDArray[np.floating]) -> I64:
    """float32 numbers as the 64-bit fields of a row."""
    return values.astype(np.float32).view(np.uint32).astype(np.int64)
