"""An operator's own policy, named as `module:Class`.

The class is called with the scheduler's config and must have the methods of `core.policy.Policy`. What is wrong is
said at start-up, in a sentence.
"""

from __future__ import annotations

from importlib import import_module

from paceline.config.engine import SchedulerConfig
from paceline.core.policy import Policy
from paceline.errors import ConfigError

METHODS = ("order", "victim", "share")


def load_policy(spec: str, config: SchedulerConfig) -> Policy:
    """Import the class a `module:Class` names and make its policy."""
    where = f"--scheduling-policy {spec}"
    module_name, _, class_name = spec.partition(":")
    if not module_name or not class_name.isidentifier():
        raise ConfigError(f"{where}: give the module and the class, such as my_policies:LongestFirst")
    try:
        kind = getattr(import_module(module_name), class_name, None)
    except Exception as error:
        raise ConfigError(
            f"{where}: {module_name} cannot be imported ({type(error).__name__}: {error}); "
            "is its folder on PYTHONPATH?"
        ) from error
    if not isinstance(kind, type):
        raise ConfigError(f"{where}: {module_name} has no class {class_name}")
    missing = [name for name in METHODS if not callable(getattr(kind, name, None))]
    if missing:
        raise ConfigError(f"{where}: the class lacks {', '.join(missing)}; a policy has {', '.join(METHODS)}")
    try:
        policy: Policy = kind(config)
    except Exception as error:
        raise ConfigError(
            f"{where}: the class cannot be called with the config ({type(error).__name__}: {error})"
        ) from error
    return policy
