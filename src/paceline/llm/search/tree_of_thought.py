"""Tree of thought: each round, several next steps are proposed for each answer under way, and the best are kept.

A step ends at `step_end`. Steps are scored by their mean logprob, by votes (the model is asked several times which of
them is the best) or by a judge (the model is asked for a number behind each).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import InvalidRequest
from paceline.llm.search.base import Search, SearchResult, all_held, candidate, check_choice, check_range
from paceline.llm.tree import AsyncBranch, AsyncTree

MAX_PROMPT_CHARS = 4000
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
JUDGE = "\n\nFrom 1 to 10, how good is the reasoning so far? Score:"
VOTE = "\n\nThe number of the best of these steps is"


@dataclass(frozen=True, kw_only=True)
class TreeOfThought(Search):
    """`depth` rounds of `width` proposals for each of the `keep` best."""

    needs_logprobs: ClassVar[bool] = True

    width: int = 3
    keep: int = 2
    depth: int = 4
    step_end: str = "\n\n"
    step_tokens: int = 64
    score: str = "logprob"  # or vote, judge
    judge_prompt: str = ""  # put behind a step for the judge, or behind all of them for a vote; "": our own
    votes: int = 3

    def __post_init__(self) -> None:
        check_range("width", self.width, 1, 16)
        check_range("keep", self.keep, 1, 16)
        check_range("depth", self.depth, 1, 32)
        check_range("step_tokens", self.step_tokens, 1, 4096)
        check_range("votes", self.votes, 1, 32)
        check_choice("score", self.score, ("logprob", "vote", "judge"))
        for name in ("step_end", "judge_prompt"):
            value = getattr(self, name)
            if not isinstance(value, str) or len(value) > MAX_PROMPT_CHARS:
                raise InvalidRequest(
                    f"search: {name} must be a text of {MAX_PROMPT_CHARS} characters", param="search"
                )
        if not self.step_end:
            raise InvalidRequest("search: step_end must not be empty", param="search")

    @property
    def num_parallel(self) -> int:
        return max(self.width * self.keep, self.votes)

    async def run(self, tree: AsyncTree) -> SearchResult:
        kept: list[AsyncBranch] = [tree.root]
        scores: dict[AsyncBranch, float] = {}
        for _ in range(self.depth):
            going = [
                branch for branch in kept if branch is tree.root or not _is_complete(branch, self.step_end)
            ]
            if not going:
                break
            proposed = [branch for branch in kept if branch not in going]
            for branch in going:
                proposed += await branch.fork(self.width, max_tokens=self.step_tokens, stop=self.step_end)
            await all_held(tree)
            proposed = [branch for branch in proposed if branch.held is not None]
            scores = await self._scores(tree, proposed)
            ranked = sorted(proposed, key=lambda branch: -scores[branch])
            kept, dropped = ranked[: self.keep], ranked[self.keep :]
            for branch in [*dropped, *(each for each in going if each is not tree.root)]:
                branch.prune()
            for branch in kept:
                branch.score = scores[branch]
        return self.result(tree, [candidate(branch, scores[branch]) for branch in kept])

    async def _scores(self, tree: AsyncTree, proposed: list[AsyncBranch]) -> dict[AsyncBranch, float]:
        if self.score == "logprob":
            return {branch: branch.logprob for branch in proposed}
        if self.score == "judge":
            return await self._judged(tree, proposed)
        listed = "".join(f"\n\nStep {number}:\n{each.text}" for number, each in enumerate(proposed, 1))
        append = listed + (self.judge_prompt or VOTE)
        voters = await tree.root.fork(self.votes, append=append, max_tokens=6)
        await all_held(tree)
        votes = Counter(_number(voter, append) for voter in voters)
        for voter in voters:
            voter.prune()
        return {each: votes[float(number)] / self.votes for number, each in enumerate(proposed, 1)}

    async def _judged(self, tree: AsyncTree, proposed: list[AsyncBranch]) -> dict[AsyncBranch, float]:
        append = self.judge_prompt or JUDGE
        judges = {
            branch: (await branch.fork(1, append=append, max_tokens=6, temperature=0, stop=()))[0]
            for branch in proposed
        }
        await all_held(tree)
        found = {}
        for branch, judge in judges.items():
            value = _number(judge, append)
            found[branch] = 0.0 if value is None else value
            judge.prune()
        return found


def _is_complete(branch: AsyncBranch, step_end: str) -> bool:
    """It ended by itself, not at the end of a step or because a step was too long."""
    return branch.held == "stop" and branch.output.stop_reason != step_end


def _number(branch: AsyncBranch, asked: str) -> float | None:
    """The first number that was said behind what was put in."""
    said = branch.text.rpartition(asked)[2]
    found = _NUMBER.search(said)
    return None if found is None else float(found.group())
