"""Trees: a prompt and the branches that are made of it, as programs use them; the same names sync and async.

    with llm.tree("Q: ...", SamplingParams(max_tokens=512)) as tree:
        for branch in tree.root.fork(8, temperature=0.9):
            branch.until("\\n\\n")                       # it is held there
        for branch in tree.held():
            branch.score = judge(branch.text)
            if tree.rank(branch) >= 3: branch.prune()
            else: branch.extend("\\nCheck: ")

Written once, as coroutines over a `Backend`: the one of `LLM` computes in place and never waits, so that its coroutines
end at their first step. Knows outputs, not events. Decision: docs/decisions/0042-searches.md.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from paceline.errors import InvalidRequest, UnknownRequest
from paceline.llm.outputs import CompletionOutput, RequestOutput

Value = TypeVar("Value")
Inserted = str | Sequence[int]  # text or token ids


class Backend(Protocol):
    """The engine behind one tree. What can be asked are the methods of `Frontend` that begin with a name."""

    @property
    def output(self) -> RequestOutput:
        """The newest state of all branches."""

    async def ask(self, what: str, *args: Any, **options: Any) -> Any:
        """Do something between two steps; `output` is newer than that when it returns."""

    def tell(self, what: str, *args: Any, **options: Any) -> None:
        """The same without waiting for it, in the same order; what it raises is raised by `settled`."""

    async def settled(self) -> None:
        """Wait until everything that was told has been done."""

    async def changed(self) -> None:
        """Wait until `output` may be newer."""

    async def close(self) -> None:
        """End what is left."""


class BranchView:
    """One branch: what it has come to, and what needs no waiting."""

    def __init__(self, tree: _Tree[Any], index: int, parent: int | None, score: float) -> None:
        self._tree = tree
        self.index = index
        self.parent = parent  # index of the branch it was forked from
        self._score = score
        self.is_prompt = parent is None  # it has not been told to generate

    def __repr__(self) -> str:
        return f"<branch {self.index}, {self.state}, {len(self.token_ids)} tokens, score {self.score:g}>"

    @property
    def output(self) -> CompletionOutput:
        return self._tree.output.outputs[self.index]

    @property
    def text(self) -> str:
        """Everything behind the prompt: what its parent had, what was put in, what it has generated."""
        return self.output.text

    @property
    def token_ids(self) -> list[int]:
        return self.output.token_ids

    @property
    def logprob(self) -> float:
        """The mean of its generated tokens. Needs `logprobs` in the tree's sampling."""
        output = self.output
        if output.logprobs is None:
            raise InvalidRequest(
                "give SamplingParams(logprobs=0) to know how likely tokens are", param="logprobs"
            )
        count = sum(map(bool, output.logprobs))
        return (output.cumulative_logprob or 0.0) / count if count else 0.0

    @property
    def state(self) -> str:
        """prompt (it generates nothing yet), running, held or ended."""
        output = self.output
        if output.finished:
            return "ended"
        if output.held is not None:
            return "held"
        return "prompt" if self.is_prompt else "running"

    @property
    def held(self) -> str | None:
        """What would have ended it: stop or length; None unless it is held."""
        return self.output.held

    @property
    def score(self) -> float:
        """Inside its tree, branches of a higher score go first and are preempted last."""
        return self._score

    @score.setter
    def score(self, score: float) -> None:
        self._score = float(score)
        self._tree.backend.tell("set_score", self.index, self._score)

    def until(self, *stops: str, max_tokens: int | None = None) -> None:
        """Generate up to the first of these texts, for at most `max_tokens` more, and be held there.

        Counts from what was put in last; without a text, it generates up to its end.
        """
        self._tree.backend.tell("stop_at", self.index, stops)
        if self.state != "running" or max_tokens is not None:
            self.is_prompt = False
            self._tree.backend.tell("extend", self.index, (), max_tokens=max_tokens)

    def prune(self) -> None:
        """End it; branches that were made of it go on."""
        self._tree.backend.tell("prune", self.index)


