"""How tokens are chosen for one request: a frozen, validated value, and the one declaration of its parameters.

Each field of `SamplingParams` is declared with its range, its help text and the places that offer it. The frames
between the processes, the fields of the HTTP API, the flags of `run` and `chat`, `/set` in a chat and the defaults that
model files recommend are derived from `PARAMETERS`. Ranges follow the OpenAI API and vLLM where they agree. Validation
happens once, on construction; ids are checked against a vocabulary by `check_vocabulary`.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from paceline.core.parameters import KVKeep, NestedParameter, Pin, PoolingParams
from paceline.core.structure import Structure
from paceline.errors import InvalidRequest, refusing

NO_CHANGES: Mapping[str, Any] = MappingProxyType({})
OF_BRANCH: Mapping[str, Any] = {"n": 1, "prompt_logprobs": None, "pin": None}  # what is its parent's alone
MAX_BRANCHES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 64
MAX_BIAS = 300
MAX_LOGPROBS = 20
MAX_WORDS = 128
MAX_OBJECTIVE_MS = 86_400_000  # a day
DEFAULT_HOLD_S, MAX_HOLD_S = 60.0, 3600.0
ON_INFEASIBLE = ("refuse", "try")
ON_STOP = ("end", "hold")
_LARGEST = 2**31 - 1
_LARGEST_SEED = 2**63 - 1


_BEAMS = "use LLM.search('beam', ...) or LLM.search('best_of', ...)"
# Names that vLLM's class of this name has or had.
UNSUPPORTED = {
    "guided_decoding": "use structured_outputs",
    "use_beam_search": _BEAMS,
    "best_of": _BEAMS,
    "length_penalty": _BEAMS,
    "early_stopping": _BEAMS,
    "logits_processors": "use logit_bias, allowed_token_ids or bad_words",
    "truncate_prompt_tokens": "shorten the prompt before the call",
    "thinking_token_budget": "use max_tokens",
    "flat_logprobs": "logprobs are a list with one entry for each token",
    "extra_args": "there is nothing that reads them",
}


class Offer(enum.Flag):
    """Where a parameter can be given, besides the constructor."""

    NOWHERE = 0
    API = enum.auto()  # a field of every route that generates, and of the lines that `run-batch` reads
    SERVER = enum.auto()  # a field of a server's routes only
    FLAG = enum.auto()  # a flag of `run` and `chat`
    SET = enum.auto()  # `/set` in a chat
    MODEL = enum.auto()  # the files of a model may recommend a value
    FORK = enum.auto()  # a branch may have another value than its parent
    CHAT = FLAG | SET
    EVERYWHERE = API | CHAT | MODEL | FORK


def parameter(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
    offered: Offer = Offer.API,
    is_basic: bool = False,
    is_text: bool = False,
) -> Any:
    """Declare one parameter: its default, its meaning, its range (both ends included) and where it is offered.

    `is_basic`: on the short help page of a command. `is_text`: about text, which the engine never sees. A default
    that is a function makes the value.
    """
    metadata = {
        "help": help,
        "low": low,
        "high": high,
        "choices": choices,
        "offered": offered,
        "is_basic": is_basic,
        "is_text": is_text,
    }
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


class RequestOutputKind(enum.Enum):
    """What each item of `AsyncLLM.generate` holds."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new since the item before
    FINAL_ONLY = 2  # there is one item, at the end


