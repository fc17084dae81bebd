"""Searches that draw whole answers: best of n, self-consistency, and a look at what an answer would be.

Best of n takes the likeliest of several answers; the unlikely half is dropped at each checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import InvalidRequest
from paceline.llm.search.base import (
    MAX_WIDTH,
    AnswerReading,
    Candidate,
    Search,
    SearchResult,
    all_held,
    candidate,
    check_range,
)
from paceline.llm.tree import AsyncTree


@dataclass(frozen=True, kw_only=True)
class BestOf(Search):
    """`n` answers by their mean logprob."""

    needs_logprobs: ClassVar[bool] = True

    n: int = 8
    # Shares of max_tokens at which the less likely half is pruned; none: all answers are made to their end. By a
    # quarter of the answers' length their order says something about the end; half of the tokens are saved.
    checkpoints: tuple[float, ...] = (0.25, 0.5)

    def __post_init__(self) -> None:
        check_range("n", self.n, 1, MAX_WIDTH)
        if not isinstance(self.checkpoints, tuple | list):
            raise InvalidRequest("search: checkpoints is a list of shares of max_tokens", param="search")
        for share in self.checkpoints:
            check_range("a checkpoint", share, 0.01, 0.99, float)
        if list(self.checkpoints) != sorted(set(self.checkpoints)):
            raise InvalidRequest("search: checkpoints must rise", param="search")

    @property
    def num_parallel(self) -> int:
        return self.n

    async def run(self, tree: AsyncTree) -> SearchResult:
        ends = [max(1, int(share * tree.max_tokens)) for share in self.checkpoints]
        ends = [*sorted(set(ends) - {tree.max_tokens}), tree.max_tokens]
        branches = await tree.root.fork(self.n, max_tokens=ends[0])
        kept = len(branches)
        for done, end in zip(ends, [*ends[1:], None], strict=True):
            await all_held(tree)
            branches = [branch for branch in branches if branch.held is not None]
            branches.sort(key=lambda branch: -branch.logprob)
            if end is None:
                break
            kept = (kept + 1) // 2
            for branch in branches[kept:]:
                branch.prune()
            branches = branches[:kept]
            for branch in branches:
                if branch.held == "length":
                    await branch.extend(max_tokens=end - done)
        return self.result(tree, [candidate(branch, branch.logprob) for branch in branches])


# Probe: a long answer is asked for its result on the way, and ends when it has said the same several times in a row.
#
# The probe is a branch with `ask` put behind what there is; the answer itself never sees it (Dynasor, Fu et al.,
# 2024).


@dataclass(frozen=True, kw_only=True)
class Probe(Search):
    """Asked every `every` tokens; `agree` equal answers in a row end it."""

    ask: str = "\n\nThe answer is"
    every: int = 64
    agree: int = 3
    answer_tokens: int = 16
    pattern: str = r"\s*(\S.*)"  # what is read of the words behind `ask`, its first group

    def __post_init__(self) -> None:
        check_range("every", self.every, 1, 100_000)
        check_range("agree", self.agree, 2, 100)
        check_range("answer_tokens", self.answer_tokens, 1, 1024)
        AnswerReading.of(self.pattern)
        if not isinstance(self.ask, str) or not self.ask:
            raise InvalidRequest("search: ask must be a text", param="search")

    @property
    def num_parallel(self) -> int:
        return 1

    async def run(self, tree: AsyncTree) -> SearchResult:
        reading = AnswerReading.of(self.pattern)
        said: list[str | None] = []
        (answer,) = await tree.root.fork(1, max_tokens=min(self.every, tree.max_tokens))
        while True:
            await all_held(tree)
            (probe,) = await answer.fork(
                1, append=self.ask, max_tokens=self.answer_tokens, temperature=0, stop="\n"
            )
            await all_held(tree)
            said.append(await reading.read(probe.text.rpartition(self.ask)[2], tree.backend))
            probe.prune()
            last = said[-self.agree :]
            is_certain = len(last) == self.agree and last[0] is not None and len(set(last)) == 1
            left = tree.max_tokens - len(answer.token_ids)
            if is_certain or answer.held != "length" or left < 1:
                share = sum(each == said[-1] for each in said) / len(said)
                return self.result(tree, [candidate(answer, share, said[-1])])
            await answer.extend(max_tokens=min(self.every, left))


# Self-consistency: several answers are drawn and the one given most often wins; no more than it takes to be certain.
#
# After each answer the leader is compared with the next: if it would still lead when all answers were drawn, with a
# probability above `certainty` by the posterior of the two counts (Beta, uniform prior), the rest is not drawn.
# Aggarwal et al. (2023) ask instead which of the two is the likelier one, which takes more answers to know.


def certainty_of(first: int, second: int, left: int) -> float:
    """That an answer given `first` times still leads one given `second` times after `left` more; a tie is half a lead.

    Each of these is taken to be one of the two: a third answer would leave their difference as it is.
    """
    chance = 0.0
    for more in range(left + 1):
        lead = (first + more) - (second + left - more)
        if lead >= 0:
            ways = math.comb(left, more) * _beta(first + 1 + more, second + 1 + left - more)
            chance += ways * (0.5 if lead == 0 else 1.0)
    return chance / _beta(first + 1, second + 1)


def _beta(one: int, other: int) -> float:
    return 1.0 / (one * math.comb(one + other - 1, one))


@dataclass(frozen=True, kw_only=True)
class SelfConsistency(Search):
    """At most `n` answers, read by a pattern, a JSON pointer, or as the line behind a text."""

    n: int = 16
    pattern: str | None = None
    pointer: str | None = None
    after: str | None = None
    certainty: float = 0.95
    parallel: int = 4  # that are drawn at the same time

    def __post_init__(self) -> None:
        check_range("n", self.n, 1, MAX_WIDTH)
        check_range("parallel", self.parallel, 1, MAX_WIDTH)
        check_range("certainty", self.certainty, 0.5, 1, float)
        AnswerReading.of(self.pattern, self.pointer, self.after)

    @property
    def num_parallel(self) -> int:
        return min(self.n, self.parallel)

    async def run(self, tree: AsyncTree) -> SearchResult:
        reading = AnswerReading.of(self.pattern, self.pointer, self.after)
        votes: Counter[str] = Counter()
        found: dict[int, Candidate] = {}  # by branch
        num_drawn = min(self.n, self.parallel)
        await tree.root.fork(num_drawn)
        async for branch in tree.held():
            answer = await reading.read(branch.text, tree.backend)
            found[branch.index] = candidate(branch, 0.0, answer)
            branch.prune()
            if answer is not None:
                votes[answer] += 1
            counts = [count for _, count in votes.most_common(2)] + [0, 0]
            if counts[0] and certainty_of(counts[0], counts[1], self.n - len(found)) > self.certainty:
                break
            # No more than may be needed: if those that are under way agree with the leader, they are enough.
            running = num_drawn - len(found)
            more = 0
            while (
                num_drawn < self.n
                and running < self.parallel
                and certainty_of(counts[0] + running, counts[1], self.n - num_drawn) <= self.certainty
            ):
                more, running, num_drawn = more + 1, running + 1, num_drawn + 1
            if more:
                await tree.root.fork(more)
        total = max(1, len(found))
        ranked = [
            Candidate(
                text=each.text,
                token_ids=each.token_ids,
                score=votes[each.answer] / total if each.answer is not None else 0.0,
                finish_reason=each.finish_reason,
                answer=each.answer,
            )
            for _, each in sorted(found.items())  # a tie goes to the first branch, whichever ended first
        ]
        return self.result(tree, ranked)
