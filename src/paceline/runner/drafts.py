"""Drafts on the CPU: guesses of a row's next tokens, from what its own tokens have been like.

A row that has said the same few tokens before is likely to go on as it did then. An index of n-grams tells where that
was: one open hash for all rows, in which a later place replaces an earlier one. A number that is unique to each owner
of a row is part of every key, so that no row finds another's text. A draft is a hint: it can be wrong, and costs time
then; whether it was right is decided by the token that is drawn.
Everything is done over all rows of a step at once.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core.plan import DRAFT_KINDS, DraftTally, StepPlan
from paceline.runner.device_rows import DeviceRows

Index = NDArray[np.int64]
U64 = NDArray[np.uint64]
F32 = NDArray[np.float32]
Bool = NDArray[np.bool_]

SIZES = (5, 3, 2)  # of n-grams, the longest first: the longest that is found counts
MISSED, PARTLY, WHOLLY = 0, 1, 2  # how a row's last draft fared
SLOTS = 1 << 19
_PRIME = np.uint64(0x9E3779B97F4A7C15)
_HIGH = np.uint64(32)
NOWHERE = -1


class Drafter(Protocol):
    """Guesses the next tokens of rows. What it guesses changes when tokens come, never which."""

    def join(self, rows: DeviceRows, row: int) -> None:
        """A row has a new owner; all its tokens are there."""
        ...

    def propose(self, rows: DeviceRows, plan: StepPlan, at: Index) -> tuple[Index, Index] | None:
        """Drafts of the decoding rows `at` as tokens [rows, width], and how many each row has; no more than the plan
        allows. None: no row has any."""
        ...

    def observe(self, rows: DeviceRows, at: Index, count: Index, verified: Index) -> None:
        """The rows `at` have got `count` tokens each, and so many drafts of each were verified."""
        ...

    def take_tally(self) -> DraftTally | None:
        """How drafts have fared since the last call; None: none was compared."""
        ...


class NgramIndex:
    """Where n-grams of rows were last seen."""

    def __init__(self) -> None:
        self._keys: NDArray[np.uint32] = np.zeros(SLOTS, np.uint32)
        self._places: NDArray[np.int32] = np.full(SLOTS, NOWHERE, np.int32)

    def find(self, grams: Index, salt: U64) -> Index:
        """The position behind the last place of each n-gram [number, n], or NOWHERE."""
        slot, key = _hash(grams, salt)
        return np.where(self._keys[slot] == key, self._places[slot], NOWHERE).astype(np.int64)

    def put(self, grams: Index, salt: U64, places: Index) -> None:
        slot, key = _hash(grams, salt)
        self._keys[slot], self._places[slot] = key, places


def _hash(grams: Index, salt: U64) -> tuple[Index, NDArray[np.uint32]]:
    value = salt + np.uint64(grams.shape[1])
    for column in grams.T:
        value = (value ^ column.astype(np.uint64)) * _PRIME
        value ^= value >> np.uint64(29)
    return (value & np.uint64(SLOTS - 1)).astype(np.int64), (value >> _HIGH).astype(np.uint32)


class NgramDrafter:
    """Makes drafts of rows, and tells how they fared."""

    def __init__(self, num_rows: int) -> None:
        self._index = NgramIndex()
        self._salt: U64 = np.zeros(num_rows, np.uint64)
        self._owners = 0
        self._last: NDArray[np.int64] = np.zeros(num_rows, np.int64)  # how the row's last draft fared
        self._trust: F32 = np.zeros(DRAFT_KINDS, np.float32)
        # The draft of each row that is next, whether it will be verified or only compared.
        self._next_kind: Index = np.full(num_rows, NOWHERE, np.int64)
        self._next_place: Index = np.zeros(num_rows, np.int64)
        self._compared: Index = np.zeros(DRAFT_KINDS, np.int64)
        self._equal: Index = np.zeros(DRAFT_KINDS, np.int64)

    def join(self, rows: DeviceRows, row: int) -> None:
        self._owners += 1
        self._salt[row] = self._owners * 0x1_0000_0001
        self._last[row], self._next_kind[row] = PARTLY, NOWHERE
        known = rows.tokens[row, : rows.num_tokens[row]]
        for size in SIZES:
            if len(known) >= size:
                grams = np.lib.stride_tricks.sliding_window_view(known, size)
                self._index.put(grams, np.full(len(grams), self._salt[row]), np.arange(size, len(known) + 1))

    def propose(self, rows: DeviceRows, plan: StepPlan, at: Index) -> tuple[Index, Index] | None:
        """Those that are worth their time: of each row as many as its chances allow, and as the plan does of all."""
        if len(plan.trust):
            self._trust = plan.trust
        if not plan.draft_width:
            return None
        kind, place, length = self._next_kind[at], self._next_place[at], rows.num_tokens[at]
        trust = self._trust[kind].astype(np.float64)
        trust[(kind == NOWHERE) | rows.ended[at]] = 0.0
        most = np.minimum(plan.draft_width, rows.limit[at] - length - 1)
        depth = np.arange(1, plan.draft_width + 1)
        survival = trust[:, None] ** depth
        wanted = (survival >= max(plan.draft_floor, 1e-3)) & (depth <= most[:, None])
        if np.count_nonzero(wanted) > plan.draft_tokens:
            # The likeliest; among equals those of the first rows. A draft is never likelier than the one before it.
            ranked = np.argsort(np.where(wanted, -survival, np.inf), axis=None, kind="stable")
            wanted[:] = False
            wanted.reshape(-1)[ranked[: plan.draft_tokens]] = True
        count = wanted.sum(axis=1)
        if not count.any():
            return None
        # Behind the end of what is known the text is taken to repeat itself.
        period = np.maximum(length - place, 1)
        places = place[:, None] + (depth - 1) % period[:, None]
        tokens = rows.tokens[at[:, None], np.minimum(places, rows.tokens.shape[1] - 1)]
        return tokens, count

    def observe(self, rows: DeviceRows, at: Index, count: Index, verified: Index) -> None:
        self._tally(rows, at, count, verified)
        self._look(rows, at, count)

    def take_tally(self) -> DraftTally | None:
        if not self._compared.any():
            return None
        tally = DraftTally(self._compared.astype(np.int32), self._equal.astype(np.int32))
        self._compared[:], self._equal[:] = 0, 0
        return tally

    def _tally(self, rows: DeviceRows, at: Index, count: Index, verified: Index) -> None:
        """Drafts that were verified, and of the others the first: it is compared with the token that came."""
        kind, place = self._next_kind[at], self._next_place[at]
        before = rows.num_tokens[at] - count
        had = kind != NOWHERE
        guess = rows.tokens[at, np.minimum(place, before - 1)]
        only_seen = had & (verified == 0) & (count > 0)
        is_right = guess == rows.tokens[at, np.minimum(before, rows.tokens.shape[1] - 1)]
        compared = np.where(verified > 0, np.minimum(count, verified), only_seen)
        equal = np.where(verified > 0, np.minimum(count - 1, verified), only_seen & is_right)
        np.add.at(self._compared, kind[had], compared[had])
        np.add.at(self._equal, kind[had], equal[had])
        fate = np.where(equal >= compared, WHOLLY, np.where(equal > 0, PARTLY, MISSED))
        self._last[at[had]] = fate[had]

    def _look(self, rows: DeviceRows, at: Index, count: Index) -> None:
        """Find where each row's last tokens stood before, and note where they stand now."""
        length = rows.num_tokens[at]
        self._next_kind[at] = NOWHERE
        owner = np.repeat(np.arange(len(at)), count)
        ends = np.repeat(length, count) - np.repeat(np.cumsum(count), count) + np.arange(len(owner)) + 1
        for number, size in enumerate(SIZES):
            new = (ends < length[owner]) & (ends >= size)  # n-grams behind which a token is known
            self._note(rows, at[owner[new]], ends[new], size)
            asking = np.flatnonzero((self._next_kind[at] == NOWHERE) & (length > size))
            row = at[asking]
            if not len(row):
                continue
            grams = rows.tokens[row[:, None], length[asking, None] - size + np.arange(size)]
            place = self._index.find(grams, self._salt[row])
            found = (place != NOWHERE) & (place < length[asking])
            hit = row[found]
            self._next_place[hit] = place[found]
            self._next_kind[hit] = 3 * number + self._last[hit]
        for size in SIZES:
            long = length >= size
            self._note(rows, at[long], length[long], size)

    def _note(self, rows: DeviceRows, row: Index, end: Index, size: int) -> None:
        """The n-grams of rows that end before position `end`."""
        if len(row):
            grams = rows.tokens[row[:, None], end[:, None] - size + np.arange(size)]
            self._index.put(grams, self._salt[row], end)
