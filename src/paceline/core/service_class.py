"""Classes of service: their names, from the most to the least urgent, and the level of priority each stands for.

A request's number of priority counts from the level of its class, so that a request without a class counts as standard.
Spot work is preempted first, whatever the policy. Knows nothing of keys and prices.
"""

from __future__ import annotations

from typing import NamedTuple

from paceline.errors import InvalidRequest

INTERACTIVE, STANDARD, SPOT, BATCH = CLASSES = ("interactive", "standard", "spot", "batch")
DEFAULT_CLASS = STANDARD
LEVELS = {INTERACTIVE: -1, STANDARD: 0, SPOT: 1, BATCH: 2}
# The class of the key; the last two are other servers' words.
OWN = ("auto", "default", "scale", "standard_only")
# Words of other servers for classes that are here too.
SYNONYMS = {"priority": INTERACTIVE, "flex": SPOT}
TIERS = (*OWN[:2], *CLASSES, *OWN[2:], *SYNONYMS)


class Urgency(NamedTuple):
    """How urgent a request is: its class, and a number within it. The lower goes first."""

    service_class: str = DEFAULT_CLASS
    priority: int = 0

    @property
    def standing(self) -> int:
        """What requests are compared by: the number counts from the level of the class. Raises InvalidRequest."""
        found = LEVELS[self.service_class] + self.priority
        if not -(2**31) <= found < 2**31:
            raise InvalidRequest(f"priority {self.priority} is out of range", param="priority")
        return found

    def check(self) -> None:
        """Raise InvalidRequest for a number that is out of range."""
        _ = self.standing


PLAIN = Urgency()


def class_of(tier: str | None, own: str = DEFAULT_CLASS) -> str:
    """The class a `service_tier` names; `own` where it leaves that open. Raises InvalidRequest."""
    if tier is None or tier in OWN:
        return own
    found = SYNONYMS.get(tier, tier)
    if found not in LEVELS:
        raise InvalidRequest(f"service_tier must be one of {', '.join(TIERS)}", param="service_tier")
    return found


def is_better(one: str, other: str) -> bool:
    """Whether a class is more urgent than another."""
    return LEVELS[one] < LEVELS[other]
