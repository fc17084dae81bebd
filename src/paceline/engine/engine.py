"""The engine: requests in, steps, events out.

`step()` reads aloud: plan, submit, wait, update. `step_overlapped()` is the same with the wait moved behind the
next plan, `depth` steps later. A step that fails is recovered from a snapshot; a request whose step fails twice
ends with an error, and after three failures in a row the engine gives up, with every request answered.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.audit.ring import DecisionRing
from paceline.core.adapter import NO_ADAPTER
from paceline.core.clock import Clock
from paceline.core.events import Decision, Forecast, StepEvents
from paceline.core.guide import Guide
from paceline.core.plan import FailedStep, NoRunner, Pending, Runner, StepChecker, StepPlan, StepResult
from paceline.core.recorder import Inputs, StepRecord, StepRecorder, StepWatcher
from paceline.core.request import (
    DEFAULT_TENANT,
    BlockKey,
    BranchState,
    Given,
    Request,
    RequestHooks,
    RequestId,
    TreeLimits,
    cut_stretches,
    sooner,
)
from paceline.core.sampling import SamplingParams, branch_seed
from paceline.core.service_class import DEFAULT_LEVEL, ServiceLevel
from paceline.core.standing import ALL_LOST
from paceline.core.stretch import MediaPart, ModulePart
from paceline.engine.adapters import Adapters
from paceline.engine.guides import Guides
from paceline.engine.media import Media
from paceline.engine.module_requests import ModuleRequests
from paceline.engine.prefix_keys import keys_in_parts
from paceline.engine.resumed import Outputs, has_stopped, take_up
from paceline.errors import EngineFailed, InvalidRequest, InvalidTransition, UnknownRequest
from paceline.scheduler.scheduler import Scheduler

OnForecast = Callable[[RequestId, Forecast | None], object]
MAX_FAILURES_IN_A_ROW = 3
LONGEST_WRITE_S = 10.0  # that closing waits for a disk


@dataclass(slots=True)
class StepInFlight:
    """A submitted plan, and what the log will say about it."""

    plan: StepPlan
    pending: Pending
    t_plan: float
    inputs: Inputs
    decisions: Sequence[Decision]
    # Of its rows, by row; None: they have been supplied, or there are none.
    guides: dict[int, Guide] | None = None


class Engine:
    """One scheduler, one runner. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        clock: Clock,
        hooks: RequestHooks,
        depth: int = 1,
        recorder: StepRecorder | None = None,
        checker: StepChecker | None = None,
        ring: DecisionRing | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.depth = depth
        self.last_error: Exception | None = None
        # Called for every request before it is added.
        self.on_forecast: OnForecast | None = None
        self._runner = runner
        self._clock = clock
        self._hooks = hooks
        self._recorder = recorder
        self._ring = ring if ring is not None else DecisionRing(0)
        self.checker = checker
        self.watcher: StepWatcher | None = None  # None, most of the time
        self.guides = Guides(scheduler, None)
        self.adapters = Adapters(scheduler)
        self.media = Media(scheduler)
        self.modules = ModuleRequests(scheduler)
        self.ends: tuple[int, ...] = ()  # tokens that end an output
        self.on_close: Callable[[], object] = lambda: None  # called last, once
        self.before_plan: Callable[[], None] | None = None  # may tell the scheduler what has come since
        # Makes names of prefixes with this key, if it may; returns the key in use.
        self.use_prefix_key: Callable[[bytes], bytes] = lambda key: b""
        self._in_flight: deque[StepInFlight] = deque()
        self._failures = 0
        self._next_id = 1

    # -- requests ------------------------------------------------------------------------------------------

    def add(
        self,
        tokens: Sequence[int] | NDArray[np.int32],
        sampling: SamplingParams,
        *,
        tenant: str = DEFAULT_TENANT,
        service_level: ServiceLevel = DEFAULT_LEVEL,
        deadline_s: float | None = None,
        arrival_s: float | None = None,
        tree: TreeLimits | None = None,
        adapter: int = NO_ADAPTER,
        media: Sequence[MediaPart] = (),
        modules: Sequence[ModulePart] = (),
        is_module: bool = False,
        keys: Sequence[BlockKey] | None = None,
        outputs: Outputs | None = None,
    ) -> list[RequestId]:
        """Accept a prompt; returns the ids of its `sampling.n` branches. All are accepted or none is.

        `tree`: what these branches, and all that are forked from them, may have together. `adapter`: its number, see
        `adapters`. `media`: pictures, in the order of the prompt; their tokens stand in it. `modules`: texts of the
        prompt whose KV is computed alone and copied to its place, in the order of the prompt; their tokens stand in it.
        Where a module is not in the cache, it is computed first. `is_module`: the prompt is such a text, and is there
        for nothing else (with a pin, it stays): it ends without output, and prompts that place it find its blocks.
        `keys`: those of the prompt, where they have been made. `outputs`: what is known of each branch's output, None
        for a branch that has ended: the request goes on behind it, see `engine.resumed`, and the ids are those of the
        branches that go on.
        """
        arrival_s = self._clock.now() if arrival_s is None else arrival_s
        given = Given(tenant, service_level, arrival_s, adapter, media, modules, is_module, keys)
        branches = self._family(tokens, sampling, given)
        if outputs is not None:
            branches = take_up(branches, outputs, self._hooks)
        due_s = sooner(deadline_s, arrival_s, sampling.deadline_ms)
        for branch in branches:
            branch.deadline_s = due_s
        branches[0].tree_limits = tree
        guide = self.guides.check(sampling.structured_outputs)
        # A call that wants vectors has many inputs: when one of them is ready says nothing about the call.
        if self.on_forecast is not None and sampling.pooling is None:
            self.on_forecast(branches[0].id, self.scheduler.forecast(branches[0]))
        self.scheduler.add(branches)
        if media:
            self.media.hold(branches[0], media)
        if sampling.structured_outputs is not None:
            self.guides.add(branches, guide)
        for branch in branches if outputs is not None else ():
            if has_stopped(branch, self.ends) or self.guides.is_over(branch.id):
                self.scheduler.finish_at(branch.id, branch.num_tokens - branch.num_prompt)
        return [branch.id for branch in branches]

    def forecast(
        self,
        tokens: Sequence[int] | NDArray[np.int32],
        sampling: SamplingParams,
        *,
        tenant: str = DEFAULT_TENANT,
        service_level: ServiceLevel = DEFAULT_LEVEL,
        adapter: int = NO_ADAPTER,
        media: Sequence[MediaPart] = (),
        modules: Sequence[ModulePart] = (),
        keys: Sequence[BlockKey] | None = None,
    ) -> Forecast | None:
        """When a request would have its first and last token if it came now; it is not added. Pictures need no pixels.

        None while too little is known. Raises what `add` would refuse it with.
        """
        next_id = self._next_id
        try:
            given = Given(tenant, service_level, self._clock.now(), adapter, media, modules, keys=keys)
            branches = self._family(tokens, sampling, given)
        finally:
            self._next_id = next_id
        self.scheduler.check(branches)
        return self.scheduler.forecast(branches[0])

    def _family(
        self,
        tokens: Sequence[int] | NDArray[np.int32],
        sampling: SamplingParams,
        given: Given,
    ) -> list[Request]:
        """The branches of a request, the others children of the first."""
        self.adapters.check(given.adapter)
        prompt = np.ascontiguousarray(tokens, np.int32)
        branches = [self._branch(prompt, sampling, index) for index in range(sampling.n)]
        for branch in branches:
            branch.tenant, branch.service_level = given.tenant, given.service_level
            branch.arrival_s, branch.adapter = given.arrival_s, given.adapter
            branch.is_module = given.is_module
        first, *others = branches
        if given.media:
            self.media.attach(first, given.media)
        if given.modules:
            self.modules.attach(first, given.modules)
        if sampling.prompt_logprobs is None:  # else every token of the prompt is computed, none is reused
            first.keys = list(self._hooks.new_keys(first) if given.keys is None else given.keys)
        for branch in others:
            branch.parent, branch.keys = first.id, first.keys.copy()
            branch.media, branch.modules, branch.stretches = first.media, first.modules, first.stretches
        first.branches = len(others)
        return branches

    def prompt_keys(self, tokens: NDArray[np.int32], tenant: str, adapter: int) -> Iterator[list[BlockKey]]:
        """The prefix keys of a plain prompt, some at a time: all that another thread than the engine's may ask for."""
        return keys_in_parts(self._hooks, tokens, tenant, adapter)

    @property
    def next_id(self) -> int:
        return self._next_id

    def number_from(self, first_id: RequestId) -> None:
        """The next request is to have this id, and its branches those that follow; ids only go up."""
        if first_id < self._next_id:
            raise InvalidRequest(f"request id {first_id} was used before")
        self._next_id = first_id

    def add_request(self, request: Request) -> None:
        """Accept a request made elsewhere (a simulation, a log)."""
        self._next_id = max(self._next_id, request.id + 1)
        self.scheduler.add([request])

    def fork(
        self,
        request_id: RequestId,
        count: int,
        *,
        at: int | None = None,
        append: Sequence[int] = (),
        score: float = 0.0,
        changes: Mapping[str, Any] | None = None,
    ) -> list[RequestId]:
        """Branch a live request `count` times behind token `at` of its output, or behind the last it has delivered.

        `append` stands behind that, and the branches continue from there. `changes` are fields of SamplingParams; a
        branch may generate as many tokens as its parent could from there, unless they say otherwise. Branches are of
        their parent's tree, where those with a higher score go first. Prune a branch to drop it.
        """
        known = self.scheduler.tokens_of(request_id)
        parent = self.scheduler.state.requests[request_id]
        if parent.is_module:
            raise InvalidTransition(f"request {request_id} ends with its prompt: there is nothing to branch")
        at = len(known) - parent.num_prompt if at is None else at
        if not 0 <= at <= len(known) - parent.num_prompt:
            produced = len(known) - parent.num_prompt
            raise InvalidRequest(
                f"at: the output has {produced} tokens, there is no place {at} in it", param="at"
            )
        kept = parent.num_prompt + at
        tokens = np.concatenate([known[:kept], np.array(append, np.int32)])
        sampling = self._forked(parent, at, len(append), changes or {})
        guide, start = None, 0
        if sampling.structured_outputs is not None:
            guide, start = self.guides.of_branch(parent, tokens.tolist(), kept)
        own_seed = changes is not None and "seed" in changes
        first = 0 if own_seed else parent.branches + 1
        branches = [self._branch(tokens, sampling, first + index) for index in range(count)]
        block_size = self.scheduler.state.kv.block_size
        for index, branch in enumerate(branches):
            branch.branch = parent.branches + 1 + index
            branch.tenant, branch.service_level = parent.tenant, parent.service_level
            branch.adapter = parent.adapter
            branch.media, branch.modules, branch.stretches = parent.media, parent.modules, parent.stretches
            branch.deadline_s, branch.arrival_s = parent.deadline_s, parent.arrival_s
            branch.shares, branch.score = cut_stretches(branch, kept, block_size), score
            branch.keys = parent.keys[: branch.shares // block_size]
            branch.keys += self._hooks.new_keys(branch)
        self.scheduler.fork(request_id, branches)
        parent.branches += count
        if sampling.structured_outputs is not None:
            self.guides.add(branches, guide, start)
        return [branch.id for branch in branches]

    def _forked(
        self, parent: Request, at: int, num_append: int, changes: Mapping[str, Any]
    ) -> SamplingParams:
        """The parameters of a branch: those of its parent, from a place in its output on."""
        left = parent.sampling.max_tokens - at - num_append
        if left < 1 and "max_tokens" not in changes:
            raise InvalidTransition(
                f"request {parent.id} has all its tokens: there is nothing to branch, unless max_tokens says how many "
                "more there may be"
            )
        min_tokens = min(max(0, parent.sampling.min_tokens - at), changes.get("max_tokens", left))
        if (
            changes.get("structured_outputs", parent.sampling.structured_outputs)
            != parent.sampling.structured_outputs
        ):
            raise InvalidRequest("a branch has the structure of its parent", param="structured_outputs")
        return parent.sampling.of_branch(left, min_tokens, changes)

    def extend(
        self,
        request_id: RequestId,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        modules: Sequence[ModulePart] = (),
    ) -> None:
        """Put tokens behind the output of a live request, which continues from there; see `Scheduler.extend`.

        Without tokens, one that is held goes on, and any other gets another `max_tokens`. `modules`: texts among the
        tokens that are placed, as in `add`; where they begin counts from the first of these tokens.
        """
        known = self.scheduler.tokens_of(request_id)  # raises where there is no such request
        extended = self.scheduler.state.requests[request_id]
        if not len(tokens) and max_tokens is None and extended.held is None:
            raise InvalidRequest("there is nothing to extend the answer by", param="tokens")
        moved = self.guides.of_extension(request_id, known.tolist(), tokens)
        inserted = np.array(tokens, np.int32)
        placed = self.modules.placed_behind(extended, len(known), inserted, modules)
        self.scheduler.extend(request_id, inserted, max_tokens, placed)
        request = self.scheduler.state.requests.get(request_id)
        if moved is not None and request is not None:  # else it failed on the way
            self.guides.extended(request_id, moved, request.num_tokens)
            if moved.is_over:
                self.scheduler.finish_at(request_id, request.num_tokens - request.num_prompt)

    def set_score(self, request_id: RequestId, score: float) -> None:
        """Where a branch stands among the others of its tree."""
        if not math.isfinite(score):
            raise InvalidRequest("score must be a finite number", param="score")
        self.scheduler.set_score(request_id, score)

    def branches_of(self, request_id: RequestId) -> list[BranchState]:
        """The live branches of a request's tree, in the order they came."""
        requests = self.scheduler.state.requests
        request = requests.get(request_id)
        if request is None:
            raise UnknownRequest(f"no live request has the id {request_id}")
        members = [request_id] if request.tree is None else sorted(request.tree.members)
        found = [requests[RequestId(number)] for number in members]
        return [
            BranchState(
                request=branch.id,
                parent=branch.parent,
                state=branch.state,
                score=branch.score,
                num_prompt=branch.num_prompt,
                num_output=self.scheduler.num_tokens_of(branch) - branch.num_prompt,
                shares=branch.shares,
            )
            for branch in found
        ]

    def unload_adapter(self, number: int) -> bool:
        """No new request may have this adapter; those that have it end with it. False where there is none."""
        was_loaded = self.adapters.unload(number)
        self._release_adapters()
        return was_loaded

    def _release_adapters(self) -> None:
        submitted = self.num_submitted
        self.adapters.release(self._in_flight[0].plan.seq if self._in_flight else submitted + 1, submitted)

    def abort(self, request_id: RequestId) -> bool:
        return self.scheduler.abort(request_id)

    def prune(self, request_id: RequestId) -> bool:
        return self.scheduler.prune(request_id)

    def decisions_of(self, request_id: RequestId) -> list[Decision]:
        """What is still known about a request, live or ended: its newest decisions, oldest first."""
        latest = self.scheduler.state.decisions  # since the last plan
        return self._ring.of(request_id) + [each for each in latest if each.request == request_id]

    # -- steps ---------------------------------------------------------------------------------------------

    def step(self) -> StepEvents:
        """One step, start to end: plan, submit, wait, update."""
        plan = self._schedule()
        if plan is not None and self._submit(plan):
            self._wait()
        return self.scheduler.take_events()

    def step_overlapped(self) -> StepEvents:
        """The same, with the device `depth` steps behind: it computes while the next plan is made."""
        # What guides allow depends on all tokens before. So the newest step draws when the others are done, after the
        # next one is planned: the device has that as soon as it has drawn.
        is_late = bool(self._in_flight and self._in_flight[-1].guides)
        while is_late and len(self._in_flight) > 1:
            self._wait()
        plan = self._schedule()
        if self._in_flight:
            self._supply()
        if plan is not None:
            self._submit(plan)
        if self._in_flight and (plan is None or (len(self._in_flight) > self.depth and not is_late)):
            self._wait()
        return self.scheduler.take_events()

    def drain(self) -> StepEvents:
        """Wait for every step under way."""
        while self._in_flight:
            self._wait()
        return self.scheduler.take_events()

    @property
    def now_s(self) -> float:
        """The engine's own time, which deadlines count in."""
        return self._clock.now()

    @property
    def has_requests(self) -> bool:
        return bool(self.scheduler.state.requests)

    @property
    def num_submitted(self) -> int:
        """Plans handed to the runner so far; unchanged after a step that found nothing to do."""
        return self.scheduler.state.kv.submitted

    @property
    def is_idle(self) -> bool:
        """Nothing is under way; a further step would do nothing until something new comes in."""
        return not self._in_flight and not self.scheduler.has_open_copies

    def sleep(self, *, levels_lost: int = ALL_LOST) -> None:
        """Let go of the runner, and of what these levels hold. Requests stay; rows are computed again once awake."""
        while self._in_flight:
            self._wait()
        self._runner.reset(StepPlan(seq=self.num_submitted, full=True))  # no copy is under way behind this
        self.scheduler.sleep(levels_lost=levels_lost)
        self.adapters.obey()
        self.media.sleep()
        self._runner = NoRunner()
        if self.checker is not None:
            self.checker.after_update(None)

    def wake(self, runner: Runner) -> None:
        """Go on with a runner that holds nothing yet."""
        assert self.is_asleep, "it has a runner"
        runner.reset(StepPlan(seq=self.num_submitted, full=True))
        self._runner = runner
        self.media.wake(runner)

    def move_slab(self, number: int, *, gained: bool) -> bool:
        """Blocks come from another model or go to it. False: a copy under way needs some of those that should go."""
        state = self.scheduler.state
        if not gained and (not state.kv.slabs.can_lose(number) or state.rows.num_reserved):
            while self._in_flight:
                self._wait()
        return self.scheduler.move_slab(number, gained=gained)

    @property
    def is_asleep(self) -> bool:
        return isinstance(self._runner, NoRunner)

    def close(self) -> None:
        """Complete what is under way, what is to be written to a disk too, and close the log."""
        try:
            self.drain()
            until_s = self._clock.now() + LONGEST_WRITE_S
            while not (self.has_requests or self.is_idle or self._failures or self.is_asleep) and (
                self._clock.now() < until_s
            ):
                self.step()
        finally:
            self.on_close()
            if self._recorder is not None:
                self._recorder.close(self.scheduler.take_journal(), self.scheduler.take_decisions())

    def _schedule(self) -> StepPlan | None:
        if self.guides.is_compiling:
            self.guides.let_in()
        if self.adapters.is_reading:
            self.adapters.take_read()
        if self.adapters.is_leaving:
            self._release_adapters()
        if self.media.is_holding:
            self.media.let_go()
        if self.before_plan is not None:
            self.before_plan()
        if self.modules.orders:  # of the step before: what is added now is in this one's log
            self.modules.obey()
        plan = self.scheduler.schedule()
        if plan is None and self.modules.orders:
            self.modules.obey()
            plan = self.scheduler.schedule()
        if self.scheduler.state.adapters.orders:
            self.adapters.obey()
        if self.checker is not None:
            self.checker.after_schedule(plan)
        return plan

    def _submit(self, plan: StepPlan) -> bool:
        inputs, decisions = self.scheduler.take_journal(), self.scheduler.take_decisions()
        self._ring.add(decisions)
        t_plan = self.scheduler.state.now_s
        if self.watcher is not None:
            self.watcher.submitted(plan, decisions, t_plan)
        try:
            pending = self._runner.submit(plan)
        except Exception as error:
            self._in_flight.append(StepInFlight(plan, FailedStep(error), t_plan, inputs, decisions))
            self._recover(error)
            return False
        guides = self.guides.of_rows(plan) if self.guides else None
        self._in_flight.append(StepInFlight(plan, pending, t_plan, inputs, decisions, guides))
        return True

    def _supply(self) -> None:
        """Give the oldest step under way its guides: they stand behind all tokens before it now."""
        step = self._in_flight[0]
        if step.guides:
            try:
                step.pending.supply(step.guides)
            except Exception as error:
                step.pending = FailedStep(error)
            step.guides = None

    def _wait(self) -> None:
        step = self._in_flight[0]
        self._supply()
        try:
            result = step.pending.wait()
        except Exception as error:
            self._recover(error)
            return
        self._in_flight.popleft()
        self._failures = 0
        if self.guides:
            self.guides.count(result.guided)
            self.guides.fail_broken()  # their tokens are not delivered
        known = len(self.scheduler.state.events.tokens)
        self.scheduler.update(result)
        if self.guides:
            self.guides.advance(self.scheduler.state.events.tokens[known:])
        if self.checker is not None:
            self.checker.after_update(result)
        self._record(step, result)

    def _recover(self, error: Exception) -> None:
        """No result will come for the steps under way: start over from a clean plan."""
        self.last_error = error
        if not (_is_out_of_memory(error) and self.scheduler.shrink()):
            self._failures += 1
        lost, self._in_flight = list(self._in_flight), deque()
        snapshot = self.scheduler.recover()
        for step in lost:
            self._record(step, None)
        if self._failures >= MAX_FAILURES_IN_A_ROW:
            self._give_up(error)
        try:
            self._runner.reset(snapshot)
        except Exception as reset_error:
            self._give_up(reset_error)
        if self.checker is not None:
            self.checker.after_update(None)

    def _record(self, step: StepInFlight, result: StepResult | None) -> None:
        if self.watcher is not None:
            self.watcher.completed(step.plan.seq, self.scheduler.state.now_s, failed=result is None)
        if self._recorder is None:
            return
        self._recorder.step(
            StepRecord(
                t_plan=step.t_plan,
                t_done=self.scheduler.state.now_s,
                inputs=step.inputs,
                plan=step.plan,
                result=result,
                decisions=step.decisions,
            )
        )

    def _give_up(self, error: Exception) -> None:
        """Answer every request, then say that the engine is lost. The events are still to be taken."""
        self.scheduler.fail_all()
        raise EngineFailed(
            f"the engine stopped after {self._failures} failed steps: {type(error).__name__}"
        ) from error

    def _branch(self, tokens: NDArray[np.int32], sampling: SamplingParams, index: int) -> Request:
        own = sampling
        if sampling.n > 1 or (index and (sampling.seed, sampling.prompt_logprobs) != (None, None)):
            seed = None if sampling.seed is None else branch_seed(sampling.seed, index)
            prompt_logprobs = None if index else sampling.prompt_logprobs  # the same for all: one tells them
            own = replace(sampling, n=1, seed=seed, prompt_logprobs=prompt_logprobs)
        request = Request(RequestId(self._next_id), tokens, own)
        self._next_id += 1
        request.branch = index
        return request


def _is_out_of_memory(error: Exception) -> bool:
    """Of the host or of a device; torch's own error is known by its name, for torch is not known here."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
