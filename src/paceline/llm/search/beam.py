"""Beam search: at each place the likeliest continuations of all beams together go on.

Equal to `generate(num_beams=...)` of transformers with `early_stopping=False` and `True`, up to rounding. A beam is a
branch that is held after each token: one continuation goes on with it, the others are forks of the token before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from paceline.core.sampling import MAX_LOGPROBS, SamplingParams
from paceline.errors import InvalidRequest
from paceline.llm.search.base import Candidate, Search, SearchResult, all_held, check_range
from paceline.llm.tree import AsyncBranch, AsyncTree

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

    @property
    def tokens(self) -> list[int]:
        return [*self.branch.token_ids[:-1], self.token]


@dataclass(frozen=True, kw_only=True)
class Beam(Search):
    """`width` beams; an answer's score is the sum of its logprobs over its length to the power of `length_penalty`."""

    width: int = 4
    length_penalty: float = 1.0
    early_stopping: bool = False  # end as soon as `width` answers are complete

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
        return self.width

    async def run(self, tree: AsyncTree) -> SearchResult:
        tokenizer = tree.backend.tokenizer
        ends = frozenset(tree.backend.sampling.stop_token_ids)
        if tokenizer is not None:
            ends |= frozenset(tokenizer.eos_token_ids)
        num_kept = min(max(2, 1 + len(ends)) * self.width, MAX_LOGPROBS)
        beams = dict.fromkeys(await tree.root.fork(1, max_tokens=1), 0.0)
        done: list[tuple[float, list[int], str]] = []  # the best `width`
        for length in range(1, tree.max_tokens + 1):
            await all_held(tree)
            steps = _likeliest(beams, num_kept)
            is_last = length == tree.max_tokens
            for step in steps[: self.width]:
                if is_last or step.token in ends:
                    reason = "stop" if step.token in ends else "length"
                    done.append((step.score / length**self.length_penalty, step.tokens, reason))
            done = sorted(done, key=lambda each: -each[0])[: self.width]
            going = [] if is_last else [step for step in steps if step.token not in ends][: self.width]
            if not going or self._is_over(done, going[0].score / length**self.length_penalty):
                break
            beams = await _go_on(beams, going)
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


def _likeliest(beams: dict[AsyncBranch, float], count: int) -> list[_Step]:
    steps = []
    for branch, score in beams.items():
        known = branch.output.logprobs
        assert known, "a held beam has the logprobs of its last token"
        steps += [_Step(score + found.logprob, branch, token) for token, found in known[-1].items()]
    return sorted(steps, key=lambda step: -step.score)[:count]


async def _go_on(beams: dict[AsyncBranch, float], going: list[_Step]) -> dict[AsyncBranch, float]:
    """The branches of the next place, and their scores."""
    following: dict[AsyncBranch, float] = {}
    kept = []
    for step in going:
        tokens = step.branch.token_ids
        if step.token == tokens[-1]:
            kept.append(step)
        else:
            (made,) = await step.branch.fork(1, at=len(tokens) - 1, append=[step.token], max_tokens=1)
            following[made] = step.score
    for step in kept:
        await step.branch.extend(max_tokens=1)
        following[step.branch] = step.score
    for branch in beams.keys() - following.keys():
        branch.prune()
    return following
