"""Scheduling policies: one file each in this folder, which holds one subclass of `paceline.policy.Policy`.

The name of the file is the name of the policy. `config.engine.POLICIES` lists the files; flags, API, live page and
documentation take the names from there. A policy can also be a user's class, named as `module:Class`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module

from paceline.config.engine import POLICIES, SchedulerConfig
from paceline.config.user_class import load_class
from paceline.errors import ConfigError
from paceline.policy import Policy

METHODS = ("order", "victim", "share")  # of a class that is not derived from Policy


def _class_in(module_name: str) -> type[Policy]:
    """The policy that a file of this folder defines."""
    classes = [each for each in vars(import_module(module_name)).values() if isinstance(each, type)]
    (found,) = [each for each in classes if issubclass(each, Policy) and each.__module__ == module_name]
    return found


POLICY_CLASSES: Mapping[str, type[Policy]] = {name: _class_in(f"{__name__}.{name}") for name in POLICIES}
# Options of the config that can be changed together with the policy.
POLICY_OPTIONS = frozenset(("long_prefill_share",)).union(*(kind.options for kind in POLICY_CLASSES.values()))


def make_policy(config: SchedulerConfig, before: Policy | None = None) -> Policy:
    """The policy a config names. `before` is the one it replaces: what tenants were served stays known."""
    name = config.scheduling_policy
    if ":" in name:
        # A user's class has read its options at start-up; changed options are for the policy that replaces it.
        return before if before is not None else load_policy(name, config)
    if name not in POLICY_CLASSES:
        raise ConfigError(f"unknown scheduling policy {name!r}")
    policy = POLICY_CLASSES[name](config)
    if before is not None:
        policy.take_over(before)
    return policy


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


def load_policy(spec: str, config: SchedulerConfig) -> Policy:
    """Import the class that a `module:Class` names and make its policy. Errors are said at start-up, in a sentence."""
    kind = load_class("--scheduling-policy", spec, "my_policies:LongestFirst", METHODS)
    try:
        policy: Policy = with_defaults(kind)(config)
    except Exception as error:
        raise ConfigError(
            f"--scheduling-policy {spec}: the class cannot be called with the config ({type(error).__name__}: {error})"
        ) from error
    return policy


def with_defaults(kind: type) -> type[Policy]:
    """A class with the methods of a policy that is not derived from it, with the defaults of those it does not have."""
    return kind if issubclass(kind, Policy) else type(kind.__name__, (kind, Policy), {})
