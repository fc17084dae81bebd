"""Scheduling policies, one small file each, behind the seam of `core.policy`."""

from __future__ import annotations

from paceline.config import SchedulerConfig
from paceline.core.policy import Policy
from paceline.errors import ConfigError
from paceline.scheduler.policy.fcfs import FirstComeFirstServed
from paceline.scheduler.policy.priority import PriorityWithAgeing
from paceline.scheduler.policy.short_first import ShortPromptsFirst


def make_policy(config: SchedulerConfig) -> Policy:
    """The policy a config names."""
    if config.scheduling_policy == "fcfs":
        return FirstComeFirstServed(config.long_prefill_share)
    if config.scheduling_policy == "priority":
        return PriorityWithAgeing(config.long_prefill_share, config.ageing_s)
    if config.scheduling_policy == "short-first":
        return ShortPromptsFirst(config.long_prefill_share, config.prompt_handicap_ms / 1e3)
    raise ConfigError(f"unknown scheduling policy {config.scheduling_policy!r}")
