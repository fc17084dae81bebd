"""An engine on the fake runner, driven by hand, with everything its clients and its runner have seen.

A `Bench` checks the invariants after every half-step, the order of tokens as they arrive, and every output
against the reference when its request ends. Tests look at `bench.seen`: one entry per plan, by request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from paceline.config.engine import EngineConfig, KVConfig, SchedulerConfig
from paceline.core.clock import ManualClock
from paceline.core.events import Decision, DecisionKind, Finished, Held, StepEvents
from paceline.core.guide import Guide
from paceline.core.plan import Pending, Runner, StepPlan, StepResult
from paceline.core.recorder import Inputs, StepRecord
from paceline.core.request import BlockKey, FinishReason, Request, RequestHooks, RequestId, RequestState
from paceline.core.sampling import SamplingParams
from paceline.core.service_class import ServiceLevel
from paceline.core.stretch import ModulePart
from paceline.engine.adapters import Adapters
from paceline.engine.engine import Engine
from paceline.engine.prefix_keys import PrefixKeyHooks
from paceline.factory import build_engine
from paceline.kv.block_pool import BlockPool
from paceline.kv.prefix import KeyMaker
from paceline.policy import Policy
from paceline.scheduler.invariants import InvariantChecker
from paceline.scheduler.scheduler import Scheduler
from tests.fake_adapters import HeldReads, Memory, read
from tests.fake_faults import DeviceFault
from tests.fakes import FakeRunner
from tests.reference_output import NONE, Placed, Stretches, placed_of, reference_output, vectors_of

_KV_OPTIONS = frozenset(spec.name for spec in fields(KVConfig))
_SMALL: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 65,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "max_model_len": 128,
    "watermark": 0.0,
}


def engine_config(depth: int = 0, **options: Any) -> EngineConfig:
    """A small engine; `options` are fields of KVConfig and SchedulerConfig. A pool has one null block."""
    chosen = _SMALL | options
    kv = {name: value for name, value in chosen.items() if name in _KV_OPTIONS}
    rest = {name: value for name, value in chosen.items() if name not in _KV_OPTIONS}
    return EngineConfig(kv=KVConfig(**kv), scheduler=SchedulerConfig(**rest), depth=depth, check_every=0)


def prompt(length: int, start: int = 0) -> list[int]:
    """Tokens no other prompt has, unless `start` is the same."""
    return [1000 * start + index for index in range(length)]


@dataclass(frozen=True, slots=True)
class Seen:
    """A plan, by request: known tokens computed, and requests that decode."""

    plan: StepPlan
    spans: dict[int, int]
    decodes: frozenset[int]


class Watch:
    """Stands at two seams of the engine: checks every half-step, and keeps plans, decisions and records."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.records: list[StepRecord] = []
        self.decisions: list[Decision] = []
        self.check = True
        self._scheduler: Scheduler | None = None
        self._checker: InvariantChecker | None = None

    def watch(self, scheduler: Scheduler) -> Watch:
        self._scheduler, self._checker = scheduler, InvariantChecker(scheduler)
        return self

    @property
    def checker(self) -> InvariantChecker:
        assert self._checker is not None
        return self._checker

    def after_schedule(self, plan: StepPlan | None) -> None:
        if self.check:
            self.checker.after_schedule(plan)
        if plan is None:
            return
        assert self._scheduler is not None
        state = self._scheduler.state
        owner = state.rows.request_id
        spans: dict[int, int] = {}
        for each, count in zip(
            owner[plan.spans.row].tolist(), plan.spans.num_scheduled.tolist(), strict=True
        ):
            spans[each] = spans.get(each, 0) + count
        decoding = np.flatnonzero(state.flights[-1].mask)
        self.seen.append(Seen(plan, spans, frozenset(owner[decoding].tolist())))

    def after_update(self, result: StepResult | None) -> None:
        if self.check:
            self.checker.after_update(result)

    def step(self, record: StepRecord) -> None:
        self.records.append(record)
        self.decisions += record.decisions

    def close(self, inputs: Inputs, decisions: Sequence[Decision]) -> None:
        self.decisions += decisions


