"""Probe: a long answer is asked for its result on the way, and ends when it has said the same several times in a row.

The probe is a branch with `ask` put behind what there is; the answer itself never sees it (Dynasor, Fu et al., 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import InvalidRequest
from paceline.llm.search.base import AnswerReading, Search, SearchResult, all_held, candidate, check_range
from paceline.llm.tree import AsyncTree


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
