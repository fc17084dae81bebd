"""How urgent a request is: the class it runs in, and the number of priority the engine goes by.

A request may name a class that is no better than its key's, and a number within what the key allows. Pure.
"""

from __future__ import annotations

from paceline.core.classes import Urgency, class_of, is_better
from paceline.server.call import Caller
from paceline.server.failures import NotPermitted, PriorityNotPermitted


class ClassNotPermitted(NotPermitted):
    """A class of service above the key's."""


def urgency_of(caller: Caller, tier: str | None, priority: int | None) -> Urgency:
    """The urgency of a request of this caller, who may leave both open. Raises NotPermitted for what its key does not
    allow."""
    chosen = class_of(tier, caller.service_class)
    if is_better(chosen, caller.service_class) and not caller.is_admin:
        message = (
            f"this key has the class {caller.service_class} and may not ask for {chosen}; "
            f"leave service_tier out or name a class that is no better"
        )
        raise ClassNotPermitted(message, param="service_tier")
    number = max(0, caller.lowest_priority_number or 0) if priority is None else priority
    check_number(caller, number)
    return Urgency(service_class=chosen, priority=number)


def check_number(caller: Caller, priority: int) -> None:
    """Raises PriorityNotPermitted for a number that the key does not allow."""
    lowest = caller.lowest_priority_number
    if lowest is not None and priority < lowest:
        message = f"this key may ask for priority {lowest} and above, not for {priority}"
        raise PriorityNotPermitted(message, param="priority")
