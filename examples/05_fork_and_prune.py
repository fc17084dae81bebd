"""A small tree search: fork a running generation into branches that share its KV blocks, prune the unlikely ones.

A fork copies nothing: all branches read the same blocks, and each gets its own only for what it adds.

    python examples/05_fork_and_prune.py [MODEL]
"""

import sys

from paceline import LLM, SamplingParams

PROMPT = "The best way to learn a language is to speak it. " * 3
ROUND, KEPT, FORKS = 8, 2, 2  # steps between two choices, branches that survive one, new branches of each

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None)
params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, logprobs=1, ignore_eos=True)


def likelihood(branch):
    return branch.cumulative_logprob / len(branch.token_ids)


for number, output in enumerate(llm.stream(PROMPT, params)):
    if number % ROUND != ROUND - 1 or output.finished:
        continue
    live = sorted((part for part in output.outputs if not part.finished), key=likelihood, reverse=True)
    for branch in live[KEPT:]:
        llm.prune(output.request_id, branch.index)
    for branch in live[:KEPT]:
        llm.fork(output.request_id, branch.index, FORKS)
    print(f"step {number + 1}: {len(live)} live, the best at {likelihood(live[0]):.2f} per token")

whole = [part for part in output.outputs if part.finish_reason == "length"]
best = max(whole, key=likelihood)
print(f"{len(output.outputs)} branches, {len(whole)} of them to the end; the best:")
print(f"{likelihood(best):.2f}: {best.text}")
