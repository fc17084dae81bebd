"""One generation: the engine's updates of one or more prompts as deltas of text, in the order of their branches.

Owns the way from token ids to text, endings and figures of one request, and its permit. Whatever fails here ends this
request alone; however it ends, the engine and the observer are notified once and the permit goes back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from paceline.core.events import NOT_FINITE, Finished, Rule
from paceline.core.plan import RowLogprobs
from paceline.core.request import Cost, FinishReason
from paceline.core.sampling import SamplingParams
from paceline.errors import PacelineError
from paceline.llm.branch_text import DEADLINE, PRUNED, BranchText, logprob_entry
from paceline.llm.outputs import CompletionOutput, Logprob, RequestOutput
from paceline.llm.prompts import PreparedRequest
from paceline.process.client import BranchUpdate, EngineStream, EngineUnavailable
from paceline.server.billing.charge import receipt
from paceline.server.errors import CATALOGUE, DeadlineExceeded, GenerationFailed, QueueTimeout
from paceline.server.generate.estimates import forecast_headers
from paceline.server.generate.request_admission import Permit
from paceline.server.generate.request_record import Observer, RequestRecord
from paceline.text.answer import AnswerEvent
from paceline.text.tokenizer import Tokenizer
from paceline.text.tools.scanner import Said

_logger = logging.getLogger("paceline.server")
_ABORT, _ERROR = FinishReason.ABORT.value, FinishReason.ERROR.value


@dataclass(slots=True)
class Delta:
    """What is new of one branch. `output` is the branch so far, without its text; it has ended when it says so."""

    index: int  # of the choice: branches of the first prompt, then of the second, ...
    text: str
    tokens: list[int]
    logprobs: list[dict[int, Logprob]] | None
    output: CompletionOutput
    has_ended: bool
    # Where an answer may be more than text: that, with the text in it.
    events: list[AnswerEvent] | None = None
    held: str | None = None  # what would have ended it here: stop or length
    is_injected: bool = False  # it was put in from outside

    @property
    def parts(self) -> Sequence[AnswerEvent]:
        """What is new in order: text, reasoning and calls."""
        if self.events is not None:
            return self.events
        return (Said(self.text),) if self.text else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a request so far."""

    num_prompt: int
    num_output: int
    num_cached: int
    num_image: int = 0  # of the prompt's, those that stand for pictures
    num_reused: int = 0  # of the prompt's, those of placed texts that were copied
    num_reasoning: int | None = None  # of the output; None where the model has no reasoning
    # Drafts from its prediction, right and wrong, of the branches that have ended; None: it has no prediction.
    predictions: tuple[int, int] | None = None
    dropped: int = 0  # tokens whose KV was dropped: the answer is not the one that all of its context gives
    receipt: Mapping[str, Any] | None = None  # once every branch has ended, where one is wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkStart:
    """Where the branches of a fork begin: behind the first `at` tokens of another branch and `append`."""

    request_id: str  # of the request they are branches of
    parent_index: int
    parent: BranchText
    at: int
    append: Sequence[int]
    sampling: SamplingParams
    count: int
    first_index: int

    @property
    def num_tokens(self) -> int:
        return self.at + len(self.append)


class _PromptPart:
    """One prompt of the request under way."""

    __slots__ = (
        *("begin_text", "branches", "first_index", "num_open", "num_taken_over", "prepared"),
        *("prompt_logprobs", "stream", "task"),
    )

    def __init__(
        self,
        stream: EngineStream,
        prepared: PreparedRequest,
        tokenizer: Tokenizer,
        first_index: int,
        fork: ForkStart | None = None,
    ) -> None:
        sampling = prepared.sampling
        self.stream = stream
        self.prepared = prepared
        self.first_index = first_index
        ids = prepared.token_ids
        form = prepared.form
        self.begin_text = ""  # that the branches of a fork have from the start
        self.num_taken_over = 0  # output tokens that the engine counts as their prompt
        if fork is None:
            self.branches = [BranchText(index, tokenizer, ids, sampling, form) for index in range(sampling.n)]
        else:
            places = range(first_index, first_index + fork.count)
            self.branches = [BranchText(index, tokenizer, ids, fork.sampling, form) for index in places]
            for branch in self.branches:
                self.begin_text = branch.begin_with(fork.parent, fork.at, fork.append)
            self.num_taken_over = fork.num_tokens
        self.num_open = len(self.branches)
        self.prompt_logprobs: list[RowLogprobs | None] | None = None
        if sampling.prompt_logprobs is not None and fork is None:
            self.prompt_logprobs = [None] * len(ids)
        self.task: asyncio.Task[list[BranchUpdate]] | None = None


