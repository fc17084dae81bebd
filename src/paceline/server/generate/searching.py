"""Searches over HTTP: the tree of a search whose branches live in the engine's process.

One request of a client: it has one permit, one record and one receipt, whatever the number of branches. Each fork is a
stream of the engine, read by a task that brings its texts up to date; the search itself is a coroutine of
`paceline.llm.search`, which knows nothing of that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.request import Change, Cost, FinishReason, TreeLimits
from paceline.core.sampling import MAX_HOLD_S
from paceline.core.service_class import ServiceLevel
from paceline.errors import PacelineError
from paceline.llm.branch_text import PRUNED, BranchText
from paceline.llm.outputs import CompletionOutput, RequestOutput
from paceline.llm.prompts import PreparedRequest, PromptReader
from paceline.llm.search import Search, SearchResult
from paceline.llm.tree import AsyncTree, FindPattern, TellingBackend
from paceline.process.client import BranchUpdate, EngineClient, EngineStream
from paceline.server.billing.charge import receipt
from paceline.server.errors import DeadlineExceeded, GenerationFailed
from paceline.server.generate.generation import Usage
from paceline.server.generate.request_record import Observer, RequestRecord
from paceline.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search came to, as routes show it."""

    output: RequestOutput  # the best answers
    usage: Usage
    figures: dict[str, Any]
    ignored: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Branch:
    stream: EngineStream
    place: int  # in its stream
    text: BranchText
    num_taken_over: int

    @property
    def number(self) -> int:
        return self.stream.first + self.place


