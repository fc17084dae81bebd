"""What searches save, and whether they still find what they would find without saving.

*consistency*: votes over multiple-choice questions (tasks of BIG-Bench Hard: JSON files with `examples` of `input` and
`target`). Each question gets a full vote, and one that stops as soon as its leader is certain: how often both have the
same answer, and how many of the samples were drawn.

*best-of*: several answers to prompts (JSON lines with `turns`), all of them to their end and with the less likely half
pruned at checkpoints: the share of tokens, and how often the answer is one of the best three of all.

    python -m benchmarks.searches consistency --data FOLDER [--questions 200]
    python -m benchmarks.searches best-of --data FILE [--prompts 40]
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from benchmarks.harness import Benchmark, Found, Given, flag
from paceline import LLM, SamplingParams

bench = Benchmark(__doc__)
CHOICE = r"^\s*([A-R])\b"


def questions(folder: Path, count: int) -> list[dict[str, str]]:
    """Multiple-choice questions of all tasks, the same ones in every run."""
    found = [
        example
        for path in sorted(folder.glob("*.json"))
        for example in json.loads(path.read_text())["examples"]
        if "\n(B)" in example["input"] and len(example["input"]) < 1500
    ]
    random.Random(1).shuffle(found)
    return found[:count]


@bench.part(
    flag("--data", "", "folder of the tasks"),
    flag("--model", "", "folder, file or name; empty: the default one"),
    flag("--questions", 200),
    flag("--width", 16, "answers of a full vote"),
)
def consistency(given: Given) -> Found:
    """Votes that stop early against full ones."""
    llm = LLM(given.model or None)
    params = SamplingParams(temperature=0.7, max_tokens=4, seed=1)
    same = drawn = full_drawn = 0
    asked = questions(Path(given.data), given.questions)
    for question in asked:
        prompt = f"{question['input']}\nThe answer is ("
        options: dict[str, Any] = {"n": given.width, "pattern": CHOICE}
        early = llm.search("self_consistency", prompt, params, **options)
        full = llm.search("self_consistency", prompt, params, certainty=1.0, parallel=given.width, **options)
        same += early.answer == full.answer
        drawn, full_drawn = drawn + early.num_branches, full_drawn + full.num_branches
    print(
        f"{same / len(asked):.1%} have the answer of the full vote, {drawn / full_drawn:.1%} of its samples"
    )
    return {"questions": len(asked), "same": same / len(asked), "samples": drawn / full_drawn}


@bench.part(
    flag("--data", "", "file of prompts"),
    flag("--model", "", "folder, file or name; empty: the default one"),
    flag("--prompts", 40),
    flag("--width", 8, "answers"),
    flag("--tokens", 96, "most tokens of an answer"),
)
def best_of(given: Given) -> Found:
    """Halving at checkpoints against all answers to their end."""
    llm = LLM(given.model or None)
    params = SamplingParams(temperature=1.0, max_tokens=given.tokens, seed=1, logprobs=0)
    lines = Path(given.data).read_text().splitlines()[: given.prompts]
    among = tokens = full_tokens = 0
    for line in lines:
        messages = [{"role": "user", "content": json.loads(line)["turns"][0]}]
        halved = llm.search("best_of", messages, params, n=given.width)
        full = llm.search("best_of", messages, params, n=given.width, checkpoints=())
        best = [candidate.token_ids for candidate in full.candidates[:3]]
        among += halved.token_ids in best
        tokens, full_tokens = tokens + halved.num_generated, full_tokens + full.num_generated
    print(f"{among / len(lines):.0%} are of the best three, {tokens / full_tokens:.1%} of the tokens")
    return {"prompts": len(lines), "among_best_three": among / len(lines), "tokens": tokens / full_tokens}


if __name__ == "__main__":
    bench.main()