@refusing(UNSUPPORTED)
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one request."""

    max_tokens: int = parameter(
        16,
        "most tokens of an answer",
        low=1,
        high=_LARGEST,
        offered=Offer.CHAT | Offer.FORK,
        is_basic=True,
    )
    min_tokens: int = parameter(0, "tokens before anything may end the answer", low=0, high=_LARGEST)
    n: int = parameter(1, "answers to make; they share the prompt", low=1, high=MAX_BRANCHES)
    temperature: float = parameter(
        1.0,
        "0: always the most likely token; higher: more varied",
        low=0,
        high=2,
        offered=Offer.EVERYWHERE,
        is_basic=True,
    )
    top_k: int = parameter(
        0,
        "sample from this number of the most likely tokens; 0 and -1: all",
        low=-1,
        high=_LARGEST,
        offered=Offer.EVERYWHERE,
    )
    top_p: float = parameter(
        1.0,
        "sample from the most likely tokens with this total probability",
        low=1e-9,
        high=1,
        offered=Offer.EVERYWHERE,
        is_basic=True,
    )
    min_p: float = parameter(
        0.0,
        "minimum probability, relative to the most likely token; 0: off",
        low=0,
        high=1,
        offered=Offer.EVERYWHERE,
    )
    repetition_penalty: float = parameter(
        1.0,
        "above 1: tokens of the prompt and the answer become less likely",
        low=1e-3,
        high=100,
        offered=Offer.EVERYWHERE,
    )
    presence_penalty: float = parameter(
        0.0,
        "subtracted from the logits of tokens that the answer has",
        low=-2,
        high=2,
        offered=Offer.API | Offer.SET | Offer.FORK,
    )
    frequency_penalty: float = parameter(
        0.0,
        "subtracted from the logit of a token for each time the answer has it",
        low=-2,
        high=2,
        offered=Offer.API | Offer.SET | Offer.FORK,
    )
    logit_bias: Mapping[int, float] = parameter(
        lambda: MappingProxyType({}),
        "added to the logits of these tokens, -100 to 100",
        offered=Offer.API | Offer.FORK,
    )
    allowed_token_ids: tuple[int, ...] | None = parameter(None, "no other tokens are produced")
    # Text is turned into token ids before a request is added.
    bad_words: tuple[str | tuple[int, ...], ...] = parameter(
        (), "words that are not produced, as text or token ids"
    )
    prediction: str | tuple[int, ...] = parameter(
        (),
        "what the answer is expected to say, as text or token ids: drafts are made from it, which changes no token",
        offered=Offer.NOWHERE,
    )
    seed: int | None = parameter(
        None,
        "the same seed gives the same answer",
        low=-_LARGEST_SEED - 1,
        high=_LARGEST_SEED,
        offered=Offer.API | Offer.SET | Offer.FORK,
    )
    stop: tuple[str, ...] = parameter(
        (),
        "text that ends an answer; several are allowed",
        offered=Offer.API | Offer.CHAT | Offer.FORK,
        is_text=True,
    )
    stop_token_ids: tuple[int, ...] = parameter(
        (), "tokens that end an answer", offered=Offer.API | Offer.FORK
    )
    ignore_eos: bool = parameter(False, "continue after the end of text", offered=Offer.API | Offer.FORK)
    logprobs: int | None = parameter(
        None,
        "likely tokens to return for each token of the answer; -1: the whole vocabulary",
        low=-1,
        high=MAX_LOGPROBS,
        offered=Offer.NOWHERE,
    )
    prompt_logprobs: int | None = parameter(
        None, "the same for the prompt", low=-1, high=MAX_LOGPROBS, offered=Offer.NOWHERE
    )
    structured_outputs: Structure | None = parameter(  # noqa: RUF009
        None, "the form of the answer: a JSON schema, a pattern, a grammar, choices", offered=Offer.NOWHERE
    )
    kv_keep: KVKeep | None = parameter(  # noqa: RUF009
        None,
        "tokens whose KV is kept once the answer has begun, the first and the most recent ones; what lies between is "
        "dropped, which changes the answer",
    )
    pooling: PoolingParams | None = parameter(  # noqa: RUF009
        None,
        "the request ends with a vector instead of tokens; use `LLM.embed` or /v1/embeddings",
        offered=Offer.NOWHERE,
    )
    pin: Pin | None = parameter(  # noqa: RUF009
        None,
        "the prompt's KV stays in the cache for `ttl_s` seconds after the request, as far as pins may take room",
        offered=Offer.NOWHERE,
    )
    # 1: all of it. Comes with a key, not with a request.
    cache_share: float = parameter(
        1.0,
        "share of the cache beyond which what its tenant left there is evicted first",
        low=0,
        high=1,
        offered=Offer.NOWHERE,
    )
    detokenize: bool = parameter(True, "whether outputs have text", offered=Offer.NOWHERE, is_text=True)
    skip_special_tokens: bool = parameter(True, "leave control tokens out of the text", is_text=True)
    spaces_between_special_tokens: bool = parameter(True, "spaces around control tokens", is_text=True)
    include_stop_str_in_output: bool = parameter(
        False, "keep the text that ended the answer", offered=Offer.API | Offer.FORK, is_text=True
    )
    output_kind: RequestOutputKind = parameter(  # noqa: RUF009
        RequestOutputKind.CUMULATIVE,
        "what the items of a stream hold; `LLM` returns whole outputs",
        offered=Offer.NOWHERE,
        is_text=True,
    )
    # Times wanted of a request; see docs/guides/deadlines.md.
    deadline_ms: int | None = parameter(
        None,
        "from arrival to the last token; the request ends then, with the tokens it has",
        low=1,
        high=MAX_OBJECTIVE_MS,
        offered=Offer.SERVER,
    )
    ttft_slo_ms: int | None = parameter(
        None, "wanted from arrival to the first token", low=1, high=MAX_OBJECTIVE_MS, offered=Offer.SERVER
    )
    itl_slo_ms: int | None = parameter(
        None, "wanted between two tokens", low=1, high=MAX_OBJECTIVE_MS, offered=Offer.SERVER
    )
    on_infeasible: str = parameter(
        "refuse",
        "try: accept the request even if the forecast says that its times cannot be met",
        choices=ON_INFEASIBLE,
        offered=Offer.SERVER,
    )
    on_stop: str = parameter(
        "end",
        "hold: an answer that would end is kept, to be forked or extended",
        choices=ON_STOP,
        offered=Offer.SERVER | Offer.FORK,
    )
    hold_s: float = parameter(
        DEFAULT_HOLD_S,
        "how long it is kept before it is pruned",
        low=0.01,
        high=MAX_HOLD_S,
        offered=Offer.SERVER | Offer.FORK,
    )

    def __post_init__(self) -> None:
        _normalize(self)
        _check_ranges(self)
        _check_counts(self)

    def of_branch(self, max_tokens: int, min_tokens: int, changes: Mapping[str, Any] = NO_CHANGES) -> Self:
        """These for a single branch of a request, which may generate `max_tokens` tokens, with `changes`."""
        changed = {"max_tokens": max_tokens, "min_tokens": min_tokens, **OF_BRANCH}
        if changes:
            return replace(self, **{**changed, **changes, "n": 1})
        # Nothing else changes and all was checked before: a beam makes several branches for each token, and `replace`
        # checks every field.
        found = object.__new__(type(self))
        for name in _FIELDS:
            object.__setattr__(found, name, changed[name] if name in changed else getattr(self, name))
        return found

    @property
    def has_objectives(self) -> bool:
        """Whether anything is wanted of its times."""
        return not self.deadline_ms is self.ttft_slo_ms is self.itl_slo_ms is None

    @property
    def longest_output(self) -> int:
        """Most tokens of an answer; a request that ends with a vector has none."""
        return 0 if self.pooling is not None else self.max_tokens

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids outside `[0, vocab_size)` in any field."""
        fields: tuple[tuple[str, tuple[int, ...]], ...] = (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", tuple(self.logit_bias)),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("bad_words", tuple(t for word in self.bad_words if not isinstance(word, str) for t in word)),
            ("prediction", () if isinstance(self.prediction, str) else self.prediction),
            ("pooling", () if self.pooling is None else self.pooling.token_ids),
        )
        for name, tokens in fields:
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise InvalidRequest(f"{name}: token id {token} is not in [0, {vocab_size})", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A declared parameter, for the places that offer it."""

    name: str
    type: Any  # as annotated
    default: Any
    help: str
    low: Any
    high: Any
    choices: tuple[str, ...] | None
    offered: Offer
    is_basic: bool
    is_text: bool

    @property
    def kind(self) -> Any:
        """The class of its values, None left out."""
        plain = self.type
        if isinstance(plain, UnionType):
            plain = next(part for part in get_args(plain) if part is not NoneType)
        return get_origin(plain) or plain


def _declared() -> dict[str, Parameter]:
    hints = get_type_hints(SamplingParams)
    declared = {}
    for spec in fields(SamplingParams):
        default = spec.default if spec.default_factory is MISSING else spec.default_factory()
        declared[spec.name] = Parameter(
            name=spec.name, type=hints[spec.name], default=default, **spec.metadata
        )
    return declared


PARAMETERS: Mapping[str, Parameter] = _declared()


def offered(where: Offer) -> list[Parameter]:
    """The parameters that a place offers, in the order of their declaration."""
    return [parameter for parameter in PARAMETERS.values() if parameter.offered & where]


def branch_seed(seed: int, branch: int) -> int:
    """The seed of one branch of a request; branch 0 keeps the request's own."""
    if branch == 0:
        return seed
    text = b"%d:%d" % (seed, branch)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def _normalize(params: SamplingParams) -> None:
    """Accept the shapes people write: one string for `stop`, lists for tuples, 0 and -1 for no limit."""
    if isinstance(params.stop, str):
        object.__setattr__(params, "stop", (params.stop,))
    for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "prediction"):
        value = getattr(params, name)
        if value is None:
            if name != "allowed_token_ids":
                object.__setattr__(params, name, ())
        elif isinstance(value, list | set | frozenset):
            object.__setattr__(params, name, tuple(value))
    if params.prediction == "":
        object.__setattr__(params, "prediction", ())
    if params.structured_outputs is not None:
        object.__setattr__(params, "structured_outputs", Structure.of(params.structured_outputs))
    kinds: tuple[type[NestedParameter], ...] = (KVKeep, Pin, PoolingParams)
    for kind in kinds:
        given = getattr(params, kind.NAME)
        if given is not None:
            object.__setattr__(params, kind.NAME, kind.of(given))
    if params.logit_bias is None:
        object.__setattr__(params, "logit_bias", MappingProxyType({}))


