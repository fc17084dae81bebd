"""What drafts bring: the same prompts with and without them, in turns, in one process.

A file of questions by category, one JSON object a line with `category` and `turns` (as Spec-Bench has them). Of each
category some first turns are answered greedily by an engine that takes so many requests at a time; tokens are the same
with drafts and without, which is checked. Figures: tokens per second of whole runs, prompts included, and the ratio;
tokens a row gets in a step, drafts verified for each token, and the share of them that was right.

    python -m benchmarks.drafts --data spec_bench_question.jsonl [--clients 1,4,8] [--questions 4] [--rounds 5]
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.harness import Benchmark, Found, Given, flag, in_turns, rows_of
from paceline import LLM, SamplingParams

MOST_CHARACTERS = 6000  # of a question

bench = Benchmark(__doc__)


class Engine:
    """An engine, and what it has done."""

    def __init__(self, given: Given, clients: int, method: str) -> None:
        self._llm = LLM(
            given.model,
            max_num_seqs=clients,
            enable_prefix_caching=False,
            speculative_config=method,
        )
        self._sampling = SamplingParams(max_tokens=given.tokens, temperature=given.temperature, seed=1)
        self.tokens: list[list[int]] = []

    def answer(self, questions: list[str]) -> float:
        """Seconds it takes."""
        chats = [[{"role": "user", "content": text[:MOST_CHARACTERS]}] for text in questions]
        started_s = time.perf_counter()
        outputs = self._llm.chat(chats, self._sampling, use_tqdm=False)
        seconds = time.perf_counter() - started_s
        self.tokens = [output.outputs[0].token_ids for output in outputs]
        return seconds

    def counts(self) -> tuple[int, int, int]:
        counters = self._llm._front.engine.scheduler.state.counters
        return counters.draft_tokens, counters.accepted_tokens, counters.logit_rows

    def close(self) -> None:
        self._llm.shutdown()


@bench.part(
    flag("--data", None, "questions, a JSON object a line", kind=Path, required=True),
    flag("--model", None, "folder or GGUF file (default: SmolLM2-135M-Instruct)"),
    flag("--clients", "1,4,8", "requests at a time, one table row for each"),
    flag("--questions", 4, "of each category; never fewer than clients"),
    flag("--categories", "", "only these, separated by commas"),
    flag("--tokens", 128, "most of an answer"),
    flag("--temperature", 0.0),
    flag("--method", "ngram"),
    flag("--rounds", 5, "pairs of runs"),
)
def drafts(given: Given) -> Found:
    by_category: dict[str, list[str]] = {}
    for line in given.data.read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        by_category.setdefault(question["category"], []).append(question["turns"][0])
    chosen = given.categories.split(",") if given.categories else list(by_category)
    return {"drafts": rows_of(_measured(given, {name: by_category[name] for name in chosen}))}


def _measured(given: Given, by_category: dict[str, list[str]]) -> Iterator[Found]:
    for clients in map(int, given.clients.split(",")):
        off, on = Engine(given, clients, "off"), Engine(given, clients, given.method)
        ratios = []
        for category, questions in by_category.items():
            asked = questions[: max(given.questions, clients)]
            before = on.counts()
            works = {"off": partial(off.answer, asked), "on": partial(on.answer, asked)}
            seconds = in_turns(works, given.rounds)
            assert off.tokens == on.tokens, f"{category}: other tokens with drafts"
            verified, right, rows = (now - then for now, then in zip(on.counts(), before, strict=True))
            total = sum(map(len, on.tokens))
            ratio = statistics.median(a / b for a, b in zip(seconds["off"], seconds["on"], strict=True))
            ratios.append(ratio)
            yield {
                "clients": clients,
                "category": category,
                "off tok/s": total / statistics.median(seconds["off"]),
                "on tok/s": total / statistics.median(seconds["on"]),
                "ratio": ratio,
                "tokens per step": total * given.rounds / rows,
                "verified per token": verified / (total * given.rounds),
                "right": right / max(verified, 1),
            }
        yield {
            "clients": clients,
            "category": "all",
            "off tok/s": "",
            "on tok/s": "",
            "ratio": statistics.geometric_mean(ratios),
        }
        off.close()
        on.close()


if __name__ == "__main__":
    bench.main()
