"""First come, first served: arrival is the only order, and the request that arrived last is preempted first."""

from __future__ import annotations

from paceline.policy import Policy


class FirstComeFirstServed(Policy):
    """In the order of arrival."""