_FIELDS = tuple(field.name for field in fields(SamplingParams))
_INT_RANGES, _FLOAT_RANGES = (
    [
        (spec.name, spec.low, spec.high, spec.default is None)
        for spec in PARAMETERS.values()
        if spec.kind is kind
    ]
    for kind in (int, float)
)


def _check_ranges(params: SamplingParams) -> None:
    for name, low, high, may_be_none in _INT_RANGES:
        value = getattr(params, name)
        if value is None and may_be_none:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidRequest(f"{name} must be a whole number, not {value!r}", param=name)
        if not low <= value <= high:
            raise InvalidRequest(f"{name} must be between {low} and {high}, not {value}", param=name)
    for name, low, high, _ in _FLOAT_RANGES:
        value = getattr(params, name)
        if not _is_finite(value):
            raise InvalidRequest(f"{name} must be a finite number, not {value!r}", param=name)
        if not low <= value <= high:
            raise InvalidRequest(f"{name} must be between {low:g} and {high:g}, not {value}", param=name)
    if not isinstance(params.output_kind, RequestOutputKind):
        message = f"output_kind must be a RequestOutputKind, not {params.output_kind!r}"
        raise InvalidRequest(message, param="output_kind")
    if params.on_infeasible not in ON_INFEASIBLE:
        message = f"on_infeasible must be one of {', '.join(ON_INFEASIBLE)}, not {params.on_infeasible!r}"
        raise InvalidRequest(message, param="on_infeasible")
    if params.on_stop not in ON_STOP:
        message = f"on_stop must be one of {', '.join(ON_STOP)}, not {params.on_stop!r}"
        raise InvalidRequest(message, param="on_stop")
    if params.min_tokens > params.max_tokens:
        message = f"min_tokens ({params.min_tokens}) is larger than max_tokens ({params.max_tokens})"
        raise InvalidRequest(message, param="min_tokens")


