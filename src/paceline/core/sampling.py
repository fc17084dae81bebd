"""How tokens are chosen for one request: a frozen, validated value.

Ranges follow the OpenAI API and vLLM where they agree. Validation happens once, on construction, so that no
later part has to doubt a value; ids are checked against a vocabulary by `check_vocabulary`, at the door.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from paceline.core.keywords import refusing
from paceline.errors import InvalidRequest

MAX_BRANCHES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 64
MAX_BIAS = 300
MAX_LOGPROBS = 20
MAX_WORDS = 128
MAX_WISH_MS = 86_400_000  # a day
ON_INFEASIBLE = ("refuse", "try")
SEED_LOW, SEED_HIGH = -(2**63), 2**63 - 1


_SCHEMA = "answers are not constrained to a schema or grammar; describe the format in the prompt and check the answer"
_BEAMS = "there is no beam search; n gives several branches of one prompt"
# Names that vLLM's class of this name has or had.
UNSUPPORTED = {
    "structured_outputs": _SCHEMA,
    "guided_decoding": _SCHEMA,
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


class RequestOutputKind(Enum):
    """What each item of `AsyncLLM.generate` holds."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new since the item before
    FINAL_ONLY = 2  # there is one item, at the end


@refusing(UNSUPPORTED)
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one request. `temperature` 0 is greedy; 0 switches `top_k` and `min_p` off."""

    max_tokens: int = 16
    min_tokens: int = 0
    n: int = 1  # branches that share the prompt
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    allowed_token_ids: tuple[int, ...] | None = None
    # Words that must not be produced: text, or token ids, which text is turned into before a request is added.
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # of a stream; `LLM` gives whole outputs
    # What is wanted of its times; see docs/guides/deadlines.md.
    deadline_ms: int | None = None  # from arrival to the last token; it ends then, whatever it has
    ttft_slo_ms: int | None = None  # from arrival to the first token
    itl_slo_ms: int | None = None  # between two tokens
    # What to do with a request that cannot make its times: refuse, or try anyway.
    on_infeasible: str = "refuse"

    def __post_init__(self) -> None:
        _normalize(self)
        _check_ranges(self)
        _check_counts(self)

    @property
    def has_wishes(self) -> bool:
        """Whether anything is wanted of its times."""
        return not self.deadline_ms is self.ttft_slo_ms is self.itl_slo_ms is None

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids outside `[0, vocab_size)` in any field."""
        fields: tuple[tuple[str, tuple[int, ...]], ...] = (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", tuple(self.logit_bias)),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("bad_words", tuple(t for word in self.bad_words if not isinstance(word, str) for t in word)),
        )
        for name, tokens in fields:
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise InvalidRequest(f"{name}: token id {token} is not in [0, {vocab_size})", param=name)


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
    for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
        value = getattr(params, name)
        if value is None:
            if name != "allowed_token_ids":
                object.__setattr__(params, name, ())
        elif isinstance(value, list | set | frozenset):
            object.__setattr__(params, name, tuple(value))
    if params.logit_bias is None:
        object.__setattr__(params, "logit_bias", MappingProxyType({}))


_INT_RANGES: tuple[tuple[str, int, int], ...] = (
    ("max_tokens", 1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("n", 1, MAX_BRANCHES),
    ("top_k", -1, 2**31 - 1),
    ("seed", SEED_LOW, SEED_HIGH),
    ("logprobs", -1, MAX_LOGPROBS),
    ("prompt_logprobs", -1, MAX_LOGPROBS),
    ("deadline_ms", 1, MAX_WISH_MS),
    ("ttft_slo_ms", 1, MAX_WISH_MS),
    ("itl_slo_ms", 1, MAX_WISH_MS),
)
_MAY_BE_NONE = frozenset({"seed", "logprobs", "prompt_logprobs", "deadline_ms", "ttft_slo_ms", "itl_slo_ms"})
_FLOAT_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 2.0),
    ("top_p", 1e-9, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 1e-3, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)


def _check_ranges(params: SamplingParams) -> None:
    for name, low, high in _INT_RANGES:
        value = getattr(params, name)
        if value is None and name in _MAY_BE_NONE:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidRequest(f"{name} must be a whole number, not {value!r}", param=name)
        if not low <= value <= high:
            raise InvalidRequest(f"{name} must be between {low} and {high}, not {value}", param=name)
    for name, low_f, high_f in _FLOAT_RANGES:
        value = getattr(params, name)
        if not _is_finite(value):
            raise InvalidRequest(f"{name} must be a finite number, not {value!r}", param=name)
        if not low_f <= value <= high_f:
            raise InvalidRequest(f"{name} must be between {low_f:g} and {high_f:g}, not {value}", param=name)
    if not isinstance(params.output_kind, RequestOutputKind):
        message = f"output_kind must be a RequestOutputKind, not {params.output_kind!r}"
        raise InvalidRequest(message, param="output_kind")
    if params.on_infeasible not in ON_INFEASIBLE:
        message = f"on_infeasible must be one of {', '.join(ON_INFEASIBLE)}, not {params.on_infeasible!r}"
        raise InvalidRequest(message, param="on_infeasible")
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
    for token, bias in params.logit_bias.items():
        is_id = isinstance(token, int) and not isinstance(token, bool)
        if not is_id or not _is_finite(bias) or not -100 <= bias <= 100:
            raise InvalidRequest("logit_bias maps token ids to numbers from -100 to 100", param="logit_bias")
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise InvalidRequest("allowed_token_ids must name at least one token", param="allowed_token_ids")
