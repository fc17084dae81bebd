"""Keyword arguments of `LLM` and `AsyncLLM`, which are the options of the configs under their vLLM names.

Also what scripts written for vLLM may ask of them that Paceline does not do, and what to do instead.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from paceline.config.engine import EngineConfig, KVConfig, ModelConfig, SchedulerConfig
from paceline.config.options import options_of, pick
from paceline.errors import ConfigError, Hints, PacelineError, did_you_mean, is_off, not_supported, refuse

ENGINE_CONFIGS = (KVConfig, SchedulerConfig, EngineConfig)
# Other names for options: what vLLM calls them.
ALIASES = {"num_gpu_blocks_override": "num_blocks"}
# Known from vLLM, accepted where they ask for what we do anyway.
WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("pipeline_parallel_size", "data_parallel_size"), (1,)),
    **dict.fromkeys(("disable_log_stats", "disable_custom_all_reduce"), (True, False)),
    **dict.fromkeys(("disable_cascade_attention", "async_scheduling"), (True, False)),
    "enable_chunked_prefill": (True,),
    **dict.fromkeys(("swap_space", "cpu_offload_gb"), (0,)),
    "tokenizer_mode": ("auto",),
    **dict.fromkeys(("task", "runner"), ("auto", "generate")),
    "convert": ("auto", "none"),
}


def split_arguments(model: str | None, given: Mapping[str, Any]) -> tuple[ModelConfig, dict[str, Any]]:
    """The model's config, and the engine options that were given. None means not given."""
    options = {ALIASES.get(name, name): value for name, value in given.items() if value is not None}
    for name in [name for name in options if name in WITHOUT_EFFECT or name in OPTIONS]:
        value = options.pop(name)
        if value not in WITHOUT_EFFECT.get(name, ()) and not is_off(value):
            raise ConfigError(not_supported(f"{name}={value!r:.100}", OPTIONS.get(name, "leave it out")))
    for name in ("limit_mm_per_prompt", "mm_processor_kwargs"):  # mappings, as vLLM has them
        if isinstance(options.get(name), Mapping):
            options[name] = json.dumps(options[name])
    known = {spec.name for config in (ModelConfig, *ENGINE_CONFIGS) for spec in options_of(config)}
    for name in options:
        if name not in known:
            raise ConfigError(f"there is no option {name}{did_you_mean(name, known)}")
    own = pick(ModelConfig, options)
    engine = {name: value for name, value in options.items() if name not in own}
    for config in ENGINE_CONFIGS:  # before a model is loaded for nothing
        config(**pick(config, engine))
    if model is not None:
        own["model"] = str(model)
    return ModelConfig(**own), engine


_LORA = "give LoRARequest(name, number, folder) as lora_request; it is read when it is first used"
_PROMPT_ADAPTER = "prompt adapters cannot be loaded; LoRA adapters can: lora_request"
_MEDIA = "give pictures in messages to chat(); audio and video are not read"
_POOLING = "use embed, score, classify or rerank of LLM"
_ONLY_LLM = "LLM has it, and a server answers /v1/embeddings"
_PROFILE = "record a run with run_log='run.jsonl.gz' and look at it with `paceline trace`"
_SCHEMA = "give SamplingParams(structured_outputs={'json': schema}); there is one backend"
_KERNELS = "kernels and graphs follow from the model; enforce_eager=True leaves graphs out"
_ONE_PROCESS = "the model runs in one process; start a second one for another device"

# Keyword arguments of `generate` and `chat`.
CALLS: Hints = {
    "prompt_adapter_request": _PROMPT_ADAPTER,
    "guided_options_request": _SCHEMA,
    "pooling_params": _POOLING,
    "mm_processor_kwargs": _MEDIA,
    "prompt_token_ids": 'give them as the prompt: {"prompt_token_ids": [...]}',
    "chat_template_content_format": "the template decides; leave it out",
    "tokenization_kwargs": "give token ids as the prompt to tokenize it in another way",
    "truncate_prompt_tokens": "shorten the prompt before the call",
    "trace_headers": "spans are made by a server: paceline serve --otlp-endpoint",
    "data_parallel_rank": _ONE_PROCESS,
}
# Keys of a prompt that is a mapping.
PROMPT_KEYS: Hints = {
    **dict.fromkeys(("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"), _MEDIA),
    "prompt_embeds": "a prompt is text or token ids",
    **dict.fromkeys(("encoder_prompt", "decoder_prompt"), "models are decoders; give one prompt"),
}
# Keyword arguments of the classes themselves: what a machine or a model of another kind needs.
OPTIONS: Hints = {
    **dict.fromkeys(("pipeline_parallel_size", "data_parallel_size"), _ONE_PROCESS),
    **dict.fromkeys(("enable_expert_parallel", "distributed_executor_backend"), _ONE_PROCESS),
    "trust_remote_code": "no code from a model is run; take a model of a supported architecture",
    "speculative_model": 'name it in speculative_config: \'{"model": "FOLDER"}\'',
    "allowed_local_media_path": "chat() opens any path that it is given; leave it out",
    "enable_chunked_prefill": "prompts are always computed in chunks; see max_num_batched_tokens",
    "swap_space": "give num_host_blocks, in KV blocks",
    "cpu_offload_gb": "weights stay on one device; take a smaller or quantised model",
    **dict.fromkeys(("task", "runner", "convert", "pooler_config", "override_pooler_config"), _POOLING),
    "hf_overrides": "the model's config.json decides; change it there",
    "hf_token": "set the environment variable HF_TOKEN",
    "tokenizer_revision": "give tokenizer a folder that holds the one you want",
    "tokenizer_mode": "the tokenizer's own files decide",
    "chat_template": "give it to chat(): llm.chat(messages, chat_template=...)",
    "logits_processors": "use logit_bias, allowed_token_ids or bad_words of SamplingParams",
    **dict.fromkeys(("guided_decoding_backend", "structured_outputs_config"), _SCHEMA),
    **dict.fromkeys(("compilation_config", "attention_config"), _KERNELS),
    "profiler_config": _PROFILE,
    "preemption_mode": "give preemption: auto, recompute or swap",
    "served_model_name": "it belongs to a server: paceline serve --served-model-name",
}
# Methods of the classes.
METHODS: Hints = {
    **dict.fromkeys(("encode", "reward"), _POOLING),
    **dict.fromkeys(("embed", "classify", "score", "rerank"), _ONLY_LLM),  # of AsyncLLM
    "beam_search": "use search('beam', prompt, width=...)",
    **dict.fromkeys(("start_profile", "stop_profile"), _PROFILE),
    **dict.fromkeys(("add_lora", "remove_lora", "list_loras", "pin_lora"), _LORA),
    **dict.fromkeys(("sleep", "wake_up"), "shut it down and make another one"),
    **dict.fromkeys(("collective_rpc", "apply_model"), _ONE_PROCESS),
    "get_metrics": "every output has its own metrics; a server has /metrics",
}


class UnsupportedMethod(PacelineError, AttributeError):
    """A method that vLLM's classes have and these do not."""


def check_call(owner: Callable[..., object], given: dict[str, Any]) -> None:
    """Refuse keyword arguments of a call that its signature does not have."""
    if given:
        refuse(f"{owner.__name__}()", given, CALLS, list(inspect.signature(owner).parameters))


def unsupported_method(owner: str, name: str) -> UnsupportedMethod | None:
    hint = METHODS.get(name)
    return None if hint is None else UnsupportedMethod(not_supported(f"{owner}.{name}", hint))
