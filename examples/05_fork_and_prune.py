"""A small tree search: fork a running request into branches that share its KV blocks, prune the unlikely ones.

A fork copies nothing: all branches read the same blocks, and each gets its own only for what it adds.

    python examples/05_fork_and_prune.py [MODEL]
"""

import sys
from collections import defaultdict

from paceline import LLM, SamplingParams

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None)
engine, tokenizer = llm.loaded.engine, llm.get_tokenizer()
pool = engine.scheduler.state.kv.groups[0].pool
texts, scores = defaultdict(list), defaultdict(float)


def steps(count: int) -> None:
    """Steps of the engine; every delivered token comes with how likely it was."""
    for event in (event for _ in range(count) for event in engine.step().logprobs):
        texts[event.request].append(event.logprobs.token)
        scores[event.request] += event.logprobs.logprob


params = SamplingParams(temperature=1.0, seed=1, max_tokens=64, logprobs=1, ignore_eos=True)
live = engine.add(tokenizer.encode("The best way to learn a language is to speak it. " * 3), params)
steps(4)
for round_number in range(3):
    for parent in live.copy():
        for branch in engine.fork(parent, 2):
            texts[branch], scores[branch] = texts[parent].copy(), scores[parent]
            live.append(branch)
    steps(8)
    print(f"round {round_number}: {len(live)} branches hold {pool.usable - pool.num_free} blocks")
    live.sort(key=scores.__getitem__, reverse=True)
    for branch in live[2:]:
        engine.prune(branch)
    live = live[:2]
print(f"{scores[live[0]]:.1f}: {tokenizer.decode(texts[live[0]])}")
