"""From the engine's events to outputs: text, logprobs and endings of every request under way.

Stop strings are found here, outside the step loop; the engine is told at which token its output ends, and whatever
it delivers beyond is dropped. Knows the engine by its events and two commands, not by its parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.events import Finished, LogprobEvent, StepEvents
from paceline.core.plan import RowLogprobs
from paceline.core.request import FinishReason, RequestId
from paceline.llm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from paceline.llm.prompts import PreparedRequest
from paceline.text.stream import TextDelta, TextStream
from paceline.text.tokenizer import Tokenizer


class Commands(Protocol):
    """What the collector asks of the engine."""

    def finish_at(self, request_id: RequestId, num_output: int) -> bool: ...


@dataclass(slots=True, eq=False)
class Branch:
    """One engine request: a branch of what the caller asked for."""

    id: RequestId
    whole: Whole
    output: CompletionOutput
    stream: TextStream | None
    cut: bool = False  # a stop string was found: what still comes is dropped


@dataclass(slots=True, eq=False)
class Whole:
    """What the caller asked for, with all its branches."""

    output: RequestOutput
    prepared: PreparedRequest
    branches: list[Branch] = field(default_factory=list)
    changed: bool = False


class Collector:
    """Outputs of all requests under way."""

    def __init__(self, tokenizer: Tokenizer | None, commands: Commands) -> None:
        self._tokenizer = tokenizer
        self._commands = commands
        self._branches: dict[RequestId, Branch] = {}

    @property
    def num_open(self) -> int:
        return len(self._branches)

    def open(
        self, name: str, prepared: PreparedRequest, ids: Iterable[RequestId], arrival_s: float
    ) -> RequestOutput:
        """Follow a request the engine has accepted under `ids`, one for each branch."""
        sampling = prepared.sampling
        output = RequestOutput(
            request_id=name,
            prompt=prepared.text,
            prompt_token_ids=prepared.token_ids,
            outputs=[],
            prompt_logprobs=None if sampling.prompt_logprobs is None else [None] * len(prepared.token_ids),
            metrics=RequestMetrics(arrival_s=arrival_s),
        )
        whole = Whole(output, prepared)
        for index, request_id in enumerate(ids):
            own = CompletionOutput(index=index)
            if sampling.logprobs is not None:
                own.logprobs, own.cumulative_logprob = [], 0.0
            stream = None
            if self._tokenizer is not None and sampling.detokenize:
                stream = TextStream(self._tokenizer, prepared.token_ids, sampling)
            output.outputs.append(own)
            whole.branches.append(Branch(request_id, whole, own, stream))
            self._branches[request_id] = whole.branches[-1]
        return output

    def take(self, events: StepEvents) -> list[RequestOutput]:
        """Bring outputs up to date; returns those that changed. Each is one object that grows."""
        endings = {ending.request: ending for ending in events.finished}
        changed: dict[int, Whole] = {}
        for event in events.logprobs:
            self._take_logprobs(event)
        for batch in events.tokens:
            columns = (batch.requests.tolist(), batch.tokens.tolist(), batch.index.tolist())
            for request_id, token, index in zip(*columns, strict=True):
                branch = self._branches.get(request_id)
                if branch is not None and not branch.cut:
                    ending = endings.get(request_id)
                    is_stop = _is_stop_token(ending, index)
                    self._take_token(branch, token, batch.time_s, is_stop=is_stop)
                    changed[id(branch.whole)] = branch.whole
        for ending in events.finished:
            branch = self._branches.pop(ending.request, None)
            if branch is not None:
                self._end(branch, ending)
                changed[id(branch.whole)] = branch.whole
        return [whole.output for whole in changed.values()]

    def ids_of(self, name: str) -> list[RequestId]:
        """Engine requests under way of one request of a caller."""
        return [branch.id for branch in self._branches.values() if branch.whole.output.request_id == name]

    def _take_token(self, branch: Branch, token: int, time_s: float, *, is_stop: bool) -> None:
        output, metrics = branch.output, branch.whole.output.metrics
        assert metrics is not None
        output.token_ids.append(token)
        metrics.first_token_s = time_s if metrics.first_token_s is None else metrics.first_token_s
        metrics.last_token_s = time_s
        if branch.stream is None:
            return
        delta = branch.stream.push([token], ends_with_stop_token=is_stop)
        output.text += delta.text
        if delta.stopped_at is not None:
            self._cut(branch, delta)
            self._commands.finish_at(branch.id, delta.stopped_at)

    def _cut(self, branch: Branch, delta: TextDelta) -> None:
        """A stop string was met: the output ends at the token that completed it."""
        branch.cut = True
        del branch.output.token_ids[delta.stopped_at :]
        branch.output.stop_reason = delta.stop_reason

    def _take_logprobs(self, event: LogprobEvent) -> None:
        branch = self._branches.get(event.request)
        if branch is None or branch.cut:
            return
        entry = self._entry(event.logprobs)
        prompt, own = branch.whole.output.prompt_logprobs, branch.output
        number = event.logprobs.position - len(branch.whole.prepared.token_ids)
        if number < 0 and prompt is not None:
            prompt[number] = entry
        elif own.logprobs is not None and number == len(own.logprobs):
            own.logprobs.append(entry)
            own.cumulative_logprob = (own.cumulative_logprob or 0.0) + event.logprobs.logprob

    def _entry(self, found: RowLogprobs) -> dict[int, Logprob]:
        entry = {found.token: self._logprob(found.token, found.logprob, found.rank)}
        for rank, (token, value) in enumerate(zip(found.top_tokens, found.top_logprobs, strict=True), 1):
            entry.setdefault(token, self._logprob(token, value, rank))
        return entry

    def _logprob(self, token: int, value: float, rank: int) -> Logprob:
        text = None if self._tokenizer is None else self._tokenizer.token_text(token)
        return Logprob(logprob=value, rank=rank, decoded_token=text)

    def _end(self, branch: Branch, ending: Finished) -> None:
        output, whole = branch.output, branch.whole
        if branch.stream is not None and not branch.cut:
            rest = branch.stream.finish()
            output.text += rest.text
            if rest.stopped_at is not None:  # completed by characters that were held back until now
                self._cut(branch, rest)
        if output.logprobs is not None:
            del output.logprobs[len(output.token_ids) :]
        output.finish_reason = FinishReason.STOP.value if branch.cut else ending.reason.value
        if ending.reason is FinishReason.ERROR:
            output.error = ending.detail
        elif ending.reason is FinishReason.STOP and not branch.cut and output.token_ids:
            last = output.token_ids[-1]
            if last in whole.prepared.sampling.stop_token_ids:
                output.stop_reason = last
        result = whole.output
        if output.index == 0:  # the others take the prompt over from the first
            result.num_cached_tokens = ending.num_cached
        assert result.metrics is not None
        result.metrics.preemptions += ending.preemptions
        result.finished = all(part.finished for part in result.outputs)
        if result.finished:
            result.metrics.finished_s = ending.time_s


def _is_stop_token(ending: Finished | None, index: int) -> bool:
    """Whether token `index` is the stop token the engine ended this request by."""
    return ending is not None and ending.reason is FinishReason.STOP and index == ending.num_output - 1
