"""Rows of a batch over time, as bytes: what a picture of lanes is drawn from.

Owns the codes and how neighbouring steps of one row become one stretch. It draws nothing and knows no engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Held: taken by a request whose prompt is not computed in this step.
EMPTY, PROMPT, DECODE, PADDING, HELD = range(5)

Codes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lanes:
    """What each row did in each step; times are seconds since the start of the run."""

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    codes: Codes  # [steps, rows]
    num_slots: int  # requests at once; where steps are planned ahead there are more rows, of which some rest

    def stretches(self, row: int, code: int) -> list[tuple[float, float]]:
        """When `row` did that, as (start, length); steps that follow each other without a gap are one stretch."""
        at = np.flatnonzero(self.codes[:, row] == code)
        if not at.size:
            return []
        cuts = np.flatnonzero(np.diff(at) > 1) + 1
        found = []
        for part in np.split(at, cuts):
            start_s = float(self.start_s[part[0]])
            found.append((start_s, float(self.end_s[part[-1]]) - start_s))
        return found

    @property
    def useful_share(self) -> float | None:
        """Of all slots, while steps ran, the share that computed for a request that still wanted it."""
        durations = self.end_s - self.start_s
        useful = ((self.codes == PROMPT) | (self.codes == DECODE)).sum(axis=1) / self.num_slots
        whole = float(durations.sum())
        return float(durations @ useful) / whole if whole > 0.0 else None
