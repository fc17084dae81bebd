"""Memory of a model on the CPU with a filled KV cache: anonymous bytes after loading and after so many cached tokens.

    python -m benchmarks.cpu_memory [--model MODEL] [--tokens 4096]

Prompts are made-up token ids, each its own, of 1,024 tokens; their blocks stay in the prefix cache.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

PROMPT = 1020


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=None)
    parser.add_argument("--tokens", type=int, default=4096)
    given = parser.parse_args()

    from paceline import LLM, SamplingParams

    llm = LLM(given.model, max_num_batched_tokens=64, max_model_len=2048)
    print(f"loaded: {_anonymous_mb():.0f} MB anonymous", flush=True)
    vocabulary = llm.loaded.checkpoint.spec.vocab_size
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    for number in range(given.tokens // 1024):
        prompt = [(7 * place + 31 * number + 1) % vocabulary for place in range(PROMPT)]
        llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        print(f"{(number + 1) * 1024} tokens cached: {_anonymous_mb():.0f} MB anonymous", flush=True)


def _anonymous_mb() -> float:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+)", status)
    assert found is not None
    return int(found[1]) * 1024 / 1e6


if __name__ == "__main__":
    main()
