"""What a model's makers recommend for sampling, out of generation_config.json. Absent stays None."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.checkpoint.fields import NEGATIVE, Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Values for requests that do not say otherwise."""

    do_sample: bool | None = None  # False: greedy is what the makers meant
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0: no limit
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


def generation_defaults(fields: Fields) -> GenerationDefaults:
    return GenerationDefaults(
        do_sample=fields.flag("do_sample") if fields.has("do_sample") else None,
        temperature=fields.optional_number("temperature", above=NEGATIVE),
        top_p=fields.optional_number("top_p", above=0),
        top_k=fields.optional_integer("top_k", minimum=0),
        min_p=fields.optional_number("min_p", above=NEGATIVE),
        repetition_penalty=fields.optional_number("repetition_penalty", above=0),
        max_new_tokens=fields.optional_integer("max_new_tokens"),
    )
