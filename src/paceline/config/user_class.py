"""Classes of an operator's own, named as `module:Class` on a command line. Errors are said in a sentence, at
start-up."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from paceline.errors import ConfigError


def load_class(option: str, spec: str, example: str, methods: Sequence[str]) -> type:
    """Import the class that `spec` names; it must have `methods`."""
    where = f"{option} {spec}"
    module_name, _, class_name = spec.partition(":")
    if not module_name or not class_name.isidentifier():
        raise ConfigError(f"{where}: give the module and the class, such as {example}")
    try:
        kind = getattr(import_module(module_name), class_name, None)
    except Exception as error:
        raise ConfigError(
            f"{where}: {module_name} cannot be imported ({type(error).__name__}: {error}); "
            "is its folder on PYTHONPATH?"
        ) from error
    if not isinstance(kind, type):
        raise ConfigError(f"{where}: {module_name} has no class {class_name}")
    missing = [name for name in methods if not callable(getattr(kind, name, None))]
    if missing:
        raise ConfigError(f"{where}: the class lacks {', '.join(missing)}; it needs {', '.join(methods)}")
    return kind
