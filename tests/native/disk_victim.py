"""An engine with a disk, to be killed: it answers prompts at random and says what came. See test_native_disk.py."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace

from paceline import LLM, SamplingParams
from paceline.config.engine import PreemptionCosts
from paceline.runner.stores.store_level import StoreLevel

NUM_PROMPTS = 12
LENGTH = 400
NUM_NEW = 4


def prompts() -> list[list[int]]:
    """Some begin alike."""
    rng = random.Random(7)
    texts = [[rng.randrange(4, 90) for _ in range(LENGTH)] for _ in range(NUM_PROMPTS // 2)]
    return texts + [text[: LENGTH // 2] + text[: LENGTH // 2][::-1] for text in texts]


def options() -> dict[str, object]:
    """A device that holds four of the prompts."""
    return {"num_blocks": 4 * LENGTH // 16, "cpu_threads": 1, "max_num_batched_tokens": 64, "seed": 0}


def cheap_disk(_: StoreLevel, costs: PreemptionCosts) -> PreemptionCosts:
    """Instead of what was measured: what is on the disk is waited for, however busy the machine."""
    return replace(costs, token_s=10.0, disk_block_s=1e-4)


SAMPLING = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, logprobs=0)


def answer(llm: LLM, number: int) -> tuple[list[tuple[int, float]], int]:
    """The tokens of an answer with their log-probabilities, and how many of the prompt were found."""
    (output,) = llm.generate([{"prompt_token_ids": prompts()[number]}], SAMPLING, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [(token, each[token].logprob) for token, each in pairs], output.num_cached_tokens


def nap(llm: LLM, level: int) -> None:
    """The model sleeps, and wakes with another runner."""
    engine, sleeper = llm.loaded.engine, llm.loaded.sleeper
    engine.sleep(levels_lost=sleeper.levels_lost)
    sleeper.let_go(level)
    engine.wake(sleeper.open())


def main() -> None:
    model, folder, size, seed = sys.argv[1:]
    rng = random.Random(int(seed))
    StoreLevel.with_rates = cheap_disk  # type: ignore[method-assign, assignment]
    with LLM(model, kv_disk_dir=folder, kv_disk_size=int(size), **options()) as llm:
        print(json.dumps("ready"), flush=True)
        while True:
            number = rng.randrange(NUM_PROMPTS)
            print(json.dumps([number, *answer(llm, number)]), flush=True)


if __name__ == "__main__":
    main()
