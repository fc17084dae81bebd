"""What drafts bring. *answers*: the same prompts with and without them, in turns, in one process.

A file of questions by category, one JSON object a line with `category` and `turns` (as Spec-Bench has them). Of each
category some first turns are answered greedily by an engine that takes so many requests at a time; tokens are the same
with drafts and without, which is checked. Figures: tokens per second of whole runs, prompts included, and the ratio;
tokens a row gets in a step, drafts verified for each token, and the share of them that was right.

*recorded*: tokens a row would get in a step if it said what a log of requests says, every draft verified; no model
computes. A folder of files with one JSON object a line: `timestamp`, `input`, `output`.

    python -m benchmarks.drafts answers --data spec_bench_question.jsonl [--clients 1,4,8] [--questions 4] [--rounds 5]
    python -m benchmarks.drafts recorded FOLDER [--width 8]
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness import Benchmark, Found, Given, flag, in_turns, rows_of
from paceline import LLM, SamplingParams
from paceline.config.engine import DraftConfig, EngineConfig, SchedulerConfig
from paceline.core.plan import StepPlan
from paceline.models.files.fetch import resolve
from paceline.models.files.open import open_checkpoint
from paceline.runner.device_rows import DeviceRows
from paceline.runner.drafts import History, NgramDrafter
from paceline.scheduler.draft_budget import DraftBudget
from paceline.text.tokenizer import Tokenizer

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
def answers(given: Given) -> Found:
    """Questions answered with and without drafts, in turns."""
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


@bench.part(
    flag("folder", None, "of *.jsonl files", kind=Path),
    flag("--width", 8, "drafts of a step"),
    flag("--requests", 134, "the first of the log"),
)
def recorded(given: Given) -> Found:
    """Tokens per step over a log of requests, every draft verified."""
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(resolve(None, None, None)))
    lines = [line for path in sorted(given.folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    requests = sorted(map(json.loads, lines), key=lambda request: request["timestamp"])[: given.requests]
    texts = [
        (tokenizer.encode(request["input"]), tokenizer.encode(request["output"])) for request in requests
    ]
    found = [_said(name, texts, given.width) for name in ("ngram", "history")]
    return {"requests": len(texts), "width": given.width, "recorded": rows_of(found)}


def _said(name: str, texts: list[tuple[list[int], list[int]]], width: int) -> Found:
    longest = max(len(prompt) + len(answer) for prompt, answer in texts) + width + 1
    scheduler = SchedulerConfig(max_num_seqs=1, max_model_len=longest)
    rows = DeviceRows(EngineConfig(scheduler=scheduler, depth=0))
    drafter = NgramDrafter(History() if name == "history" else None)
    budget, only = DraftBudget(DraftConfig(), width), np.array([0])
    steps = tokens = verified = 0
    for prompt, answer in texts:
        rows.tokens[0, : len(prompt)] = prompt
        rows.num_tokens[0], rows.limit[0], rows.ended[0], rows.texts[0] = len(prompt), longest, False, 1
        drafter.join(rows, 0)
        said = 0
        while said < len(answer):
            plan = budget.stamp(StepPlan(seq=1), width, width)
            made = drafter.propose(rows, plan, only) if said else None
            guess = [] if made is None else made[0][0, : made[1][0]].tolist()
            right = 0
            while right < len(guess) and guess[right : right + 1] == answer[said + right : said + right + 1]:
                right += 1
            new = answer[said : said + right + 1]
            end = int(rows.num_tokens[0]) + len(new)
            rows.tokens[0, end - len(new) : end], rows.num_tokens[0] = new, end
            drafter.observe(rows, only, np.array([len(new)]), np.array([len(guess)]))
            budget.learn_drafts(drafter.take_tally())
            said, steps, verified = said + len(new), steps + 1, verified + len(guess)
        rows.ended[0] = True
        drafter.leave(rows, 0)
        tokens += len(answer)
    return {"drafts from": name, "tokens per step": tokens / steps, "verified per token": verified / tokens}


if __name__ == "__main__":
    bench.main()
