"""Invariants of adapters: rows have theirs in memory, and places are counted right."""

from __future__ import annotations

from collections import Counter

from paceline.core.request import NO_ROW
from paceline.scheduler.invariants.registry import PLANNED, CheckContext, invariant


@invariant("A1", moment=PLANNED)
def rows_have_their_adapter(context: CheckContext) -> str | None:
    """What a plan says of a row is its request's adapter, and it stands for one that is in memory."""
    state = context.scheduler.state
    places = state.adapters
    if not places.identities and not places.rows:
        return None
    owners = state.rows.requests
    for row in context.live.tolist():
        request = owners[row]
        number = 0 if request is None else request.adapter
        if number and (number not in places.resident or not places.identities.get(number)):
            return f"row {row} has adapter {number}, which is not in memory"
    plan = context.plan
    if plan is not None and len(plan.joins.adapter):
        for row, number in zip(plan.joins.row.tolist(), plan.joins.adapter.tolist(), strict=True):
            request = owners[row]
            if request is not None and request.adapter != number:
                return f"row {row} joins with adapter {number}, its request has {request.adapter}"
    return None


@invariant("A2")
def no_adapter_with_rows_is_evicted(context: CheckContext) -> str | None:
    """Rows, and steps under way, keep an adapter in memory; there are no more of them than there are places."""
    state = context.scheduler.state
    places = state.adapters
    if not places.identities and not places.users:
        return None
    requests = [request for request in state.requests.values() if request.adapter]
    rows = Counter(request.adapter for request in requests if request.row != NO_ROW)
    if rows != places.rows or Counter(request.adapter for request in requests) != places.users:
        return f"rows have adapters {dict(rows)}, and {places.rows} are counted"
    kept = places.resident.keys() | places.leaving.keys()
    for number, last in places.last_plan.items():
        if last > state.kv.completed and number not in kept and number in places.identities:
            return f"adapter {number} was let go of before step {last} has completed"
    if not rows.keys() <= places.resident.keys():
        return f"adapters {sorted(rows.keys() - places.resident.keys())} have rows and were evicted"
    taken = len(places.resident) + len(places.coming) + len(places.leaving)
    if places.most and taken > places.most:
        return f"{taken} adapters are in memory or on their way, and there are {places.most} places"
    return None
