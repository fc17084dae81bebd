"""Which engines a request has been in, and why: for its explanation, for as long as it is remembered."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.events import Decision, DecisionKind, Rule
from paceline.core.request import RequestId
from paceline.routing.view import NOBODY, Choice

MOST_KNOWN = 8192  # requests
MOST_BRANCHES = 256  # that a request may have
MOST_PASSAGES = 64
MOST_MOVED = 1024
TOGETHER_S = 1.0  # requests that go the same way within this time are one passage


@dataclass(slots=True)
class Passage:
    """Requests that went on in another engine, as they are shown."""

    time_s: float  # of the last of them
    source: int
    target: int
    requests: int = 0
    tokens: int = 0  # that they had


@dataclass(slots=True)
class Way:
    """Of one request."""

    first: int  # its number
    engine: int
    inner: int  # the number it has there
    count: int  # branches; their numbers follow
    notes: list[Decision] = field(default_factory=list)

    def explained(self, number: int, told: Sequence[Decision]) -> list[Decision]:
        """What the engine that has it now says of a branch, and how it came there, in order."""
        notes = self.notes
        if len(notes) > 1:  # it has waited since it came here
            since_s = notes[-1].time_s
            told = [
                each._replace(seconds=max(0.0, each.time_s - since_s))
                if each.kind is DecisionKind.ADMIT
                else each
                for each in told
            ]
        both = sorted([*notes, *told], key=lambda each: each.time_s)
        return [each._replace(request=RequestId(number)) for each in both]


class Ways:
    """The newest requests, by number."""

    def __init__(self) -> None:
        self.passages: deque[Passage] = deque(maxlen=MOST_PASSAGES)  # the newest
        # The newest: number, and the one it has now.
        self.moved: deque[tuple[int, int]] = deque(maxlen=MOST_MOVED)
        self.num_moved = 0  # since the start
        self._ways: OrderedDict[int, Way] = OrderedDict()

    def of(self, number: int) -> Way | None:
        """Branches of a request have the numbers behind its first."""
        for first in range(number, max(0, number - MOST_BRANCHES), -1):
            way = self._ways.get(first)
            if way is not None:
                return way if number < first + way.count else None
        return None

    def forked(self, first: int, count: int, engine: int) -> None:
        """Branches are made where their parent is."""
        self._enter(Way(first, engine, first, count))

    def chosen(self, first: int, inner: int, count: int, choice: Choice, now_s: float) -> None:
        """A request goes to an engine, under this number."""
        way = self._enter(Way(first, choice.engine, inner, count))
        if way.notes and way.notes[-1].kind is DecisionKind.FAILOVER:
            self._passed(way.engine, choice.engine, way.notes[-1].value, now_s)
            self.moved.append((first, inner))
            self.num_moved += 1
        way.engine, way.inner = choice.engine, inner
        against = ""
        if choice.against != NOBODY and choice.cost_s:
            against = f"; engine {choice.against}: {choice.against_cost_s:.3f} s"
        way.notes.append(
            Decision(
                DecisionKind.ROUTE,
                RequestId(first),
                Rule.CHOSEN,
                choice.cached_tokens,
                time_s=now_s,
                seconds=choice.cost_s,
                detail=f"engine {choice.engine}: {choice.rule}{against}",
            )
        )

    def _passed(self, source: int, target: int, num_tokens: int, now_s: float) -> None:
        known = [each for each in self.passages if (each.source, each.target) == (source, target)]
        if not known or now_s - known[-1].time_s > TOGETHER_S:
            known.append(Passage(now_s, source, target))
            self.passages.append(known[-1])
        passage = known[-1]
        passage.time_s = now_s
        passage.requests += 1
        passage.tokens += num_tokens

    def _enter(self, new: Way) -> Way:
        way = self._ways.setdefault(new.first, new)
        if len(self._ways) > MOST_KNOWN:
            self._ways.popitem(last=False)
        return way

    def lost(self, first: int, num_known: int) -> None:
        """Its engine was lost behind so many tokens."""
        way = self._ways.get(first)
        if way is not None:
            way.notes.append(
                Decision(
                    DecisionKind.FAILOVER,
                    RequestId(first),
                    Rule.ENGINE_LOST,
                    num_known,
                    time_s=time.monotonic(),
                    detail=f"engine {way.engine}",
                )
            )
