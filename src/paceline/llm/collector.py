"""From the engine's events to outputs: text, logprobs and endings of every request under way.

Stop strings are found here, outside the step loop; the engine learns at which token its output ends, and whatever
it delivers beyond is dropped. Knows the engine by its events and that command, not by its parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.events import Finished, Held, LogprobEvent, StepEvents, TokenEvents
from paceline.core.request import FinishReason, RequestId
from paceline.core.sampling import SamplingParams
from paceline.errors import InvalidRequest, UnknownRequest
from paceline.llm.branch_text import BranchText, known_logprob, logprob_entry
from paceline.llm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from paceline.llm.prompts import PreparedRequest
from paceline.text.tokenizer import Tokenizer

# Tokens of branches that are not read before they end: kept in columns, so that a step costs the same for any
# batch.
#
# Entry i of a step's tokens goes to the place of its request with a few array operations; Python sees a branch when
# it opens and when it closes.


I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
_NOWHERE = -1
_FIRST_PLACES, _FIRST_IDS = 64, 1024


class TokenColumns:
    """A row of tokens for each open branch. Request ids only go up."""

    def __init__(self, width: int) -> None:
        self._tokens: I32 = np.zeros((_FIRST_PLACES, width), np.int32)
        self._filled: I64 = np.zeros(_FIRST_PLACES, np.int64)
        self._first_s = np.zeros(_FIRST_PLACES)
        self._last_s = np.zeros(_FIRST_PLACES)
        self._free = list(range(_FIRST_PLACES))
        self._place_of: I64 = np.full(_FIRST_IDS, _NOWHERE, np.int64)  # by id, from `_base` on
        self._base = 0
        self.open_ids: dict[int, int] = {}  # and their places

    def open(self, request_id: int) -> None:
        if not self._free:
            self._more_places()
        place = self._free.pop()
        self._filled[place] = 0
        if request_id - self._base >= len(self._place_of):
            self._more_ids(request_id)
        self._place_of[request_id - self._base] = self.open_ids[request_id] = place

    def take(self, batch: TokenEvents) -> NDArray[np.bool_] | None:
        """Keep the tokens of open branches; returns which are of others, None if there are none."""
        at = batch.requests - self._base
        known = (at >= 0) & (at < len(self._place_of))
        places = np.full(len(at), _NOWHERE, np.int64)
        places[known] = self._place_of[at[known]]
        others = places == _NOWHERE
        tokens, index = batch.tokens, batch.index
        if others.any():
            mine = ~others
            places, tokens, index = places[mine], tokens[mine], index[mine]
        self._tokens[places, index] = tokens
        self._filled[places] = index + 1
        self._first_s[places[index == 0]] = batch.time_s
        self._last_s[places] = batch.time_s
        return others if len(places) < len(others) else None

    def close(self, request_id: int) -> tuple[list[int], float, float]:
        """The branch's tokens, and when the first and the last came."""
        place = self.open_ids.pop(request_id)
        self._place_of[request_id - self._base] = _NOWHERE
        self._free.append(place)
        tokens: list[int] = self._tokens[place, : self._filled[place]].tolist()
        return tokens, float(self._first_s[place]), float(self._last_s[place])

    def _more_places(self) -> None:
        before = len(self._filled)
        self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
        self._filled = np.concatenate([self._filled, np.zeros_like(self._filled)])
        self._first_s = np.concatenate([self._first_s, np.zeros(before)])
        self._last_s = np.concatenate([self._last_s, np.zeros(before)])
        self._free = list(range(before, 2 * before))

    def _more_ids(self, request_id: int) -> None:
        """Room for a new id; those before the oldest open one are forgotten."""
        self._base = min(self.open_ids, default=request_id)
        size = max(_FIRST_IDS, 2 * (request_id - self._base + 1))
        self._place_of = np.full(size, _NOWHERE, np.int64)
        for known, place in self.open_ids.items():
            self._place_of[known - self._base] = place


@dataclass(slots=True, eq=False)
class BranchOutput:
    """One engine request: a branch of what the caller asked for."""

    id: RequestId
    whole: OpenOutput
    text: BranchText
    parent: BranchOutput | None = None
    # Output tokens of the branch it was forked from; the engine counts them, and `append`, as its prompt.
    num_shared: int = 0
    append: Sequence[int] = ()

    @property
    def num_taken_over(self) -> int:
        return self.num_shared + len(self.append)

    @property
    def output(self) -> CompletionOutput:
        return self.text.output


