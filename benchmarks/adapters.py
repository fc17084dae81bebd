"""What adapters cost on a CPU: clients on as many adapters against the same clients on none.

Each of the clients has an adapter of its own and is in every step, the case in which adapters cost most: nothing of one
is shared with another. *unused*: an engine that may have adapters, with all of them in memory and no request that names
one. A round is one batch of all clients, greedy, end of text ignored; the three take turns, and a ratio is the median
over the rounds. Adapters are made up. Run it on a machine that does nothing else.

    python -m benchmarks.adapters [--clients 8] [--rank 8] [--targets all] [--bits 16] [--rounds 5] [--tokens 48]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Found, Given, flag, in_turns, row, table
from paceline import LLM, LoRARequest, SamplingParams
from tests.adapter_folders import ALL_SEVEN, adapter_arrays, write_adapter

bench = Benchmark(__doc__)
TARGETS = {"all": ALL_SEVEN, "qv": ("q_proj", "v_proj")}
PROMPT_TOKENS = 24


def adapters(llm: LLM, folder: Path, given: Given) -> list[LoRARequest]:
    """One for each client, as PEFT writes them; of 16 bits: numbers that bfloat16 holds."""
    spec, targets = llm.loaded.checkpoint.spec, TARGETS[given.targets]
    made = []
    for number in range(1, given.clients + 1):
        arrays = adapter_arrays(spec, targets, given.rank, seed=number, size=0.01)
        if given.bits == 16:
            arrays = {
                name: (each.view(np.uint32) & 0xFFFF0000).view(np.float32) for name, each in arrays.items()
            }
        path = write_adapter(folder / f"{number}", arrays, rank=given.rank, targets=targets)
        made.append(LoRARequest(f"{number}", number, str(path)))
    return made


def tokens_per_second(llm: LLM, given: Given, chosen: Sequence[LoRARequest | None]) -> float:
    """One batch; prompts are short, so that what is timed is decoding."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1000, 9000, PROMPT_TOKENS).tolist() for _ in range(given.clients)]
    sampling = SamplingParams(temperature=0, max_tokens=given.tokens, ignore_eos=True)
    llm.reset_prefix_cache()
    started_s = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False, lora_request=list(chosen))
    return float(given.clients * given.tokens / (time.perf_counter() - started_s))


@bench.part(
    flag("--model", None, "file or folder; the default model"),
    flag("--clients", 8, "requests at once, each with its adapter"),
    flag("--rank", 8, "of the adapters"),
    flag("--targets", "all", "matrices they change", choices=list(TARGETS)),
    flag("--bits", 16, "of an adapter's numbers", choices=[16, 32]),
    flag("--rounds", 5, "batches of each kind"),
    flag("--tokens", 48, "of each answer"),
)
def adapters_against_none(given: Given) -> Found:
    """Tokens a second without adapters, with them in memory and unused, and with one for each client."""
    options: dict[str, Any] = {
        "max_num_seqs": given.clients,
        "max_model_len": 512,
        "skip_tokenizer_init": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        without = LLM(given.model, **options)
        adapted = LLM(given.model, **options, enable_lora=True, max_lora_rank=max(16, given.rank))
        chosen = adapters(adapted, Path(folder), given)
        none = [None] * given.clients
        works = {
            "none": partial(tokens_per_second, without, given, none),
            "unused": partial(tokens_per_second, adapted, given, none),
            "adapters": partial(tokens_per_second, adapted, given, chosen),
        }
        in_turns(dict(reversed(works.items())), 1)  # reads the adapters, and grows what grows
        speeds = in_turns(works, given.rounds)
    found: Found = {
        "clients": given.clients,
        "rank": given.rank,
        "targets": given.targets,
        "bits": given.bits,
    }
    table("", "tok/s", "against none")
    for name, values in speeds.items():
        ratio = statistics.median(one / base for one, base in zip(values, speeds["none"], strict=True))
        found[name] = {"tok_s": round(statistics.median(values), 1), "against_none": round(ratio, 3)}
        row(name, statistics.median(values), ratio)
    return found


if __name__ == "__main__":
    bench.main()
