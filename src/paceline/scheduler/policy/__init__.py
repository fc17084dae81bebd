"""Scheduling policies, one small file each, behind the seam of `core.policy`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from paceline.config.engine import POLICIES, SchedulerConfig
from paceline.core.policy import Policy
from paceline.errors import ConfigError
from paceline.scheduler.policy.deadline import LeastSlack, token_seconds
from paceline.scheduler.policy.fair import FairShare, parse_weights
from paceline.scheduler.policy.fcfs import FirstComeFirstServed
from paceline.scheduler.policy.own import load_policy
from paceline.scheduler.policy.priority import PriorityWithAgeing
from paceline.scheduler.policy.shortest import ShortestFirst
from paceline.scheduler.policy.tail import SoftTail

# What policies read of the config.
POLICY_OPTIONS = frozenset(
    (
        "ageing_s",
        "first_token_s",
        "flood_tokens",
        "long_prefill_share",
        "output_handicap_ms",
        "output_token_cost",
        "prompt_handicap_ms",
        "tenant_weights",
    )
)


def make_policy(config: SchedulerConfig, before: Policy | None = None) -> Policy:
    """The policy a config names. `before` is the one it takes over from: what tenants were served stays known."""
    if ":" in config.scheduling_policy:
        # An operator's own has read its options at start-up; what changes is for whichever takes over from it.
        return before if before is not None else load_policy(config.scheduling_policy, config)
    if config.scheduling_policy == "fair":
        counted = before if isinstance(before, FairShare) else None
        weights = parse_weights(config.tenant_weights)
        return FairShare(
            config.long_prefill_share, weights, config.output_token_cost, config.flood_tokens, counted
        )
    make = _MAKERS.get(config.scheduling_policy)
    if make is None:
        raise ConfigError(f"unknown scheduling policy {config.scheduling_policy!r}")
    return make(config)


def changed_policy(config: SchedulerConfig, name: str, options: Mapping[str, float | str]) -> SchedulerConfig:
    """The config with another policy, for a change while serving."""
    if name not in POLICIES and name != config.scheduling_policy:
        what = "is loaded at start-up only" if ":" in name else "is not known"
        raise ConfigError(f"the scheduling policy {name} {what}; choose one of {', '.join(POLICIES)}")
    unknown = sorted(options.keys() - POLICY_OPTIONS)
    if unknown:
        known = ", ".join(sorted(POLICY_OPTIONS))
        raise ConfigError(f"{', '.join(unknown)} cannot be changed with the policy, only {known}")
    return replace(config, scheduling_policy=name, **options)  # type: ignore[arg-type]


def _deadline(config: SchedulerConfig) -> Policy:
    first_s = math.inf if config.first_token_s is None else config.first_token_s
    return LeastSlack(config.long_prefill_share, token_seconds(config), config.ageing_s, first_s)


def _shortest(config: SchedulerConfig) -> Policy:
    prompt_s, output_s = config.prompt_handicap_ms / 1e3, config.output_handicap_ms / 1e3
    return ShortestFirst(config.long_prefill_share, prompt_s, output_s, config.ageing_s)


_MAKERS: dict[str, Callable[[SchedulerConfig], Policy]] = {
    "fcfs": lambda config: FirstComeFirstServed(config.long_prefill_share),
    "priority": lambda config: PriorityWithAgeing(config.long_prefill_share, config.ageing_s),
    "deadline": _deadline,
    "shortest": _shortest,
    "tail": lambda config: SoftTail(config.long_prefill_share),
}
