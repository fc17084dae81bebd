"""The only file that knows all classes: it puts an engine together from a config, a runner and a clock."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from paceline.config import Capacity, EngineConfig
from paceline.core.clock import Clock, MonotonicClock
from paceline.core.hooks import RequestHooks
from paceline.core.plan import Runner, StepChecker
from paceline.core.policy import Policy
from paceline.core.recorder import StepRecorder
from paceline.engine.engine import Engine
from paceline.engine.keys import PrefixKeyHooks
from paceline.kv.block_pool import BlockPool
from paceline.kv.manager import KVManager
from paceline.kv.prefix import KeyMaker
from paceline.scheduler.invariants import InvariantViolation, SampledChecker
from paceline.scheduler.modes import make_mode
from paceline.scheduler.policy import make_policy
from paceline.scheduler.rows import Rows
from paceline.scheduler.scheduler import Scheduler
from paceline.scheduler.state import SchedulerState

_logger = logging.getLogger("paceline")


def build_scheduler(
    config: EngineConfig,
    clock: Clock,
    hooks: RequestHooks,
    *,
    policy: Policy | None = None,
    make_pool: Callable[..., BlockPool] = BlockPool,
) -> Scheduler:
    """A scheduler with its own row table and KV cache."""
    capacity = Capacity.of(config)
    mode = make_mode(config.scheduler)
    # A padded rectangle has no use for a shared beginning: every row computes all of it.
    kv_config = replace(config.kv, enable_prefix_caching=False) if mode.keeps_finished else config.kv
    kv = KVManager(
        kv_config,
        capacity,
        max_chunk=config.scheduler.max_num_batched_tokens,
        at_once=mode.keeps_finished,
        make_pool=make_pool,
    )
    rows = Rows(capacity.num_rows, config.scheduler.max_model_len)
    state = SchedulerState(
        config.scheduler,
        kv,
        rows,
        policy=policy if policy is not None else make_policy(config.scheduler),
        mode=mode,
        clock=clock,
        hooks=hooks,
    )
    return Scheduler(state)


def build_engine(
    config: EngineConfig,
    runner: Runner,
    *,
    clock: Clock | None = None,
    hooks: RequestHooks | None = None,
    recorder: StepRecorder | None = None,
    policy: Policy | None = None,
    make_pool: Callable[..., BlockPool] = BlockPool,
    make_checker: Callable[[Scheduler], StepChecker] | None = None,
) -> Engine:
    """An engine around `runner`. Without hooks of its own it makes prefix keys from token ids; without a checker of
    its own it looks at the invariants every `config.check_every` steps and logs what it finds."""
    clock = clock if clock is not None else MonotonicClock()
    hooks = hooks if hooks is not None else PrefixKeyHooks(KeyMaker(config.kv.block_size))
    scheduler = build_scheduler(config, clock, hooks, policy=policy, make_pool=make_pool)
    checker: StepChecker | None = None
    if make_checker is not None:
        checker = make_checker(scheduler)
    elif config.check_every:
        checker = SampledChecker(scheduler, config.check_every, _log_violation)
    return Engine(
        scheduler, runner, clock=clock, hooks=hooks, depth=config.depth, recorder=recorder, checker=checker
    )


def _log_violation(violation: InvariantViolation) -> None:
    _logger.error("an invariant does not hold: %s", violation)
