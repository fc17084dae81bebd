"""The config of an engine once all its sizes are known, what follows from it, and what is added when its steps have
been measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.config.encoder import EncoderWork
from paceline.config.engine import (
    EngineConfig,
    GroupSpec,
    KVConfig,
    PreemptionCosts,
    SchedulerConfig,
)
from paceline.config.options import pick
from paceline.config.speculative import DraftConfig
from paceline.errors import ConfigError

_SLABS = ("slab_blocks", "least_blocks", "most_slabs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What follows from a config: sizes that are computed, never configured."""

    num_rows: int  # rows of the row table: a freed row is used again only when the steps before it are done
    max_blocks_per_row: int

    @classmethod
    def of(cls, config: EngineConfig) -> Capacity:
        # A finished row of a padded batch goes on decoding beside the longest one: room for both lengths.
        longest = config.scheduler.max_model_len * (1 if config.scheduler.mode == "continuous" else 2)
        return cls(
            num_rows=config.scheduler.max_num_seqs * (config.depth + 1),
            max_blocks_per_row=math.ceil(longest / config.kv.block_size) + 1,
        )


def with_drafts(config: EngineConfig, drafts: DraftConfig) -> EngineConfig:
    if config.scheduler.mode != "continuous":
        raise ConfigError(
            "--speculative-config needs --mode continuous: rows of a padded batch go on together"
        )
    return replace(config, scheduler=replace(config.scheduler, drafts=drafts))


def with_pools(config: EngineConfig, pools: tuple[str, ...], *, only: bool) -> EngineConfig:
    """With the kinds of vectors that its runner makes, and whether it makes nothing else."""
    return replace(config, scheduler=replace(config.scheduler, pools=pools, only_pools=only))


def with_encoder(config: EngineConfig, work: EncoderWork) -> EngineConfig:
    """With an encoder of pictures."""
    return replace(config, scheduler=replace(config.scheduler, encoder=work))


def weighs_preemption(config: EngineConfig) -> bool:
    """Whether anything is decided by what preemption costs; if not, nothing is measured."""
    return config.kv.num_host_blocks > 0 or config.scheduler.scheduling_policy != "fcfs"


def with_costs(config: EngineConfig, costs: PreemptionCosts) -> EngineConfig:
    return replace(config, scheduler=replace(config.scheduler, preemption_costs=costs))


def engine_config(windows: Sequence[int | None], sizes: Mapping[str, Any]) -> EngineConfig:
    """Of an engine whose layer groups have these windows; `sizes` holds fields of its configs by name."""
    return EngineConfig(
        kv=KVConfig(
            **pick(KVConfig, sizes),
            groups=tuple(GroupSpec(window=window) for window in windows),
            **{name: sizes[name] for name in ("cache_on_host", *_SLABS) if name in sizes},
        ),
        scheduler=_scheduler_config(sizes),
        **pick(EngineConfig, sizes),
    )


def _scheduler_config(sizes: Mapping[str, Any]) -> SchedulerConfig:
    config = SchedulerConfig(**pick(SchedulerConfig, sizes), pools=sizes.get("pools", ()))
    # A pace and a dial learn in their own way; padded batches have one size.
    if config.step_target_ms or config.has_dial or config.mode != "continuous":
        return config
    return replace(config, learned_steps=sizes.get("learned_steps"))
