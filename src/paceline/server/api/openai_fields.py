"""The fields of /v1/chat/completions and /v1/completions, and the sampling fields every generating route has."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core.sampling import Offer, Parameter, offered
from paceline.core.service_class import TIERS
from paceline.server.access.caller import LARGEST_PRICE
from paceline.server.api.fields import (
    Choice,
    Field,
    FieldTable,
    Flag,
    Group,
    Kind,
    ListOf,
    MapOf,
    Number,
    OneOrMany,
    Shaped,
    Text,
    Whole,
)
from paceline.server.api.limits import OWN_LIMITS, RequestLimits

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LARGEST = 2**31 - 1
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
TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def sampling_fields(limits: RequestLimits) -> list[Field]:
    """How tokens are chosen and when they end: the parameters of SamplingParams under their names."""
    ids = Whole(0, LARGEST)
    stop = Text(1, max_bytes=limits.stop_bytes, no_nul=True)
    bias = MapOf(Number(-100, 100), limits.biases, 12, "maps token ids to numbers from -100 to 100")
    # Where an operator can lower the range, or where the value is more than a number or a flag.
    kinds: dict[str, Kind] = {
        "min_tokens": Whole(0, limits.answer_tokens),
        "n": Whole(1, limits.branches),
        "top_p": Number(0, 1, above=True),
        "stop": OneOrMany(stop, ListOf(stop, limits.stops), "a text or a list of texts"),
        "stop_token_ids": ListOf(ids, limits.stop_ids),
        "allowed_token_ids": ListOf(ids, limits.allowed_ids, 1),
        "bad_words": ListOf(Text(1, 256), limits.bad_words),
        "logit_bias": bias,
    }
    return [
        Field(name=spec.name, kind=kinds.get(spec.name) or kind_of(spec), help=spec.help)
        for spec in offered(Offer.API)
    ]


def kind_of(spec: Parameter) -> Kind:
    """What a field of a parameter holds, from its declaration."""
    if spec.choices is not None:
        return Choice(spec.choices)
    if spec.kind is bool:
        return Flag()
    return Whole(spec.low, spec.high) if spec.kind is int else Number(spec.low, spec.high)


def chat_table(limits: RequestLimits, *, serves: bool = True) -> FieldTable:
    """Fields of /v1/chat/completions; `serves=False` for requests out of a file."""
    described = {"type": "array", "items": MESSAGE_SCHEMA, "minItems": 1, "maxItems": limits.messages}
    tokens = Whole(1, limits.answer_tokens)
    own = [
        Field(
            name="messages",
            kind=Shaped((list,), MESSAGES_MUST, described),
            help="the conversation",
            required=True,
        ),
        Field(
            name="max_tokens",
            kind=tokens,
            help=f"tokens of an answer; default: all that fit; {CLAMPED}",
        ),
        Field(
            name="max_completion_tokens",
            kind=tokens,
            help="another name for max_tokens",
        ),
        Field(name="logprobs", kind=Flag(), help="how likely the tokens were"),
        Field(name="top_logprobs", kind=Whole(0, limits.top_logprobs), help="likeliest tokens at each place"),
        Field(
            name="chat_template_kwargs",
            kind=MapOf(Flag(), limits.switches, message="takes true or false for names the template knows"),
            help="switches of the chat template",
        ),
        Field(name="add_generation_prompt", kind=Flag(), help="begin the assistant's turn (default)"),
        Field(name="continue_final_message", kind=Flag(), help="go on with the last message"),
        Field(name="add_special_tokens", group=Group.ONLY, only=(False,)),
        Field(name="echo", group=Group.ONLY, only=(False,)),
        *_unsupported("prompt", "suffix", "chat_template", "documents", "mm_processor_kwargs"),
    ]
    return FieldTable(CHAT, [*_common(limits, serves=serves), *own])


def completions_table(limits: RequestLimits, *, serves: bool = True) -> FieldTable:
    """Fields of /v1/completions; `serves=False` for requests out of a file."""
    described = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, TOKEN_IDS]}
    tokens = Whole(0, limits.answer_tokens)
    described["anyOf"].append({"type": "array", "items": TOKEN_IDS, "maxItems": limits.prompts})
    own = [
        Field(name="prompt", kind=Shaped((str, list), PROMPT_MUST, described), required=True),
        Field(
            name="max_tokens",
            kind=tokens,
            help=f"tokens of an answer; default 16; 0 with echo; {CLAMPED}",
        ),
        Field(name="echo", kind=Flag(), help="begin the answer with the prompt"),
        Field(name="logprobs", kind=Whole(0, limits.completion_logprobs), help="likeliest tokens to tell"),
        Field(name="add_special_tokens", group=Group.ONLY, only=(True,)),
        Field(name="suffix", group=Group.ONLY, only=("",)),
        *_unsupported("messages", "max_completion_tokens", "top_logprobs", "prompt_embeds"),
        *_unsupported("chat_template_kwargs", "chat_template"),
    ]
    return FieldTable(COMPLETIONS, [*_common(limits, serves=serves), *own])


def _common(limits: RequestLimits, *, serves: bool) -> list[Field]:
    return [
        model_field(),
        *sampling_fields(limits),
        Field(name="best_of", kind=Whole(1, limits.branches), help="must equal n"),
        Field(name="prompt_logprobs", kind=Whole(0, limits.top_logprobs), help="the same for the prompt"),
        Field(name="return_token_ids", kind=Flag(), help="give the token ids beside the text"),
        *(serving_fields(limits) if serves else _not_serving()),
        *without_effect(limits),
        Field(name="parallel_tool_calls", kind=Flag(), group=Group.WITHOUT_EFFECT),
        *tool_fields("none", "auto", '"none"'),
        Field(name="functions", group=Group.ONLY, only=([],)),
        Field(name="function_call", group=Group.ONLY, only=("none", "auto")),
        Field(name="response_format", group=Group.ONLY, only=({"type": "text"},)),
        Field(name="modalities", group=Group.ONLY, only=(["text"],)),
        Field(name="use_beam_search", group=Group.ONLY, only=(False,)),
        Field(name="length_penalty", group=Group.ONLY, only=(1, 1.0)),
        Field(name="reasoning_effort", group=Group.ONLY, only=("none",)),
        *_unsupported("audio", "prediction", "web_search_options", "truncate_prompt_tokens"),
        *_unsupported("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *_unsupported("logits_processors", "kv_transfer_params"),
    ]


def model_field() -> Field:
    return Field(name="model", kind=Text(1), help="one of /v1/models; default: the model that is served")


def tool_fields(no_tools: object, automatic: object, written: str) -> list[Field]:
    """No tool is ever called; tools come with a choice that rules calls out (`without_idle_tools`) or not at all."""
    instead = f'leave it out, or send "tool_choice": {written} to have the conversation answered in text'
    return [
        Field(name="tools", group=Group.ONLY, only=([],), instead=instead),
        Field(
            name="tool_choice",
            group=Group.ONLY,
            only=(no_tools, automatic),
            instead=f"send {written} or leave it out",
        ),
    ]


def serving_fields(limits: RequestLimits) -> list[Field]:
    """What only makes sense of a server."""
    return [
        Field(name="stream", kind=Flag(), help="send the answer as it is made"),
        Field(
            name="stream_options",
            kind=MapOf(Flag(), 2, message="takes include_usage and continuous_usage_stats, true or false"),
            help="include_usage: a last chunk with usage; continuous_usage_stats: usage in every chunk",
        ),
        *urgency_fields(),
        price_field(),
        Field(
            name="cache_salt",
            kind=Text(1, limits.cache_salt_chars),
            help="cached prompts are shared only with requests that bring the same",
        ),
        *wish_fields(),
    ]


def wish_fields() -> list[Field]:
    """What is wanted of a request's times, in milliseconds."""
    return [Field(name=spec.name, kind=kind_of(spec), help=spec.help) for spec in offered(Offer.SERVER)]


