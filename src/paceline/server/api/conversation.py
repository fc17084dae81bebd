"""What the other APIs' requests become: a conversation and sampling, in the form chat completions have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.core.sampling import SamplingParams
from paceline.errors import InvalidRequest
from paceline.llm.defaults import chat_sampling
from paceline.server.api.fields import Field
from paceline.server.api.openai_fields import sampling_fields
from paceline.server.api.openai_requests import SAMPLED, ModelFacts, bias_of
from paceline.server.limits import RequestLimits


def extra_sampling_fields(limits: RequestLimits, *without: str) -> list[Field]:
    """The sampling fields an API has no names of its own for; one answer only."""
    return [field for field in sampling_fields(limits) if field.name not in ("n", *without)]


def conversation_sampling(
    given: Mapping[str, Any], facts: ModelFacts, max_tokens: int | None, **changes: Any
) -> SamplingParams:
    """Sampling out of fields under their own names."""
    found = {name: given[name] for name in SAMPLED if name in given}
    if "logit_bias" in given:
        found["logit_bias"] = bias_of(given["logit_bias"])
    if max_tokens is not None:
        found["max_tokens"] = max_tokens
    return chat_sampling(facts.generation, facts.max_model_len, **found | changes)


def checked_messages(messages: Any, limits: RequestLimits, *, param: str) -> list[Any]:
    if not isinstance(messages, list) or not 1 <= len(messages) <= limits.messages:
        raise InvalidRequest(f"{param} must be a list of 1 to {limits.messages} messages", param=param)
    return messages


def ends_with_assistant(messages: list[Any]) -> bool:
    """Whether the answer goes on with what the client began for the model."""
    last = messages[-1]
    return isinstance(last, Mapping) and last.get("role") == "assistant"
