"""What a caller gets: the text, tokens and figures of one request, in the shape people know from vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import attrgetter


@dataclass(slots=True, kw_only=True)  # not frozen, which takes twice as long: a token may have 21 of them
class Logprob:
    """How likely a token was at its place."""

    logprob: float
    rank: int | None = None  # 1 is the likeliest
    decoded_token: str | None = None
    is_drafted: bool = False  # it came as a draft that was right


Logprobs = list[dict[int, Logprob]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool. Its arguments are a JSON object, unless the answer broke off inside (`is_complete`)."""

    id: str
    name: str
    arguments: str
    is_complete: bool = True


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One branch of a request, as far as it has come."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None  # stop, length, abort or error; None while it runs
    # The stop string or stop id that was met; deadline, when its time was up.
    stop_reason: int | str | None = None
    error: str | None = None  # what went wrong, when finish_reason is error
    # Of conversations, where the model has them; `text` is then the answer without them.
    reasoning: str | None = None
    num_reasoning_tokens: int = 0
    tool_calls: tuple[ToolCall, ...] = ()
    # Of branches that are kept at their end (`on_stop="hold"`): what would have ended it, stop or length; None while
    # it runs and when it has ended.
    held: str | None = None
    num_holds: int = 0  # so far
    vector: bytes = b""  # of a pooled request: little-endian float32
    # of its tokens, those it did not take over from another branch and that were not put in
    num_generated: int = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def copied(self) -> CompletionOutput:
        """The state it is in now. Fields by name: `copy.copy` takes three times as long, and this is done per token."""
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=self.token_ids.copy(),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs.copy(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            reasoning=self.reasoning,
            num_reasoning_tokens=self.num_reasoning_tokens,
            tool_calls=self.tool_calls,
            held=self.held,
            num_holds=self.num_holds,
            num_generated=self.num_generated,
            vector=self.vector,
        )


@dataclass(slots=True)
class RequestMetrics:
    """Times by the engine's clock, in seconds; None until it has happened."""

    arrival_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    queue_s: float | None = None  # until its first admission; the longest of its branches
    preemptions: int = 0
    swaps: int = 0  # of these, those that kept its KV on the host
    recomputed_tokens: int = 0  # computed again after a preemption
    kv_dropped_tokens: int = 0  # whose KV was dropped (`kv_keep`); above 0 the output is lossy
    # KV blocks held, each for as long as it was; a shared one counts for each holder.
    kv_block_seconds: float = 0.0
    recompute_kv_block_seconds: float = 0.0  # of these, while tokens were computed again

    def copied(self) -> RequestMetrics:
        return RequestMetrics(*_figures(self))


# All at once: one by one takes longer, and this is done per token.
_figures = attrgetter(*RequestMetrics.__dataclass_fields__)


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
    num_image_tokens: int = 0  # of the prompt, those that stand for pictures
    num_reused_tokens: int = 0  # of the prompt, those of placed texts that were copied
    # Drafts from its prediction that were verified, over all branches: those that were right, and the others.
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    metrics: RequestMetrics | None = None

    def copied(self) -> RequestOutput:
        """The state it and its branches are in now; the prompt, which does not change, is shared."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[part.copied() for part in self.outputs],
            prompt_logprobs=self.prompt_logprobs,
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            num_image_tokens=self.num_image_tokens,
            num_reused_tokens=self.num_reused_tokens,
            accepted_prediction_tokens=self.accepted_prediction_tokens,
            rejected_prediction_tokens=self.rejected_prediction_tokens,
            metrics=None if self.metrics is None else self.metrics.copied(),
        )


class OutputDelta:
    """What is new in an output since it was last looked at. Text, tokens and logprobs of a branch only grow."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int, bool]] = {}  # characters, tokens and end, by branch

    def since_last(self, output: RequestOutput) -> RequestOutput:
        """Branches that have something new, with that alone; `cumulative_logprob` stays the whole sum."""
        new = []
        for part in output.outputs:
            state = (len(part.text), len(part.token_ids), part.finished)
            num_chars, num_tokens, _ = seen = self._seen.get(part.index, (0, 0, False))
            if state == seen:
                continue
            self._seen[part.index] = state
            new.append(
                replace(
                    part,
                    text=part.text[num_chars:],
                    token_ids=part.token_ids[num_tokens:],
                    logprobs=None if part.logprobs is None else part.logprobs[num_tokens:],
                )
            )
        return replace(output, outputs=new)
