"""The fields of /v1/chat/completions and /v1/completions, and the sampling fields every generating route has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.config.engine import REUSE
from paceline.core.sampling import Offer, Parameter, offered
from paceline.core.service_class import TIERS
from paceline.errors import InvalidRequest
from paceline.server.access.caller import LARGEST_PRICE
from paceline.server.api import structures
from paceline.server.api.fields import (
    FLAG,
    Field,
    FieldTable,
    Kind,
    choice,
    list_of,
    map_of,
    number,
    one_or_many,
    only,
    shaped,
    stop_text,
    text,
    unsupported,
    whole,
    without_effect,
)
from paceline.server.api.route import OWN_LIMITS, RequestLimits
from paceline.text.dialect import DEFAULT_THINKING, Thinking
from paceline.text.tools.use import MAX_TOOLS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LARGEST = 2**31 - 1
PRIORITY_KIND = whole(-LARGEST, LARGEST)
CLAMPED = "more than fit into the context are not made"
PROMPT_MUST = "a text, a list of texts, a list of token ids, or a list of such lists"
MESSAGES_MUST = "a list with at least one message"
MESSAGE_SCHEMA = {
    "type": "object",
    "properties": {
        "role": {
            "type": "string",
            "enum": ["system", "developer", "user", "assistant", "tool", "function"],
        },
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
    },
    "required": ["role"],
}
TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
PREDICTION = shaped(
    (dict,),
    "an object with type and content",
    {
        "type": "object",
        "properties": {
            "type": {"const": "content"},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART}]},
        },
        "required": ["type", "content"],
    },
)
TREE = map_of(
    whole(1, LARGEST), 3, message="takes max_rows, max_tokens and max_branches, whole numbers from 1 on"
)
SEARCH = shaped(
    (dict,),
    "an object with type and options",
    {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]},
)
# Of `prompt_cache_retention`, in seconds. None: as long as eviction lets it stay.
RETENTIONS = {"in_memory": None, "in-memory": None, "24h": 86_400}
TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def sampling_fields(limits: RequestLimits, *without: str) -> list[Field]:
    """How tokens are chosen and when they end: the parameters of SamplingParams under their names."""
    ids = whole(0, LARGEST)
    # Where an operator can lower the range, or where the value is more than a number or a flag.
    kinds: dict[str, Kind] = {
        "min_tokens": whole(0, limits.answer_tokens),
        "n": whole(1, limits.branches),
        "top_p": number(0, 1, above=True),
        "stop": one_or_many(stop_text(limits.stop_bytes), limits.stops, "a text or a list of texts"),
        "stop_token_ids": list_of(ids, limits.stop_ids),
        "allowed_token_ids": list_of(ids, limits.allowed_ids, 1),
        "bad_words": list_of(text(1, 256), limits.bad_words),
        "kv_keep": map_of(
            whole(0, LARGEST), 2, message="takes first and recent, whole numbers; recent is 1 or more"
        ),
        "logit_bias": map_of(
            number(-100, 100), limits.biases, 12, "maps token ids to numbers from -100 to 100"
        ),
    }
    return [
        Field(spec.name, kinds.get(spec.name) or kind_of(spec), spec.help)
        for spec in offered(Offer.API)
        if spec.name not in without
    ]


def kind_of(spec: Parameter) -> Kind:
    """What a field of a parameter holds, from its declaration."""
    if spec.choices is not None:
        return choice(spec.choices)
    if spec.kind is bool:
        return FLAG
    return whole(spec.low, spec.high) if spec.kind is int else number(spec.low, spec.high)


def messages_kind(limits: RequestLimits, **more: int) -> Kind:
    schema = {"type": "array", "items": MESSAGE_SCHEMA, **more, "maxItems": limits.messages}
    return shaped((list,), MESSAGES_MUST, schema)


def chat_table(limits: RequestLimits, *, serves: bool = True) -> FieldTable:
    """Fields of /v1/chat/completions; `serves=False` for requests out of a file."""
    switches = map_of(FLAG, limits.switches, message="takes true or false for names the template knows")
    own = [
        Field("messages", messages_kind(limits, minItems=1), "the conversation", required=True),
        Field(
            "max_tokens",
            whole(1, limits.answer_tokens),
            f"tokens of an answer; default: all that fit; {CLAMPED}",
        ),
        Field("max_completion_tokens", whole(1, limits.answer_tokens), "another name for max_tokens"),
        Field("logprobs", FLAG, "how likely the tokens were"),
        Field("top_logprobs", whole(0, limits.top_logprobs), "likeliest tokens at each place"),
        Field("return_drafted", FLAG, "say of each token in logprobs whether it came as a draft"),
        Field("chat_template_kwargs", switches, "switches of the chat template"),
        Field(
            "prediction",
            PREDICTION,
            "what the answer is expected to say; changes when tokens come, never which",
        ),
        *template_fields(),
        *openai_tool_fields(),
        *reasoning_fields(limits),
        only("add_special_tokens", False),
        only("echo", False),
        *unsupported("prompt", "suffix", "chat_template", "documents", "mm_processor_kwargs"),
    ]
    return FieldTable(CHAT, [*_common(limits, serves=serves), *own])


def completions_table(limits: RequestLimits, *, serves: bool = True) -> FieldTable:
    """Fields of /v1/completions; `serves=False` for requests out of a file."""
    described = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, TOKEN_IDS]}
    described["anyOf"].append({"type": "array", "items": TOKEN_IDS, "maxItems": limits.prompts})
    own = [
        Field("prompt", shaped((str, list), PROMPT_MUST, described), required=True),
        Field(
            "max_tokens",
            whole(0, limits.answer_tokens),
            f"tokens of an answer; default 16; 0 with echo; {CLAMPED}",
        ),
        Field("echo", FLAG, "begin the answer with the prompt"),
        Field("logprobs", whole(0, limits.completion_logprobs), "likeliest tokens to tell"),
        only("add_special_tokens", True),
        only("suffix", ""),
        *unsupported("messages", "max_completion_tokens", "top_logprobs", "prompt_embeds", "prediction"),
        only("return_drafted", False),
        *unsupported("chat_template_kwargs", "chat_template"),
    ]
    return FieldTable(COMPLETIONS, [*_common(limits, serves=serves), *own])


def _common(limits: RequestLimits, *, serves: bool) -> list[Field]:
    return [
        model_field(),
        *sampling_fields(limits),
        Field("prompt_logprobs", whole(0, limits.top_logprobs), "the same for the prompt"),
        Field("return_token_ids", FLAG, "give the token ids beside the text"),
        *(serving_fields(limits) if serves else _not_serving()),
        *(search_fields(limits) if serves else _not_searching(limits)),
        *client_fields(limits),
        *no_tool_fields(),
        only("functions", []),
        only("function_call", "none", "auto"),
        *structures.openai_fields(),
        only("modalities", ["text"]),
        only("reasoning_effort", "none"),
        *unsupported("audio", "web_search_options", "truncate_prompt_tokens"),
        *unsupported("logits_processors", "kv_transfer_params"),
    ]


def search_fields(limits: RequestLimits) -> list[Field]:
    """Answers that are searched for by several branches; see docs/guides/trees.md."""
    return [
        Field(
            "search", SEARCH, "type (best_of, self_consistency, beam, tree_of_thought, probe) and its options"
        ),
        Field("best_of", whole(1, limits.branches), "answers to make, of which the n likeliest are given"),
        Field("use_beam_search", FLAG, "search the likeliest answer with best_of (or n) beams"),
        Field("length_penalty", number(-10, 10), "of beams: above 0, longer answers rank higher (default 1)"),
    ]


def _not_searching(limits: RequestLimits) -> list[Field]:
    return [
        Field("best_of", whole(1, limits.branches), "must equal n"),
        only("use_beam_search", False),
        only("length_penalty", 1, 1.0),
        *unsupported("search"),
    ]


def model_field() -> Field:
    return Field("model", text(1), "one of /v1/models; default: the model that is served")


def template_fields() -> list[Field]:
    return [
        Field("add_generation_prompt", FLAG, "begin the assistant's turn (default)"),
        Field("continue_final_message", FLAG, "go on with the last message"),
    ]


def no_tool_fields() -> list[Field]:
    """A prompt that is no conversation has no tools."""
    instead = f"leave it out, or send the conversation to {CHAT}"
    return [only("tools", [], instead=instead), only("tool_choice", "none", "auto", instead=instead)]


def serving_fields(limits: RequestLimits) -> list[Field]:
    """What only makes sense of a server."""
    options = map_of(FLAG, 2, message="takes include_usage and continuous_usage_stats, true or false")
    return [
        Field("stream", FLAG, "send the answer as it is made"),
        Field(
            "stream_options",
            options,
            "include_usage: a last chunk with usage; continuous_usage_stats: usage in every chunk",
        ),
        *service_level_fields(),
        salt_field(limits),
        Field(
            "tree",
            TREE,
            "what the request and its forks may have together: max_rows, max_tokens, max_branches",
        ),
        context_reuse_field(),
        *objective_fields(),
    ]


CONTEXT_REUSE = (
    "how parts of the type context are used; exact (default): their texts stand there; blend: what was computed of "
    "each alone is copied to its place"
)


def context_reuse_field(about: str = CONTEXT_REUSE) -> Field:
    return Field("context_reuse", choice(REUSE), about)


def salt_field(limits: RequestLimits) -> Field:
    return Field(
        "cache_salt",
        text(1, limits.cache_salt_chars),
        "cached prompts are shared only with requests that bring the same",
    )


def objective_fields() -> list[Field]:
    """What is wanted of a request's times, in milliseconds."""
    return [Field(spec.name, kind_of(spec), spec.help) for spec in offered(Offer.SERVER)]


