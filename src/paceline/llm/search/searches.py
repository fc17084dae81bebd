"""The searches there are. Whole answers: best of n, a look at what an answer would be, self-consistency; from the best
branches on: tree of thought and beam search.

Best of n takes the likeliest of several answers; the unlikely half is dropped at each checkpoint."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import ClassVar, NamedTuple

from paceline.core.sampling import MAX_LOGPROBS, SamplingParams
from paceline.errors import InvalidRequest
from paceline.llm.search.base import (
    MAX_WIDTH,
    AnswerReading,
    Candidate,
    Search,
    SearchResult,
    all_held,
    candidate,
    check_choice,
    check_range,
)
from paceline.llm.tree import AsyncBranch, AsyncTree

MAX_PROMPT_CHARS = 4000
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
JUDGE = "\n\nFrom 1 to 10, how good is the reasoning so far? Score:"
VOTE = "\n\nThe number of the best of these steps is"


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


# Tree of thought: each round, several next steps are proposed for each answer under way, and the best are kept.
#
# A step ends at `step_end`. Steps are scored by their mean logprob, by votes (the model is asked several times which of
# them is the best) or by a judge (the model is asked for a number behind each).


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
    """It reached its end, not at the end of a step or because a step was too long."""
    return branch.held == "stop" and branch.output.stop_reason != step_end


def _number(branch: AsyncBranch, asked: str) -> float | None:
    """The first number that was said behind what was put in."""
    said = branch.text.rpartition(asked)[2]
    found = _NUMBER.search(said)
    return None if found is None else float(found.group())


# Beam search: at each place the likeliest continuations of all beams together go on.
#
# Equal to `generate(num_beams=...)` of transformers with `early_stopping=False` and `True`, up to rounding. A beam is
# a branch that runs and tells how likely each next token was. The continuation with its own token goes on with it,
# others are forks of the token before, which share what it has computed.


# What changes which tokens are drawn, and not how likely the model says they are.
_RULES = (
    *("allowed_token_ids", "bad_words", "logit_bias", "structured_outputs", "min_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


class _Step(NamedTuple):
    """A beam with one more token."""

    score: float  # sum of its logprobs
    branch: AsyncBranch
    token: int
    length: int  # tokens of the beam then

    @property
    def tokens(self) -> list[int]:
        return [*self.branch.token_ids[: self.length - 1], self.token]

    @property
    def is_own(self) -> bool:
        """Whether the branch itself has that token."""
        return self.branch.token_ids[self.length - 1] == self.token


@dataclass(frozen=True, kw_only=True)
class Beam(Search):
    """`width` beams; an answer's score is the sum of its logprobs over its length to the power of `length_penalty`."""

    width: int = 4
    length_penalty: float = 1.0
    early_stopping: bool = False  # end as soon as `width` answers are complete
    is_lockstep: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("width", self.width, 1, MAX_LOGPROBS // 2)
        check_range("length_penalty", self.length_penalty, -10, 10, float)

    def sampling(self, given: SamplingParams) -> SamplingParams:
        if given.stop:
            raise InvalidRequest(
                "search: a beam ends at stop_token_ids and the end of text, not at texts", param="stop"
            )
        default = SamplingParams()
        for name in _RULES:
            if getattr(given, name) != getattr(default, name):
                message = f"search: beams rank tokens by the model's own probabilities; leave {name} out"
                raise InvalidRequest(message, param=name)
        return replace(given, n=1, temperature=0, logprobs=MAX_LOGPROBS, ignore_eos=True, seed=None)

    @property
    def num_parallel(self) -> int:
        return 2 * self.width  # with those that the next ones are made of

    async def run(self, tree: AsyncTree) -> SearchResult:
        tokenizer = tree.backend.tokenizer
        ends = frozenset(tree.backend.sampling.stop_token_ids)
        if tokenizer is not None:
            ends |= frozenset(tokenizer.eos_token_ids)
        num_kept = min(max(2, 1 + len(ends)) * self.width, MAX_LOGPROBS)
        beams = dict.fromkeys(await tree.root.fork(1), 0.0)
        done: list[tuple[float, list[int], str]] = []  # the best `width`
        spent: set[AsyncBranch] = set()  # beams that were left, and have forks
        for length in range(1, tree.max_tokens + 1):
            await _all_reach(length, beams, spent, tree)
            steps = _likeliest(beams, length, num_kept)
            is_last = length == tree.max_tokens
            for step in steps[: self.width]:
                if is_last or step.token in ends:
                    reason = "stop" if step.token in ends else "length"
                    done.append((step.score / length**self.length_penalty, step.tokens, reason))
            done = sorted(done, key=lambda each: -each[0])[: self.width]
            going = [] if is_last else [step for step in steps if step.token not in ends][: self.width]
            if not going or self._is_over(done, going[0].score / length**self.length_penalty):
                break
            beams, spent = await _next_beams(beams, going)
        return self.result(tree, [self._candidate(tree, each, ends) for each in done])

    def _is_over(self, done: list[tuple[float, list[int], str]], best_possible: float) -> bool:
        """Whether the beams that are left cannot come before those that are complete."""
        return len(done) == self.width and (self.early_stopping or best_possible <= done[-1][0])

    @staticmethod
    def _candidate(tree: AsyncTree, found: tuple[float, list[int], str], ends: frozenset[int]) -> Candidate:
        score, tokens, reason = found
        shown = tokens[:-1] if tokens[-1] in ends else tokens
        tokenizer = tree.backend.tokenizer
        text = "" if tokenizer is None else tokenizer.decode(shown)
        return Candidate(text=text, token_ids=tokens, score=score, finish_reason=reason)


async def _all_reach(
    length: int, beams: dict[AsyncBranch, float], spent: set[AsyncBranch], tree: AsyncTree
) -> None:
    """Wait until all beams have this many tokens; those that have failed before are left out. What they were made of
    ends behind the next step: by then they share it, or wait for its row."""
    await tree.backend.settled()
    while late := [branch for branch in beams if len(branch.token_ids) < length]:
        for branch in late:
            if branch.state == "ended":
                del beams[branch]
        await tree.backend.changed()
        while spent:
            spent.pop().prune()


def _likeliest(beams: dict[AsyncBranch, float], length: int, count: int) -> list[_Step]:
    steps: list[tuple[float, AsyncBranch, int]] = []
    for branch, score in beams.items():
        known = branch.output.logprobs
        assert known, "a beam has the logprobs of its tokens"
        steps += [(score + each.logprob, branch, token) for token, each in known[length - 1].items()]
    steps.sort(key=itemgetter(0), reverse=True)
    return [_Step(*step, length) for step in steps[:count]]


async def _next_beams(
    beams: dict[AsyncBranch, float], going: list[_Step]
) -> tuple[dict[AsyncBranch, float], set[AsyncBranch]]:
    """The branches of the next place with their scores, and others that some of them were made of."""
    following = {step.branch: step.score for step in going if step.is_own}
    for step in going:
        if not step.is_own:
            (made,) = await step.branch.fork(1, at=step.length - 1, append=[step.token])
            following[made] = step.score
    parents = {step.branch for step in going}
    for branch in beams.keys() - following.keys() - parents:
        branch.prune()
    return following, parents - following.keys()
