"""Looks at what the engine's own invariants cannot see: rejections, endings without a cause, distrusted blocks.

A watch that stands inside the engine's error boundary leaves what it sees with the checker, because the boundary
would take it for a failing request; the world has it raised before anything that follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from paceline.config.engine import EngineConfig
from paceline.core.events import Finished, Held
from paceline.core.plan import StepResult, StepTimes
from paceline.core.request import BlockKey, FinishReason, Request, RequestState
from paceline.core.sampling import SamplingParams
from paceline.scheduler.invariants import InvariantViolation
from paceline.scheduler.scheduler import Scheduler
from paceline.scheduler.state import SchedulerState
from paceline.scheduler.step.admission import Verdict
from tests.fake_faults import Faults
from tests.fakes import FakeRunner
from tests.reference_output import Placed


@dataclass
class Expectation:
    """What the client of one request sees and expects."""

    prompt: list[int]
    sampling: SamplingParams
    tenant: str
    tokens: list[int] = field(default_factory=list)
    seen: int = 0  # tokens of the prompt that its guide has seen
    stop_at: int | None = None  # a stop string ends it after this number of tokens
    deadline_s: float | None = None
    told: set[str] = field(default_factory=set)  # details its ending may carry, by what was done to it
    ended: Finished | None = None
    held: Held | None = None  # it has come to its end and is kept
    before: int = 0  # output tokens that have become part of its prompt: something was put in behind them
    coming: list[int] = field(default_factory=list)  # tokens that were put in and are still to be delivered
    start: int = 0  # what its adapter stands for
    # By position of its prompt, the vector that stands there.
    pictures: dict[int, int] = field(default_factory=dict)
    placed: Placed = ()  # what of its prompt is copied from modules

    def continues(self, injected: list[int], request: Request) -> None:
        """Tokens were put behind its own: from there on it is like a request with all of them as its prompt."""
        self.prompt = self.prompt + self.tokens + injected
        self.seen += len(self.tokens) + len(injected)
        self.before += len(self.tokens) + len(injected)
        self.sampling = replace(
            request.sampling, max_tokens=request.sampling.max_tokens - self.before, min_tokens=0
        )
        self.tokens, self.coming, self.held = [], list(injected), None

    def injected(self, token: int, index: int) -> None:
        """A token that was put in is delivered like any other, in its turn."""
        if not self.coming or self.coming[0] != token or index != self.before - len(self.coming):
            raise InvariantViolation("S20", f"token {token} was put in at {index} and comes out of turn")
        self.coming.pop(0)

    def places(self, other: Expectation) -> bool:
        """Whether it places the text that another computes for a pin."""
        computes = other.sampling.pin is not None and other.sampling.pin.computes
        return (
            computes
            and self.tenant == other.tenant
            and any(self.prompt[start:end] == other.prompt[: end - start] for start, _, end in self.placed)
        )

    def check_reason(self, ending: Finished) -> None:
        """S20e: a request that ends early was aborted, or something went wrong for it. L8: a deadline is not early."""
        if ending.detail == "deadline" and (self.deadline_s is None or ending.time_s < self.deadline_s):
            raise InvariantViolation("L8", f"request {ending.request} was ended before {self.deadline_s}")
        early = ending.reason in (FinishReason.ABORT, FinishReason.ERROR)
        if early and ending.detail not in self.told and ending.detail != "deadline":
            raise InvariantViolation(
                "S20e", f"request {ending.request} ended by {ending.detail} for no reason"
            )


class AdmissionWatch:
    """S18: an admission that is refused, or fails, leaves everything as it was."""

    def __init__(self, scheduler: Scheduler, found: Callable[[InvariantViolation], None]) -> None:
        self._scheduler = scheduler
        self._found = found
        admission = scheduler.composer.admission
        self._admit = admission.admit
        admission.admit = self._watched  # type: ignore[method-assign]
        pins = scheduler.state.kv.pins
        self._expire = pins.expire
        pins.expire = self._expired  # type: ignore[method-assign]
        self._before: object = None

    def state(self) -> object:
        """Everything an admission may change, as something comparable."""
        state = self._scheduler.state
        kv, rows, queue = state.kv, state.rows, state.queue
        seen: list[object] = [
            (rows.num_live, rows.num_free, queue.num_tokens, kv.delta.mark()),
            list(
                map(
                    len,
                    (queue.ids(), state.requests, state.joins, state.leaves, state.prefilling,
                     state.computing, state.children, kv.fences, kv.tickets.open),
                )
            ),
        ]  # fmt: skip
        for level in kv.levels[1:]:
            seen += (part.num_free for part in level)
        for group in kv.groups:
            pool = group.pool
            seen += (pool.refs.tobytes(), pool.num_free, len(pool.evictable), len(group.cache))
            seen += (group.reserved, group.bounds())
        return seen

    def begin(self) -> None:
        """A request is about to be added or changed."""
        self._before = self.state()

    def check_refusal(self) -> None:
        """It was refused."""
        if self.state() != self._before:
            raise InvariantViolation("S18", "a refused request left something behind")

    def _expired(self) -> None:
        """Time passes for pins when a request is added, also for one that is refused."""
        pins = self._scheduler.state.kv.pins
        count = len(pins)
        self._expire()
        if len(pins) < count:
            self._before = self.state()

    def _watched(self, request: Request, budget_left: int) -> Verdict:
        before = (self.state(), request.state, request.row)
        try:
            verdict = self._admit(request, budget_left)
        except Exception:
            self._compare(before, request)
            raise
        if verdict.rule is not None:
            self._compare(before, request)
        return verdict

    def _compare(self, before: object, request: Request) -> None:
        if (self.state(), request.state, request.row) != before:
            self._found(InvariantViolation("S18", f"refusing request {request.id} left something behind"))


class WatchedRunner(FakeRunner):
    """A runner that remembers which cached blocks were computed by rows whose numbers turned out not finite."""

    def __init__(self, config: EngineConfig, faults: Faults) -> None:
        super().__init__(config, faults)
        self.scheduler: Scheduler | None = None
        self.found: Callable[[InvariantViolation], None] | None = None
        self._distrusted: list[tuple[int, int, BlockKey]] = []  # group, block, key
        scheduler = config.scheduler
        self._tells_times = scheduler.step_costs is not None or scheduler.learned_steps is not None
        self._ended_s = 0.0

    def finish_until(self, seq: int) -> StepResult:
        try:
            result = super().finish_until(seq)
        except InvariantViolation as violation:  # the engine takes it for a failed step
            assert self.found is not None
            self.found(violation)
            raise
        if 0 in result.finite.tobytes():
            for at in np.flatnonzero(~result.finite).tolist():
                self._distrust(int(result.rows[at]), int(result.generation[at]))
        if self._tells_times:  # a pace learns from them
            started_s = self._ended_s
            self._ended_s += self.faults.rng.choice((0.0005, 0.002, 0.01))
            result = result._replace(times=StepTimes(start_s=started_s, end_s=self._ended_s))
        return result

    def check_distrusted(self) -> None:
        """S16: what such a row computed is not in the cache any more, unless others hold it and vouch for it."""
        if not self._distrusted or self.scheduler is None:
            return
        for group, block, key in self._distrusted:
            if self.scheduler.state.kv.groups[group].cache.key_of(block) is key:
                raise InvariantViolation("S16", f"block {block} of a row with unusable numbers is cached")
        self._distrusted.clear()

    def _distrust(self, row: int, generation: int) -> None:
        assert self.scheduler is not None
        state = self.scheduler.state
        if state.rows.generation[row] != generation:
            return
        for group in state.kv.groups:
            start = max(int(group.computed_from[row]), int(group.first[row]))
            for block in group.table[row, start : int(group.held[row])].tolist():
                if group.pool.cached[block] and group.pool.refs[block] == 1:
                    self._distrusted.append((group.index, block, group.cache.key_of(block)))


class BatchWatch:
    """M1: the rows of a padded batch that end without an abort leave together."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._padded = scheduler.state.mode.keeps_finished
        self._running: set[int] = set()

    def before_step(self) -> None:
        if self._padded:
            rows = self._scheduler.state.rows
            self._running = set(rows.request_id[np.flatnonzero(rows.live)].tolist())

    def after_step(self, finished: Sequence[Finished]) -> None:
        if not self._padded or not any(
            f.reason in (FinishReason.STOP, FinishReason.LENGTH) for f in finished
        ):
            return
        requests = self._scheduler.state.requests
        for name in self._running & requests.keys():
            if requests[name].state is RequestState.RUNNING:  # type: ignore[index]
                raise InvariantViolation("M1", f"request {name} runs on although others of its batch left")


