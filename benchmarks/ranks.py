"""A model in several processes (`--tensor-parallel-size`) against the same model in one.

*tokens*: greedy and seeded answers to prompts of 64 tokens of English, with one rank and with several, both by torch in
float32 on the CPU. An answer may go another way only where the two likeliest tokens were closer than --margin (in
logprobs of the one rank); how many did is printed, and one that did so elsewhere fails the command.

    python -m benchmarks.ranks [--model FILE] [--ranks 3] [--prompts 200] [--answer 32] [--margin 1e-3]
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.harness import TEXT, Benchmark, Found, Given, flag
from paceline import LLM, SamplingParams
from paceline.models.files.fetch import resolve

bench = Benchmark(__doc__)
PROMPT = 64
Answers = list[tuple[list[int], list[float]]]  # tokens, and how much likelier each was than the next


def answers(given: Given, ranks: int) -> tuple[Answers, list[list[int]]]:
    """Greedy ones, and seeded ones."""
    options: dict[str, Any] = {"device": "cpu", "cpu_backend": "torch", "quantization": "none"}
    options |= {"max_model_len": 256, "tensor_parallel_size": ranks, "enable_prefix_caching": False}
    if ranks > 1:
        options["cpu_backend"] = "auto"
    with LLM(given.model, **options) as llm:
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"))
        step = max(1, (len(ids) - PROMPT) // given.prompts)
        prompts = [{"prompt_token_ids": list(ids[at * step :][:PROMPT])} for at in range(given.prompts)]
        more = {"max_tokens": given.answer, "ignore_eos": True}
        greedy = SamplingParams(temperature=0.0, logprobs=2, **more)
        found: Answers = []
        for output in llm.generate(prompts, greedy, use_tqdm=False):
            (answer,) = output.outputs
            gaps = []
            for entry in answer.logprobs or []:
                first, second = sorted((each.logprob for each in entry.values()), reverse=True)[:2]
                gaps.append(first - second)
            found.append((list(answer.token_ids), gaps))
        seeded = [SamplingParams(seed=number, top_p=0.95, **more) for number in range(len(prompts))]
        drawn = llm.generate(prompts, seeded, use_tqdm=False)
        return found, [list(output.outputs[0].token_ids) for output in drawn]


@bench.part(
    flag("--model", "smollm2", "file, folder or name"),
    flag("--ranks", 3, "processes"),
    flag("--prompts", 200, "of 64 tokens"),
    flag("--answer", 32, "tokens of each answer"),
    flag("--margin", 1e-3, "between the two likeliest tokens"),
)
def tokens(given: Given) -> Found:
    given.model = str(resolve(given.model, None, None))
    one, one_drawn = answers(given, 1)
    several, drawn = answers(given, given.ranks)
    equal = closer = 0
    wrong = []
    for number, ((ours, gaps), (theirs, _)) in enumerate(zip(one, several, strict=True)):
        first = next(
            (at for at, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None
        )
        if first is None:
            equal += 1
        elif gaps[first] <= given.margin:
            closer += 1
        else:
            wrong.append((number, first, gaps[first]))
    found = {
        "ranks": given.ranks,
        "prompts": given.prompts,
        "greedy_equal": equal,
        "greedy_closer_than_margin": closer,
        "greedy_wrong": len(wrong),
        "seeded_equal": sum(a == b for a, b in zip(one_drawn, drawn, strict=True)),
    }
    if wrong:
        print(found)
        sys.exit(f"answers differ where the margin was clear: {wrong[:4]}")
    return found


if __name__ == "__main__":
    bench.main()
