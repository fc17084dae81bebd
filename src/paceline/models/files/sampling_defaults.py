"""The sampling a model recommends, and the one rule for models that recommend none.

A Hugging Face folder recommends by generation_config.json, a GGUF file by its fields general.sampling.*. What such a
model leaves out is neutral, as in vLLM. A model without settings gets `FALLBACK`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.core.sampling import Offer, SamplingParams, offered
from paceline.models.files.config_fields import NEGATIVE, Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Values for requests that do not say otherwise."""

    sampling: Mapping[str, float] = field(default_factory=dict)  # by parameter; neutral where it is absent
    do_sample: bool | None = None  # False: greedy is what the makers meant
    max_new_tokens: int | None = None


# Temperature 1 with every token allowed makes small and quantised models ramble: their unlikely tokens are noise.
FALLBACK = GenerationDefaults(sampling={"temperature": 0.7, "top_p": 0.95})
ANSWER_TOKENS = 1024  # an answer on a terminal is no longer, unless the user or the model says so
GGUF_PREFIX = "general.sampling."
# Parameters that a GGUF file calls by another name.
GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}


def generation_defaults(fields: Fields) -> GenerationDefaults:
    """What generation_config.json says."""
    found: dict[str, float | None] = {}
    for spec in offered(Offer.MODEL):
        if spec.kind is int:
            found[spec.name] = fields.optional_integer(spec.name, minimum=spec.low)
        else:
            found[spec.name] = fields.optional_number(spec.name, above=0 if spec.low > 0 else NEGATIVE)
    return GenerationDefaults(
        sampling={name: value for name, value in found.items() if value is not None},
        do_sample=fields.flag("do_sample") if fields.has("do_sample") else None,
        max_new_tokens=fields.optional_integer("max_new_tokens"),
    )


def gguf_generation(values: Mapping[str, object], where: str) -> GenerationDefaults | None:
    """What the fields of a GGUF file say; None where they say nothing."""
    found = {}
    for spec in offered(Offer.MODEL):
        value = values.get(GGUF_PREFIX + GGUF_NAMES.get(spec.name, spec.name))
        if value is not None:
            # The format keeps float32: 0.95 is meant where 0.949999988 is written.
            found[spec.name] = round(value, 6) if isinstance(value, float) else value
    if not found:
        return None
    return generation_defaults(Fields(found, f"{where}: {GGUF_PREFIX.removesuffix('.')}"))


# Sampling of requests that leave it open: what the model recommends (see `generation_defaults`).
#
# Every way to a model derives its defaults from here: the HTTP API, `LLM`, `AsyncLLM` and the commands.


def default_sampling(generation: GenerationDefaults, **changes: Any) -> SamplingParams:
    """Recommended sampling with `changes` on top."""
    given: dict[str, Any] = dict(generation.sampling)
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
    return {spec.name: getattr(sampling, spec.name) for spec in offered(Offer.MODEL)}
