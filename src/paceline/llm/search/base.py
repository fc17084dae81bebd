"""What searches share: their result, how answers are read, and how options are checked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from paceline.core.sampling import SamplingParams
from paceline.errors import InvalidRequest
from paceline.llm.tree import AsyncBranch, AsyncTree, Backend
from paceline.text.guide.check import last_match

MAX_WIDTH = 128
MAX_PATTERN_CHARS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An answer that was found."""

    text: str
    token_ids: list[int]
    score: float
    finish_reason: str  # stop or length
    answer: str | None = None  # what was read from its text, where that is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search came to. The fields of the best candidate are its own."""

    candidates: list[Candidate]  # the best first
    num_branches: int  # that were made
    num_generated: int  # tokens of all of them

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def text(self) -> str:
        return self.best.text

    @property
    def token_ids(self) -> list[int]:
        return self.best.token_ids

    @property
    def score(self) -> float:
        return self.best.score

    @property
    def answer(self) -> str | None:
        return self.best.answer


@dataclass(frozen=True, kw_only=True)
class Search:
    """One search and its options."""

    needs_logprobs: ClassVar[bool] = False
    is_lockstep: ClassVar[bool] = False  # it looks at every token before the next: steps ahead are of no use

    @property
    def num_parallel(self) -> int:
        """Most branches that compute at the same time."""
        raise NotImplementedError

    def sampling(self, given: SamplingParams) -> SamplingParams:
        """How the tree has to sample."""
        given = replace(given, n=1)
        return replace(given, logprobs=0) if self.needs_logprobs and given.logprobs is None else given

    async def run(self, tree: AsyncTree) -> SearchResult:
        raise NotImplementedError

    def result(self, tree: AsyncTree, candidates: Iterable[Candidate]) -> SearchResult:
        ranked = sorted(candidates, key=lambda candidate: -candidate.score)
        return SearchResult(
            candidates=ranked,
            num_branches=len(tree.output.outputs) - 1,
            num_generated=tree.num_generated,
        )


def candidate(branch: AsyncBranch, score: float, answer: str | None = None) -> Candidate:
    reason = branch.held or branch.output.finish_reason or "stop"
    return Candidate(
        text=branch.text, token_ids=list(branch.token_ids), score=score, finish_reason=reason, answer=answer
    )


async def all_held(tree: AsyncTree) -> list[AsyncBranch]:
    """Wait until no branch runs; those that came to a hold."""
    return [branch async for branch in tree.held()]


def check_range(name: str, value: object, low: float, high: float, kind: type = int) -> None:
    is_kind = isinstance(value, int | float) if kind is float else isinstance(value, int)
    if not is_kind or isinstance(value, bool) or not low <= value <= high:  # type: ignore[operator]
        must = f"must be between {low:g} and {high:g}"
        raise InvalidRequest(f"search: {name} {must}, not {value!r:.40}", param="search")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidRequest(f"search: {name} must be one of {', '.join(choices)}", param="search")


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """Finds the answer in a text: by a pattern (its first group, the last place), by a JSON pointer, or as the rest of
    the line behind the last place of a text."""

    pattern: re.Pattern[str] | None = None
    pointer: str | None = None
    after: str | None = None

    @classmethod
    def of(
        cls, pattern: str | None = None, pointer: str | None = None, after: str | None = None
    ) -> AnswerReading:
        if sum(given is not None for given in (pattern, pointer, after)) != 1:
            raise InvalidRequest("search: give one of pattern, pointer and after", param="search")
        if pointer is not None:
            if not isinstance(pointer, str) or (pointer and not pointer.startswith("/")):
                raise InvalidRequest('search: pointer is a JSON pointer, as "/answer"', param="search")
            return cls(pointer=pointer)
        if after is not None:
            if not isinstance(after, str) or not 1 <= len(after) <= MAX_PATTERN_CHARS:
                raise InvalidRequest(
                    f"search: after is a text of 1 to {MAX_PATTERN_CHARS} characters", param="search"
                )
            return cls(after=after)
        if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARS:
            raise InvalidRequest(
                f"search: pattern is a text of at most {MAX_PATTERN_CHARS} characters", param="search"
            )
        try:
            return cls(re.compile(pattern))
        except (re.error, OverflowError, RecursionError) as error:
            message = f"search: pattern is not a regular expression: {error}"
            raise InvalidRequest(message[:300], param="search") from None

    async def read(self, text: str, backend: Backend) -> str | None:
        """None where there is no answer. A backend may have its own way to match patterns."""
        if self.pattern is not None and backend.find_pattern is not None:
            return await backend.find_pattern(self.pattern.pattern, text)
        return self.read_here(text)

    def read_here(self, text: str) -> str | None:
        if self.pattern is not None:
            return last_match(self.pattern, text)
        if self.after is not None:
            _, there, rest = text.rpartition(self.after)
            said = rest.strip().partition("\n")[0].strip() if there else ""
            return said.rstrip(".") or None
        try:
            value = json.loads(text)
            for part in (self.pointer or "").split("/")[1:]:
                name = part.replace("~1", "/").replace("~0", "~")
                value = value[int(name)] if isinstance(value, list) else value[name]
        except (ValueError, LookupError, TypeError, RecursionError):
            return None
        return value.strip() if isinstance(value, str) else json.dumps(value, sort_keys=True)
