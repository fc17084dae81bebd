"""How many replicas it takes where regions are alone and where they follow the sun.

A sum over the day of what comes and what a replica serves, without queues: what comes beyond what all replicas serve is
not served in time. Both are reckoned in the same way, so that their ratio says what helping each other is worth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InputError
from paceline.lab.world.curve import ReplicaCurve
from paceline.lab.world.world_file import World

Floats = NDArray[np.float64]

SAMPLE_S = 60.0
HALVINGS = 40
RATES = 100  # that are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCounts:
    """Replicas at which this share of requests is served within the bounds."""

    share: float
    alone: int
    together: int

    @property
    def saved(self) -> float:
        return 1.0 - self.together / self.alone if self.alone else 0.0


def sizes_for(world: World, curve: ReplicaCurve, share: float) -> ReplicaCounts:
    """The fewest replicas for `share`; alone, each region reaches it by itself."""
    rate = rate_within(curve, world.token_slo_s)
    hours = np.arange(0.0, world.hours, SAMPLE_S / 3600.0)
    came = np.array([world.rates_at(hour) for hour in hours.tolist()])
    alone = sum(_fewest(column, rate, share) for column in came.T)
    return ReplicaCounts(share=share, alone=alone, together=_fewest(came.sum(axis=1), rate, share))


def rate_within(curve: ReplicaCurve, token_slo_s: float) -> float:
    """The highest rate of one replica at which tokens come within their bound."""
    for rate in np.linspace(1.0, 0.01, RATES) * curve.rate:
        speed = max(1.0 - rate * curve.prompt_s, 1e-9)
        if np.interp(curve.rows_at(rate), curve.rows, curve.token_s) / speed <= token_slo_s:
            return float(rate)
    raise InputError(f"slo.token_s: no rate keeps {token_slo_s:g} s between tokens")


def _fewest(came: Floats, rate: float, share: float) -> int:
    low, high = 0.0, float(came.max()) / rate
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        served = np.minimum(came, middle * rate).sum()
        low, high = (low, middle) if served >= share * came.sum() else (middle, high)
    return int(np.ceil(high - 1e-6))
