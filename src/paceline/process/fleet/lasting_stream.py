"""One request of a fleet, as its reader sees it: it goes on in another engine when the one that makes it is lost.

What the reader has been given is kept as token ids. They are all another engine needs: it computes them again and goes
on behind them, with the same seeds at the same positions. The reader sees one stream, under the numbers of the first
engine. Belongs to one event loop, as `streams` does.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from paceline.core.events import Finished, Forecast
from paceline.core.request import Change, FinishReason, RequestId
from paceline.core.sampling import SamplingParams
from paceline.core.service_class import ServiceLevel
from paceline.core.stretch import PromptParts
from paceline.errors import QueueFull
from paceline.process.client import Begun, BranchUpdate, EngineUnavailable, OnUpdates
from paceline.process.streams import Stream

# Of an engine that was told to end its requests, or of a model that no engine can wake.
FINAL = frozenset(("shutting_down", "model_unavailable", "engine_lost_twice"))
REFUSED_S = 600.0  # how long a prompt is refused that was with two engines that were lost
LOST_TWICE = "the request was with two engines that were lost, and is not tried again"

_logger = logging.getLogger("paceline")


@dataclass(slots=True, kw_only=True)
class Asked:
    """A request as it came: all that another engine needs to hear of it but its output."""

    tokens: Sequence[int]
    sampling: SamplingParams
    timeout_s: float | None
    adapter: str  # its name; "": none
    more: dict[str, Any]  # tenant, service level, tree, parts
    came_s: float = field(default_factory=time.monotonic)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.came_s

    @property
    def left_s(self) -> float | None:
        return None if self.timeout_s is None else max(0.0, self.timeout_s - self.age_s)


class Keeper(Protocol):
    """The fleet, as its streams know it."""

    output_tokens: Counter[int]  # told, by engine

    async def find_engine(self, stream: FleetStream) -> None:
        """Wait until an engine has the request. Raises EngineUnavailable where none has it in time."""

    def lost(self, stream: FleetStream, error: EngineUnavailable) -> None:
        """Its engine is lost: it goes on in another one. Raises where it ends with its engine."""

    def pass_over(self, stream: FleetStream) -> bool:
        """The queue of its engine was full: whether another one has taken it."""

    def forget(self, stream: FleetStream) -> None:
        """It is over, or its reader is gone."""


class FleetStream:
    """Implements `EngineStream`."""

    def __init__(self, fleet: Keeper, first: int, count: int, asked: Asked | None) -> None:
        """`asked`: None for branches that only the engine can go on with which has them."""
        self.first = first
        self.count = count
        self.asked = asked
        self.failovers = 0
        self.strikes = 0  # engines that were lost while they may just have begun with it
        self.engine = -1  # that has it, or had it last; -1: none yet
        self.fingerprint = ""  # of that engine
        self.refused_by: set[int] = set()  # engines whose queue was full
        self.outputs: list[list[int]] = [[] for _ in range(count)]
        self.endings: list[Finished | None] = [None] * count
        self.forecast: Forecast | None = None
        self.first_news_s = 0.0  # after it came
        self.has_news = False  # the engine that has it has told something of it
        self.inner: Stream | None = None
        self.is_closed = False
        self.is_paused = False  # by its owner: another engine is not looked for meanwhile
        self._cuts: dict[int, int] = {}  # ends that a stop string has set, by branch
        # By branch, the first token of its output whose logprobs the reader does not have.
        self._unlogged = [0] * count
        self._made: list[BranchUpdate] = []  # endings that no engine will tell
        self._fleet = fleet
        self._on_updates: OnUpdates | None = None

    # -- EngineStream --------------------------------------------------------------------------------------

    async def take(self) -> list[BranchUpdate]:
        while True:
            if self._made:
                made, self._made = self._made, []
                return self._note(made)
            inner = self.inner
            if inner is None:
                await self._fleet.find_engine(self)
                continue
            try:
                return self._note(await inner.take())
            except QueueFull:
                if inner.error is None or not self._fleet.pass_over(self):
                    raise
            except EngineUnavailable as error:
                self._fleet.lost(self, error)  # raises where it ends with its engine

    def divert(self, on_updates: OnUpdates) -> None:
        self._on_updates = on_updates
        if self.inner is not None:
            self.inner.divert(self._diverted)

    def finish_at(self, branch: int, num_output: int) -> None:
        self._cuts[branch] = num_output
        if self.inner is not None:
            self.inner.finish_at(branch, num_output)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._fleet.forget(self)
        if self.inner is not None:
            self.inner.close()
        self._on_updates = None

    # -- for the fleet -------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        return any(self.outputs) or any(self.endings)

    @property
    def is_waiting(self) -> bool:
        """No engine has it."""
        return self.inner is None and self.asked is not None

    @property
    def is_put_aside(self) -> bool:
        """It is paused, and has time left."""
        return self.is_paused and self.asked is not None and self.asked.left_s != 0.0

    @property
    def was_read(self) -> bool:
        """Whether the engine that has it knew of it: it forecasts each request once it has read it, but for vectors."""
        if self.has_news or (self.asked is not None and self.asked.sampling.pooling is not None):
            return True
        return self.inner is not None and self.inner.is_known

    @property
    def is_over(self) -> bool:
        return None not in self.endings

    @property
    def begun(self) -> Begun | None:
        """How far it is and how old, for another engine."""
        if self.asked is None:
            return None
        known = zip(self.outputs, self.endings, strict=True) if self.has_begun else ()
        return Begun(tuple([None if ending else output.copy() for output, ending in known]), self.asked.age_s)

    def go_on(self, engine: int, inner: Stream) -> None:
        """An engine has it now."""
        self.engine, self.inner, self.has_news = engine, inner, False
        if self._on_updates is not None:
            inner.divert(self._diverted)

    def changed(self, change: Change) -> None:
        """Its owner has changed it: the next engine has to know."""
        asked = self.asked
        if asked is None:
            return
        if change.priority is not None:
            level: ServiceLevel = asked.more["service_level"]
            asked.more["service_level"] = level._replace(priority=change.priority)
        if change.until_s is not None:
            asked.timeout_s = None if change.until_s == math.inf else change.until_s - asked.came_s
        if change.paused is not None:
            self.is_paused = change.paused

    def settle(self) -> None:
        """End the branches that a stop string has ended, although their engine did not live to say so."""
        for branch, num_output in self._cuts.items():
            if self.endings[branch] is None and len(self.outputs[branch]) >= num_output:
                self._made.append(BranchUpdate(branch=branch, ending=self._ending(branch, num_output)))

    def _ending(self, branch: int, num_output: int) -> Finished:
        assert self.asked is not None
        return Finished(
            request=RequestId(self.first + branch),
            reason=FinishReason.STOP,
            detail="",
            time_s=time.monotonic(),
            num_prompt=len(self.asked.tokens),
            num_output=num_output,
            num_cached=0,
            preemptions=0,
        )

    def _diverted(self, updates: list[BranchUpdate]) -> bool:
        return self._on_updates is not None and self._on_updates(self._note(updates))

    def _note(self, updates: list[BranchUpdate]) -> list[BranchUpdate]:
        """Keep what the reader is given."""
        if not self.has_news and updates:
            self._first_news()
        for update in updates:
            if update.tokens:
                self.outputs[update.branch] += update.tokens
                self._fleet.output_tokens[self.engine] += len(update.tokens)
            if update.logprobs and self.asked is not None:
                self._note_logprobs(update, len(self.asked.tokens))
            if update.held is not None or update.is_injected:
                self.asked = None  # its end is another than what was asked for
            if update.ending is not None:
                ending = update.ending._replace(request=RequestId(self.first + update.branch))
                if self.failovers and self.forecast is not None:
                    # The engine that was lost has found this much in its cache, and the price follows from that.
                    cached = min(ending.num_prompt, self.forecast.num_cached)
                    ending = ending._replace(num_cached=max(ending.num_cached, cached))
                if self.failovers:
                    ending = ending._replace(queue_s=min(ending.queue_s, self.first_news_s))
                self.endings[update.branch] = update.ending = ending
        if self.is_over:
            self._fleet.forget(self)
        return updates

    def _note_logprobs(self, update: BranchUpdate, num_prompt: int) -> None:
        """They come before their tokens: an engine may be lost between the two, and the next one tells them again."""
        told = self._unlogged[update.branch]
        update.logprobs = [each for each in update.logprobs if not 0 <= each.position - num_prompt < told]
        for each in update.logprobs:
            self._unlogged[update.branch] = max(self._unlogged[update.branch], each.position - num_prompt + 1)

    def _first_news(self) -> None:
        self.has_news = True
        if not self.first_news_s and self.asked is not None:
            self.first_news_s = self.asked.age_s
        if self.forecast is None and self.inner is not None:
            self.forecast = self.inner.forecast


class RefusedPrompts:
    """Prompts that ended two engines: they are not given to more of them for a time."""

    def __init__(self) -> None:
        self._until_s: dict[bytes, float] = {}

    def add(self, tokens: Sequence[int], parts: PromptParts) -> None:
        now_s = time.monotonic()
        self._until_s = {prompt: until_s for prompt, until_s in self._until_s.items() if until_s > now_s}
        self._until_s[_identity(tokens, parts)] = now_s + REFUSED_S
        _logger.error("a request was with two engines that were lost: its prompt is refused for ten minutes")

    def check(self, tokens: Sequence[int], parts: PromptParts) -> None:
        """Raises EngineUnavailable for one of them."""
        if self._until_s and self._until_s.get(_identity(tokens, parts), 0.0) > time.monotonic():
            raise EngineUnavailable(LOST_TWICE, code="engine_lost_twice")


def _identity(tokens: Sequence[int], parts: PromptParts) -> bytes:
    """Of a prompt with the pictures that stand in it."""
    hashed = hashlib.blake2b(np.array(tokens, np.int64).tobytes(), digest_size=16)
    for part in parts.media:
        hashed.update(part.given.content)
    return hashed.digest()
