"""Bodies of OpenAI requests, as the engine wants them: prompts or messages, and sampling.

Fields and their kinds are in `openai_fields`; here they become values, and what only several fields together can get
wrong is found. Used by the server and for files of requests alike; knows nothing of either, nor of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from paceline.core.adapter import AdapterInfo
from paceline.core.parameters import Pin
from paceline.core.request import TreeLimits
from paceline.core.sampling import PARAMETERS, SamplingParams
from paceline.errors import InvalidRequest
from paceline.llm.pairs import NOT_CUT, Cut, PairPlan, PooledInput, TextPair
from paceline.llm.search import Search, make_search
from paceline.models.files.sampling_defaults import GenerationDefaults, chat_sampling, default_sampling
from paceline.server.access.caller import Caller
from paceline.server.api.fields import FieldTable, GivenFields
from paceline.server.api.openai_fields import (
    CHAT,
    COMPLETIONS,
    MESSAGES_MUST,
    PROMPT_MUST,
    RETENTIONS,
    chat_table,
    completions_table,
    read_thinking,
)
from paceline.server.api.route import OWN_LIMITS, RequestLimits
from paceline.server.api.structures import structure_field, structure_of
from paceline.server.billing.pricing import decimal_of
from paceline.server.errors import UnknownModel, UnsupportedParameter
from paceline.server.generate.context_store import Context
from paceline.text.placed_texts import PlacedTexts
from paceline.text.tools.reading import read_openai_tools
from paceline.text.tools.use import ToolUse

STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What reading a request has to know of the model."""

    names: tuple[str, ...]  # the first is the one that answers carry
    max_model_len: int
    generation: GenerationDefaults
    adapters: Mapping[str, AdapterInfo] = field(default_factory=dict)  # by the names they are models under


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledBody:
    """What a call for vectors wants beside the requests for them."""

    given: Mapping[str, Any]  # the fields of its body
    name: Callable[[int], str]  # what one of its inputs is called where it is wrong
    cut: Cut = NOT_CUT
    plan: PairPlan | None = None  # of pairs that are scored


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedBody:
    """One request: a conversation, or prompts that are answered side by side."""

    model: str
    sampling: SamplingParams
    messages: Sequence[Any] | None = None
    # Texts or token ids; pairs and the like only where vectors are wanted.
    prompts: tuple[PooledInput, ...] = ()
    # How it is rendered: arguments of `ChatPrompts.render`, tools and reasoning among them.
    template: Mapping[str, Any] = field(default_factory=dict)
    echoes_prompt: bool = False  # a completion begins with its prompt
    only_echoes: bool = False  # and ends there too (max_tokens 0)
    is_stream: bool = False  # the answer is sent as it is made
    includes_usage: bool = False  # in a last chunk of the stream
    runs_usage: bool = False  # in every chunk
    shows_token_ids: bool = False
    shows_drafted: bool = False  # of each token in logprobs, whether it came as a draft
    shows_prompt_logprobs: bool = False
    priority: int | None = None  # within its class
    service_tier: str | None = None  # None: the class of the key
    max_price: Decimal | None = None  # of a million output tokens
    cache_salt: str = ""
    structure_field: str = ""  # the field that asks for a form of the answer
    tree: TreeLimits | None = None  # of each prompt and what is forked from it
    search: Search | None = None  # how answers are looked for; `sampling.n` of them are given
    ignored: tuple[str, ...] = ()  # unknown fields
    pooled: PooledBody | None = None  # it wants vectors
    contexts: tuple[Context, ...] = ()  # whose texts stand in it
    blends: bool = False  # contexts are placed, where there are any
    is_module: bool = False  # it computes such a text alone

    @property
    def tools(self) -> ToolUse | None:
        """The tools that may be called."""
        return self.template.get("use")

    @property
    def placed(self) -> PlacedTexts | None:
        """The texts of contexts that are placed, which marks in the messages stand for."""
        return self.template.get("placed")

    @property
    def num_branches(self) -> int:
        return self.sampling.n * max(1, len(self.prompts))

    @property
    def shown_prompt(self) -> str:
        """What a user wrote last, as far as it is text."""
        if self.messages is None:
            shown = (each.first if isinstance(each, TextPair) else each for each in self.prompts)
            return next((each for each in shown if isinstance(each, str)), "")
        contents = [message.get("content") for message in self.messages if message.get("role") == "user"]
        content = contents[-1] if contents else ""
        if isinstance(content, list):
            content = " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        if not isinstance(content, str):
            return ""
        return content if self.placed is None else self.placed.put_into(content)