def service_level_fields() -> list[Field]:
    """Service class, priority and the price that is accepted."""
    return [
        Field("priority", PRIORITY_KIND, "within its class, lower goes first"),
        Field(
            "service_tier",
            choice(TIERS),
            "class of service, no better than the key's; auto and default: the key's own",
        ),
        Field(
            "max_price",
            number(0, LARGEST_PRICE),
            "dearest price of a million output tokens it accepts; above it, it is refused",
        ),
    ]


def metadata_kind(limits: RequestLimits) -> Kind:
    return map_of(text(0, limits.metadata_chars), limits.metadata_entries)


def client_fields(limits: RequestLimits) -> list[Field]:
    """What clients send along and nothing depends on."""
    names = (
        *("safety_identifier", "prompt_cache_key", "verbosity"),
        *("request_id", "user"),
    )
    return [
        Field(
            "prompt_cache_retention",
            choice(tuple(RETENTIONS)),
            "24h: the prompt stays cached for a day, as far as the key's part of the cache goes",
        ),
        *(without_effect(name, text(0, limits.name_chars)) for name in names),
        without_effect("store", FLAG),
        without_effect("include_reasoning", FLAG),
        without_effect("metadata", metadata_kind(limits)),
        without_effect("parallel_tool_calls", FLAG),
    ]