class AsyncBranch(BranchView):
    """A branch of `AsyncLLM.tree`."""

    async def fork(
        self,
        count: int = 1,
        *,
        at: int | None = None,
        append: Inserted = "",
        score: float = 0.0,
        **changes: Any,
    ) -> list[AsyncBranch]:
        """Make branches of its first `at` tokens (all it has), with `append` behind them.

        `changes` are parameters of sampling: temperature, seed, max_tokens, stop, ... Raises TreeFull.
        """
        return await self._tree.fork(self, count, at=at, append=append, score=score, changes=changes)

    async def extend(self, given: Inserted = "", *, max_tokens: int | None = None) -> None:
        """Put text or tokens behind what it has and let it go on, for at most `max_tokens` more."""
        await self._tree.extend(self, given, max_tokens)


class Branch(BranchView):
    """A branch of `LLM.tree`."""

    def fork(
        self,
        count: int = 1,
        *,
        at: int | None = None,
        append: Inserted = "",
        score: float = 0.0,
        **changes: Any,
    ) -> list[Branch]:
        """Make branches of its first `at` tokens (all it has), with `append` behind them.

        `changes` are parameters of sampling: temperature, seed, max_tokens, stop, ... Raises TreeFull.
        """
        return now(self._tree.fork(self, count, at=at, append=append, score=score, changes=changes))

    def extend(self, given: Inserted = "", *, max_tokens: int | None = None) -> None:
        """Put text or tokens behind what it has and let it go on, for at most `max_tokens` more."""
        now(self._tree.extend(self, given, max_tokens))


SomeBranch = TypeVar("SomeBranch", bound=BranchView)


class _Tree(Generic[SomeBranch]):
    """What the two kinds of trees share."""

    kind: type[SomeBranch]

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._all: list[SomeBranch] = [self.kind(self, 0, None, 0.0)]
        self._seen: dict[int, int] = {}  # holds that were handed out, by branch

    @property
    def output(self) -> RequestOutput:
        return self.backend.output

    @property
    def root(self) -> SomeBranch:
        """The prompt. It generates nothing before it is told to."""
        return self._all[0]

    @property
    def branches(self) -> list[SomeBranch]:
        """All that generate or are held, in the order they were made."""
        return [branch for branch in self._all if branch.state in ("running", "held")]

    def rank(self, branch: BranchView) -> int:
        """How many of the branches have a higher score."""
        return sum(other.score > branch.score for other in self.branches)

    async def fork(self, parent: SomeBranch, count: int, **how: Any) -> list[SomeBranch]:
        found = await self.backend.ask("fork", parent.index, count, **how)
        made = [self.kind(self, index, parent.index, how["score"]) for index in found]
        self._all += made
        return made

    async def extend(self, branch: SomeBranch, given: Inserted, max_tokens: int | None) -> None:
        await self.backend.ask("extend", branch.index, given, max_tokens=max_tokens)
        branch.is_prompt = False

    async def next_held(self) -> SomeBranch | None:
        """The next branch that is held, once for each time; None when none runs any more."""
        while True:
            await self.backend.settled()
            for branch in self._all:
                if branch.held is not None and branch.output.num_holds > self._seen.get(branch.index, 0):
                    self._seen[branch.index] = branch.output.num_holds
                    return branch
            if not any(branch.state == "running" for branch in self._all):
                return None
            await self.backend.changed()


class AsyncTree(_Tree[AsyncBranch]):
    """`AsyncLLM.tree`: a prompt and its branches. Leaving the context ends what is left."""

    kind = AsyncBranch

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.backend.close()

    async def held(self) -> AsyncIterator[AsyncBranch]:
        """Branches as they come to a stop, until none runs."""
        while (branch := await self.next_held()) is not None:
            yield branch


class Tree(_Tree[Branch]):
    """`LLM.tree`: a prompt and its branches. Leaving the context ends what is left."""

    kind = Branch

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        now(self.backend.close())

    def held(self) -> Iterator[Branch]:
        """Branches as they come to a stop, until none runs."""
        while (branch := now(self.next_held())) is not None:
            yield branch


def now(coroutine: Coroutine[Any, Any, Value]) -> Value:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        value: Value = done.value
        return value
    coroutine.close()
    raise AssertionError("the engine of LLM computes in place: there is nothing to wait for")


class Told:
    """Errors of what was told and not waited for; a branch that has ended meanwhile needs no command."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def note(self, error: BaseException | None) -> None:
        if isinstance(error, Exception) and not isinstance(error, UnknownRequest) and self._error is None:
            self._error = error

    def check(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
