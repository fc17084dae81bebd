"""What blending keeps of SmolLM2's answers to questions about retrieved passages, and what it saves.

Prompts of Spec-Bench's category `rag`: four passages, cut to 160 tokens, and a question. Of each: KL of the next tokens
to those of the whole prompt, with placed passages and without passages; answers that hold one of the references; and
the time to the first token where the passages are computed where they stand, and where they are resident.

    python -m benchmarks.blend_smollm2 --prompts spec_bench_question.jsonl [--count 80] [--json FILE]
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np

from benchmarks.harness import Benchmark, Found, Given, flag, spread
from paceline import LLM, SamplingParams
from paceline.core.blend_quality import Blending, PassagePrompt
from paceline.core.stretch import ModulePart
from paceline.engine.engine import Engine
from paceline.runner.blending import measure_blending
from paceline.runner.cpu import CPUSleeper
from paceline.runner.cpu_backend import CPUBackend
from paceline.text.passages import PassageQuestion, passage_prompts
from paceline.text.tokenizer import Tokenizer

PASSAGES, TOKENS, ANSWER = 4, 160, 64
EXACT, BLEND = "exact", "blend"
bench = Benchmark(__doc__)


def read(path: Path, count: int) -> list[tuple[PassageQuestion, list[str]]]:
    """Questions with their passages, and what an answer may hold."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if entry["category"] == "rag":
            *passages, question = [part for part in entry["turns"][0].split("\n") if part.strip()]
            references = [
                one for each in entry["reference"] for one in (each if isinstance(each, list) else [each])
            ]
            found.append((PassageQuestion(tuple(passages[:PASSAGES]), question), references))
    return found[:count]


def cut(prompt: PassagePrompt) -> PassagePrompt:
    return tuple(part._replace(tokens=part.tokens[:TOKENS]) if part.is_placed else part for part in prompt)


def plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def holds(answer: str, references: Sequence[str]) -> bool:
    return any(plain(each) in plain(answer) for each in references if plain(each))


def tokenizer_of(llm: LLM) -> Tokenizer:
    found = llm.get_tokenizer()
    assert found is not None
    return found


class Side:
    """An engine that answers prompts one at a time."""

    def __init__(self, llm: LLM) -> None:
        self.engine: Engine = llm.loaded.engine
        self._tokenizer = tokenizer_of(llm)

    def _finish(self) -> None:
        while self.engine.has_requests or not self.engine.is_idle:
            self.engine.step()

    def keep(self, prompt: PassagePrompt) -> None:
        """Compute the passages alone."""
        for part in prompt:
            if part.is_placed:
                sampling = SamplingParams(temperature=0.0, max_tokens=1)
                self.engine.add(list(part.tokens), sampling, is_module=True)
        self._finish()

    def answer(self, prompt: PassagePrompt, how: str) -> tuple[str, float]:
        """The answer, and seconds to its first token."""
        tokens: list[int] = []
        modules = []
        for part in prompt:
            if part.is_placed and how == BLEND:
                modules.append(ModulePart(len(tokens), len(part.tokens)))
            tokens += part.tokens
        sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER)
        began = time.perf_counter()
        (number,) = self.engine.add(tokens, sampling, modules=modules)
        found: list[int] = []
        first_s = 0.0
        while self.engine.has_requests or not self.engine.is_idle:
            for batch in self.engine.step().tokens:
                if not found:
                    first_s = time.perf_counter() - began
                assert set(batch.requests.tolist()) == {number}
                found += batch.tokens.tolist()
        return self._tokenizer.decode(found), first_s


def summary(checked: Blending) -> Found:
    return {
        "kept": round(checked.kept or 0.0, 4),
        "agreement": round(checked.agreement, 4),
        "kl_blend": round(checked.divergence, 4),
        "kl_without": round(checked.left_out, 4),
    }


@bench.part(
    flag("--prompts", None, "Spec-Bench's question.jsonl", kind=Path, required=True),
    flag("--count", 80, "prompts, from the first on"),
    flag("--model", "smollm2", "model"),
    flag("--threads", 2, "that compute"),
)
def blend(given: Given) -> Found:
    asked = read(given.prompts, given.count)
    llm = LLM(given.model, cpu_threads=given.threads)
    prompts = [cut(each) for each in passage_prompts(tokenizer_of(llm), [each for each, _ in asked], 8000)]
    side = Side(llm)
    hits = {EXACT: 0, BLEND: 0}
    taken: dict[str, list[float]] = {EXACT: [], BLEND: []}
    same = 0
    for prompt, (_, references) in zip(prompts, asked, strict=True):
        side.keep(prompt)
        answers = {}
        for how in (EXACT, BLEND):
            answers[how], first_s = side.answer(prompt, how)
            hits[how] += holds(answers[how], references)
            taken[how].append(first_s)
        same += answers[EXACT] == answers[BLEND]
    checked = measure_blending(cast("CPUSleeper[CPUBackend]", llm.loaded.sleeper).make_step, prompts)
    llm.shutdown()
    tokens = [sum(len(part.tokens) for part in prompt) for prompt in prompts]
    placed = [sum(len(part.tokens) for part in prompt if part.is_placed) for prompt in prompts]
    ratios = np.array(taken[EXACT]) / np.array(taken[BLEND])
    return {
        "prompts": len(prompts),
        "tokens_of_a_prompt": round(float(np.mean(tokens)), 1),
        "of_these_in_passages": round(float(np.mean(placed)), 1),
        **summary(checked),
        "answers_with_a_reference": hits,
        "same_answers": same,
        "first_token_s": {how: spread(times, 4) for how, times in taken.items()},
        "times_lower": round(float(np.median(ratios)), 2),
    }


if __name__ == "__main__":
    bench.main()
