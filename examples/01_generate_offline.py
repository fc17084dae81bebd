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

# A seed gives the same tokens whatever runs beside it: one prompt alone, then in a batch with the others.
seeded = SamplingParams(temperature=0.8, seed=7, max_tokens=16)
alone = llm.generate(prompts[0], seeded, use_tqdm=False)[0].outputs[0].text
batched = llm.generate(prompts, seeded, use_tqdm=False)[0].outputs[0].text
print(f"seed 7, alone:      {alone!r}")
print(f"seed 7, in a batch: {batched!r}")
print("the same" if alone == batched else "NOT the same")

# Another seed, another text: two branches of one prompt.
for branch in llm.generate(prompts[0], SamplingParams(temperature=0.8, seed=8, n=2), use_tqdm=False)[
    0
].outputs:
    print(f"seed 8, branch {branch.index}:   {branch.text!r}")
