"""Faults of the runner without a model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field


class DeviceFault(RuntimeError):
    """An injected failure of a whole step."""


@dataclass
class Faults:
    """What goes wrong on the device, drawn from a seeded source. All off by default."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    step_failure: float = 0.0
    nan_row: float = 0.0
    late_copies: int = 2  # a copy completes up to this many steps late
    late_moves: int = 0  # one between host and disk, up to this many
    copy_failure: float = 0.0
    bad_encoding: float = 0.0  # chance of a group that one of its items has unusable numbers
    right_drafts: float = 0.7  # chance of a draft to be the token that comes
