"""Keyword arguments of `LLM` and `AsyncLLM`, which are the options of the configs under their vLLM names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from paceline.config import EngineConfig, KVConfig, ModelConfig, SchedulerConfig
from paceline.errors import ConfigError

# Other names for options: what vLLM calls them.
ALIASES = {"num_gpu_blocks_override": "num_blocks"}
# Known from vLLM, accepted where they ask for what we do anyway.
WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "trust_remote_code": (False,),
    "disable_log_stats": (True, False),
    "enable_chunked_prefill": (True,),
    "swap_space": (0,),
    "tokenizer_mode": ("auto",),
}


def split_arguments(model: str | None, given: Mapping[str, Any]) -> tuple[ModelConfig, dict[str, Any]]:
    """The model's config, and the engine options that were given. None means not given."""
    options = {ALIASES.get(name, name): value for name, value in given.items() if value is not None}
    for name in [name for name in options if name in WITHOUT_EFFECT]:
        value = options.pop(name)
        if value not in WITHOUT_EFFECT[name]:
            raise ConfigError(f"{name}={value!r} is not supported")
    own = _names(ModelConfig)
    engine = _names(KVConfig) | _names(SchedulerConfig) | _names(EngineConfig)
    for name in options:
        if name not in own | engine:
            close = difflib.get_close_matches(name, own | engine, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"there is no option {name}{hint}")
    mine = {name: value for name, value in options.items() if name in own}
    if model is not None:
        mine["model"] = str(model)
    given = {name: value for name, value in options.items() if name not in own}
    for config in (KVConfig, SchedulerConfig, EngineConfig):  # before a model is loaded for nothing
        config(**{name: value for name, value in given.items() if name in _names(config)})
    return ModelConfig(**mine), given


def _names(config: type) -> set[str]:
    return {spec.name for spec in fields(config) if "help" in spec.metadata}