def check_idle(state: SchedulerState, clients: Mapping[int, Expectation]) -> None:
    """L4: when no request is left, nothing is; and every request has its ending."""
    for group in state.kv.groups:
        if group.pool.num_free != group.pool.usable:
            raise InvariantViolation("L4", f"{group.pool.usable - group.pool.num_free} blocks are lost")
    leftovers = (state.requests, state.orders, state.prefilling, state.children, state.computing)
    held = (len(state.queue), state.rows.num_live, state.kv.fences, state.kv.tickets.open)
    encodings = state.encodings
    if encodings.pool.num_free != encodings.pool.usable or encodings.rows or encodings.unfinished:
        raise InvariantViolation("L4", "pages of vectors are lost")
    if state.kv.sources.rows or state.modules.rows or state.modules.computing or state.modules.orders:
        raise InvariantViolation("L4", "something of a module is left behind")
    if any(leftovers) or any(held) or state.adapters.rows or state.adapters.users:
        raise InvariantViolation("L4", "something of a request is left behind")
    if any(part.num_free != part.num_places for level in state.kv.levels[1:] for part in level):
        raise InvariantViolation("L4", "a place on the host or the disk is lost")
    for name, client in clients.items():
        if client.ended is None:
            raise InvariantViolation("S20", f"request {name} never ended")
