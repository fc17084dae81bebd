"""Sampling of requests that leave it open: what the model recommends (see `checkpoint.generation`).

Every way to a model derives its defaults from here: the HTTP API, `LLM`, `AsyncLLM` and the commands.
"""

from __future__ import annotations

from typing import Any

from paceline.checkpoint.generation import GenerationDefaults
from paceline.core.sampling import SamplingParams

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def default_sampling(generation: GenerationDefaults, **changes: Any) -> SamplingParams:
    """Recommended sampling with `changes` on top."""
    given = {name: getattr(generation, name) for name in NAMES if getattr(generation, name) is not None}
    if generation.do_sample is False:
        given["temperature"] = 0.0
    if generation.max_new_tokens is not None:
        given["max_tokens"] = generation.max_new_tokens
    return SamplingParams(**given | changes)


def chat_sampling(generation: GenerationDefaults, longest: int, **changes: Any) -> SamplingParams:
    """The same for an answer in a conversation, whose length is `longest` unless the model or `changes` say more."""
    return default_sampling(generation, **{"max_tokens": generation.max_new_tokens or longest, **changes})


def described_sampling(generation: GenerationDefaults) -> dict[str, float]:
    """The defaults by name, for clients that show them."""
    sampling = default_sampling(generation)
    return {name: getattr(sampling, name) for name in NAMES}
