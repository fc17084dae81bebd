"""What is always true of a scheduler, as functions.

Each invariant has the name it has in the reliability plan, a moment it is checked at, and tags that say for which
batching modes it holds. `InvariantChecker` runs them after every schedule and update in tests and simulations,
and every `check_every` steps in production. A function returns None, or a sentence that says what is wrong. Those that
read arrays are sweeps: they look at pictures of many half-steps at once, and name the half-step that is wrong.
"""

from __future__ import annotations

from paceline.scheduler.invariants.checker import InvariantChecker, SampledChecker
from paceline.scheduler.invariants.registry import INVARIANTS, InvariantViolation

__all__ = ["INVARIANTS", "InvariantChecker", "InvariantViolation", "SampledChecker"]
