"""Best of n: several answers, of which the likeliest is taken; the unlikely half is dropped at each checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import InvalidRequest
from paceline.llm.search.base import MAX_WIDTH, Search, SearchResult, all_held, candidate, check_range
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
