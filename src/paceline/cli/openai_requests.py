"""Bodies of OpenAI requests, as the engine wants them: prompts or messages, and sampling.

Every field is either used, known to change nothing, or refused by name; none is dropped in silence. Values are
checked for their kind here and for their range by `SamplingParams`. Knows nothing of files or of the engine.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.checkpoint.generation import GenerationDefaults
from paceline.core.sampling import SamplingParams
from paceline.errors import InvalidRequest
from paceline.llm.defaults import default_sampling

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

# Fields that go into SamplingParams under their own name.
SAMPLED = (
    *("max_tokens", "min_tokens", "n", "temperature", "top_k", "top_p", "min_p", "seed", "stop"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "stop_token_ids", "ignore_eos"),
    *("allowed_token_ids", "bad_words", "skip_special_tokens", "include_stop_str_in_output"),
)
OWN = {
    CHAT: ("messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"),
    COMPLETIONS: ("prompt", "echo"),
}
COMMON = ("model", "logit_bias", "logprobs")
WITHOUT_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("stream_options", "parallel_tool_calls", "verbosity"),
)
# Known, but only where they ask for what is done anyway.
ONLY: Mapping[str, tuple[object, ...]] = {
    "stream": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "best_of": (1,),
    "suffix": ("",),
}
UNSUPPORTED = ("audio", "prediction", "reasoning_effort", "web_search_options", "prompt_logprobs")
FLAGS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
ID_LISTS = ("stop_token_ids", "allowed_token_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What reading a request has to know of the model."""

    names: tuple[str, ...]  # the first is the one that answers carry
    max_model_len: int
    generation: GenerationDefaults


class UnknownModel(InvalidRequest):
    """The request names another model than the one that is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """Whether a completion begins with its prompt, and whether it ends there too (max_tokens 0)."""

    prompt: bool = False
    nothing_else: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedBody:
    """One request: a conversation, or prompts that are answered side by side."""

    model: str
    sampling: SamplingParams
    messages: Sequence[Any] | None = None
    prompts: tuple[str | list[int], ...] = ()
    switches: Mapping[str, object] | None = None  # for the chat template
    echo: Echo = field(default_factory=Echo)


def parse_body(url: str, body: Mapping[str, Any], facts: ModelFacts) -> ParsedBody:
    """Raises InvalidRequest whose `param` names the field."""
    given = {name: value for name, value in body.items() if value is not None}
    _refuse_fields(url, given)
    model = _model(given.get("model"), facts)
    if url == COMPLETIONS:
        echo = _echo(given)
        sampling = _sampling(url, given | {"max_tokens": 1} if echo.nothing_else else given, facts)
        if echo.prompt:
            sampling = replace(sampling, prompt_logprobs=sampling.logprobs)
        return ParsedBody(model=model, sampling=sampling, prompts=_prompts(given.get("prompt")), echo=echo)
    sampling = _sampling(url, given, facts)
    messages, switches = given.get("messages"), given.get("chat_template_kwargs")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list with at least one message", param="messages")
    if switches is not None and not isinstance(switches, dict):
        raise InvalidRequest("chat_template_kwargs must be an object", param="chat_template_kwargs")
    return ParsedBody(model=model, sampling=sampling, messages=messages, switches=switches)


def _refuse_fields(url: str, given: Mapping[str, Any]) -> None:
    known = {*SAMPLED, *OWN[url], *COMMON, *WITHOUT_EFFECT}
    for name, value in given.items():
        if name in known or (name in ONLY and value in ONLY[name]):
            continue
        if name in ONLY:
            raise InvalidRequest(f"{name} is not supported; leave it out", param=name)
        if name in UNSUPPORTED or any(name in own for own in OWN.values()):
            raise InvalidRequest(f"{name} is not supported by {url}", param=name)
        close = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise InvalidRequest(f"{name!r:.100} is not a field of {url}{hint}", param=name[:100])


def _model(name: object, facts: ModelFacts) -> str:
    if name is None:
        return facts.names[0]
    if name not in facts.names:
        message = f"the model {name!r:.200} is not loaded; this run answers for {', '.join(facts.names)}"
        raise UnknownModel(message, param="model")
    return str(name)


def _sampling(url: str, given: Mapping[str, Any], facts: ModelFacts) -> SamplingParams:
    changes = {name: given[name] for name in SAMPLED if name in given}
    _check_kinds(changes)
    if "max_completion_tokens" in given:
        changes["max_tokens"] = given["max_completion_tokens"]
    if url == CHAT and "max_tokens" not in changes and facts.generation.max_new_tokens is None:
        changes["max_tokens"] = facts.max_model_len  # the rest of the context, whatever that is
    if "logit_bias" in given:
        changes["logit_bias"] = _bias(given["logit_bias"])
    changes["logprobs"] = _chat_logprobs(given) if url == CHAT else given.get("logprobs")
    return default_sampling(facts.generation, **changes)


def _echo(given: Mapping[str, Any]) -> Echo:
    wanted = given.get("echo", False)
    if not isinstance(wanted, bool):
        raise InvalidRequest("echo must be true or false", param="echo")
    return Echo(prompt=wanted, nothing_else=wanted and given.get("max_tokens") == 0)


def _check_kinds(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in FLAGS and not isinstance(value, bool):
            raise InvalidRequest(f"{name} must be true or false", param=name)
        if name in ID_LISTS and not _is_list_of(value, int):
            raise InvalidRequest(f"{name} must be a list of token ids", param=name)
        if name == "bad_words" and not _is_list_of(value, str):
            raise InvalidRequest("bad_words must be a list of texts", param=name)
        if name == "stop" and not (isinstance(value, str) or _is_list_of(value, str)):
            raise InvalidRequest("stop must be a text or a list of texts", param=name)


def _chat_logprobs(given: Mapping[str, Any]) -> int | None:
    wanted, count = given.get("logprobs", False), given.get("top_logprobs")
    if not isinstance(wanted, bool):
        raise InvalidRequest("logprobs must be true or false", param="logprobs")
    if not wanted:
        if count is not None:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        return None
    if count is not None and (type(count) is not int or not 0 <= count <= 20):
        raise InvalidRequest("top_logprobs must be a whole number from 0 to 20", param="top_logprobs")
    return count or 0


def _bias(value: object) -> dict[int, float]:
    """JSON has only texts as keys."""
    if not isinstance(value, dict) or not all(
        key.removeprefix("-").isascii() and key.removeprefix("-").isdigit() for key in value
    ):
        raise InvalidRequest("logit_bias maps token ids to numbers from -100 to 100", param="logit_bias")
    return {int(key): number for key, number in value.items()}


def _prompts(value: Any) -> tuple[str | list[int], ...]:
    """A text, a list of texts, token ids, or a list of those."""
    if isinstance(value, str) or _is_list_of(value, int):
        return (value,)
    if _is_list_of(value, str) or (_is_list_of(value, list) and all(_is_list_of(ids, int) for ids in value)):
        return tuple(value)
    raise InvalidRequest(
        "prompt must be a text, a list of texts, a list of token ids, or a list of such lists", param="prompt"
    )


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(type(part) is kind for part in value)