class BodyParser:
    """Reads bodies of one route. `serves=False` for requests out of a file, which are read strictly."""

    def __init__(self, url: str, limits: RequestLimits, *, strict: bool = False, serves: bool = True) -> None:
        make = chat_table if url == CHAT else completions_table
        self.table: FieldTable = make(limits, serves=serves)
        self._url = url
        self._limits = limits
        self._strict = strict
        self._serves = serves

    def parse(self, body: Mapping[str, Any], facts: ModelFacts) -> ParsedBody:
        """Raises InvalidRequest whose `param` names the field."""
        read = self.table.read(without_idle_tools(body), strict=self._strict)
        given, common = read.fields, common_values(read, facts)
        if not self._serves and given.get("best_of", given.get("n", 1)) != given.get("n", 1):
            raise UnsupportedParameter("best_of must equal n; leave it out", param="best_of")
        shows_prompt_logprobs = "prompt_logprobs" in given
        if shows_prompt_logprobs and common["is_stream"]:
            raise UnsupportedParameter(
                "prompt_logprobs is not given in a stream; leave one of them out", param="prompt_logprobs"
            )
        common["shows_token_ids"] = given.get("return_token_ids", False)
        common["shows_prompt_logprobs"] = shows_prompt_logprobs
        common["search"] = read_search(given) if self._serves else None
        if common["search"] is not None and common["is_stream"]:
            raise InvalidRequest("a search is not streamed: its answer is known at the end", param="stream")
        if self._url == COMPLETIONS:
            return self._completion(given, facts, common)
        return self._chat(given, facts, common)

    def _completion(self, given: Mapping[str, Any], facts: ModelFacts, common: dict[str, Any]) -> ParsedBody:
        echoes, only_echoes = given.get("echo", False), given.get("max_tokens") == 0
        if only_echoes and not echoes:
            raise InvalidRequest("max_tokens must be at least 1 unless echo is true", param="max_tokens")
        prompts = read_prompts(given["prompt"], self._limits.prompts)
        if common["search"] is not None and (len(prompts) > 1 or echoes):
            raise InvalidRequest("a search answers one prompt, without echo", param="search")
        sampling = _sampling(self._url, {**given, "max_tokens": 1} if only_echoes else given, facts)
        if echoes and sampling.logprobs is not None:
            most = max(sampling.logprobs, sampling.prompt_logprobs or 0)
            sampling = replace(sampling, prompt_logprobs=most)
        echo = {"echoes_prompt": echoes, "only_echoes": only_echoes}
        return ParsedBody(sampling=sampling, prompts=prompts, **echo, **common)

    def _chat(self, given: Mapping[str, Any], facts: ModelFacts, common: dict[str, Any]) -> ParsedBody:
        messages = given["messages"]
        if not messages:
            raise InvalidRequest(f"messages must be {MESSAGES_MUST}", param="messages")
        if len(messages) > self._limits.messages:
            message = f"messages takes at most {self._limits.messages} entries, not {len(messages)}"
            raise InvalidRequest(message, param="messages")
        sampling = _sampling(self._url, given, facts)
        template = {
            **template_options(given),
            "use": read_openai_tools(given),
            "thinking": read_thinking(given),
        }
        shows_drafted = given.get("return_drafted", False)
        if shows_drafted and sampling.logprobs is None:
            raise InvalidRequest("return_drafted needs logprobs to be true", param="return_drafted")
        return ParsedBody(
            sampling=sampling, messages=messages, template=template, shows_drafted=shows_drafted, **common
        )