def _is_finite(value: object) -> bool:
    """A number a float can hold; True and False are no numbers here."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _check_counts(params: SamplingParams) -> None:
    limits: tuple[tuple[str, int, int], ...] = (
        ("stop", len(params.stop), MAX_STOPS),
        ("stop_token_ids", len(params.stop_token_ids), MAX_STOP_IDS),
        ("logit_bias", len(params.logit_bias), MAX_BIAS),
        ("bad_words", len(params.bad_words), MAX_WORDS),
    )
    for name, count, limit in limits:
        if count > limit:
            raise InvalidRequest(f"{name} takes at most {limit} entries, not {count}", param=name)
    for text in params.stop:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"a stop string has 1 to {MAX_STOP_CHARS} characters", param="stop")
    if params.stop and not params.detokenize:
        raise InvalidRequest(
            "stop strings are found in the text of an answer: leave detokenize on, or use stop_token_ids",
            param="stop",
        )
    for token, bias in params.logit_bias.items():
        is_id = isinstance(token, int) and not isinstance(token, bool)
        if not is_id or not _is_finite(bias) or not -100 <= bias <= 100:
            raise InvalidRequest("logit_bias maps token ids to numbers from -100 to 100", param="logit_bias")
    if params.structured_outputs is not None and params.ignore_eos:
        raise InvalidRequest(
            "ignore_eos: an answer with structured_outputs ends where its structure does", param="ignore_eos"
        )
    if params.structured_outputs is not None and params.allowed_token_ids is not None:
        raise InvalidRequest(
            "allowed_token_ids: the structure of an answer says which tokens it may have; leave one of them out",
            param="allowed_token_ids",
        )
    if params.kv_keep is not None and params.prompt_logprobs is not None:
        raise InvalidRequest(
            "kv_keep: an answer that does not see its whole prompt is not measured by it; leave prompt_logprobs out",
            param="kv_keep",
        )
    if params.pooling is not None:
        _check_pooled(params)
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise InvalidRequest("allowed_token_ids must name at least one token", param="allowed_token_ids")


def _check_pooled(params: SamplingParams) -> None:
    """A request that ends with a vector has no output that these could be about."""
    for name, unset in _NOT_POOLED.items():
        if getattr(params, name) != unset:
            raise InvalidRequest(
                f"{name}: a request with pooling ends with a vector and has no tokens; leave it out",
                param=name,
            )


_NOT_POOLED: Mapping[str, Any] = {
    name: PARAMETERS[name].default
    for name in ("n", "logprobs", "prompt_logprobs", "structured_outputs", "kv_keep", "on_stop", "prediction")
}
