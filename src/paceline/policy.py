"""What a scheduling policy is written with: subclass `Policy` and name the class by `--scheduling-policy module:Class`.

See docs/guides/write-a-policy.md. The policies that come with the engine are in `scheduler/policy`.
"""

from paceline.core.policy import Policy, RequestView, Victim

__all__ = ["Policy", "RequestView", "Victim"]