_OWN = {url: BodyParser(url, OWN_LIMITS, strict=True, serves=False) for url in (CHAT, COMPLETIONS)}


def parse_body(url: str, body: Mapping[str, Any], facts: ModelFacts) -> ParsedBody:
    """A request out of an operator's own file. Raises InvalidRequest whose `param` names the field."""
    return _OWN[url].parse(body, facts)


def without_idle_tools(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body without tools that it forbids to call: they would only tempt the model to write calls as text."""
    if body.get("tool_choice") in ("none", {"type": "none"}) and isinstance(body.get("tools"), list):
        return {name: value for name, value in body.items() if name != "tools"}
    return body


def checked_model(name: object, facts: ModelFacts) -> str:
    if name is None:
        return facts.names[0]
    if name not in facts.names and name not in facts.adapters:
        raise _unknown(name, facts)
    return str(name)


def check_caller(caller: Caller, model: str, facts: ModelFacts) -> None:
    """Raises UnknownModel for an adapter that a key may not use, as for one that is not there."""
    if model not in facts.names and not caller.may_name(model):
        raise _unknown(model, facts)


def _unknown(name: object, facts: ModelFacts) -> UnknownModel:
    message = f"the model {name!r:.128} is not loaded; there is {', '.join(facts.names)}"
    return UnknownModel(message, param="model")


def template_options(given: Mapping[str, Any]) -> dict[str, Any]:
    goes_on = given.get("continue_final_message", False)
    return {
        "switches": given.get("chat_template_kwargs"),
        "add_generation_prompt": given.get("add_generation_prompt", not goes_on),
        "continue_final_message": goes_on,
    }


def common_values(read: GivenFields, facts: ModelFacts) -> dict[str, Any]:
    """Fields of a `ParsedBody` that every API gives under the same names, where it gives them."""
    given = read.fields
    price = given.get("max_price")
    return {
        "model": checked_model(given.get("model"), facts),
        **_streaming(given),
        "priority": given.get("priority"),
        "service_tier": given.get("service_tier"),
        "max_price": None if price is None else decimal_of(price),
        "cache_salt": _checked_salt(given.get("cache_salt", "")),
        "structure_field": structure_field(given),
        "tree": _tree_limits(given.get("tree")),
        "blends": given.get("context_reuse") == "blend",
        "ignored": read.ignored,
    }


def given_sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters among the fields, under their own names."""
    found = {name: given[name] for name in PARAMETERS if name in given and name != "structured_outputs"}
    if "logit_bias" in given:
        found["logit_bias"] = _bias(given["logit_bias"])
    if (structure := structure_of(given)) is not None:
        found["structured_outputs"] = structure
    if (seconds := RETENTIONS.get(given.get("prompt_cache_retention", "in_memory"))) is not None:
        found["pin"] = Pin(ttl_s=seconds)
    if "prediction" in given:
        found["prediction"] = _predicted_text(given["prediction"])
    return found


def _sampling(url: str, given: Mapping[str, Any], facts: ModelFacts) -> SamplingParams:
    changes = given_sampling(given)
    most = given.get("max_completion_tokens")
    if most is not None and changes.setdefault("max_tokens", most) != most:
        message = "max_tokens and max_completion_tokens differ; give one of them"
        raise InvalidRequest(message, param="max_completion_tokens")
    if url == CHAT:  # without a length: the rest of the context
        changes["logprobs"] = _chat_logprobs(given)
        return chat_sampling(facts.generation, facts.max_model_len, **changes)
    return default_sampling(facts.generation, **{**changes, "logprobs": given.get("logprobs")})


def _streaming(given: Mapping[str, Any]) -> dict[str, bool]:
    wanted, options = given.get("stream", False), given.get("stream_options")
    if options is None:
        return {"is_stream": wanted}
    if not wanted:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    for name in options:
        if name not in STREAM_OPTIONS:
            message = f"stream_options takes {' and '.join(STREAM_OPTIONS)}, not {name!r:.64}"
            raise InvalidRequest(message, param="stream_options")
    usage, every = (bool(options.get(name)) for name in STREAM_OPTIONS)
    return {"is_stream": True, "includes_usage": usage, "runs_usage": every}


def read_search(given: Mapping[str, Any]) -> Search | None:
    """`search`, or what older APIs call `best_of` and `use_beam_search`."""
    count, width, asked = given.get("n", 1), given.get("best_of"), given.get("search")
    is_beam = given.get("use_beam_search", False)
    if asked is not None:
        if is_beam or width is not None:
            raise InvalidRequest("give search, or best_of and use_beam_search, not both", param="search")
        options = {name: value for name, value in asked.items() if name != "type"}
        return make_search(str(asked.get("type", "")), options)
    if width is not None and width < count:
        raise InvalidRequest(f"best_of ({width}) must be at least n ({count})", param="best_of")
    if is_beam:
        penalty = given.get("length_penalty", 1.0)
        return make_search("beam", {"width": width or count, "length_penalty": penalty})
    if given.get("length_penalty", 1) != 1:
        raise InvalidRequest("length_penalty is for use_beam_search", param="length_penalty")
    if width is None or width == count:
        return None
    return make_search("best_of", {"n": width, "checkpoints": ()})


def _tree_limits(given: Mapping[str, int] | None) -> TreeLimits | None:
    """Raises InvalidRequest for a limit that does not exist."""
    for name in given or ():
        if name not in TreeLimits.__dataclass_fields__:
            known = ", ".join(TreeLimits.__dataclass_fields__)
            raise InvalidRequest(f"tree takes {known}, not {name!r:.64}", param="tree")
    return None if given is None else TreeLimits(**given)


def _checked_salt(value: str) -> str:
    """Printable text without slashes, so that it can stand in a name and makes no path."""
    if not value.isprintable() or "/" in value or "\\" in value:
        message = "cache_salt must be printable text without slashes"
        raise InvalidRequest(message, param="cache_salt")
    return value


def _chat_logprobs(given: Mapping[str, Any]) -> int | None:
    wanted, count = given.get("logprobs", False), given.get("top_logprobs")
    if not wanted and count:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return (count or 0) if wanted else None


def _bias(value: Mapping[str, float]) -> dict[int, float]:
    """JSON has only texts as keys."""
    if not all(key.isascii() and key.isdigit() and str(int(key)) == key for key in value):
        raise InvalidRequest("logit_bias maps token ids to numbers from -100 to 100", param="logit_bias")
    return {int(key): number for key, number in value.items()}


def _predicted_text(value: Mapping[str, Any]) -> str:
    """OpenAI's `prediction`: a text, or its parts."""
    content = value.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if value.get("type") != "content" or not isinstance(parts, list):
        raise InvalidRequest(
            'prediction must be {"type": "content", "content": ...} with a text or a list of text parts',
            param="prediction",
        )
    texts = [
        part["text"]
        for part in parts
        if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
    ]
    if len(texts) != len(parts):
        raise InvalidRequest(
            'prediction.content takes parts of the form {"type": "text", "text": ...}', param="prediction"
        )
    return "".join(texts)


def read_prompts(value: Any, most: int, name: str = "prompt") -> tuple[str | list[int], ...]:
    """A text, a list of texts, token ids, or a list of those."""
    if isinstance(value, str) or _is_list_of(value, int):
        return (value,)
    if isinstance(value, list) and value and isinstance(value[0], str | list) and len(value) > most:
        raise InvalidRequest(f"{name} takes at most {most} {name}s, not {len(value)}", param=name)
    if _is_list_of(value, str) or (_is_list_of(value, list) and all(_is_list_of(ids, int) for ids in value)):
        return tuple(value)
    raise InvalidRequest(f"{name} must be {PROMPT_MUST}", param=name)


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(type(part) is kind for part in value)


def checked_messages(messages: Any, limits: RequestLimits, *, param: str) -> list[Any]:
    if not isinstance(messages, list) or not 1 <= len(messages) <= limits.messages:
        raise InvalidRequest(f"{param} must be a list of 1 to {limits.messages} messages", param=param)
    return messages
