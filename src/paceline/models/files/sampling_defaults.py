"""The sampling a model recommends, and the one rule for models that recommend none.

A Hugging Face folder recommends by generation_config.json, a GGUF file by its fields general.sampling.*. What such a
model leaves out is neutral, as in vLLM. A model without settings of its own gets `FALLBACK`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.sampling import SamplingParams
from paceline.models.files.fields import NEGATIVE, Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Values for requests that do not say otherwise. None: neutral."""

    do_sample: bool | None = None  # False: greedy is what the makers meant
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0 and -1: no limit
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


# Temperature 1 with every token allowed makes small and quantised models ramble: their unlikely tokens are noise.
FALLBACK = GenerationDefaults(temperature=0.7, top_p=0.95)
ANSWER_TOKENS = 1024  # an answer on a terminal is no longer, unless the user or the model says so
GGUF_PREFIX = "general.sampling."
GGUF_NAMES = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def generation_defaults(fields: Fields) -> GenerationDefaults:
    """What generation_config.json says."""
    return GenerationDefaults(
        do_sample=fields.flag("do_sample") if fields.has("do_sample") else None,
        temperature=fields.optional_number("temperature", above=NEGATIVE),
        top_p=fields.optional_number("top_p", above=0),
        top_k=fields.optional_integer("top_k", minimum=-1),
        min_p=fields.optional_number("min_p", above=NEGATIVE),
        repetition_penalty=fields.optional_number("repetition_penalty", above=0),
        max_new_tokens=fields.optional_integer("max_new_tokens"),
    )


def gguf_generation(values: Mapping[str, object], where: str) -> GenerationDefaults | None:
    """What the fields of a GGUF file say; None where they say nothing."""
    found = {
        name: values[GGUF_PREFIX + own] for own, name in GGUF_NAMES.items() if GGUF_PREFIX + own in values
    }
    if not found:
        return None
    # The format keeps float32: 0.95 is meant where 0.949999988 is written.
    rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in found.items()}
    return generation_defaults(Fields(rounded, f"{where}: {GGUF_PREFIX.removesuffix('.')}"))


# Sampling of requests that leave it open


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
