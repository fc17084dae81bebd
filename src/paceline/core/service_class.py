"""Classes of service: their names, from the most to the least urgent, and the priority each stands for.

A request's number of priority counts from the priority of its class; a request without a class counts as standard.
Spot work is preempted first, whatever the policy. Knows nothing of keys and prices.
"""

from __future__ import annotations

from typing import NamedTuple

from paceline.errors import InvalidRequest

INTERACTIVE, STANDARD, SPOT, BATCH = CLASSES = ("interactive", "standard", "spot", "batch")
DEFAULT_CLASS = STANDARD
CLASS_PRIORITIES = {INTERACTIVE: -1, STANDARD: 0, SPOT: 1, BATCH: 2}
# The class of the key; the last two are other servers' words.
OWN = ("auto", "default", "scale", "standard_only")
# Words of other servers for classes that are here too.
SYNONYMS = {"priority": INTERACTIVE, "flex": SPOT}
TIERS = (*OWN[:2], *CLASSES, *OWN[2:], *SYNONYMS)


class ServiceLevel(NamedTuple):
    """The service class of a request and its priority within the class; lower numbers go first."""

    service_class: str = DEFAULT_CLASS
    priority: int = 0

    @property
    def effective_priority(self) -> int:
        """The priority of the class plus the request's own; requests are compared by it. Raises InvalidRequest."""
        found = CLASS_PRIORITIES[self.service_class] + self.priority
        if not -(2**31) <= found < 2**31:
            raise InvalidRequest(f"priority {self.priority} is out of range", param="priority")
        return found

    def check(self) -> None:
        """Raise InvalidRequest for a number that is out of range."""
        _ = self.effective_priority


DEFAULT_LEVEL = ServiceLevel()


def class_of(tier: str | None, own: str = DEFAULT_CLASS) -> str:
    """The class a `service_tier` names; `own` where it leaves that open. Raises InvalidRequest."""
    if tier is None or tier in OWN:
        return own
    found = SYNONYMS.get(tier, tier)
    if found not in CLASS_PRIORITIES:
        raise InvalidRequest(f"service_tier must be one of {', '.join(TIERS)}", param="service_tier")
    return found


def is_better(one: str, other: str) -> bool:
    """Whether a class is more urgent than another."""
    return CLASS_PRIORITIES[one] < CLASS_PRIORITIES[other]
