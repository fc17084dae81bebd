"""Sampling for callers who give none: what the model's makers recommend, else the defaults."""

from __future__ import annotations

from typing import Any

from paceline.checkpoint.generation import GenerationDefaults
from paceline.core.sampling import SamplingParams

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def default_sampling(generation: GenerationDefaults, **changes: Any) -> SamplingParams:
    """Recommended sampling with `changes` on top."""
    given = {name: getattr(generation, name) for name in _NAMES if getattr(generation, name) is not None}
    if generation.do_sample is False:
        given["temperature"] = 0.0
    if generation.max_new_tokens is not None:
        given["max_tokens"] = generation.max_new_tokens
    return SamplingParams(**given | changes)
