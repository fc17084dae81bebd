"""Branches under way, by the engine's numbers: what forking and extending them has to know.

A branch is here while the answer it belongs to is being read. Branches are named by their request and their index, as
`id/3`; a request without an index means its first branch. Decision: docs/decisions/0041-trees.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.core.request import BranchState, ChangeOutcome
from paceline.errors import InvalidRequest
from paceline.llm.branch_text import BranchText
from paceline.llm.prompts import PreparedRequest
from paceline.process.client import EngineClient
from paceline.server.api.openai_requests import ParsedBody
from paceline.server.errors import UnknownRequestId
from paceline.server.generate.generation import Generation
from paceline.server.generate.requests import Recent, RecentRequests, number_of

_ENDED = "this branch has ended, or no client reads it any more"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LiveBranch:
    """A branch whose answer is being read."""

    number: int  # the engine's
    index: int  # among the branches of its request
    route: str  # that its answer has the format of
    body: ParsedBody  # of its request
    prepared: PreparedRequest
    text: BranchText
    num_taken_over: int  # output tokens that the engine counts as its prompt
    adapter: str = ""  # identity of its request's

    def fork_point(self, at: int | None) -> int:
        """How many of its output tokens branches begin with. Raises InvalidRequest."""
        there = len(self.text.output.token_ids)
        if at is None:
            return there
        if at > there:
            raise InvalidRequest(f"at must be at most {there}: the output has no more tokens", param="at")
        if at < self.num_taken_over:
            message = f"at must be at least {self.num_taken_over}, where this branch begins: fork its parent instead"
            raise InvalidRequest(message, param="at")
        return at


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkAsked:
    """What a client asks a fork to be."""

    count: int
    at: int | None = None
    append: str | Sequence[int] = ""
    score: float = 0.0
    is_stream: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)  # of sampling parameters


class LiveBranches:
    """All branches whose answers are being read."""

    def __init__(self) -> None:
        self._known: dict[int, LiveBranch] = {}

    def note(self, request_id: str, body: ParsedBody, route: str, generation: Generation) -> None:
        """Know the branches of a generation until it is closed."""
        first = 0 if generation.fork is None else generation.fork.first_index
        found = {}
        for place, (number, prepared, text, taken) in enumerate(generation.branches()):
            found[number] = LiveBranch(
                number=number,
                index=first + place,
                route=route,
                body=body,
                prepared=prepared,
                text=text,
                num_taken_over=taken,
                adapter=generation.record.adapter,
            )
        self._known |= found

        def forget() -> None:
            for number in found:
                self._known.pop(number, None)

        generation.on_closed = forget

    def find(self, known: Recent) -> LiveBranch:
        """The first branch that is asked about. Raises UnknownRequestId unless it is under way."""
        live = self._known.get(known.numbers[0]) if known.numbers else None
        if live is None or live.text.output.finished:
            raise UnknownRequestId(_ENDED)
        return live


def chosen_branch(known: Recent, branch: str | None) -> Recent:
    """A request with one of its branches alone. Raises UnknownRequestId."""
    if branch is None:
        return known
    index = number_of(branch)
    if index is None or index >= len(known.numbers):
        raise UnknownRequestId(f"the request has no branch {branch:.40}")
    return replace(known, numbers=(known.numbers[index],))


async def prune(client: EngineClient, known: Recent, branches: Sequence[int] | None) -> dict[str, Any]:
    """End branches of a request: those with these indexes, or all."""
    for index in branches or ():
        if index >= len(known.numbers):
            raise UnknownRequestId(f"the request has no branch {index}")
    chosen = range(len(known.numbers)) if branches is None else branches
    outcomes = await client.prune([known.numbers[index] for index in chosen])
    ended = [
        index for index, outcome in zip(chosen, outcomes, strict=True) if outcome is ChangeOutcome.CHANGED
    ]
    if not ended:
        raise UnknownRequestId("the request has ended")
    return {"id": known.id, "object": "request.prune", "pruned": [f"{known.id}/{index}" for index in ended]}


async def show_tree(client: EngineClient, recent: RecentRequests, known: Recent) -> dict[str, Any]:
    """The live branches of a request's tree. Raises UnknownRequestId when there are none."""
    found: list[BranchState] = []
    for number in known.numbers:
        found = await client.tree(number)
        if found:
            break
    if not found:
        raise UnknownRequestId("the request has ended")

    def name(number: int | None) -> str | None:
        known_as = None if number is None else recent.branch_of(number)
        return None if known_as is None else f"{known_as[0]}/{known_as[1]}"

    branches = [
        {
            "id": name(branch.request),
            "parent": name(branch.parent),
            "state": branch.state.value,
            "score": branch.score,
            "prompt_tokens": branch.num_prompt,
            "output_tokens": branch.num_output,
            "shared_tokens": branch.shares,
        }
        for branch in found
    ]
    return {"id": known.id, "object": "request.tree", "branches": branches}