def _not_serving() -> list[Field]:
    return [
        only("stream", False),
        without_effect("stream_options"),
        without_effect("service_tier", text(0, OWN_LIMITS.name_chars)),
        *unsupported("priority", "cache_salt", "max_price", "tree", "context_reuse"),
        *unsupported(*(field.name for field in objective_fields())),
    ]


# The fields about tools and reasoning, and what they say about reasoning; tools are read in `text.tools.reading`.


# Tokens of reasoning for each effort; None: as many as the model likes.
EFFORTS: dict[str, int | None] = {
    "none": 0,
    "minimal": 256,
    "low": 1_024,
    "medium": 4_096,
    "high": 16_384,
    "xhigh": 65_536,
    "max": None,
}
_TOOLS = shaped(
    (list,), "a list of tools", {"type": "array", "items": {"type": "object"}, "maxItems": MAX_TOOLS}
)
Json = Mapping[str, Any]


def openai_tool_fields() -> list[Field]:
    """Fields of a conversation whose answer may call tools."""
    modes = {"anyOf": [{"type": "string", "enum": ["none", "auto", "required"]}, {"type": "object"}]}
    chosen = shaped((str, dict), "a text or an object", modes)
    return [
        Field("tools", _TOOLS, f"functions that the model may call, at most {MAX_TOOLS}"),
        Field("tool_choice", chosen, "none, auto, required, or one function; default: auto"),
        Field("parallel_tool_calls", FLAG, "whether one answer may hold several calls (default)"),
    ]


def anthropic_tool_fields() -> list[Field]:
    """The same as Anthropic has them, and its field about reasoning."""
    modes = _with_type("auto", "any", "tool", "none", name="string", disable_parallel_tool_use="boolean")
    kinds = _with_type("enabled", "adaptive", "disabled", budget_tokens="integer")
    return [
        Field("tools", _TOOLS, f"tools that the model may use, at most {MAX_TOOLS}"),
        Field("tool_choice", shaped((dict,), "an object", modes), "auto, any, tool or none; default: auto"),
        Field("thinking", shaped((dict,), "an object", kinds), "a budget of reasoning, or none of it"),
    ]


def _with_type(*kinds: str, **others: str) -> dict[str, Any]:
    """The schema of an object that has one of these types."""
    parts: dict[str, Any] = {name: {"type": kind} for name, kind in others.items()}
    parts["type"] = {"type": "string", "enum": list(kinds)}
    return {"type": "object", "properties": parts, "required": ["type"]}


def reasoning_fields(limits: RequestLimits) -> list[Field]:
    tokens = ", ".join(f"{name} {EFFORTS[name] or 'no limit'}" for name in ("low", "medium", "high", "max"))
    return [
        Field("reasoning_effort", choice(tuple(EFFORTS)), f"a budget of reasoning in tokens: {tokens}"),
        Field("thinking_token_budget", whole(0, limits.answer_tokens), "most tokens of reasoning"),
        Field("include_reasoning", FLAG, "whether the answer has its reasoning (default)"),
    ]


def read_thinking(given: Json) -> Thinking:
    """What chat and Responses say about reasoning."""
    effort = given.get("reasoning_effort")
    if effort is None and "thinking_token_budget" not in given and given.get("include_reasoning", True):
        return DEFAULT_THINKING
    budget = given.get("thinking_token_budget", None if effort is None else EFFORTS[effort])
    return Thinking(
        wanted=None if effort is None else effort != "none",
        budget=budget,
        hidden=not given.get("include_reasoning", True),
    )


def read_anthropic_thinking(given: Json) -> Thinking:
    """Anthropic's `thinking`."""
    value = given.get("thinking")
    if value is None:
        return DEFAULT_THINKING
    kind, budget = value.get("type"), value.get("budget_tokens")
    if kind == "disabled":
        return Thinking(wanted=False)
    is_budget = type(budget) is int and budget >= 1
    if kind not in ("enabled", "adaptive") or not (is_budget or (budget is None and kind == "adaptive")):
        message = 'thinking takes {"type": "enabled", "budget_tokens": N}, {"type": "adaptive"} or {"type": "disabled"}'
        raise InvalidRequest(message, param="thinking")
    return Thinking(wanted=True, budget=budget)
