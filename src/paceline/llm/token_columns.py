"""Tokens of branches nobody reads before they end: kept in columns, so that a step costs the same for any batch.

Entry i of a step's tokens goes to the place of its request with a few array operations; Python sees a branch when it
opens and when it closes. Knows request ids and numbers, no text and no outputs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.core.events import TokenEvents

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
_NOWHERE = -1
_FIRST_PLACES, _FIRST_IDS = 64, 1024


class TokenColumns:
    """A row of tokens for each open branch. Request ids only go up."""

    def __init__(self, width: int) -> None:
        self._tokens: I32 = np.zeros((_FIRST_PLACES, width), np.int32)
        self._filled: I64 = np.zeros(_FIRST_PLACES, np.int64)
        self._first_s = np.zeros(_FIRST_PLACES)
        self._last_s = np.zeros(_FIRST_PLACES)
        self._free = list(range(_FIRST_PLACES))
        self._place_of: I64 = np.full(_FIRST_IDS, _NOWHERE, np.int64)  # by id, from `_base` on
        self._base = 0
        self.open_ids: dict[int, int] = {}  # and their places

    def open(self, request_id: int) -> None:
        if not self._free:
            self._more_places()
        place = self._free.pop()
        self._filled[place] = 0
        if request_id - self._base >= len(self._place_of):
            self._more_ids(request_id)
        self._place_of[request_id - self._base] = self.open_ids[request_id] = place

    def take(self, batch: TokenEvents) -> NDArray[np.bool_] | None:
        """Keep the tokens of open branches; returns which are of others, None if there are none."""
        at = batch.requests - self._base
        known = (at >= 0) & (at < len(self._place_of))
        places = np.full(len(at), _NOWHERE, np.int64)
        places[known] = self._place_of[at[known]]
        others = places == _NOWHERE
        tokens, index = batch.tokens, batch.index
        if others.any():
            mine = ~others
            places, tokens, index = places[mine], tokens[mine], index[mine]
        self._tokens[places, index] = tokens
        self._filled[places] = index + 1
        self._first_s[places[index == 0]] = batch.time_s
        self._last_s[places] = batch.time_s
        return others if len(places) < len(others) else None

    def close(self, request_id: int) -> tuple[list[int], float, float]:
        """The branch's tokens, and when the first and the last came."""
        place = self.open_ids.pop(request_id)
        self._place_of[request_id - self._base] = _NOWHERE
        self._free.append(place)
        tokens: list[int] = self._tokens[place, : self._filled[place]].tolist()
        return tokens, float(self._first_s[place]), float(self._last_s[place])

    def _more_places(self) -> None:
        before = len(self._filled)
        self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
        self._filled = np.concatenate([self._filled, np.zeros_like(self._filled)])
        self._first_s = np.concatenate([self._first_s, np.zeros(before)])
        self._last_s = np.concatenate([self._last_s, np.zeros(before)])
        self._free = list(range(before, 2 * before))

    def _more_ids(self, request_id: int) -> None:
        """Room for a new id; those before the oldest open one are forgotten."""
        self._base = min(self.open_ids, default=request_id)
        size = max(_FIRST_IDS, 2 * (request_id - self._base + 1))
        self._place_of = np.full(size, _NOWHERE, np.int64)
        for known, place in self.open_ids.items():
            self._place_of[known - self._base] = place
