"""What `paceline train-head` takes, declared once."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.options import CheckedOptions, option
from paceline.config.speculative import HEAD_KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainHeadOptions(CheckedOptions):
    """Which head is trained for which model, from what, and for how long."""

    name: str = option(
        "smollm2", "smollm2, org/model, org/model:file.gguf, or a path", argument=True, metavar="MODEL"
    )
    out: str | None = option(None, "folder to write the head to; a run that was stopped goes on there")
    kind: str = option("eagle", "kind of head", choices=HEAD_KINDS)
    prompts: str | None = option(None, "prompts (JSON, JSONL or text) that the model answers", metavar="FILE")
    text: str | None = option(None, "texts (JSON, JSONL or text) to learn from as they are", metavar="FILE")
    tokens: int = option(
        0, "most tokens to learn from; 0: 200,000 on a CPU, 4,000,000 on a GPU", low=0, high=10**9
    )
    answer_tokens: int = option(256, "most tokens of an answer to a prompt", low=8, high=65536)
    temperature: float = option(0.0, "temperature of the answers to prompts", low=0.0, high=2.0)
    minutes: float = option(20.0, "how long it may take, all together", low=0.01, high=100_000.0)
    steps: int = option(0, "most steps of training; 0: as many as there is time for", low=0, high=10**9)
    depth: int = option(4, "tokens ahead that are learned", low=1, high=8)
    draft_vocab: int = option(
        8192, "tokens the head can guess, the most frequent ones; 0: all", low=0, high=10**7
    )
    device: str = option("auto", "where to train", choices=("auto", "cuda", "cpu"))
    seed: int = option(0, "seed of the first weights and of the order of texts", low=0, high=2**31 - 1)