class Generation:
    """A request the engine works on. `close` it in whatever way it ends."""

    def __init__(
        self,
        started: Sequence[tuple[PreparedRequest, EngineStream]],
        tokenizer: Tokenizer,
        permit: Permit,
        record: RequestRecord,
        observer: Observer,
        *,
        first_token_timeout_s: float | None = None,
        timeout_s: float | None = None,
        fork: ForkStart | None = None,
    ) -> None:
        self.record = record
        self.fork = fork
        self.on_closed: Callable[[], None] | None = None
        # Prompts that are read at a time, where they reach the engine only then; None: all.
        self.at_once: int | None = None
        self.ignored: tuple[str, ...] = ()  # parts of the asked form of the answer that change nothing
        self._tokenizer = tokenizer
        self._permit = permit
        self._observer = observer
        self._first_timeout_s, self._timeout_s = first_token_timeout_s, timeout_s
        self._is_closed = False
        self._accept: Callable[[list[Delta]], bool] | None = None
        self._failure: PacelineError | None = None
        self._parts: list[_PromptPart] = []
        self._num_open = 0
        for prepared, stream in started:
            first = self._num_open if fork is None else fork.first_index
            self._parts.append(_PromptPart(stream, prepared, tokenizer, first, fork))
            self._num_open += self._parts[-1].num_open
        self._unended = dict.fromkeys(self._parts)
        self._num_prompt = sum(len(part.prepared.token_ids) + part.num_taken_over for part in self._parts)
        self._only = self._parts[0] if len(self._parts) == 1 else None
        observer.started(record)

    def headers(self, others: Mapping[str, str]) -> dict[str, str]:
        """Headers of the answer: with `others`, what the engine has said by now about when it will come."""
        return {**others, **forecast_headers(self._parts[0].stream.forecast)}

    @property
    def indexes(self) -> list[int]:
        """Of all choices."""
        return [part.first_index + place for part in self._parts for place in range(len(part.branches))]

    @property
    def begin_text(self) -> str:
        """What the branches of a fork have from the start."""
        return self._parts[0].begin_text

    def branches(self) -> Iterator[tuple[int, PreparedRequest, BranchText, int]]:
        """Of each branch the engine's number, its prompt, its text, and output tokens it has taken over."""
        for part in self._parts:
            for place, branch in enumerate(part.branches):
                yield part.stream.first + place, part.prepared, branch, part.num_taken_over

    @property
    def is_open(self) -> bool:
        """Whether some branch has not ended."""
        return self._num_open > 0

    @property
    def usage(self) -> Usage:
        record, cost = self.record, self.record.cost
        has_prediction = any(part.prepared.sampling.prediction for part in self._parts)
        shown_receipt = (
            receipt(record, record.charge) if record.shows_receipt and not self._num_open else None
        )
        return Usage(
            num_prompt=self._num_prompt,
            num_output=record.num_output,
            num_cached=record.num_cached,
            num_image=record.num_image,
            num_reused=cost.reused,
            num_reasoning=self._num_reasoning,
            predictions=(cost.accepted_predictions, cost.rejected_predictions) if has_prediction else None,
            dropped=cost.dropped,
            receipt=shown_receipt,
        )

    @property
    def _num_reasoning(self) -> int | None:
        form = self._parts[0].prepared.form
        if form is None or form.reasoning is None:
            return None
        return sum(branch.output.num_reasoning_tokens for part in self._parts for branch in part.branches)

    @property
    def _used_tokens(self) -> int:
        """What counts against the key's limit: all that was delivered, and nothing where we failed before that."""
        record = self.record
        if record.first_token_s is None and record.error_code:
            return 0
        return self._num_prompt + record.num_output

    @property
    def prompts(self) -> list[PreparedRequest]:
        return [part.prepared for part in self._parts]

    def prompt_logprobs(self, prompt: int) -> list[dict[int, Logprob] | None] | None:
        """What is known of the tokens of one prompt. Takes a while for a long one; from any thread."""
        found = self._parts[prompt].prompt_logprobs
        if found is None:
            return None
        return [None if entry is None else logprob_entry(self._tokenizer, entry) for entry in found]

    async def next(self) -> list[Delta]:
        """Wait for updates. Raises what went wrong, after which there is nothing left to do but `close`."""
        try:
            if self.record.first_token_s is None and self._first_timeout_s is not None:
                taken = await self._take_first(self._first_timeout_s)
            elif self._only is not None:
                taken = [(self._only, await self._only.stream.take())]
            else:
                taken = await self._take_any()
        except PacelineError as error:  # refused by the engine, or the engine is gone
            raise self._noted(error) from None
        except Exception as error:
            raise self._broken() from error
        if self._failure is not None:  # of updates that did not wake the reader
            raise self._failure
        return self._read_all(taken)

    def divert(self, accept: Callable[[list[Delta]], bool]) -> None:
        """From now on, deltas that find the reader waiting in `next` go to `accept`, and the reader sleeps on.

        When that says no, or when something went wrong, `next` returns or raises. Does nothing where it cannot.
        """
        if self._only is not None:
            self._accept = accept
            self._only.stream.divert(self._push)

    def _push(self, found: list[BranchUpdate]) -> bool:
        """Called by the dispatcher of frames: an error here is raised in the reader's `next`."""
        assert self._only is not None and self._accept is not None
        try:
            return self._accept(self._read_all([(self._only, found)]))
        except PacelineError as error:
            self._failure = error
        except Exception:
            self._failure = self._broken()
        return False

    def _read_all(self, taken: list[tuple[_PromptPart, list[BranchUpdate]]]) -> list[Delta]:
        try:
            return [self._read(part, update) for part, found in taken for update in found]
        except _ENDINGS as error:
            raise self._noted(error) from None
        except Exception as error:
            # An unknown id or row: it must not affect other requests.
            raise self._broken() from error

    async def complete(self) -> list[RequestOutput]:
        """Wait for all of it: an output for each prompt, without what `prompt_logprobs` tells."""
        texts: dict[int, list[str]] = {index: [self.begin_text] for index in self.indexes}
        while self._num_open:
            for delta in await self.next():
                if delta.text:
                    texts[delta.index].append(delta.text)
        outputs = []
        for part in self._parts:
            for branch in part.branches:
                place = branch.output.index if self.fork is None else branch.output.index - part.first_index
                branch.output.text = "".join(texts[part.first_index + place])
            outputs.append(
                RequestOutput(
                    request_id=self.record.id,
                    prompt=part.prepared.text,
                    prompt_token_ids=part.prepared.token_ids,
                    outputs=[branch.output for branch in part.branches],
                    num_image_tokens=part.prepared.num_image,
                    finished=True,
                )
            )
        record, first = self.record, outputs[0]
        first.num_cached_tokens, first.num_reused_tokens = record.num_cached, record.cost.reused
        first.accepted_prediction_tokens = record.cost.accepted_predictions
        first.rejected_prediction_tokens = record.cost.rejected_predictions
        await self.settle()
        return outputs

    @property
    def must_settle(self) -> bool:
        """Whether the last frame has to wait until the request is in the ledger."""
        return self.record.charge.waits

    async def settle(self) -> None:
        """Put the request into the ledger, before its last frame leaves. Raises LedgerUnavailable."""
        assert not self._num_open, "settled when every branch has ended"
        try:
            await self.record.charge.settle(self.record)
        except PacelineError as error:
            raise self._noted(error) from None

    def release(self) -> None:
        """The last frame is about to leave: nothing may come between. Raises LedgerUnavailable."""
        try:
            self.record.charge.release(self.record)
        except PacelineError as error:
            raise self._noted(error) from None

    def sent(self) -> None:
        """The frames of everything that was read so far are written."""
        self.record.num_sent = self.record.num_output

    def close(self) -> None:
        """End what still runs, give everything back. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._accept = None
        record = self.record
        try:
            for part in self._parts:
                part.stream.close()
                _forget(part.task)
        finally:
            self._permit.release(used_tokens=self._used_tokens)
            record.finished_s = time.monotonic()
            if self.on_closed is not None:
                self.on_closed()
            if self._num_open and not record.finish_reason:
                record.finish_reason = _ABORT  # the client left
            record.charge.give_up(record)
            self._notify_end()

    def _notify_end(self) -> None:
        """The answer is complete by now, and figures that go wrong must not spoil it."""
        try:
            self._observer.finished(self.record)
        except Exception:
            _logger.exception("the end of request %s was not counted", self.record.id)

    # -- updates -------------------------------------------------------------------------------------------

    async def _take_first(self, timeout_s: float) -> list[tuple[_PromptPart, list[BranchUpdate]]]:
        left = timeout_s - (time.monotonic() - self.record.received_s)
        try:
            async with asyncio.timeout(max(left, 0.0)):
                return await self._take_any()
        except TimeoutError:
            message = "no token came in the time a request may wait; try again later"
            raise QueueTimeout(message, retry_after_s=self._permit.next_place_s()) from None

    async def _take_any(self) -> list[tuple[_PromptPart, list[BranchUpdate]]]:
        """Updates of those prompts that have some. The next one of a prompt is asked for after this one."""
        waiting = []
        asked = list(islice(self._unended, self.at_once))
        for part in asked:
            if part.task is None:
                part.task = asyncio.ensure_future(part.stream.take())
            waiting.append(part.task)
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        taken = []
        for part in asked:
            if part.task is not None and part.task.done():
                done, part.task = part.task, None
                taken.append((part, done.result()))
        return taken

    def _read(self, part: _PromptPart, update: BranchUpdate) -> Delta:
        branch = part.branches[update.branch]
        output, ending = branch.output, update.ending
        if update.is_injected or (update.tokens and output.held is not None):
            return self._read_injected(part, branch, update)
        before = len(output.token_ids)
        if update.logprobs:
            self._read_logprobs(part, branch, update)
        text = ""
        events: list[AnswerEvent] | None = None if part.prepared.form is None else []
        if update.tokens and branch.cut_at is None:
            last = ending or update.held
            is_stop = (
                last is not None
                and last.reason is FinishReason.STOP
                and before - part.num_taken_over + len(update.tokens) == last.num_output
            )
            text = branch.push(update.tokens, ends_with_stop_token=is_stop)
            if branch.cut_at is not None and ending is None:
                part.stream.finish_at(update.branch, branch.cut_at - part.num_taken_over)
            self._count(len(output.token_ids) - before, update.time_s)
            if events is not None:
                events += branch.events
        if ending is not None:
            text += self._end(part, branch, ending)
            if events is not None:
                events += branch.events
        tokens = update.tokens if branch.cut_at is None else output.token_ids[before:]
        logprobs = None if output.logprobs is None else output.logprobs[before : before + len(tokens)]
        if update.held is not None:
            branch.hold(update.held.reason.value)
        index = part.first_index + update.branch
        held = None if update.held is None else output.held
        return Delta(index, text, tokens, logprobs, output, ending is not None, events, held)

    def _read_injected(self, part: _PromptPart, branch: BranchText, update: BranchUpdate) -> Delta:
        """Tokens that were put in, or the first behind a hold: what its end had hidden is text now."""
        put_in = update.tokens if update.is_injected else []
        index = part.first_index + update.branch
        if put_in and branch.cut_at is not None and branch.output.held is None:
            # A stop string was found before: the engine learns of it later, and drops these too.
            return Delta(index, "", [], None, branch.output, False)
        begun = branch.inject(put_in)
        self._num_prompt += len(put_in)
        self.record.num_prompt += len(put_in)
        events = None if part.prepared.form is None else list(branch.events)
        if update.is_injected:
            return Delta(index, begun, put_in, None, branch.output, False, events, is_injected=True)
        delta = self._read(part, update)
        delta.text = begun + delta.text
        if delta.events is not None and events is not None:
            delta.events = events + delta.events
        return delta

    def _read_logprobs(self, part: _PromptPart, branch: BranchText, update: BranchUpdate) -> None:
        for found in update.logprobs:
            number = found.position - len(part.prepared.token_ids)
            if number >= 0:
                branch.push_logprobs(found, number)
            elif part.prompt_logprobs is not None:
                part.prompt_logprobs[number] = found

    def _count(self, count: int, time_s: float) -> None:
        record = self.record
        if record.first_token_s is None:
            record.first_token_s = time.monotonic()
            forecast = self._parts[0].stream.forecast
            record.predicted_ttft_s = None if forecast is None else forecast.first_token_s
            self._permit.leave_queue()
            self._observer.first_token(record)
        record.num_output += count
        self._observer.tokens(record, count, time_s)

    def _end(self, part: _PromptPart, branch: BranchText, ending: Finished) -> str:
        record, output = self.record, branch.output
        text = branch.finish(ending.reason.value, ending.detail)
        for outcome, number in branch.call_outcomes.items():
            record.tool_calls[outcome] = record.tool_calls.get(outcome, 0) + number
        part.num_open -= 1
        if not part.num_open:
            del self._unended[part]
        self._num_open -= 1
        if branch is part.branches[0]:  # the others take the prompt over from the first
            record.num_cached += ending.num_cached
        record.longest_output = max(record.longest_output, ending.num_output)
        record.preemptions += ending.preemptions
        record.failovers = sum(each.stream.failovers for each in self._parts)
        record.cost = Cost._make(map(sum, zip(record.cost, ending.cost, strict=True)))
        record.queue_s = max(record.queue_s or 0.0, ending.queue_s)
        if ending.vector:
            output.vector = ending.vector
            record.num_vectors += 1
            if record.first_token_s is None:  # it waits no longer
                record.first_token_s = time.monotonic()
                self._permit.leave_queue()
        if output.finish_reason in (_ERROR, _ABORT) and ending.detail != PRUNED:
            raise self._failure_of(ending)
        if not record.finish_reason:
            record.finish_reason = output.finish_reason or ""
        return text

    def _failure_of(self, ending: Finished) -> PacelineError:
        if ending.reason is not FinishReason.ABORT or ending.detail != DEADLINE:
            return _failure(ending)
        deadline_ms = self.record.objectives[0]
        taken_s = time.monotonic() - self.record.received_s
        made = f"{ending.num_output} tokens were made by then"
        if deadline_ms is not None and taken_s >= deadline_ms / 1e3:
            return DeadlineExceeded(f"the deadline_ms of {deadline_ms} was up; {made}")
        is_servers = self._timeout_s is not None and taken_s >= self._timeout_s
        if not is_servers and (deadline_ms is not None or self._timeout_s is not None):
            return DeadlineExceeded(f"the deadline that it was given on its way was up; {made}")
        if ending.num_output == 0:
            message = "no token came in the time a request may take; try again later"
            return QueueTimeout(message, retry_after_s=self._permit.next_place_s())
        return DeadlineExceeded("the request took longer than it may; ask for fewer tokens")

    def _noted(self, error: PacelineError) -> PacelineError:
        self.record.finish_reason = _ABORT if isinstance(error, _ABORTS) else _ERROR
        self.record.error_code = str(getattr(error, "code", ""))
        return error

    def _broken(self) -> PacelineError:
        """Something of ours is wrong. The log has what, the client does not."""
        _logger.exception("request %s failed between the engine and its text", self.record.id)
        return self._noted(GenerationFailed("the request failed inside the server"))


_ABORTS = (QueueTimeout, DeadlineExceeded, EngineUnavailable)
_ENDINGS = (*_ABORTS, GenerationFailed)  # what a branch can end with; see `_failure`


def _failure(ending: Finished) -> PacelineError:
    """What to tell of a branch that did not end well."""
    if ending.reason is FinishReason.ERROR:
        if ending.detail == "numerical_error":
            return GenerationFailed(NOT_FINITE, code="numerical_error")
        if ending.detail in (Rule.GRAMMAR_ERROR, Rule.GRAMMAR_TOO_COMPLEX):
            return GenerationFailed(CATALOGUE[ending.detail].message, code=ending.detail)
        return GenerationFailed("the request failed inside the engine")
    # The client is still here and this process did not end the request: the engine is going away.
    return EngineUnavailable("the engine has ended the request; try again in a moment")


def _forget(task: asyncio.Task[list[BranchUpdate]] | None) -> None:
    """The result is not needed any more, nor is what it raised."""
    if task is None:
        return
    if not task.done():
        task.cancel()
    elif not task.cancelled():
        task.exception()
