"""Keyword arguments of `LLM` and `AsyncLLM`, which are the options of the configs under their vLLM names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.config.engine import EngineConfig, KVConfig, ModelConfig, SchedulerConfig
from paceline.config.options import options_of, pick
from paceline.core.keywords import is_off, not_supported, with_closest
from paceline.errors import ConfigError
from paceline.llm.unsupported import OPTIONS

ENGINE_CONFIGS = (KVConfig, SchedulerConfig, EngineConfig)
# Other names for options: what vLLM calls them.
ALIASES = {"num_gpu_blocks_override": "num_blocks"}
# Known from vLLM, accepted where they ask for what we do anyway.
WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "disable_log_stats": (True, False),
    "disable_custom_all_reduce": (True, False),
    "disable_cascade_attention": (True, False),
    "async_scheduling": (True, False),
    "enable_chunked_prefill": (True,),
    "swap_space": (0,),
    "cpu_offload_gb": (0,),
    "tokenizer_mode": ("auto",),
    "task": ("auto", "generate"),
    "runner": ("auto", "generate"),
    "convert": ("auto", "none"),
}


def split_arguments(model: str | None, given: Mapping[str, Any]) -> tuple[ModelConfig, dict[str, Any]]:
    """The model's config, and the engine options that were given. None means not given."""
    options = {ALIASES.get(name, name): value for name, value in given.items() if value is not None}
    for name in [name for name in options if name in WITHOUT_EFFECT or name in OPTIONS]:
        value = options.pop(name)
        if value not in WITHOUT_EFFECT.get(name, ()) and not is_off(value):
            raise ConfigError(not_supported(f"{name}={value!r:.100}", OPTIONS.get(name, "leave it out")))
    known = {spec.name for config in (ModelConfig, *ENGINE_CONFIGS) for spec in options_of(config)}
    for name in options:
        if name not in known:
            raise ConfigError(with_closest(f"there is no option {name}", name, known))
    own = pick(ModelConfig, options)
    engine = {name: value for name, value in options.items() if name not in own}
    for config in ENGINE_CONFIGS:  # before a model is loaded for nothing
        config(**pick(config, engine))
    if model is not None:
        own["model"] = str(model)
    return ModelConfig(**own), engine
