"""The pace of a GPU: how long a step with prompts should take, and a table of what steps take, measured at the start.

The steps are those that are replayed while serving, of dummy rows. Owns the measuring; what is made of
the table is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from paceline.config.engine import EngineConfig, PreemptionCosts, SchedulerConfig, StepCosts
from paceline.config.sized import weighs_preemption, with_costs, with_drafts
from paceline.config.speculative import DraftConfig
from paceline.runner.gpu.graphs import TOKEN_BUCKETS
from paceline.runner.sizing import block_seconds

if TYPE_CHECKING:
    from paceline.runner.gpu.runner import GPURunner
    from paceline.runner.stores.store_level import StoreLevel

PACE = 7.1  # how much longer than a step of 64 decoding rows one with prompts should take
FEWEST = 256  # tokens of prompts a step carries at least
HELD_BEYOND = 1.3  # of a target between tokens: a controller may try steps that are longer by this factor
MARGIN = 1.25  # steps that take longer than any should by this factor are not measured
ROWS, MORE_ROWS = 64, 256
SPAN = 1024  # tokens of the step that tells what a long prompt costs


class Measurable(Protocol):
    """What is measured of a runner."""

    max_slots: int

    def decode_seconds(self, slots: int) -> float: ...
    def mixed_seconds(self, num_tokens: int, num_decode: int, start: int = 0) -> float: ...
    def context_seconds(self) -> float: ...


class Drafting(Protocol):
    """What is measured of steps with drafts."""

    @property
    def draft_sizes(self) -> tuple[int, ...]: ...
    def decode_seconds(self, slots: int) -> float: ...
    def drafted_seconds(self, num_tokens: int) -> float: ...


def with_pace(scheduler: SchedulerConfig, runner: Measurable) -> SchedulerConfig:
    """`scheduler` with a target, unless it has one, and what steps take; a step has no more tokens than keep it."""
    target_ms = scheduler.step_target_ms
    if target_ms == 0.0 and not scheduler.has_dial:
        return scheduler
    pace_ms = target_ms or PACE * runner.decode_seconds(min(ROWS, runner.max_slots)) * 1e3
    target_ms = pace_ms if target_ms is None else target_ms
    longest_ms = max(pace_ms * scheduler.step_stretch, (scheduler.target_itl_p99_ms or 0.0) * HELD_BEYOND)
    longest_s = longest_ms / 1e3 * MARGIN
    costs = measured_costs(runner, scheduler, longest_s)
    most = min(scheduler.max_num_batched_tokens, costs.sizes[-1])
    return replace(scheduler, step_target_ms=target_ms, step_costs=costs, max_num_batched_tokens=most)


def measured_costs(runner: Measurable, scheduler: SchedulerConfig, longest_s: float) -> StepCosts:
    """What steps take on this device, up to those that take `longest_s`."""
    longest = scheduler.max_model_len
    most = min(scheduler.max_num_batched_tokens, longest * runner.max_slots)
    rows = min(ROWS, max(0, min(runner.max_slots, most) // 2 - 1))
    product_s = _product_seconds(runner, min(SPAN, most - rows), longest, rows)

    def without_attention(size: int, num_rows: int) -> float:
        return runner.mixed_seconds(size, num_rows) - product_s * _products(size - num_rows, longest)

    many, size = min(MORE_ROWS, runner.max_slots // 2), min(SPAN, most)
    row_s = 0.0
    if rows < many < size:
        row_s = _slope(partial(without_attention, size), rows, many)
    sizes = [size for size in TOKEN_BUCKETS if FEWEST <= size <= most] or [most]
    seconds: list[float] = []
    for size in sizes:
        taken_s = without_attention(size, rows) - row_s * rows
        seconds.append(max(taken_s, 0.0, *seconds[-1:]))
        if taken_s > longest_s:
            break
    return StepCosts(
        sizes=tuple(sizes[: len(seconds)]),
        seconds=tuple(seconds),
        context_s=runner.context_seconds(),
        product_s=product_s,
        row_s=row_s,
    )


def measured_drafts(runner: Drafting, drafts: DraftConfig) -> DraftConfig:
    """`drafts` with what steps of each size take; the smallest is a single row, which has products of its own."""
    measured = [runner.decode_seconds(1), *(runner.drafted_seconds(size) for size in runner.draft_sizes)]
    # None takes longer than a larger one: where one seems to, something else was in its way.
    seconds = np.minimum.accumulate(measured[::-1])[::-1]
    return replace(drafts, sizes=(1, *runner.draft_sizes), seconds=tuple(seconds.tolist()))


def device_preemption_costs(
    runner: Measurable, scheduler: SchedulerConfig, block_s: float
) -> PreemptionCosts:
    """What it costs to compute a token again and to wait for a step, beside a block's copy that takes `block_s`."""
    costs = scheduler.step_costs
    if costs is not None:
        token_s, product_s = costs.seconds[-1] / costs.sizes[-1], costs.product_s
    else:
        count = min(SPAN, scheduler.max_num_batched_tokens, scheduler.max_model_len * runner.max_slots)
        token_s, product_s = runner.mixed_seconds(count, 0) / count, 0.0
    step_s = runner.decode_seconds(min(ROWS, runner.max_slots))
    return PreemptionCosts(token_s=token_s, product_s=product_s, block_s=block_s, step_s=step_s)


def _product_seconds(runner: Measurable, num_tokens: int, longest: int, rows: int) -> float:
    """More for each token before one that is computed: the same span at the beginning of a prompt and at its end."""
    span = min(num_tokens, longest // 2)
    start = longest - span
    if span < 1 or start < span:
        return 0.0
    return _slope(lambda at: runner.mixed_seconds(rows + span, rows, at), 0, start) / span


def _slope(seconds: Callable[[int], float], low: int, high: int) -> float:
    return max(0.0, (seconds(high) - seconds(low)) / (high - low))


def _products(num_tokens: int, longest: int) -> float:
    """Pairs of tokens in spans that begin at the beginning of their prompts."""
    number = max(1, num_tokens // longest)
    return number * 0.5 * min(num_tokens, longest) ** 2


def measured_config(
    config: EngineConfig,
    runner: GPURunner,
    drafts: DraftConfig | None,
    store: StoreLevel | None,
    *,
    has_pace: bool,
) -> EngineConfig:
    """With what depends on the seconds of this card."""
    if drafts is not None:
        config = with_drafts(config, measured_drafts(runner, drafts))
    if has_pace or config.scheduler.has_dial:
        paced = with_pace(config.scheduler, runner)
        config = replace(config, scheduler=paced)
    if weighs_preemption(config):
        block_s = block_seconds(config, runner.copy_out_and_back)
        prices = device_preemption_costs(runner, config.scheduler, block_s)
        config = with_costs(config, prices if store is None else store.with_rates(prices))
    return config
