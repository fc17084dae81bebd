"""Random use of a whole engine: every input in every order, checked after each half-step and against the reference.

What is compared: the invariants (by the bench), every output when its request ends, and at the end that every request
was answered and nothing is left behind.
"""

import contextlib
import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from paceline.config.engine import GroupSpec
from paceline.core.request import BlockReason, Request, RequestId, RequestState
from paceline.errors import InvalidTransition, NeverFits, QueueFull
from tests.fake_faults import Faults
from tests.fakes import FakeRunner
from tests.guides import VOCAB
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt

LONGEST = 40
numbers = st.integers(0, 1 << 16)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Engines that are short of something."""
    block_size = draw(st.sampled_from((1, 2, 4, 8)))
    enough = -(-LONGEST // block_size)
    blocks = 1 + enough + draw(st.sampled_from((0, 1, enough // 2, 3 * enough)))
    window = draw(st.sampled_from((None, None, None, 3, 9)))
    mode = draw(st.sampled_from(("continuous",) * 4 + ("dynamic", "static")))
    groups: tuple[GroupSpec, ...] = (GroupSpec(),)
    if window is not None:
        # What a request needs at a budget of 16, and the null block; at a budget of 64 long ones are refused.
        least = -(-(window + 16) // block_size) + 3
        # A padded batch needs it all.
        more = draw(st.sampled_from((0, 3, 60))) if mode == "continuous" else 60
        groups += (GroupSpec(window=window, num_blocks=least + more),)
    return {
        "depth": draw(st.sampled_from((0, 1, 1, 2, 4))),
        "block_size": block_size,
        "num_blocks": blocks,
        "num_host_blocks": draw(st.sampled_from((0, 8, 60, 60))),
        "enable_prefix_caching": draw(st.sampled_from((True, True, False))),
        "groups": groups,
        "max_num_seqs": draw(st.sampled_from((2, 4, 8))),
        "max_num_batched_tokens": draw(st.sampled_from((4, 16, 64))),
        "max_model_len": LONGEST,
        "scheduling_policy": draw(st.sampled_from(("fcfs", "priority"))),
        "ageing_s": 0.05,
        "mode": mode,
        "batch_size": draw(st.sampled_from((2, 4))),
        "batch_timeout_s": 0.01,
        "static_flush_s": 0.02,
        "long_prefill_share": draw(st.sampled_from((0.25, 1.0))),
        "watermark": draw(st.sampled_from((0.0, 0.1))),
        "preemption": draw(st.sampled_from(("recompute", "swap"))),
        "max_preemptions": draw(st.sampled_from((1, 4))),
        "max_queue": draw(st.sampled_from((10, 60))),
        "defer_shared_prefix": draw(st.booleans()),
    }


class EngineMachine(RuleBasedStateMachine):
    """The rules name what can happen; `bench` knows what must be true."""

    @initialize(
        options=configs(),
        late=st.sampled_from((0, 2)),
        seed=numbers,
        first=st.lists(numbers, min_size=1, max_size=6),
    )
    def start(self, options: dict[str, Any], late: int, seed: int, first: list[int]) -> None:
        config = engine_config(**options)
        runner = FakeRunner(config, Faults(rng=random.Random(seed), late_copies=late))
        self.bench = Bench(config, runner=runner)
        self.scheduler = self.bench.scheduler
        self.add(first)
        self.bench.step(2)

    def pick(self, number: int, *states: RequestState) -> Request | None:
        """One of the live requests, of those in `states` if any are named."""
        found = [r for r in self.bench.state.requests.values() if not states or r.state in states]
        return found[number % len(found)] if found else None

    def has(self, *states: RequestState) -> bool:
        return hasattr(self, "bench") and self.pick(0, *states) is not None

    # -- requests come and go ------------------------------------------------------------------------------

    @rule(burst=st.lists(numbers, min_size=1, max_size=5))
    def add(self, burst: list[int]) -> None:
        for number in burst:
            self.add_one(number)

    def add_one(self, number: int) -> None:
        """A request of a shape that follows from a number."""
        rng = random.Random(number)
        tokens = prompt(rng.randint(0, 20), rng.randint(0, 1)) + prompt(
            rng.randint(1, 12), rng.randint(3, 50)
        )
        sampling: dict[str, Any] = {"seed": number, "n": rng.choice((1, 1, 1, 1, 2, 3))}
        if rng.random() < 0.2:
            sampling["stop_token_ids"] = (VOCAB // 16,)
        placing = {"tenant": rng.choice(("a", "a", "b")), "priority": rng.randint(-1, 1)}
        with contextlib.suppress(QueueFull, NeverFits):
            self.bench.add_all(tokens, rng.randint(1, 18), **sampling, **placing)

    @precondition(lambda self: self.has())
    @rule(number=numbers)
    def abort(self, number: int) -> None:
        request = self.pick(number)
        assert request is not None
        assert self.bench.engine.abort(request.id)
        assert not self.bench.engine.abort(request.id)
        self.bench.flush()
        assert request.id in self.bench.finished

    @precondition(lambda self: self.has())
    @rule(number=numbers, count=st.integers(1, 3))
    def fork(self, number: int, count: int) -> None:
        request = self.pick(number)
        assert request is not None
        if len(self.scheduler.tokens_of(request.id)) < LONGEST:
            # In a padded batch it may have all its tokens and wait for the others.
            with contextlib.suppress(QueueFull, NeverFits, InvalidTransition):
                self.bench.fork(request.id, count)

    @precondition(lambda self: self.has() and self.bench.state.children)
    @rule(number=numbers)
    def prune(self, number: int) -> None:
        branches = sorted(name for children in self.bench.state.children.values() for name in children)
        assert self.bench.engine.prune(RequestId(branches[number % len(branches)]))
        self.bench.flush()

    @precondition(lambda self: self.has())
    @rule(number=numbers)
    def finish_at(self, number: int) -> None:
        request = self.pick(number)
        assert request is not None
        told = len(self.bench.tokens[request.id])
        if told:
            assert self.bench.finish_at(request.id, 1 + number % told)

    # -- requests are put aside ----------------------------------------------------------------------------

    @precondition(lambda self: self.has(RequestState.RUNNING))
    @rule(number=numbers, swap=st.booleans())
    def preempt(self, number: int, swap: bool) -> None:
        request = self.pick(number, RequestState.RUNNING)
        assert request is not None
        before = request.preemptions
        assert self.scheduler.preempt(request.id, swap=swap) == (request.preemptions > before)

    @precondition(lambda self: self.has())
    @rule(number=numbers, swap=st.booleans())
    def pause(self, number: int, swap: bool) -> None:
        request = self.pick(number)
        assert request is not None
        with contextlib.suppress(InvalidTransition):
            self.scheduler.pause(request.id, swap=swap)
            assert request.state is RequestState.PAUSED

    @precondition(lambda self: self.has(RequestState.PAUSED))
    @rule(number=numbers)
    def resume(self, number: int) -> None:
        request = self.pick(number, RequestState.PAUSED)
        assert request is not None
        self.scheduler.resume(request.id)

    @precondition(lambda self: self.has(RequestState.WAITING))
    @rule(number=numbers, timeout_s=st.sampled_from((None, 0.01)))
    def block(self, number: int, timeout_s: float | None) -> None:
        request = self.pick(number, RequestState.WAITING)
        assert request is not None
        deadline_s = None if timeout_s is None else self.bench.clock.now() + timeout_s
        self.scheduler.block(request.id, BlockReason.ADAPTER, deadline_s)

    @precondition(lambda self: self.has(RequestState.BLOCKED))
    @rule(number=numbers)
    def unblock(self, number: int) -> None:
        request = self.pick(number, RequestState.BLOCKED)
        assert request is not None
        swapping = request.blocked is not None and request.blocked.reason is BlockReason.SWAP_IN
        assert self.scheduler.unblock(request.id) != swapping

    # -- requests are changed ------------------------------------------------------------------------------

    @precondition(lambda self: self.has())
    @rule(number=numbers, priority=st.integers(-2, 3))
    def set_priority(self, number: int, priority: int) -> None:
        request = self.pick(number)
        assert request is not None
        self.scheduler.set_priority(request.id, priority)

    @precondition(lambda self: self.has())
    @rule(number=numbers, ahead_s=st.sampled_from((0.0, 0.004, 0.03, None)))
    def set_deadline(self, number: int, ahead_s: float | None) -> None:
        request = self.pick(number)
        assert request is not None
        self.scheduler.set_deadline(request.id, None if ahead_s is None else self.bench.clock.now() + ahead_s)

    @rule()
    def reset_cache(self) -> None:
        self.scheduler.reset_prefix_cache()

    # -- time goes on --------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        self.bench.overlapped = False
        self.bench.step(count)

    @rule(count=st.integers(1, 9))
    def step_overlapped(self, count: int) -> None:
        self.bench.overlapped = True
        self.bench.step(count)

    @rule()
    def drain(self) -> None:
        self.bench.receive(self.bench.engine.drain())

    @rule(seconds=st.sampled_from((0.001, 0.01, 0.1)))
    def advance_clock(self, seconds: float) -> None:
        self.bench.clock.advance(seconds)

    def teardown(self) -> None:
        """L3 and L4: without new inputs everything ends, and nothing is left."""
        if not hasattr(self, "bench"):
            return
        for request in list(self.bench.state.requests.values()):
            if request.state is RequestState.PAUSED:
                self.scheduler.resume(request.id)
            elif request.state is RequestState.BLOCKED:
                self.scheduler.unblock(request.id)
        self.bench.overlapped = self.bench.config.depth > 0
        self.bench.run()


EngineMachine.TestCase.settings = settings(
    max_examples=settings().max_examples * 3 // 2, stateful_step_count=40
)
TestEngine = pytest.mark.slow(EngineMachine.TestCase)
