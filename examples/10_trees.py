"""A tree of answers: steps are proposed, the best are kept and told to go on; and the same as a search.

Branches share the KV blocks of what they have in common. A branch is held where its step ends, until it is extended,
forked or pruned; leaving the tree ends what is left.

    python examples/10_trees.py [MODEL]
"""

import sys

from paceline import LLM, SamplingParams

QUESTION = [{"role": "user", "content": "Name three uses of a brick, one in each line."}]
PROPOSED, KEPT, ROUNDS = 6, 2, 3

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None)
params = SamplingParams(temperature=0.9, seed=1, max_tokens=24, logprobs=0)

with llm.tree(QUESTION, params, max_rows=8) as tree:
    for branch in tree.root.fork(PROPOSED):
        branch.until("\n")
    for number in range(ROUNDS):
        for branch in tree.held():
            branch.score = branch.logprob
        for branch in tree.branches:
            if tree.rank(branch) >= KEPT:
                branch.prune()
        best = max(tree.branches, key=lambda branch: branch.score)
        print(f"round {number + 1}: {len(tree.branches)} kept, the best at {best.score:.2f} per token")
        for branch in tree.branches if number + 1 < ROUNDS else ():
            branch.extend("\nAnd also: ", max_tokens=12)
    print(best.text)
    print(f"{len(tree.output.outputs) - 1} branches, {tree.num_generated} tokens")

found = llm.search("best_of", QUESTION, params, n=4)
print(f"best of {found.num_branches}, {found.num_generated} tokens: {found.score:.2f}")
