"""The guides of live requests: made when a request comes, moved on with its tokens, dropped with it.

A request whose structure is still being compiled waits outside of the queue (BLOCKED, `grammar`). A guide whose
structure is complete ends its request at that token; one that cannot continue ends it with an error.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.counters import COMPLETE, UNFINISHED
from paceline.core.events import Rule, TokenEvents
from paceline.core.guide import Guide, GuideMaker
from paceline.core.plan import GuideWork, StepPlan
from paceline.core.request import NO_ROW, BlockReason, Request, RequestId, RequestState
from paceline.core.structure import Structure
from paceline.errors import InvalidRequest, InvalidTransition
from paceline.scheduler.scheduler import Scheduler
from paceline.text.guide.matcher import GuideBatch

COMPILE_S = 10.0  # until a request whose structure is not compiled gives up
_logger = logging.getLogger("paceline")
NO_MAKER = "structured_outputs: answers with a structure are not available on this engine"


@dataclass(slots=True, eq=False)
class _Moved:
    """The guides that moved on in a step, for as long as tokens come for the same requests."""

    requests: NDArray[np.int64]  # of all tokens
    places: NDArray[np.int64]  # of those with a guide, among them
    ids: list[RequestId]
    guides: list[Guide]
    batch: GuideBatch | None  # None: with drafts a request gets several tokens
    times: int = 0  # that it has moved on


class Guides:
    """The guides of one engine. In a steady step there is no loop over them."""

    def __init__(self, scheduler: Scheduler, maker: GuideMaker | None) -> None:
        self._scheduler = scheduler
        self._maker = maker
        self._guides: dict[RequestId, Guide] = {}
        # Tokens before the first that its guide sees, and up to the last that it has seen.
        self._starts: dict[RequestId, int] = {}
        self._ends: dict[RequestId, int] = {}
        self._waiting: dict[RequestId, Structure] = {}
        # As long as no request comes, goes or changes its row.
        self._moved: _Moved | None = None
        self._by_row: dict[int, Guide] | None = None

    def __bool__(self) -> bool:
        return bool(self._guides)

    @property
    def is_compiling(self) -> bool:
        return bool(self._waiting)

    def check(self, structure: Structure | None) -> Guide | None:
        """The guide of a request that is about to come, unless it is being compiled; raises InvalidRequest where there
        can be none."""
        if structure is None:
            return None
        if self._maker is None or self._maker.objection:
            objection = NO_MAKER if self._maker is None else self._maker.objection
            raise InvalidRequest(objection, param="structured_outputs")
        try:
            return self._maker.take(structure)
        finally:
            counters = self._scheduler.state.counters
            counters.compiled, counters.compile_s = self._maker.compiled

    def add(self, requests: Sequence[Request], guide: Guide | None, start: int | None = None) -> None:
        """Requests of one structure have come; None: it is being compiled. `start`: tokens before the first that it
        has seen, where that is not their prompt."""
        self._changed()
        for request in requests:
            self._starts[request.id] = request.num_prompt if start is None else start
            self._ends[request.id] = request.num_tokens
            structure = request.sampling.structured_outputs
            if guide is not None:
                self._stand_behind(request, guide)
            elif structure is not None and not request.is_terminal:
                self._waiting[request.id] = structure
                until_s = self._scheduler.state.now_s + COMPILE_S
                self._scheduler.block(request.id, BlockReason.GRAMMAR, until_s)

    def of_branch(self, parent: Request, tokens: Sequence[int], shares: int) -> tuple[Guide | None, int]:
        """The guide of a branch with these tokens, of which it shares some with its parent, and how many come before
        the first that it has seen. None: it is being compiled."""
        start = self._starts[parent.id]
        guide = self._standing(parent.id, parent.sampling.structured_outputs, tokens[:shares])
        if guide is None:
            if len(tokens) > start:
                raise InvalidTransition(
                    f"request {parent.id}: the structure of its answer is still being compiled"
                )
            return None, start
        moved = _behind(guide, tokens[shares:])
        if moved.is_over:
            raise InvalidTransition("the structure of the answer is complete: there is nothing to branch")
        return moved, start

    def of_extension(
        self, request_id: RequestId, known: Sequence[int], tokens: Sequence[int]
    ) -> Guide | None:
        """The guide of a request that has the tokens `known` and is to get these behind them; None: it has none."""
        structure = self._scheduler.state.requests[request_id].sampling.structured_outputs
        if structure is None:
            return None
        guide = self._standing(request_id, structure, known)
        if guide is None:
            raise InvalidTransition(
                f"request {request_id}: the structure of its answer is still being compiled"
            )
        return _behind(guide, tokens)

    def extended(self, request_id: RequestId, guide: Guide, num_tokens: int) -> None:
        """A request has been extended, and has this many tokens now."""
        self._changed()
        self._guides[request_id], self._ends[request_id] = guide, num_tokens

    def _standing(
        self, request_id: RequestId, structure: Structure | None, tokens: Sequence[int]
    ) -> Guide | None:
        """A guide behind these tokens: the request's own if it stands there. It does not where a branch begins earlier,
        or a stop has cut tokens off, and it may have failed behind them."""
        self._changed()
        guide = self._guides.get(request_id)
        if guide is not None and not guide.error and self._ends[request_id] == len(tokens):
            return guide
        guide = self.check(structure)
        return None if guide is None else _behind(guide, tokens[self._starts[request_id] :])

    def let_in(self) -> None:
        """Requests whose structure is compiled by now may run."""
        requests = self._scheduler.state.requests
        for request_id, structure in list(self._waiting.items()):
            request = requests.get(request_id)
            if request is None or request.state is not RequestState.BLOCKED:
                self._end(self._waiting, request_id, UNFINISHED)
                continue
            try:
                guide = self.check(structure)
            except InvalidRequest as error:
                _logger.warning("request %d: %s", request_id, error)
                self._end(self._waiting, request_id, Rule.GRAMMAR_ERROR.value)
                self._scheduler.fail(request_id, Rule.GRAMMAR_ERROR.value)
                continue
            if guide is not None:
                del self._waiting[request_id]
                self._changed()
                if self._stand_behind(request, guide):
                    self._scheduler.unblock(request_id)
                if self.is_over(request_id):
                    self._scheduler.finish_at(request_id, request.num_tokens - request.num_prompt)

    def _stand_behind(self, request: Request, guide: Guide) -> bool:
        """A request gets its guide, behind the output that it came with. False: it does not allow that, and the request
        ends."""
        known = request.tokens[request.num_prompt :].tolist()
        try:
            self._guides[request.id] = _behind(guide, known)
        except InvalidTransition:
            self._guides[request.id] = guide.copy()
            self._end(self._guides, request.id, Rule.GRAMMAR_ERROR.value)
            self._scheduler.fail(request.id, Rule.GRAMMAR_ERROR.value)
            return False
        return True

    def is_over(self, request_id: RequestId) -> bool:
        """Whether a request's structure is complete."""
        guide = self._guides.get(request_id)
        return guide is not None and guide.is_over

    def of_rows(self, plan: StepPlan) -> dict[int, Guide]:
        """The guides of requests that have a row, by row: for the step that has just been planned. The same value as
        long as they are the same."""
        if self._by_row is None or plan.full or len(plan.joins.row) or len(plan.leaves):
            requests = self._scheduler.state.requests
            for request_id in [each for each in self._guides if each not in requests]:
                self._end(self._guides, request_id, UNFINISHED)
            rows = [(requests[request_id].row, guide) for request_id, guide in self._guides.items()]
            self._by_row = {row: guide for row, guide in rows if row != NO_ROW}
        return self._by_row

    def fail_broken(self) -> None:
        """End requests whose guide cannot continue, before their next token is delivered. One that is held gets none: a
        step that was under way went behind its end."""
        requests = self._scheduler.state.requests
        for request_id, guide in [each for each in self._guides.items() if each[1].error]:
            if request_id not in requests or requests[request_id].held is None:
                self._end(self._guides, request_id, guide.error)
                self._scheduler.fail(request_id, guide.error)

    def count(self, work: GuideWork | None) -> None:
        """A step is done."""
        if work is not None:
            counters = self._scheduler.state.counters
            counters.masks += work.masks
            counters.mask_s += work.mask_s
            counters.mask_wait_s += work.wait_s
            counters.forced_tokens += work.forced

    def advance(self, delivered: Sequence[TokenEvents]) -> None:
        """Tokens have been delivered."""
        for events in delivered:
            self._consume(events)
        self.fail_broken()

    def _consume(self, events: TokenEvents) -> None:
        moved = self._moved
        if moved is None or not np.array_equal(moved.requests, events.requests):
            moved = self._moved = self._moving(events)
        moved.times += 1
        tokens = events.tokens[moved.places]
        may_be_over = True
        if moved.batch is not None:
            may_be_over = moved.batch.consume(tokens)
        else:
            for guide, token in zip(moved.guides, tokens.tolist(), strict=True):
                guide.consume((token,))
        requests = self._scheduler.state.requests
        if not may_be_over and all(map(requests.__contains__, moved.ids)):
            return
        last = dict(zip(moved.ids, events.index[moved.places].tolist(), strict=True))
        for request_id, number in last.items():  # no token comes behind the end of a structure
            is_over = self._guides[request_id].is_over
            if is_over:
                self._scheduler.finish_at(request_id, number + 1)
            if request_id not in requests:
                self._end(self._guides, request_id, COMPLETE if is_over else UNFINISHED)

    def _moving(self, events: TokenEvents) -> _Moved:
        """For the requests of these tokens."""
        self._changed()
        own = [(at, each) for at, each in enumerate(events.requests.tolist()) if each in self._guides]
        ids = [request_id for _, request_id in own]
        guides = [self._guides[request_id] for request_id in ids]
        places = np.array([at for at, _ in own], np.int64)
        batch = GuideBatch(guides) if len(set(ids)) == len(ids) else None
        return _Moved(events.requests, places, ids, guides, batch)

    def _changed(self) -> None:
        """Before a request comes, goes or changes, and before it is asked how far guides have moved."""
        moved, self._moved, self._by_row = self._moved, None, None
        if moved is not None:
            for request_id in moved.ids:
                self._ends[request_id] += moved.times

    def _end(self, among: dict[RequestId, Any], request_id: RequestId, outcome: str) -> None:
        self._changed()
        del among[request_id]
        self._starts.pop(request_id, None)
        self._ends.pop(request_id, None)
        counts = self._scheduler.state.counters.structures
        counts[outcome] = counts.get(outcome, 0) + 1

    def end_reasoning(self, request_id: RequestId) -> bool:
        guide = self._guides.get(request_id)
        return guide is not None and guide.end_reasoning()


def _behind(guide: Guide, tokens: Sequence[int]) -> Guide:
    """A copy of a guide that has seen these tokens too. Raises where it does not allow them."""
    if guide.accepts(tokens) != len(tokens):
        raise InvalidTransition("the structure of the answer does not allow these tokens here")
    moved = guide.copy()
    moved.consume(tokens)
    return moved
