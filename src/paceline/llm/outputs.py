"""What a caller gets: the text, tokens and figures of one request, in the shape people know from vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """How likely a token was at its place."""

    logprob: float
    rank: int | None = None  # 1 is the likeliest
    decoded_token: str | None = None


Logprobs = list[dict[int, Logprob]]


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One branch of a request, as far as it has come."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None  # stop, length, abort or error; None while it runs
    stop_reason: int | str | None = None  # the stop string or stop id that was met
    error: str | None = None  # what went wrong, when finish_reason is error

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """Times by the engine's clock, in seconds; None until it has happened."""

    arrival_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    preemptions: int = 0


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A request and its branches."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
