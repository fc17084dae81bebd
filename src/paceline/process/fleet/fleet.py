"""Several engines that look like one: implements `EngineClient` over engines of the same model.

A request goes to the engine that the router chooses; when that is lost, its stream goes on in another one. Requests are
numbered across all engines, so that no two share a number; a request keeps its own, whatever engine has it.
Nothing here knows how engines are started: `processes` does. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from paceline.config.server import FleetConfig
from paceline.core.adapter import NO_ADAPTER, NO_INFO, AdapterInfo
from paceline.core.dial import DialSetting
from paceline.core.events import Forecast
from paceline.core.request import BranchState, Change, ChangeOutcome, RequestId, TreeLimits
from paceline.core.sampling import SamplingParams
from paceline.core.service_class import DEFAULT_LEVEL, ServiceLevel
from paceline.core.standing import Standing
from paceline.core.stretch import PLAIN, ModulePart, PromptParts
from paceline.errors import InvalidRequest, InvalidTransition, PacelineError, QueueFull, UnknownAdapter
from paceline.process.async_engine import AsyncEngine
from paceline.process.client import (
    DRAINED,
    EngineInfo,
    EngineState,
    EngineStats,
    EngineStream,
    EngineUnavailable,
    Explanation,
    PolicyChange,
    Steering,
)
from paceline.process.fleet.joint_figures import JointFigures, joint_info
from paceline.process.fleet.known_prefixes import FleetPrefixes
from paceline.process.fleet.lasting_stream import FINAL, LOST_TWICE, Asked, FleetStream, RefusedPrompts
from paceline.process.fleet.ways import Ways
from paceline.process.questions import Numbers
from paceline.routing.routers import make_router, route
from paceline.routing.view import Ask, Choice, FleetView, Gauges
from paceline.routing.view import EngineState as Seen

_logger = logging.getLogger("paceline")
USUAL_PER_S = 1000.0  # prompt tokens, as long as no engine knows better
LOOK_S = 0.02  # from one look for an engine to the next; longer where many look
LONGEST_LOOK_S = 0.5
_SEEN = {
    EngineState.STARTING: Seen.STARTING,
    EngineState.READY: Seen.READY,
    EngineState.STUCK: Seen.DRAINING,  # it may come back, with what it has cached
    EngineState.LOST: Seen.LOST,
    EngineState.STOPPED: Seen.LOST,
}


@dataclass(slots=True)
class Member:
    """One engine of a fleet."""

    number: int
    engine: AsyncEngine
    pid: Callable[[], int | None] = lambda: None  # of its process, while there is one here
    num_restarts: Callable[[], int] = lambda: 0
    address: str = ""  # where it is, if elsewhere
    is_draining: bool = False
    is_gone: bool = False  # it is not started again
    load: Gauges | None = None  # that the view has
    # Of its loss, while it is lost: whether requests were there that it had told nothing of.
    had_newcomers: bool | None = None

    @property
    def info(self) -> EngineInfo | None:
        """None before it was loaded for the first time."""
        try:
            return self.engine.info
        except EngineUnavailable:
            return None


class Fleet:
    """Engines behind one front."""

    def __init__(self, engines: Sequence[AsyncEngine], config: FleetConfig, numbers: Numbers) -> None:
        self.members: list[Member] = []
        self.view = FleetView(1)
        self.routed: dict[str, int] = {}  # choices, by rule
        self.output_tokens: Counter[int] = Counter()  # told, by engine
        self.failovers: dict[str, int] = {"resumed": 0, "restarted": 0, "gave_up": 0}
        self._config = config
        self._router = make_router(config.router)
        self._numbers = numbers
        self._streams: dict[int, FleetStream] = {}  # that have not ended, by each of their numbers
        self.ways = Ways()
        self.prefixes = FleetPrefixes(self.view.prefixes)
        self._figures = JointFigures()
        self._refused = RefusedPrompts()
        self._dial: DialSetting | None = None  # as they were set while serving
        self._policy: PolicyChange | None = None
        self._weights: Mapping[str, float] = {}  # of tenants
        self._tasks: set[asyncio.Future[None]] = set()
        self._is_stopping = False
        for engine in engines:
            self.attach(engine)

    def attach(self, engine: AsyncEngine) -> Member:
        """One engine more, under the next number."""
        engine.set_weights(self._weights)
        member = Member(self.view.attach(state=Seen.STARTING), engine)
        engine.on_prefixes = partial(self.prefixes.told, member.number)
        self.members.append(member)
        return member

    # -- how it stands -------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        states = {member.engine.state for member in self.members}
        order = (EngineState.READY, EngineState.STUCK, EngineState.STARTING, EngineState.LOST)
        none = EngineState.STOPPED if states else EngineState.STARTING
        return next((each for each in order if each in states), none)

    @property
    def waits_for_engine(self) -> bool:
        """Requests may come although no engine takes them now: they wait for one."""
        return not self._is_stopping and any(member.info for member in self.members)

    @property
    def info(self) -> EngineInfo:
        infos = [info for member in self.members if (info := member.info) is not None and not member.is_gone]
        if not infos:
            raise EngineUnavailable("the model is being loaded", code="starting")
        return joint_info(infos)

    @property
    def stats(self) -> EngineStats:
        return self._figures.of([member.engine.stats for member in self.members])

    @property
    def heartbeat_age_s(self) -> float:
        ready = [member.engine for member in self.members if member.engine.state is EngineState.READY]
        first = [member.engine for member in self.members[:1]]
        return max((each.heartbeat_age_s for each in ready or first), default=0.0)

    @property
    def num_open(self) -> int:
        return len({stream.first for stream in self._streams.values()})

    # -- requests ------------------------------------------------------------------------------------------

    def submit(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        tenant: str,
        service_level: ServiceLevel = DEFAULT_LEVEL,
        timeout_s: float | None = None,
        tree: TreeLimits | None = None,
        adapter: int = NO_ADAPTER,
        parts: PromptParts = PLAIN,
    ) -> EngineStream:
        """See `EngineClient`. Raises EngineUnavailable when the fleet is stopping or refuses this prompt."""
        if self._is_stopping:
            raise EngineUnavailable("the server is shutting down", code="shutting_down")
        self._refused.check(tokens, parts)
        more = {"tenant": tenant, "service_level": service_level, "tree": tree, "parts": parts}
        asked = Asked(
            tokens=tokens,
            sampling=sampling,
            timeout_s=timeout_s,
            adapter=self._adapter_name(adapter),
            more=more,
        )
        stream = FleetStream(self, 0, sampling.n, asked)
        if self._place(stream):
            assert stream.inner is not None
            stream.first = stream.inner.first
        else:
            stream.first = self._numbers.next
            self._numbers.next += sampling.n
        self._follow(stream)
        return stream

    def fork(
        self,
        number: int,
        count: int,
        *,
        at: int,
        append: Sequence[int] = (),
        score: float = 0.0,
        changes: Mapping[str, bool | int | float | str | None] | None = None,
    ) -> EngineStream:
        """See `EngineClient`. The branches are made where their parent is, and end with that engine."""
        engine, inner = self._where_live(number)
        made = engine.fork(inner, count, at=at, append=append, score=score, changes=changes)
        stream = FleetStream(self, made.first, count, None)
        stream.go_on(self._engine_of(number), made)
        self.ways.forked(made.first, count, stream.engine)
        parent = self._streams.get(number)
        if parent is not None:
            parent.asked = None  # a tree stays together
        self._follow(stream)
        return stream

    async def extend(
        self,
        number: int,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        modules: Sequence[ModulePart] = (),
    ) -> None:
        engine, inner = self._where_live(number)
        await engine.extend(inner, tokens, max_tokens=max_tokens, modules=modules)
        if number in self._streams:
            self._streams[number].asked = None  # it is another request now

    async def prune(self, numbers: Sequence[int]) -> list[ChangeOutcome]:
        return await self._each(numbers, AsyncEngine.prune)

    async def change(self, numbers: Sequence[int], change: Change) -> list[ChangeOutcome]:
        outcomes = await self._each(numbers, AsyncEngine.change, change)
        for place, number in enumerate(numbers):
            stream = self._streams.get(number)
            if stream is not None and (stream.is_waiting or outcomes[place] is ChangeOutcome.CHANGED):
                outcomes[place] = ChangeOutcome.CHANGED
                stream.changed(change)
        return outcomes

    async def _each(self, numbers: Sequence[int], ask: Any, *more: Any) -> list[ChangeOutcome]:
        """Ask every engine about the branches that it has. Those that wait for an engine are busy."""
        waiting = [number in self._streams and self._streams[number].is_waiting for number in numbers]
        outcomes = [ChangeOutcome.BUSY if waits else ChangeOutcome.ENDED for waits in waiting]
        places = [self._where(number) for number in numbers]
        for engine in {id(each): each for each, _ in places}.values():
            own = [at for at, (each, _) in enumerate(places) if each is engine and not waiting[at]]
            found = [] if not own else await ask(engine, [places[place][1] for place in own], *more)
            for place, outcome in zip(own, found, strict=True):
                outcomes[place] = outcome
        return outcomes

    async def tree(self, number: int) -> list[BranchState]:
        engine, inner = self._where_live(number)
        found = await engine.tree(inner)
        outer: dict[int | None, RequestId] = {}  # of those that have another number there
        for known, stream in self._streams.items():
            if stream.inner is not None and self.members[stream.engine].engine is engine:
                outer[stream.inner.first + known - stream.first] = RequestId(known)
        return [
            replace(
                each,
                request=outer.get(each.request, each.request),
                parent=outer.get(each.parent, each.parent),
            )
            for each in found
        ]

    async def explain(self, number: int) -> Explanation:
        engine, inner = self._where(number)
        known = Explanation([], number in self._streams)
        if engine.state is EngineState.READY:
            known = await engine.explain(inner)
        way = self.ways.of(number)
        return known if way is None else Explanation(way.explained(number, known.decisions), known.is_live)

    async def forecast(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        tenant: str,
        service_level: ServiceLevel = DEFAULT_LEVEL,
        adapter: int = NO_ADAPTER,
        parts: PromptParts = PLAIN,
    ) -> Forecast | None:
        self._look()
        name = self._adapter_name(adapter)
        ask = Ask(now_s=time.monotonic(), num_prompt=len(tokens), max_tokens=sampling.max_tokens)
        if not len(self.view.candidates(ask)):
            raise EngineUnavailable("no engine answers at the moment; try again later")
        ask = self._named(ask, tokens, tenant, name, parts)
        engine = self.members[self._router.choose(self.view, ask).engine].engine
        number = self._adapter_at(engine, name)
        return await engine.forecast(
            tokens,
            sampling,
            tenant=tenant,
            service_level=service_level,
            adapter=number,
            parts=parts,
        )

    # -- choosing ------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Bring the view up to date with what engines have said."""
        for member in self.members:
            engine, number = member.engine, member.number
            seen = Seen.DRAINING if member.is_draining else _SEEN[engine.state]
            if self.view.state[number] != seen:
                self.view.set_state(number, seen)
                if seen is Seen.READY:
                    self._is_back(member)
            load = engine.stats.load
            if seen is Seen.READY and load is not member.load:
                member.load = load
                self.view.report(number, self._priced(load), known=self.view.num_sent[number])

    def _priced(self, load: Gauges) -> Gauges:
        """An engine that knows no speed of its own yet is taken to be as fast as the fastest."""
        if load.prefill_per_s:
            return load
        known = [member.load.prefill_per_s for member in self.members if member.load is not None]
        return load._replace(prefill_per_s=max(known, default=0.0) or USUAL_PER_S)

    def _is_back(self, member: Member) -> None:
        """An engine takes requests, for the first time or again; what was changed meanwhile it has missed."""
        info = member.engine.info
        member.had_newcomers = None
        self.view.fingerprint[member.number], self.view.block_tokens = info.fingerprint, info.block_size
        if self._dial or self._policy or self.adapters.keys() != member.engine.adapters.keys():
            task = asyncio.ensure_future(self._catch_up(member.engine))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _catch_up(self, engine: AsyncEngine) -> None:
        try:
            if self._dial or self._policy:
                await engine.steer(dial=self._dial, policy=self._policy)
            for name, known in self.adapters.items():
                if name not in engine.adapters:
                    await engine.load_adapter(name, known.folder)
        except PacelineError as error:
            _logger.warning("an engine has missed a change: %s", error)

    def _named(self, ask: Ask, tokens: Sequence[int], tenant: str, adapter: str, parts: PromptParts) -> Ask:
        """With the names of the prompt's blocks."""
        identity = self.adapters.get(adapter, NO_INFO).identity if adapter else ""
        keys = self.prefixes.keys(tokens, self.view.block_tokens, tenant, identity, parts)
        return ask._replace(tenant=tenant, keys=keys)

    def _place(self, stream: FleetStream) -> bool:
        """Hand a request to the engine that the router chooses; False: none takes it now. Raises what is wrong with
        it."""
        asked = stream.asked
        assert asked is not None
        self._look()
        known = max(map(len, stream.outputs), default=0)
        ask = Ask(
            now_s=time.monotonic(),
            num_prompt=len(asked.tokens) + known,
            max_tokens=asked.sampling.max_tokens - known,
            has_begun=stream.has_begun,
            only=stream.fingerprint if stream.has_begun else None,
            without=frozenset(stream.refused_by),
        )
        if not len(self.view.candidates(ask)):  # asked many times a second by many: keys take longer
            return False
        ask = self._named(ask, asked.tokens, asked.more["tenant"], asked.adapter, asked.more["parts"])
        while True:
            choice = route(self.view, self._router, ask)
            if choice is None:
                return False
            engine = self.members[choice.engine].engine
            try:
                inner = engine.submit(
                    asked.tokens,
                    asked.sampling,
                    timeout_s=asked.left_s,
                    adapter=self._adapter_at(engine, asked.adapter),
                    begun=stream.begun,
                    **asked.more,
                )
            except (EngineUnavailable, QueueFull, UnknownAdapter):
                self.view.withdraw(choice)
                ask = ask._replace(without=ask.without | {choice.engine})
                continue
            except PacelineError:
                self.view.withdraw(choice)
                raise
            stream.fingerprint = engine.info.fingerprint
            stream.go_on(choice.engine, inner)
            self._note_choice(stream, choice, inner.first, ask.now_s)
            return True

    def _note_choice(self, stream: FleetStream, choice: Choice, inner: int, now_s: float) -> None:
        self.routed[choice.rule] = self.routed.get(choice.rule, 0) + 1
        self.ways.chosen(stream.first or inner, inner, stream.count, choice, now_s)

    # -- for streams ---------------------------------------------------------------------------------------

    async def find_engine(self, stream: FleetStream) -> None:
        """Wait until an engine has the request. Raises EngineUnavailable after `engine_wait_s`."""
        until_s = self._until_s(stream)
        while True:
            if self._is_stopping:
                raise EngineUnavailable("the server is shutting down", code="shutting_down")
            if stream.is_closed:
                raise EngineUnavailable("the request was closed by its owner")
            if stream.is_put_aside:
                until_s = self._until_s(stream)
            elif self._place(stream):
                return
            elif time.monotonic() >= until_s or all(member.is_gone for member in self.members):
                self._give_up(stream)
                raise EngineUnavailable("no engine takes the request at the moment; try again later")
            await asyncio.sleep(min(LONGEST_LOOK_S, LOOK_S * (1 + len(self._streams) / 50)))

    def _until_s(self, stream: FleetStream) -> float:
        left_s = stream.asked.left_s if stream.asked is not None else 0.0
        wait_s = self._config.engine_wait_s
        return time.monotonic() + (wait_s if left_s is None else min(wait_s, left_s))

    def lost(self, stream: FleetStream, error: EngineUnavailable) -> None:
        """The engine of a stream is lost: it goes on in another one. Raises where it ends with its engine."""
        if stream.asked is None or stream.is_closed or self._is_stopping or error.code in FINAL:
            if not stream.is_closed:
                self._give_up(stream)
            raise error
        self.ways.lost(stream.first, sum(map(len, stream.outputs)))
        if error.code != DRAINED and self._is_suspect(stream):
            stream.strikes += 1
        stream.inner = None
        stream.refused_by.clear()
        if stream.strikes >= 2:
            self._refused.add(stream.asked.tokens, stream.asked.more["parts"])
            self._give_up(stream)
            raise EngineUnavailable(LOST_TWICE, code="engine_lost_twice")
        if stream.failovers >= self._config.max_failovers and error.code != DRAINED:
            self._give_up(stream)
            raise error
        stream.failovers += 1
        self.failovers["resumed" if stream.has_begun else "restarted"] += 1
        stream.settle()

    def pass_over(self, stream: FleetStream) -> bool:
        """The queue of its engine was full: whether another one may take it."""
        stream.refused_by.add(stream.engine)
        stream.inner = None
        return stream.asked is not None and self._place(stream)

    def _is_suspect(self, stream: FleetStream) -> bool:
        """Whether the request may be why its engine was lost: one that had just come, if there is any, else all. Never
        one that the engine had not read."""
        member = self.members[stream.engine]
        if member.had_newcomers is None:
            own = [each for each in self._streams.values() if each.engine == stream.engine]
            member.had_newcomers = any(each.was_read and not each.has_news for each in own)
        return stream.was_read and not (stream.has_news and member.had_newcomers)

    def _give_up(self, stream: FleetStream) -> None:
        self.failovers["gave_up"] += 1
        self.forget(stream)

    def _follow(self, stream: FleetStream) -> None:
        for number in range(stream.first, stream.first + stream.count):
            self._streams[number] = stream

    def forget(self, stream: FleetStream) -> None:
        for number in range(stream.first, stream.first + stream.count):
            self._streams.pop(number, None)

    # -- operators ----------------------------------------------------------------------------------------

    def member(self, number: int) -> Member:
        """Raises InvalidRequest where there is none."""
        if not 0 <= number < len(self.members):
            raise InvalidRequest(
                f"there is no engine {number}, only 0 to {len(self.members) - 1}", param="number"
            )
        return self.members[number]

    async def drain(self, number: int, timeout_s: float) -> int:
        """Give an engine nothing new, and let what it has end; what has not by then goes on in others. Returns how many
        requests that were. Raises InvalidTransition where no other engine would be left."""
        member = self.member(number)
        others = [each for each in self.members if each is not member and not each.is_draining]
        if not any(each.engine.state is EngineState.READY for each in others):
            raise InvalidTransition("no other engine takes requests: one that is drained would leave none")
        member.is_draining = True
        until_s = time.monotonic() + timeout_s
        while member.engine.num_open and member.is_draining and time.monotonic() < until_s:
            await asyncio.sleep(LOOK_S)
        left = member.engine.num_open if member.is_draining else 0
        if left:
            member.engine.fail_all(EngineUnavailable("the engine was drained", code=DRAINED))
        return left

    def resume(self, number: int) -> None:
        """An engine that was drained takes requests again."""
        self.member(number).is_draining = False

    # -- where a request is --------------------------------------------------------------------------------

    def _engine_of(self, number: int) -> int:
        stream = self._streams.get(number)
        if stream is not None and stream.engine >= 0:
            return stream.engine
        way = self.ways.of(number)
        return 0 if way is None else way.engine

    def _where_live(self, number: int) -> tuple[AsyncEngine, int]:
        """The same. Raises EngineUnavailable while none has it."""
        if number in self._streams and self._streams[number].is_waiting:
            raise EngineUnavailable("the request waits for an engine; try again in a moment")
        return self._where(number)

    def _where(self, number: int) -> tuple[AsyncEngine, int]:
        """The engine that has a branch, and its number there."""
        engine, stream = self.members[self._engine_of(number)].engine, self._streams.get(number)
        if stream is not None:
            return engine, number if stream.inner is None else stream.inner.first + number - stream.first
        way = self.ways.of(number)
        return engine, number if way is None else way.inner + number - way.first

    # -- of all engines ------------------------------------------------------------------------------------

    @property
    def _ready(self) -> list[AsyncEngine]:
        """Engines that answer. Raises EngineUnavailable when there is none."""
        found = [member.engine for member in self.members if member.engine.state is EngineState.READY]
        if not found:
            raise EngineUnavailable("no engine answers at the moment; try again later")
        return found

    async def steer(self, *, dial: DialSetting | None = None, policy: PolicyChange | None = None) -> Steering:
        answers = [await engine.steer(dial=dial, policy=policy) for engine in self._ready]
        self._dial, self._policy = dial or self._dial, policy or self._policy
        return answers[0]

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        found: dict[str, AdapterInfo] = {}
        for member in self.members:
            found = {**member.engine.adapters, **found}
        return found

    async def load_adapter(self, name: str, folder: str) -> AdapterInfo:
        loaded = [await engine.load_adapter(name, folder) for engine in self._ready]
        return loaded[0]

    def unload_adapter(self, name: str) -> None:
        having = [member.engine for member in self.members if name in member.engine.adapters]
        for engine in having or [self.members[0].engine]:  # which raises
            engine.unload_adapter(name)

    def _adapter_name(self, number: int) -> str:
        if number == NO_ADAPTER:
            return ""
        found = [name for name, info in self.adapters.items() if info.number == number]
        if not found:
            raise UnknownAdapter("there is no such adapter any more", param="model")
        if len(found) > 1:  # one that was loaded while an engine was lost has another number there
            raise EngineUnavailable("not every engine has the adapters yet; try again in a moment")
        return found[0]

    def _adapter_at(self, engine: AsyncEngine, name: str) -> int:
        """An adapter's number at an engine. Raises UnknownAdapter."""
        if not name:
            return NO_ADAPTER
        if name not in engine.adapters:
            raise UnknownAdapter(f"there is no adapter {name!r:.128}", param="model")
        return engine.adapters[name].number

    async def rest(self, level: int, *, aborts: bool = False) -> Standing:
        stood = [await engine.rest(level, aborts=aborts) for engine in self._ready]
        return stood[0]

    async def snapshot(self) -> bytes:
        return await self._ready[0].snapshot()

    def unpin(self, tenant: str, name: str) -> None:
        for member in self.members:
            member.engine.unpin(tenant, name)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        for member in self.members:
            member.engine.set_weights(weights)

    def resume_all(self) -> None:
        for member in self.members:
            member.engine.resume_all()
        for stream in self._streams.values():
            stream.is_paused = False

    def stop(self) -> None:
        """Nothing new is taken, and what is lost from now on is lost."""
        self._is_stopping = True