def urgency_fields() -> list[Field]:
    """What says how urgent a request is."""
    return [
        Field(name="priority", kind=Whole(-LARGEST, LARGEST), help="within its class, lower goes first"),
        Field(
            name="service_tier",
            kind=Choice(TIERS),
            help="class of service, no better than the key's; auto and default: the key's own",
        ),
    ]


def price_field() -> Field:
    return Field(
        name="max_price",
        kind=Number(0, LARGEST_PRICE),
        help="dearest price of a million output tokens it accepts; above it, it is refused",
    )


def without_effect(limits: RequestLimits) -> list[Field]:
    """What clients send along and nothing depends on."""
    text = Text(0, limits.name_chars)
    names = (
        *("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "verbosity"),
        *("request_id", "user"),
    )
    metadata = MapOf(Text(0, limits.metadata_chars), limits.metadata_entries)
    return [
        *(Field(name=name, kind=text, group=Group.WITHOUT_EFFECT) for name in names),
        Field(name="store", kind=Flag(), group=Group.WITHOUT_EFFECT),
        Field(name="include_reasoning", kind=Flag(), group=Group.WITHOUT_EFFECT),
        Field(name="metadata", kind=metadata, group=Group.WITHOUT_EFFECT),
    ]


def _not_serving() -> Iterable[Field]:
    return [
        Field(name="stream", group=Group.ONLY, only=(False,)),
        Field(name="stream_options", group=Group.WITHOUT_EFFECT),
        Field(name="service_tier", kind=Text(0, OWN_LIMITS.name_chars), group=Group.WITHOUT_EFFECT),
        *_unsupported("priority", "cache_salt", "max_price", *(field.name for field in wish_fields())),
    ]


def _unsupported(*names: str) -> list[Field]:
    return [Field(name=name, group=Group.UNSUPPORTED) for name in names]