@dataclass(slots=True, eq=False)
class OpenOutput:
    """What the caller asked for, with all its branches."""

    output: RequestOutput
    prepared: PreparedRequest
    branches: list[BranchOutput] = field(default_factory=list)


class ForkPoint(NamedTuple):
    """Where branches begin: behind the first `at` tokens of an output."""

    branch: BranchOutput
    at: int
    source: BranchOutput  # whose tokens in the engine these are: the branch, or one that it comes from
    shared: int  # of that output's tokens
    between: Sequence[int]  # and these behind them

    @property
    def engine_at(self) -> int:
        """Counted as the engine counts."""
        return self.shared - self.source.num_taken_over


class Collector:
    """Outputs of all requests under way."""

    def __init__(
        self, tokenizer: Tokenizer | None, finish_at: Callable[[RequestId, int], bool], longest: int
    ) -> None:
        """`finish_at` ends a request of the engine at a number of output tokens; `longest`: most of a sequence."""
        self._tokenizer = tokenizer
        self._finish_at = finish_at
        self._branches: dict[RequestId, BranchOutput] = {}
        self._unread = TokenColumns(longest + 1)  # of branches that have no text and are only read whole

    @property
    def num_open(self) -> int:
        return len(self._branches)

    def open(
        self,
        name: str,
        prepared: PreparedRequest,
        ids: Iterable[RequestId],
        arrival_s: float,
        *,
        only_whole: bool = False,
    ) -> RequestOutput:
        """Follow a request the engine has accepted under `ids`, one for each branch.

        `only_whole`: it is not read before it has finished, so that its tokens need not be read one by one.
        """
        sampling = prepared.sampling
        output = RequestOutput(
            request_id=name,
            prompt=prepared.text,
            prompt_token_ids=prepared.token_ids,
            outputs=[],
            num_image_tokens=prepared.num_image,
            prompt_logprobs=None if sampling.prompt_logprobs is None else [None] * len(prepared.token_ids),
            metrics=RequestMetrics(arrival_s=arrival_s),
        )
        whole = OpenOutput(output, prepared.lean())
        for index, request_id in enumerate(ids):
            text = BranchText(index, self._tokenizer, prepared.token_ids, sampling, prepared.form)
            output.outputs.append(text.output)
            whole.branches.append(BranchOutput(request_id, whole, text))
            self._branches[request_id] = whole.branches[-1]
            if only_whole and not text.has_text and sampling.logprobs is None:
                self._unread.open(request_id)
        return output

    def branch_id(self, name: str, index: int) -> RequestId:
        """The engine's request of one branch. Raises UnknownRequest unless it is under way."""
        ids = {branch.output.index: branch.id for branch in self._open_branches(name)}
        if not ids:
            raise UnknownRequest(f"no request under way has the id {name}")
        if index not in ids:
            raise UnknownRequest(f"branch {index} of request {name} is not under way")
        return ids[index]

    def fork_point(self, parent_id: RequestId, at: int | None) -> ForkPoint:
        """Where to branch so that children begin with the first `at` tokens of an output; None: all it has."""
        branch = self._branches[parent_id]
        tokens = branch.output.token_ids
        at = len(tokens) if at is None else at
        if not 0 <= at <= len(tokens):
            raise InvalidRequest(f"at must be between 0 and the {len(tokens)} tokens there are", param="at")
        source, shared = branch, at
        while shared < source.num_taken_over:  # in what it has taken over from its own parent
            assert source.parent is not None
            source, shared = source.parent, min(shared, source.num_shared)
        if source.id not in self._branches:
            raise InvalidRequest(
                f"the first {at} tokens are those of branch {source.output.index}, which has ended: branch at "
                f"{branch.num_taken_over} or later",
                param="at",
            )
        return ForkPoint(branch, at, source, shared, tokens[shared:at])

    def fork(
        self, point: ForkPoint, append: Sequence[int], sampling: SamplingParams, ids: Iterable[RequestId]
    ) -> list[int]:
        """Follow branches that the engine has made; returns their indexes among the request's outputs."""
        whole, prepared = point.branch.whole, point.branch.whole.prepared
        outputs = whole.output.outputs
        first = len(outputs)
        for request_id in ids:
            text = BranchText(len(outputs), self._tokenizer, prepared.token_ids, sampling, prepared.form)
            text.output.text += text.begin_with(point.branch.text, point.at, append)
            outputs.append(text.output)
            branch = BranchOutput(
                request_id,
                whole,
                text,
                parent=point.source,
                num_shared=point.shared,
                append=[*point.between, *append],
            )
            whole.branches.append(branch)
            self._branches[request_id] = branch
        return list(range(first, len(outputs)))

    def is_held(self, request_id: RequestId) -> bool:
        return self._branches[request_id].output.held is not None

    def num_holds(self, request_id: RequestId) -> int:
        return self._branches[request_id].output.num_holds

    def end_hold(self, request_id: RequestId) -> None:
        """A branch goes on with nothing put in."""
        text = self._branches[request_id].text
        text.output.text += text.inject(())

    def sampling_of(self, request_id: RequestId) -> SamplingParams:
        return self._branches[request_id].text.sampling

    def stop_at(self, request_id: RequestId, sampling: SamplingParams, *, is_new: bool) -> bool:
        """Other stop strings for what a branch will generate, and unless `is_new` for what it has generated since the
        last token that was put in. Returns whether one was found there."""
        branch = self._branches[request_id]
        before, prepared = branch.text, branch.whole.prepared
        text = BranchText(before.output.index, self._tokenizer, prepared.token_ids, sampling, prepared.form)
        output, tokens = before.output, before.output.token_ids
        fixed = len(tokens) if is_new else max(before.num_fixed, branch.num_taken_over)
        found = text.begin_with(before, fixed)
        text.num_fixed = fixed
        is_stop = output.held == FinishReason.STOP.value and before.cut_at is None
        found += text.push(tokens[fixed:], ends_with_stop_token=is_stop)
        if text.output.logprobs is not None and output.logprobs is not None:
            text.output.logprobs[fixed:] = output.logprobs[fixed : len(text.output.token_ids)]
            text.output.cumulative_logprob = known_logprob(text.output)
        text.output.text, text.output.num_holds = found, output.num_holds
        text.output.num_generated = output.num_generated - (len(tokens) - len(text.output.token_ids))
        if text.cut_at is None:
            text.output.held, text.output.stop_reason = output.held, output.stop_reason
        branch.text = text
        branch.whole.output.outputs[output.index] = text.output
        if text.cut_at is None:
            return False
        self._finish_at(branch.id, text.cut_at - branch.num_taken_over)
        return True

    def take(self, events: StepEvents) -> list[RequestOutput]:
        """Bring outputs up to date; returns those that changed. Each is one object that grows."""
        endings: dict[int, Finished | Held] = {ending.request: ending for ending in events.finished}
        changed: dict[int, OpenOutput] = {}
        holds = _by_request(events.held)
        for event in events.logprobs:
            self._take_logprobs(event)
        for batch in events.tokens:
            for request_id, token, index in self._read_now(batch):
                branch = self._branches.get(request_id)
                if branch is None:
                    continue
                ending = endings.get(request_id)
                if holds or branch.output.held is not None:
                    ending = self._end_holds(branch, holds.get(request_id), index) or ending
                if batch.is_injected:
                    branch.output.text += branch.text.inject([token])
                elif branch.text.cut_at is None:
                    self._take_token(branch, token, batch.time_s, is_stop=_is_stop_token(ending, index))
                else:
                    continue
                changed[id(branch.whole)] = branch.whole
        for request_id, rest in holds.items():
            branch = self._branches.get(request_id)
            if branch is not None and rest:
                branch.text.hold(rest[-1].reason.value)
                changed[id(branch.whole)] = branch.whole
        for ending in events.finished:
            branch = self._branches.pop(ending.request, None)
            if branch is not None:
                self._end(branch, ending)
                changed[id(branch.whole)] = branch.whole
        return [whole.output for whole in changed.values()]

    def _read_now(self, batch: TokenEvents) -> Iterable[tuple[RequestId, int, int]]:
        """Request, token and index of what is looked at as it comes."""
        columns = (batch.requests, batch.tokens, batch.index)
        if self._unread.open_ids:
            others = self._unread.take(batch)
            if others is None:
                return ()
            columns = (batch.requests[others], batch.tokens[others], batch.index[others])
        requests, tokens, index = (column.tolist() for column in columns)
        return zip(requests, tokens, index, strict=True)

    def ids_of(self, name: str) -> list[RequestId]:
        """Engine requests under way of one request of a caller."""
        return [branch.id for branch in self._open_branches(name)]

    def _open_branches(self, name: str) -> list[BranchOutput]:
        return [branch for branch in self._branches.values() if branch.whole.output.request_id == name]

    def _end_holds(self, branch: BranchOutput, holds: deque[Held] | None, index: int) -> Held | None:
        """Token `index` comes: a hold before it is over. Returns the next one."""
        while holds and index >= holds[0].num_output:
            branch.text.hold(holds.popleft().reason.value)
        if branch.output.held is not None:
            branch.output.text += branch.text.inject(())
        return holds[0] if holds else None

    def _take_token(self, branch: BranchOutput, token: int, time_s: float, *, is_stop: bool) -> None:
        text, metrics = branch.text, branch.whole.output.metrics
        assert metrics is not None
        metrics.first_token_s = time_s if metrics.first_token_s is None else metrics.first_token_s
        metrics.last_token_s = time_s
        branch.output.text += text.push([token], ends_with_stop_token=is_stop)
        if text.cut_at is not None:
            self._finish_at(branch.id, text.cut_at - branch.num_taken_over)

    def _take_logprobs(self, event: LogprobEvent) -> None:
        branch = self._branches.get(event.request)
        if branch is None:
            return
        prompt = branch.whole.output.prompt_logprobs
        number = event.logprobs.position - len(branch.whole.prepared.token_ids)
        if number >= 0:
            branch.text.push_logprobs(event.logprobs, number)
        elif prompt is not None:
            prompt[number] = logprob_entry(self._tokenizer, event.logprobs)

    def _end(self, branch: BranchOutput, ending: Finished) -> None:
        output, whole = branch.output, branch.whole
        if branch.id in self._unread.open_ids:
            self._bring_back(branch)
        output.text += branch.text.finish(ending.reason.value, ending.detail)
        output.vector = ending.vector
        result = whole.output
        if output.index == 0:  # the others take the prompt over from the first
            result.num_cached_tokens = ending.num_cached
        result.accepted_prediction_tokens += ending.cost.accepted_predictions
        result.rejected_prediction_tokens += ending.cost.rejected_predictions
        assert result.metrics is not None
        _count(result.metrics, ending)
        result.finished = all(part.finished for part in result.outputs)
        if result.finished:
            result.metrics.finished_s = ending.time_s

    def _bring_back(self, branch: BranchOutput) -> None:
        """A branch that was only to be read whole has ended."""
        tokens, first_s, last_s = self._unread.close(branch.id)
        branch.output.token_ids += tokens
        branch.output.num_generated += len(tokens)
        metrics = branch.whole.output.metrics
        if tokens and metrics is not None:
            earliest = first_s if metrics.first_token_s is None else min(first_s, metrics.first_token_s)
            metrics.first_token_s = earliest
            metrics.last_token_s = max(last_s, metrics.last_token_s or last_s)


def _count(metrics: RequestMetrics, ending: Finished) -> None:
    cost = ending.cost
    metrics.queue_s = max(metrics.queue_s or 0.0, ending.queue_s)
    metrics.preemptions += ending.preemptions
    metrics.swaps += cost.swaps
    metrics.recomputed_tokens += cost.redone
    metrics.kv_dropped_tokens += cost.dropped
    metrics.kv_block_seconds += cost.block_us / 1e6
    metrics.recompute_kv_block_seconds += cost.redone_block_us / 1e6


def _by_request(held: Iterable[Held]) -> dict[RequestId, deque[Held]]:
    found: dict[RequestId, deque[Held]] = {}
    for hold in held:
        found.setdefault(hold.request, deque()).append(hold)
    return found


def _is_stop_token(ending: Finished | Held | None, index: int) -> bool:
    """Whether token `index` is the stop token the engine ended this request by."""
    return ending is not None and ending.reason is FinishReason.STOP and index == ending.num_output - 1
