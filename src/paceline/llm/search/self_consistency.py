"""Self-consistency: several answers are drawn and the one given most often wins; no more than it takes to be certain.

After each answer the leader is compared with the next: if it would still lead when all answers were drawn, with a
probability above `certainty` by the posterior of the two counts (Beta, uniform prior), the rest is not drawn. Aggarwal
et al. (2023) ask instead which of the two is the likelier one, which takes more answers to know.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from paceline.llm.search.base import (
    MAX_WIDTH,
    AnswerReading,
    Candidate,
    Search,
    SearchResult,
    candidate,
    check_range,
)
from paceline.llm.tree import AsyncTree


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
