"""Complete several prompts in this process, without a server: text in, text out, in one batch.

    python examples/01_generate_offline.py [MODEL]

MODEL is a folder, a .gguf file or a name on the Hugging Face hub; without one, SmolLM2-135M-Instruct is used.
"""

import sys

from paceline import LLM, SamplingParams

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None)

prompts = ["The capital of France is", "Three rivers of Europe:", "def fibonacci(n):"]
greedy = SamplingParams(temperature=0, max_tokens=24)
for output in llm.generate(prompts, greedy, use_tqdm=False):
    print(f"{output.prompt!r} -> {output.outputs[0].text!r}")

# A seed gives the same tokens whatever runs beside it: two branches of one prompt, twice.
sampled = SamplingParams(temperature=0.8, seed=7, n=2, max_tokens=16)
first, again = (llm.generate(prompts[0], sampled, use_tqdm=False)[0] for _ in range(2))
assert [branch.text for branch in first.outputs] == [branch.text for branch in again.outputs]
print(f"seed 7, twice: {[branch.text for branch in first.outputs]}")
