"""What a run log knows about one request: how it came, and every decision about it.

Reads the log once from the start. At the first broken line it gives up as every reader of a log does, or ends the story
there if the log was opened as one that may be cut off. The sentences are the story's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.audit.codec import decode_add, decode_decision
from paceline.audit.runlog import LoggedEnd, LoggedStep, RunLog
from paceline.audit.story import story, story_values
from paceline.core.events import Decision
from paceline.core.request import DEFAULT_TENANT, Request, account_of
from paceline.core.service_class import DEFAULT_CLASS
from paceline.errors import InputError

_BROKEN = (ValueError, KeyError, TypeError, IndexError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One request of a log."""

    request: Request  # as it was added; its tokens are zeros
    decisions: tuple[Decision, ...]
    is_whole: bool  # the log was closed: nothing can be missing at its end
    damage: str = ""  # where a log that may be cut off is broken

    def sentences(self) -> list[str]:
        told = [self._arrival(), *story(self.decisions)]
        if self.damage:
            told.append(f"the log goes no further: {self.damage}")
        elif not self.is_whole:
            told.append("the log was not closed: what came after its last step is not in it")
        return told

    def values(self) -> dict[str, Any]:
        request = self.request
        facts = {
            "id": int(request.id),
            "arrival_s": request.arrival_s,
            "num_prompt": request.num_prompt,
            "max_tokens": request.sampling.max_tokens,
            "tenant": request.tenant,
            "service_class": request.urgency.service_class,
            "priority": request.urgency.priority,
            "parent": request.parent,
        }
        values = story_values(self.decisions)
        return {"request": facts, **values, "sentences": self.sentences(), "is_whole": self.is_whole}

    def _arrival(self) -> str:
        request = self.request
        tenant = account_of(request.tenant)
        who = "" if tenant == DEFAULT_TENANT else f" of {tenant}"
        service = (
            f", of class {request.urgency.service_class}"
            if request.urgency.service_class != DEFAULT_CLASS
            else ""
        )
        priority = f", priority {request.urgency.priority}" if request.urgency.priority else ""
        branch = "" if request.parent is None else f", a branch of request {request.parent}"
        return (
            f"request {request.id}{who} came at {request.arrival_s:.3f} s with {request.num_prompt:,} tokens of prompt "
            f"and asked for up to {request.sampling.max_tokens:,} more{service}{priority}{branch}"
        )


def explain_from_log(log: RunLog, request_id: int) -> Explanation:
    """Everything a log says about a request. Raises InputError when it knows none of that number."""
    log.check_decisions()
    found: Request | None = None
    seen: list[int] = []
    decisions: list[Decision] = []

    def take(line: LoggedStep | LoggedEnd) -> None:
        nonlocal found
        try:
            for kind, _, *values in line.inputs:
                if kind == "add":
                    seen.append(values[0]["id"])
                    if values[0]["id"] == request_id:
                        found = decode_add(values[0]).make_request()
            decisions.extend(decode_decision(entry) for entry in line.decisions if entry[1] == request_id)
        except _BROKEN as problem:
            raise InputError(f"{log.path}: line {line.line} is broken: {problem}") from problem

    for step in log:
        take(step)
    if log.end is not None:
        take(log.end)
    if found is None:
        known = f"its requests are {min(seen)} to {max(seen)}" if seen else "it holds no request at all"
        raise InputError(f"{log.path} knows no request {request_id}: {known}")
    damage = "" if log.damage is None else str(log.damage)
    return Explanation(request=found, decisions=tuple(decisions), is_whole=log.end is not None, damage=damage)
