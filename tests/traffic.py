"""Random traffic with a run log: what the tests of the log and of its replay look at.

A run is drawn from one seed: inputs of every kind, several configs, faults of device, hooks and pools. The
configs are small, so that blocks run out, windows slide and queues fill within a hundred actions.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.audit.runlog import RunLogWriter, run_header
from paceline.config.engine import EngineConfig, GroupSpec, KVConfig, PreemptionCosts, SchedulerConfig
from paceline.core.clock import ManualClock
from paceline.core.request import BlockKey, BlockReason, Request, RequestId, RequestState
from paceline.core.sampling import SamplingParams
from paceline.core.service_class import CLASSES, DEFAULT_CLASS, ServiceLevel
from paceline.engine.adapters import Adapters
from paceline.engine.engine import Engine
from paceline.engine.prefix_keys import PrefixKeyHooks
from paceline.errors import EngineFailed, PacelineError
from paceline.factory import build_engine
from paceline.kv.prefix import KeyMaker
from tests.fake_adapters import HeldReads, Memory, read
from tests.fake_faults import Faults
from tests.fakes import FakeRunner

FULL = (GroupSpec(),)
SLIDING = (GroupSpec(), GroupSpec(window=12, num_blocks=24))
FIRST_TOKEN = 1_500_000_000  # prompts use ids from here on, so that one in a log would be seen


class FaultyHooks(PrefixKeyHooks):
    """Prefix keys that do not change from run to run; each hook raises now and then."""

    def __init__(self, block_size: int, rng: random.Random, rate: float) -> None:
        super().__init__(KeyMaker(block_size, process_key=bytes(32)))
        self._rng, self._rate = rng, rate
        self.raised: Counter[str] = Counter()
        self.adding = False

    def admit(self, request: Request) -> None:
        self._maybe_raise("admit", ConnectionError)

    def new_keys(self, request: Request) -> Sequence[BlockKey]:
        if not self.adding:
            self._maybe_raise("new_keys", KeyError, likelier=3)
        return super().new_keys(request)

    def finish(self, request: Request) -> None:
        self._maybe_raise("finish", ZeroDivisionError)

    def _maybe_raise(self, name: str, error: type[Exception], likelier: int = 1) -> None:
        if self._rng.random() < likelier * self._rate:
            self.raised[name] += 1
            raise error(name)


ADAPTERS = (1, 2)


class Traffic:
    """A run of random inputs over a `FakeRunner`, all from one seed. `seen` counts what happened."""

    def __init__(self, config: EngineConfig, seed: int, path: Path, *, faults: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock(3.5)
        self.config = config
        self.hooks = FaultyHooks(config.kv.block_size, random.Random(seed + 1), 2 * faults)
        device = Faults(rng=random.Random(seed + 2), step_failure=faults, nan_row=faults, late_copies=2)
        self.engine: Engine = build_engine(
            config,
            FakeRunner(config, device, check=False),
            clock=self.clock,
            hooks=self.hooks,
            recorder=RunLogWriter(path, run_header(config, seed=seed)),
            make_adapters=lambda scheduler: Adapters(scheduler, Memory(), read, HeldReads()),
        )
        for number in ADAPTERS:
            self.engine.adapters.load("", Path(str(number)))
        self.scheduler = self.engine.scheduler
        self.prompts = [self._tokens(30) for _ in range(3)]
        self.seen: Counter[str] = Counter()
        self.output_tokens: set[int] = set()
        self.faults = faults

    def run(self, num_actions: int) -> None:
        actions: dict[Callable[[], None], int] = {
            self.step: 40, self.add: 12, self.fork: 3, self.prune: 2, self.abort: 2, self.preempt: 4,
            self.pause: 3, self.resume: 4, self.priority: 2, self.deadline: 2, self.block: 2,
            self.unblock: 3, self.finish_at: 1, self.reset_cache: 1, self.foreign: 2, self.expire: 1, self.snapshot: 1,
            self.withhold: 2 if self.faults else 0,
        }  # fmt: skip
        try:
            for action in self.rng.choices(list(actions), list(actions.values()), k=num_actions):
                action()
                if self.rng.random() < 0.3:
                    self.clock.advance(self.rng.random() * 0.2)
            self._release_all()
            for _ in range(40):
                self.step()
                self.clock.advance(0.05)
        except EngineFailed:
            self.seen["gave_up"] += 1
        self.engine.close()

    def step(self) -> None:
        events = self.engine.step_overlapped() if self.engine.depth else self.engine.step()
        for event in events.tokens:
            self.output_tokens.update(event.tokens.tolist())
        for finished in events.finished:
            self.seen[finished.detail or finished.reason.value] += 1

    def add(self) -> None:
        stops = (self.rng.choice((1, 1 << 17)),)
        sampling = SamplingParams(
            max_tokens=self.rng.randint(1, 20),
            n=self.rng.choice((1, 1, 1, 2, 3)),
            seed=self.rng.randint(0, 99),
            stop_token_ids=stops,
        )
        prompt = self.rng.choice(self.prompts)[: self.rng.randint(1, 30)] + self._tokens(
            self.rng.randint(0, 6)
        )
        self.hooks.adding = True
        self._quietly(
            lambda: self.engine.add(
                prompt if self.rng.random() < 0.97 else prompt * 40,
                sampling,
                tenant=self.rng.choice(("default", "other")),
                service_level=ServiceLevel(
                    self.rng.choice((DEFAULT_CLASS, DEFAULT_CLASS, *CLASSES)), self.rng.randint(-1, 2)
                ),
                deadline_s=self.clock.now() + self.rng.random() * 4 if self.rng.random() < 0.1 else None,
                arrival_s=self.clock.now() - self.rng.random() if self.rng.random() < 0.5 else None,
            )
        )
        self.hooks.adding = False

    def foreign(self) -> None:
        """A request made elsewhere, for another model or adapter."""
        request = Request(
            RequestId(10_000 + self.rng.randint(0, 10**6)),
            np.array(self._tokens(5), np.int32),
            SamplingParams(max_tokens=6),
            arrival_s=self.clock.now(),
        )
        request.adapter, request.model = self.rng.randint(0, len(ADAPTERS)), self.rng.randint(0, 1)
        self._quietly(lambda: self.scheduler.add([request]))

    def fork(self) -> None:
        self.hooks.adding = True
        self._on(self._any(), lambda request: self.engine.fork(request, self.rng.randint(1, 2)))
        self.hooks.adding = False

    def prune(self) -> None:
        branches = [r.id for r in self.scheduler.state.requests.values() if r.parent is not None]
        self._on(self.rng.choice(branches) if branches else None, self.engine.prune)

    def abort(self) -> None:
        self._on(self._any(), self.engine.abort)

    def preempt(self) -> None:
        swap = self.rng.random() < 0.5
        self._on(self._any(RequestState.RUNNING), lambda r: self.scheduler.preempt(r, swap=swap))

    def pause(self) -> None:
        swap = self.rng.random() < 0.7
        state = self.rng.choice((None, RequestState.RUNNING))
        self._on(self._any(state), lambda request: self.scheduler.pause(request, swap=swap))

    def resume(self) -> None:
        self._on(self._any(RequestState.PAUSED), self.scheduler.resume)

    def priority(self) -> None:
        self._on(self._any(), lambda r: self.scheduler.set_priority(r, self.rng.randint(-3, 3)))

    def deadline(self) -> None:
        after = self.rng.choice((0.0, 0.3, 2.0, math.inf))
        self._on(self._any(), lambda r: self.scheduler.set_deadline(r, self.clock.now() + after))

    def block(self) -> None:
        until = self.rng.choice((None, self.clock.now() + 0.4))
        reason = self.rng.choice((BlockReason.GRAMMAR, BlockReason.ENCODER))
        self._on(self._any(RequestState.WAITING), lambda r: self.scheduler.block(r, reason, until))

    def unblock(self) -> None:
        self._on(self._any(RequestState.BLOCKED), self.scheduler.unblock)

    def finish_at(self) -> None:
        self._on(self._any(RequestState.RUNNING), lambda request: self.scheduler.finish_at(request, 0))

    def expire(self) -> None:
        self.scheduler.expire()

    def reset_cache(self) -> None:
        self.scheduler.reset_prefix_cache()

    def snapshot(self) -> None:
        if not self.scheduler.state.flights:
            self.scheduler.snapshot()

    def withhold(self) -> None:
        for group in self.scheduler.state.kv.groups:
            group.pool.withheld = self.rng.choice((0, 0, 2, 9))

    def _any(self, state: RequestState | None = None) -> RequestId | None:
        live = self.scheduler.state.requests.values()
        ids = [request.id for request in live if state is None or request.state is state]
        return self.rng.choice(ids) if ids else None

    def _on(self, request: RequestId | None, action: Callable[[RequestId], object]) -> None:
        if request is not None:
            self._quietly(lambda: action(request))

    def _quietly(self, action: Callable[[], object]) -> None:
        try:
            action()
        except PacelineError as refusal:
            self.seen[type(refusal).__name__] += 1

    def _release_all(self) -> None:
        for group in self.scheduler.state.kv.groups:
            group.pool.withheld = 0
        for request in list(self.scheduler.state.requests.values()):
            if request.state is RequestState.PAUSED:
                self.scheduler.resume(request.id)

    def _tokens(self, count: int) -> list[int]:
        return [FIRST_TOKEN + self.rng.randint(0, 10**6) for _ in range(count)]


def small_config(mode: str = "continuous", depth: int = 1, **changes: Any) -> EngineConfig:
    scheduler = SchedulerConfig(
        max_num_seqs=6,
        max_num_batched_tokens=24,
        max_model_len=64,
        mode=mode,
        batch_size=3,
        batch_timeout_s=0.1,
        static_flush_s=0.2,
        max_queue=20,
        scheduling_policy=changes.pop("scheduling_policy", "fcfs"),
        preemption=changes.pop("preemption", "recompute"),
        preemption_costs=PreemptionCosts(token_s=1e-3, block_s=1e-3, step_s=1e-3),
        max_preemptions=changes.pop("max_preemptions", 4),
        ageing_s=0.5,
    )
    kv = KVConfig(
        block_size=4,
        num_blocks=changes.pop("num_blocks", 30),
        num_host_blocks=changes.pop("num_host_blocks", 20),
        groups=changes.pop("groups", FULL),
    )
    assert not changes
    return EngineConfig(kv=kv, scheduler=scheduler, depth=depth)


CASES = {
    "plain": small_config(depth=0),
    "overlapped": small_config(depth=1, scheduling_policy="priority", preemption="swap"),
    "far-ahead": small_config(depth=2, num_blocks=20, preemption="swap"),
    "sliding": small_config(depth=1, groups=SLIDING),
    "sliding-far-ahead": small_config(depth=2, groups=SLIDING, scheduling_policy="priority"),
    "tight": small_config(depth=2, num_blocks=18, num_host_blocks=0, max_preemptions=1),
    "dynamic": small_config(mode="dynamic", depth=0),
    "dynamic-overlapped": small_config(mode="dynamic", depth=1),
    "static": small_config(mode="static", depth=1, groups=SLIDING),
    "static-far-ahead": small_config(mode="static", depth=2),
    "by-cost": small_config(depth=1, num_blocks=22, scheduling_policy="priority", preemption="auto"),
}


CASE_FAULTS = [(case, faults) for case in CASES for faults in (0.0, 0.03)]


def seed_of(case: str) -> int:
    return list(CASES).index(case)


class Runs:
    """Recorded runs, made once each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[str, float], tuple[Path, Traffic]] = {}

    def get(self, case: str, faults: float) -> tuple[Path, Traffic]:
        if (case, faults) not in self._made:
            path = self._folder / f"{case}-{faults}.jsonl"
            traffic = Traffic(CASES[case], seed_of(case), path, faults=faults)
            traffic.run(110)
            self._made[case, faults] = path, traffic
        return self._made[case, faults]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return path


def engine_with_log(config: EngineConfig, path: Path, **parts: Any) -> Engine:
    return build_engine(
        config,
        parts.pop("runner", None) or FakeRunner(config),
        clock=parts.pop("clock", None) or ManualClock(),
        hooks=PrefixKeyHooks(KeyMaker(config.kv.block_size, process_key=bytes(32))),
        recorder=RunLogWriter(path, run_header(config)),
        **parts,
    )


def run_until_idle(engine: Engine) -> None:
    for _ in range(200):
        engine.step_overlapped()
        if not engine.has_requests and engine.is_idle:
            break
    engine.close()