class TreeOverClient(TellingBackend):
    """The backend of a tree."""

    def __init__(
        self,
        client: EngineClient,
        reader: PromptReader,
        tokenizer: Tokenizer,
        prepared: PreparedRequest,
        search: Search,
        record: RequestRecord,
        observer: Observer,
        find_pattern: FindPattern,
    ) -> None:
        super().__init__()
        asked = replace(search.sampling(prepared.sampling), on_stop="hold", hold_s=MAX_HOLD_S)
        self.sampling = asked
        self.tokenizer: Tokenizer | None = tokenizer
        self.find_pattern: FindPattern | None = find_pattern  # which no client can keep busy
        self._client, self._reader, self._prepared = client, reader, prepared
        self._search, self._record, self._observer = search, record, observer
        self._branches: list[_Branch] = []
        self._tasks: set[asyncio.Task[Any]] = set()  # that read streams
        self._news = asyncio.Event()
        self._failure: Exception | None = None
        self._on_first: Callable[[], None] = lambda: None
        self.output = RequestOutput(
            request_id=record.id, prompt=prepared.text, prompt_token_ids=prepared.token_ids, outputs=[]
        )

    @property
    def numbers(self) -> list[int]:
        return [branch.number for branch in self._branches]

    @asynccontextmanager
    async def opened(
        self,
        tenant: str,
        level: ServiceLevel,
        timeout_s: float | None,
        limits: TreeLimits | None,
        adapter: int,
    ) -> AsyncIterator[None]:
        """Inside, the prompt is in the engine; however it is left, nothing of it stays there."""
        stream = self._client.submit(
            self._prepared.token_ids,
            self.sampling,
            tenant=tenant,
            service_level=level,
            timeout_s=timeout_s,
            tree=limits or TreeLimits(),
            adapter=adapter,
        )
        try:
            self._follow(stream, [self._text(self.sampling)], 0)
            # It waits for its branches; tokens that came before it is paused are not used.
            await self._client.change([stream.first], Change(paused=True))
            yield
        finally:
            for task in (*self._tasks, *self._commands):
                task.cancel()
            for branch in self._branches:
                branch.stream.close()

    async def find(self, count: int, ignored: tuple[str, ...], on_first: Callable[[], None]) -> Found:
        """Run the search; the `count` best answers."""
        record, self._on_first = self._record, on_first
        try:
            result = await self._search.run(AsyncTree(self))
            await self._end_all()
        except PacelineError as error:
            record.finish_reason, record.error_code = "error", str(getattr(error, "code", ""))
            raise
        record.finish_reason = result.best.finish_reason if result.candidates else "stop"
        await record.charge.settle(record)
        record.charge.release(record)
        shown = receipt(record, record.charge) if record.shows_receipt else None
        usage = Usage(
            num_prompt=record.num_prompt,
            num_output=record.num_output,
            num_cached=record.num_cached,
            num_image=record.num_image,
            receipt=shown,
        )
        self.output.outputs = [_output(index, each) for index, each in enumerate(result.candidates[:count])]
        return Found(output=self.output, usage=usage, figures=_figures(result), ignored=ignored)

    # -- Backend -------------------------------------------------------------------------------------------

    async def _do(self, what: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return await self._command(what)(*args, **options)

    async def changed(self) -> None:
        await self._news.wait()
        self._news.clear()
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """`opened` does."""

    def _command(self, what: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        commands: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
            "fork": self._fork,
            "extend": self._extend,
            "prune": self._prune,
            "set_score": self._score,
        }
        return commands[what]

    async def _fork(
        self,
        index: int,
        count: int,
        *,
        at: int | None,
        append: str | Sequence[int],
        score: float,
        changes: dict[str, Any],
    ) -> list[int]:
        parent = self._branches[index]
        tokens = self._reader.read_inserted(append, "search")
        sampling, changed = self._reader.read_changes(parent.text.sampling, changes)
        there = 0 if index == 0 else len(parent.text.output.token_ids)
        at = there if at is None else at
        assert at >= parent.num_taken_over, "searches branch at what a branch has generated"
        stream = self._client.fork(
            parent.number, count, at=at - parent.num_taken_over, append=tokens, score=score, changes=changed
        )
        texts = [self._text(sampling) for _ in range(count)]
        for text in texts:
            text.output.text += text.begin_with(parent.text, at, tokens)
        return self._follow(stream, texts, at + len(tokens))

    async def _extend(self, index: int, given: str | Sequence[int], *, max_tokens: int | None = None) -> None:
        branch, tokens = self._branches[index], self._reader.read_inserted(given, "search")
        if (
            not tokens
        ):  # no event tells that it goes on; before, as it may be held again before the answer is here
            branch.text.output.text += branch.text.inject(())
        await self._client.extend(branch.number, tokens, max_tokens=max_tokens)

    async def _prune(self, index: int) -> None:
        await self._client.prune([self._branches[index].number])

    async def _score(self, index: int, score: float) -> None:
        await self._client.change([self._branches[index].number], Change(score=score))

    # -- what the engine tells -----------------------------------------------------------------------------

    def _text(self, sampling: Any) -> BranchText:
        ids, form = self._prepared.token_ids, self._prepared.form
        text = BranchText(len(self.output.outputs), self.tokenizer, ids, sampling, form)
        self.output.outputs.append(text.output)
        return text

    def _follow(self, stream: EngineStream, texts: list[BranchText], num_taken_over: int) -> list[int]:
        branches = [_Branch(stream, place, text, num_taken_over) for place, text in enumerate(texts)]
        self._branches += branches
        task = asyncio.ensure_future(self._read(stream, branches))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return [text.output.index for text in texts]

    async def _read(self, stream: EngineStream, branches: list[_Branch]) -> None:
        try:
            while not all(branch.text.output.finished for branch in branches):
                for update in await stream.take():
                    self._take(branches[update.branch], update)
                self._news.set()
        except Exception as error:
            self._failure = self._failure or error
            self._news.set()

    def _take(self, branch: _Branch, update: BranchUpdate) -> None:
        text, output = branch.text, branch.text.output
        if branch is self._branches[0]:  # its tokens are not wanted
            if update.ending is not None:
                self._end(branch, update)
            return
        if update.is_injected:
            output.text += text.inject(update.tokens)
            self._record.num_prompt += len(update.tokens)
            return
        if update.tokens and output.held is not None:
            output.text += text.inject(())
        for found in update.logprobs:
            text.push_logprobs(found, found.position - len(self._prepared.token_ids))
        before, last = len(output.token_ids), update.ending or update.held
        if update.tokens and text.cut_at is None:
            num_output = before - branch.num_taken_over + len(update.tokens)
            is_stop = last is not None and last.reason is FinishReason.STOP and num_output == last.num_output
            output.text += text.push(update.tokens, ends_with_stop_token=is_stop)
            if text.cut_at is not None and update.ending is None:
                branch.stream.finish_at(branch.place, text.cut_at - branch.num_taken_over)
            self._count(len(output.token_ids) - before, update.time_s)
        if update.held is not None:
            text.hold(update.held.reason.value)
        if update.ending is not None:
            self._end(branch, update)

    def _count(self, count: int, time_s: float) -> None:
        record = self._record
        if record.first_token_s is None:
            record.first_token_s = time.monotonic()
            self._on_first()
            self._observer.first_token(record)
        record.num_output += count
        self._observer.tokens(record, count, time_s)

    def _end(self, branch: _Branch, update: BranchUpdate) -> None:
        ending, record = update.ending, self._record
        assert ending is not None
        branch.text.output.text += branch.text.finish(ending.reason.value, ending.detail)
        if branch is self._branches[0]:
            record.num_cached += ending.num_cached
        record.preemptions += ending.preemptions
        record.cost = Cost._make(map(sum, zip(record.cost, ending.cost, strict=True)))
        if ending.reason is FinishReason.ABORT and ending.detail != PRUNED:
            raise DeadlineExceeded("the search took longer than it may; ask for fewer tokens")
        if ending.reason is FinishReason.ERROR:
            raise GenerationFailed("the search failed inside the engine")

    async def _end_all(self) -> None:
        """Have every branch end, so that its cost is known."""
        await self.settled()
        await self._client.prune([each.number for each in self._branches if not each.text.output.finished])
        with suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                while not all(branch.text.output.finished for branch in self._branches):
                    await self.changed()


def _output(index: int, found: Any) -> CompletionOutput:
    return CompletionOutput(
        index=index, text=found.text, token_ids=found.token_ids, finish_reason=found.finish_reason
    )


def _figures(result: SearchResult) -> dict[str, Any]:
    return {
        "branches": result.num_branches,
        "generated_tokens": result.num_generated,
        "candidates": [
            {"score": each.score, "answer": each.answer, "finish_reason": each.finish_reason}
            for each in result.candidates
        ],
    }
