"""What one seed decides: the engine's configuration, the traffic and the faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from paceline.config.engine import (
    MODES,
    EngineConfig,
    GroupSpec,
    KVConfig,
    LearnedSteps,
    PreemptionCosts,
    SchedulerConfig,
    StepCosts,
)
from paceline.config.speculative import DraftConfig

# Steps of a world take 0.5, 2 or 10 ms: sizes go up and down all the time.
LEARNED = LearnedSteps(
    fixed_s=2e-4, token_s=1e-4, beside_s=2e-3, alone_s=4e-3, least=4, most=96, most_alone=128, product_s=2e-6
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Chances per step, and shapes of requests."""

    add: float
    burst: int  # most requests added at once
    crowd: int  # live requests at which arrivals pause
    flood: float  # chance of more arrivals at once than the queue takes
    abort: float
    fork: float
    prune: float
    preempt: float
    pause: float
    block: float
    reprioritize: float
    deadline: float
    stop_string: float
    reset_cache: float
    longest_prompt: int
    longest_output: int
    stop_chance: float  # chance of a token being a stop token
    num_tenants: int
    num_prefixes: int
    guided_share: float  # requests whose answers have a structure


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Chances of things going wrong."""

    step_failure: float
    nan_row: float
    alloc_failure: float
    cursed: float  # requests whose hooks raise
    same_keys: bool  # every block key is the same: only the payload tells blocks apart
    late_copies: int


def draw_config(rng: random.Random) -> EngineConfig:
    """A small engine, often short of something."""
    # Steps of many rows come from worlds made for them, with blocks for nearly all of them. In a crowd everything
    # happens at once and is dear to check; in the others a few rows are all there is.
    kind = rng.choices(("wide", "crowd", "narrow"), (0.5, 0.02, 0.48))[0]
    block_size = rng.choice((8, 8, 16) if kind == "wide" else (1, 2, 4, 4, 8, 16))
    max_num_seqs = rng.choice(
        {"wide": (9, 10, 10, 11), "crowd": (6, 12, 16, 24), "narrow": (1, 1, 2, 3)}[kind]
    )
    # Few entries in a table and few blocks in a pool: the same things happen, for less.
    longest = min(rng.choice((128, 192) if kind == "wide" else (64, 96, 128, 192)), 48 * block_size)
    if rng.random() < 0.03:
        longest = 256
    blocks_of_longest = -(-longest // block_size)
    pressure = rng.choice((0.5, 0.7, 0.9) if kind == "wide" else (0.1, 0.2, 0.4))
    num_blocks = 2 + blocks_of_longest + int(max_num_seqs * blocks_of_longest * pressure)
    if kind != "wide" and rng.random() < 0.08:  # too small for the longest requests: they are refused
        num_blocks = 2 + blocks_of_longest // rng.choice((2, 4))
    groups: tuple[GroupSpec, ...] = (GroupSpec(),)
    if rng.random() < (0.08 if kind == "wide" else 0.2):
        window = rng.choice((3, 8, 17))
        groups = (GroupSpec(), GroupSpec(window=window, num_blocks=num_blocks + rng.choice((0, 8))))
    swap = rng.random() < 0.6
    return EngineConfig(
        kv=KVConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            num_host_blocks=int(num_blocks * rng.choice((0.3, 1, 2))) if swap else 0,
            enable_prefix_caching=rng.random() < 0.9,
            eviction="lru"
            if num_blocks % 4 == 0
            else "reuse",  # not drawn: what is drawn later stays the same
            groups=groups,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=rng.choice((16, 32, 64) if kind == "wide" else (12, 24, 32, 64)),
            max_model_len=longest,
            scheduling_policy=rng.choice(("fcfs", "fcfs", "priority")),
            ageing_s=rng.choice((0.05, 1.0)),
            mode=rng.choices(MODES, (1, 0, 0) if kind == "wide" else (0.76, 0.12, 0.12))[0],
            batch_size=rng.choice((2, 4, 8)),
            batch_timeout_s=0.02,
            static_flush_s=0.1,
            static_order=rng.choice(("fifo", "sorted")),
            long_prefill_share=rng.choice((0.25, 0.5, 1.0)),
            watermark=rng.choice((0.0, 0.01, 0.1)),
            preemption="swap" if swap else "recompute",
            max_preemptions=rng.choice((1, 4, 4)),
            max_queue=rng.choice((6, 16)),
            max_queue_tokens=rng.choice((300, 10_000)),
            defer_shared_prefix=rng.random() < 0.8,
        ),
        depth=rng.choice((0, 0, 1, 1, 1, 2, 3)),
        check_every=0,
    )


def draw_pace(rng: random.Random, config: EngineConfig) -> EngineConfig:
    """Some engines keep a pace: the tokens of a step follow from what its rows read and from which requests wait. Some
    take short requests first. Of the others some have larger steps while no row decodes, and learn their sizes."""
    if rng.random() < 0.8:
        alone = replace(config.scheduler, max_num_prompt_tokens=rng.choice((0, 0, 40, 100)))
        if alone.max_num_prompt_tokens == 40 and alone.mode == "continuous":
            alone = replace(alone, learned_steps=LEARNED)
        return replace(config, scheduler=alone)
    policy = "shortest" if rng.random() < 0.3 else config.scheduler.scheduling_policy
    sizes = tuple(sorted(rng.sample((2, 6, 12, 16, 24, 32, 48, 64, 96, 128), rng.randint(1, 6))))
    costs = StepCosts(
        sizes=sizes,
        seconds=tuple(1e-3 + 1e-4 * size for size in sizes),
        context_s=rng.choice((0.0, 1e-6, 2e-5)),
        product_s=rng.choice((0.0, 1e-6)),
        row_s=rng.choice((0.0, 5e-5)),
    )
    paced = replace(
        config.scheduler,
        scheduling_policy=policy,
        prompt_handicap_ms=rng.choice((0.1, 5.0)),
        output_handicap_ms=0.0,
        step_costs=costs,
        step_target_ms=rng.choice((0.5, 2.0, 4.0, 8.0)),
        step_stretch=rng.choice((1.0, 1.7, 3.0)),
        step_patience_s=rng.choice((0.005, 0.05)),
    )
    return replace(config, scheduler=paced)


def draw_drafts(rng: random.Random, config: EngineConfig) -> EngineConfig:
    """Some engines verify drafts."""
    if rng.random() < 0.7 or config.scheduler.mode != "continuous":
        return config
    drafts = DraftConfig(width=rng.choice((1, 3, 3, 7)))
    return replace(config, scheduler=replace(config.scheduler, drafts=drafts))


def draw_levels(rng: random.Random, config: EngineConfig) -> EngineConfig:
    """Some engines keep prefixes in host memory and on a disk."""
    kv, scheduler = config.kv, config.scheduler
    plain = scheduler.mode == "continuous" and kv.enable_prefix_caching and len(kv.groups) == 1
    if rng.random() < 0.55 or not plain:
        return config
    costs = scheduler.preemption_costs or PreemptionCosts(token_s=1e-2)
    costs = replace(
        costs,
        token_s=rng.choice((1e-4, 1e-3, 1e-2, 1e-2)),
        block_s=rng.choice((0.0, 1e-4, 1e-3, 0.1)),
        step_s=rng.choice((0.0, 2e-3)),
        disk_block_s=rng.choice((1e-5, 1e-3, 1e-2)),
        disk_write_s=rng.choice((0.0, 1e-3, 0.02, 1.0)),
    )
    num_host = 2 + int(kv.num_blocks * rng.choice((0.1, 0.3, 1)))
    num_disk = int(kv.num_blocks * rng.choice((0, 3, 6)))
    return replace(
        config,
        kv=replace(
            kv,
            cache_on_host=True,
            num_host_blocks=num_host,
            num_disk_blocks=num_disk,
            # Not drawn from `rng`, so that the rest of a seed is what it was.
            num_staging_blocks=num_host if num_disk and (num_host + num_disk) % 3 == 0 else 0,
        ),
        scheduler=replace(scheduler, preemption_costs=costs),
    )


def more_prefixes(config: EngineConfig, traffic: Traffic) -> Traffic:
    """Where there are levels: more beginnings than the device holds, and prompts that are long enough for them."""
    if not config.kv.cache_on_host:
        return traffic
    longest = config.scheduler.max_model_len
    return replace(
        traffic,
        num_prefixes=24,
        longest_prompt=2 * longest // 3,
        longest_output=longest // 8,
        num_tenants=1,
        abort=0.02,
        reset_cache=0.002 if traffic.reset_cache else 0.0,
    )


def draw_traffic(rng: random.Random, config: EngineConfig) -> Traffic:
    longest = config.scheduler.max_model_len
    busy = rng.random() < 0.85
    many = config.scheduler.max_num_seqs > 8
    return Traffic(
        add=rng.choice((0.3, 0.5) if many else (0.2, 0.35)) if busy or many else 0.04,
        burst=rng.choice((2, 4, 6) if many else (1, 3)) if busy else 2,
        crowd=int(rng.choice((1.0, 1.3, 1.6)) * config.scheduler.max_num_seqs) + 1,
        flood=rng.choice((0.0, 0.002, 0.01)),
        abort=rng.choice((0.0, 0.02, 0.1)),
        fork=rng.choice((0.0, 0.03, 0.08)),
        prune=rng.choice((0.0, 0.03, 0.06)),
        preempt=rng.choice((0.0, 0.02, 0.1)),
        pause=rng.choice((0.0, 0.01)),
        block=rng.choice((0.0, 0.01)),
        reprioritize=rng.choice((0.0, 0.02)),
        deadline=rng.choice((0.0, 0.02)),
        stop_string=rng.choice((0.0, 0.01)),
        reset_cache=rng.choice((0.0, 0.0, 0.002)),
        longest_prompt=rng.choice((8, longest // 4, longest // 3)),
        longest_output=longest,
        stop_chance=rng.choice((0.0, 0.005, 0.02)),
        num_tenants=rng.choice((1, 3)),
        num_prefixes=rng.choice((1, 4)),
        guided_share=rng.choice((0.0, 0.0, 0.3)),
    )


def draw_trouble(rng: random.Random) -> Trouble:
    return Trouble(
        step_failure=rng.choice((0.0, 0.0, 0.0, 0.004)),
        nan_row=rng.choice((0.0, 0.0, 0.003)),
        alloc_failure=rng.choice((0.0, 0.0, 0.0, 0.05)),
        cursed=rng.choice((0.0, 0.0, 0.03)),
        same_keys=rng.random() < 0.05,
        late_copies=rng.choice((0, 2)),
    )
