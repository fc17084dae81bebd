"""What scripts written for vLLM may ask of `LLM` and `AsyncLLM` that Paceline does not do, and what to do instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from paceline.core.keywords import Hints, not_supported, refuse
from paceline.errors import PacelineError

_LORA = "adapters cannot be loaded; merge it into the weights and load the merged model"
_MEDIA = "models read text only; leave images, audio and video out"
_POOLING = "models generate text; use an embedding or ranking library for vectors and scores"
_PROFILE = "record a run with run_log='run.jsonl.gz' and look at it with `paceline trace`"
_ONE_PROCESS = "the model runs in one process; start a second one for another device"

# Keyword arguments of `generate` and `chat`.
CALLS: Hints = {
    "lora_request": _LORA,
    "prompt_adapter_request": _LORA,
    "guided_options_request": "answers are not constrained to a schema; describe the format in the prompt",
    "pooling_params": _POOLING,
    "mm_processor_kwargs": _MEDIA,
    "prompt_token_ids": 'give them as the prompt: {"prompt_token_ids": [...]}',
    "tools": "there is no tool calling; describe the functions in a message and read the answer",
    "chat_template_content_format": "the template decides; leave it out",
    "tokenization_kwargs": "give token ids as the prompt to tokenize it in another way",
    "truncate_prompt_tokens": "shorten the prompt before the call",
    "trace_headers": "spans are made by a server: paceline serve --otlp-endpoint",
    "data_parallel_rank": _ONE_PROCESS,
}
# Keys of a prompt that is a mapping.
PROMPT_KEYS: Hints = {
    "multi_modal_data": _MEDIA,
    "multi_modal_uuids": _MEDIA,
    "mm_processor_kwargs": _MEDIA,
    "prompt_embeds": "a prompt is text or token ids",
    "encoder_prompt": "models are decoders; give one prompt",
    "decoder_prompt": "models are decoders; give one prompt",
}
# Keyword arguments of the classes themselves: what a machine or a model of another kind needs.
OPTIONS: Hints = {
    "tensor_parallel_size": _ONE_PROCESS,
    "pipeline_parallel_size": _ONE_PROCESS,
    "data_parallel_size": _ONE_PROCESS,
    "enable_expert_parallel": _ONE_PROCESS,
    "distributed_executor_backend": _ONE_PROCESS,
    "trust_remote_code": "no code from a model is run; take a model of a supported architecture",
    "enable_lora": _LORA,
    "max_loras": _LORA,
    "max_lora_rank": _LORA,
    "speculative_config": "tokens are computed one at a time; leave it out",
    "speculative_model": "tokens are computed one at a time; leave it out",
    "limit_mm_per_prompt": _MEDIA,
    "mm_processor_kwargs": _MEDIA,
    "allowed_local_media_path": _MEDIA,
    "enable_chunked_prefill": "prompts are always computed in chunks; see max_num_batched_tokens",
    "swap_space": "give num_host_blocks, in KV blocks",
    "cpu_offload_gb": "weights stay on one device; take a smaller or quantised model",
    "task": _POOLING,
    "runner": _POOLING,
    "convert": _POOLING,
    "pooler_config": _POOLING,
    "override_pooler_config": _POOLING,
    "hf_overrides": "the model's config.json decides; change it there",
    "hf_token": "set the environment variable HF_TOKEN",
    "tokenizer_revision": "give tokenizer a folder that holds the one you want",
    "tokenizer_mode": "the tokenizer's own files decide",
    "chat_template": "give it to chat(): llm.chat(messages, chat_template=...)",
    "logits_processors": "use logit_bias, allowed_token_ids or bad_words of SamplingParams",
    "guided_decoding_backend": "answers are not constrained to a schema; describe the format in the prompt",
    "structured_outputs_config": "answers are not constrained to a schema; describe the format in the prompt",
    "compilation_config": "kernels and graphs follow from the model; enforce_eager=True leaves graphs out",
    "attention_config": "kernels and graphs follow from the model; enforce_eager=True leaves graphs out",
    "profiler_config": _PROFILE,
    "preemption_mode": "give preemption: auto, recompute or swap",
    "served_model_name": "it belongs to a server: paceline serve --served-model-name",
}
# Methods of the classes.
METHODS: Hints = {
    **dict.fromkeys(("embed", "encode", "classify", "score", "reward"), _POOLING),
    "beam_search": "use generate with SamplingParams(n=...), or fork a running request (examples/05)",
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