class BreakingRunner:
    """A fake device that fails at chosen places, counted from 1: submits, waits, a row of a result, resets."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        fail_submit: Sequence[int] = (),
        fail_wait: Sequence[int] = (),
        fail_reset: bool = False,
        nan_row: tuple[int, int] | None = None,
    ) -> None:
        self.config = config
        self.device = FakeRunner(config)
        self.resets: list[StepPlan] = []
        self._fail_submit, self._fail_wait, self._fail_reset = fail_submit, fail_wait, fail_reset
        self._nan_row = nan_row  # number of the result, place of the row in it
        self._submits = self._waits = 0

    @property
    def violation(self) -> AssertionError | None:
        return self.device.violation

    def reset(self, full: StepPlan) -> None:
        self.resets.append(full)
        if self._fail_reset:
            raise DeviceFault("reset")
        self.device.reset(full)

    def submit(self, plan: StepPlan) -> Pending:
        self._submits += 1
        if self._submits in self._fail_submit:
            raise DeviceFault(f"submit {self._submits}")
        return _BreakingPending(self, self.device.submit(plan))

    def wait(self, pending: Pending) -> StepResult:
        self._waits += 1
        if self._waits in self._fail_wait:
            raise DeviceFault(f"wait {self._waits}")
        result = pending.wait()
        if self._nan_row is None or self._waits < self._nan_row[0] or not len(result.rows):
            return result
        finite = result.finite.copy()
        finite[min(self._nan_row[1], len(finite) - 1)] = False
        self._nan_row = None
        return result._replace(finite=finite)


class _BreakingPending:
    def __init__(self, runner: BreakingRunner, pending: Pending) -> None:
        self._runner, self._pending = runner, pending

    def supply(self, guides: Mapping[int, Guide]) -> None:
        self._pending.supply(guides)

    def wait(self) -> StepResult:
        return self._runner.wait(self._pending)


class Bench:
    """One engine, its fake device and clock, and what its clients have got so far."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        runner: Runner | None = None,
        hooks: RequestHooks | None = None,
        policy: Policy | None = None,
        make_pool: Callable[..., BlockPool] = BlockPool,
        overlapped: bool = False,
    ) -> None:
        self.config = config if config is not None else engine_config()
        self.clock = ManualClock()
        self.runner = runner if runner is not None else FakeRunner(self.config)
        self.overlapped = overlapped
        self.asked: dict[int, tuple[list[int], SamplingParams]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.cut: set[int] = set()  # ended by a stop found outside
        self.held: dict[int, Held] = {}
        # Output tokens that count as prompt: something was put in behind them.
        self.before: dict[int, int] = {}
        self.pictures: dict[int, dict[int, int]] = {}  # vectors by position
        self.placed: dict[int, Placed] = {}  # texts that are copied to their places
        self.reads = HeldReads()
        self.watch = Watch()
        self.seen = self.watch.seen
        self.maker = KeyMaker(self.config.kv.block_size, bytes(32))
        self.engine: Engine = build_engine(
            self.config,
            self.runner,
            clock=self.clock,
            hooks=hooks if hooks is not None else PrefixKeyHooks(self.maker),
            recorder=self.watch,
            policy=policy,
            make_pool=make_pool,
            make_checker=self.watch.watch,
            make_adapters=lambda scheduler: Adapters(scheduler, Memory(), read, self.reads),
        )
        self.scheduler: Scheduler = self.engine.scheduler
        self.state = self.scheduler.state
        for each in (self.runner, getattr(self.runner, "device", None)):
            if isinstance(each, FakeRunner):
                each.placed_of = self._placed_of

    # -- requests ------------------------------------------------------------------------------------------

    def add(self, tokens: Sequence[int], max_tokens: int = 4, **options: Any) -> RequestId:
        return self.add_all(tokens, max_tokens, **options)[0]

    def add_all(self, tokens: Sequence[int], max_tokens: int = 4, **options: Any) -> list[RequestId]:
        """Add one prompt; `options` that `Engine.add` does not know are sampling parameters."""
        own = {*ServiceLevel._fields, "tenant", "service_level", "deadline_s", "arrival_s", "tree", "adapter"}
        names = own | {"media", "modules", "is_module"}
        urgent = {name: options.pop(name) for name in ServiceLevel._fields if name in options}
        options["service_level"] = ServiceLevel(**urgent)
        placing = {name: options.pop(name) for name in names if name in options}
        ids = self.engine.add(list(tokens), SamplingParams(max_tokens=max_tokens, **options), **placing)
        for request_id in ids:
            self.expect(request_id, tokens)
            self.pictures[request_id] = vectors_of(placing.get("media", ()))
        return ids

    def fork(self, request_id: RequestId, count: int = 1, **options: Any) -> list[RequestId]:
        """Fork a request; `options` are those of `Engine.fork`."""
        ids = self.engine.fork(request_id, count, **options)
        for branch in ids:
            self.expect(branch, self.request(branch).tokens.tolist())
            self.pictures[branch] = self.pictures.get(request_id, {})
        return ids

    def extend(
        self,
        request_id: RequestId,
        tokens: Sequence[int],
        max_tokens: int | None = None,
        modules: Sequence[ModulePart] = (),
    ) -> None:
        """Put tokens in; from there on the request is like one with all of them as its prompt."""
        self.flush()
        self.engine.extend(request_id, tokens, max_tokens=max_tokens, modules=modules)
        request = self.request(request_id)
        self.before[request_id] = request.num_tokens - request.num_prompt
        sampling = replace(
            request.sampling, max_tokens=request.sampling.max_tokens - self.before[request_id], min_tokens=0
        )
        self.asked[request_id] = (request.tokens.tolist(), sampling)
        self.placed[request_id] = placed_of(request)
        self.held.pop(request_id, None)
        self.flush()

    def finish_at(self, request_id: RequestId, num_output: int) -> bool:
        self.cut.add(request_id)
        ended = self.scheduler.finish_at(request_id, num_output)
        self.flush()
        return ended

    def _placed_of(self, row: int) -> Placed:
        request = self.state.rows.requests[row]
        return () if request is None else placed_of(request)

    def expect(self, request_id: RequestId, tokens: Sequence[int]) -> None:
        self.asked[request_id] = (list(tokens), self.request(request_id).sampling)
        self.tokens[request_id] = []
        self.placed[request_id] = placed_of(self.request(request_id))

    def request(self, request_id: RequestId) -> Request:
        return self.state.requests[request_id]

    def hooks_keys(self, tokens: Sequence[int], tenant: str = "default") -> list[BlockKey]:
        """The keys the default hooks make for a prompt."""
        return self.maker.extend([], np.array(tokens, np.int32), self.maker.root(tenant))

    def states(self) -> dict[int, RequestState]:
        return {request.id: request.state for request in self.state.requests.values()}

    def reasons(self, kind: DecisionKind, request_id: int | None = None) -> list[str]:
        """Why decisions of a kind were made, in order, about one request or all."""
        everything = self.watch.decisions + self.state.decisions
        return [d.reason for d in everything if d.kind is kind and request_id in (None, d.request)]

    # -- steps ---------------------------------------------------------------------------------------------

    def step(self, times: int = 1) -> Seen | None:
        """Step so often; what the last plan was, or None when there was none."""
        planned = len(self.seen)
        for _ in range(times):
            planned = len(self.seen)
            self.receive(self.engine.step_overlapped() if self.overlapped else self.engine.step())
            self._check_device()
            self.clock.advance(0.001)
        return self.seen[-1] if len(self.seen) > planned else None

    def run(self, limit: int = 2000) -> None:
        """Step until every request has ended and nothing is left behind."""
        for _ in range(limit):
            if not self.engine.has_requests and self.engine.is_idle:
                break
            before = self.scheduler.next_wakeup_s()
            if self.step() is None and self.engine.is_idle and before is not None:
                self.clock.advance_to(before)
        assert not self.engine.has_requests, f"still alive after {limit} steps: {self.states()}"
        for _ in range(20):  # copies of requests that have ended
            if not self.state.kv.tickets.open:
                break
            self.step()
        self.receive(self.engine.drain())
        self.check_empty()

    def receive(self, events: StepEvents) -> None:
        for batch in events.tokens:
            columns = (batch.requests.tolist(), batch.tokens.tolist(), batch.index.tolist())
            for request_id, token, index in zip(*columns, strict=True):
                assert request_id not in self.finished, f"request {request_id} got a token after its end"
                assert index == len(self.tokens[request_id]), f"request {request_id} got token {index}"
                self.tokens[request_id].append(token)
        for held in events.held:
            del self.tokens[held.request][held.num_output :]
            self.held[held.request] = held
        for ending in events.finished:
            assert ending.request not in self.finished, f"request {ending.request} ended twice"
            self.finished[ending.request] = ending
            self._check_output(ending)

    def flush(self) -> None:
        """Take events that came without a step (an abort, a deadline)."""
        self.receive(self.scheduler.take_events())

    def check_empty(self) -> None:
        """L4: when no request is left, nothing is."""
        state = self.state
        for group in state.kv.groups:
            assert group.pool.num_free == group.unpinned, "blocks are lost"
            assert not group.reserved and not group.held.any(), "a row keeps blocks"
        for host in state.kv.places:
            assert host.num_free == host.num_places, "host places are lost"
        left = (state.requests, state.orders, state.prefilling, state.children, state.computing)
        assert not any(left), f"left behind: {left}"
        assert not len(state.queue) and not state.queue.num_tokens and not state.rows.num_live
        assert not state.kv.fences and not state.kv.tickets.open and not state.flights
        assert self.finished.keys() == self.asked.keys(), "a request never got an ending"

    def _check_device(self) -> None:
        """The engine takes a complaint of the fake device for a failed step: it must not pass unheard."""
        violation = getattr(self.runner, "violation", None)
        if violation is not None:
            raise violation

    def _check_output(self, ending: Finished) -> None:
        tokens, sampling = self.asked[ending.request]
        before = self.before.get(ending.request, 0)
        got = self.tokens[ending.request][before:]
        size = self.config.kv.block_size
        seen = self.pictures.get(ending.request, NONE)
        expected, reason = reference_output(
            tokens,
            sampling,
            block_size=size,
            before=before,
            stretches=Stretches(seen, self.placed[ending.request]),
        )
        assert got == expected[: len(got)], f"request {ending.request} got {got}, alone it gets {expected}"
        if ending.request not in self.cut and ending.reason in (FinishReason.LENGTH, FinishReason.STOP):
            assert got == expected and ending.reason.value == reason
            assert ending.num_output == before + len(got)
