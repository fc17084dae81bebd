"""Tiny models for whole engines on the card, prompts, and what transformers makes of them in float32.

Used by the tests beside it; needs torch and transformers, and no GPU until an engine is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import transformers
from torch import Tensor

from paceline import LLM, SamplingParams
from paceline.runner.gpu.kernels import BLOCK_SIZE
from tests.torch.tiny_models import CARD, make_model

torch.set_num_threads(min(2, torch.get_num_threads()))  # products this small only wait for more of them
NUM_NEW = 24
TIE = 0.4  # between logits of a router, which are some 16 apart: what roundings before it can move
# The kernels have one table of rotations: those that change with a sequence's length are not for the card.
NAMES = (
    *(
        "llama",
        "llama-tied",
        "llama-mha",
        "llama-llama3",
        "llama-yarn",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma3",
    ),
    *("phi3", "mixtral", "qwen3_moe"),
)
MIXTURES = ("mixtral", "qwen3_moe")
SHARED = [7 + index % 400 for index in range(130)]
PROMPTS = [
    [5],
    [9, 8, 7, 6, 5],
    *([(11 * index * step) % 500 + 3 for index in range(1, 40 + 23 * step)] for step in range(1, 8)),
    [*SHARED, 41, 42],
    [*SHARED, 51],
]
# Six and six with the same beginning.
SHARING = [
    [*(SHARED if index % 2 else reversed(SHARED)), *range(100, 130), 300 + index, *range(5, 9 + 3 * index)]
    for index in range(12)
]
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 1 << 28,
    "dtype": "bfloat16",
}


@cache
def saved(name: str) -> str:
    """A folder with a random model whose weights bfloat16 can hold."""
    model = make_model(name, CARD, NAMES.index(name))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("mlp.gate.weight"):
                parameter.mul_(20.0)  # tokens know their experts well: no choice hangs on a rounding
        model.get_output_embeddings().weight.mul_(0.2)  # logits near 1: bfloat16 tells a hundredth apart
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    folder = mkdtemp()
    model.save_pretrained(folder)
    return folder


def opened(name: str, dtype: torch.dtype) -> Any:
    """The model as transformers reads it: what is not a weight, such as frequencies, stays in float32."""
    plain = {"attn_implementation": "eager"}
    if name in MIXTURES:
        plain["experts_implementation"] = "eager"
    model = transformers.AutoModelForCausalLM.from_pretrained(saved(name), dtype=dtype, **plain)
    return model.eval()


def save_wide(folder: Path) -> int:
    """A model of two layers with as many KV heads as queries; returns how many entries of a block are keys."""
    heads, head_dim = 8, 128
    sizes = {"hidden_size": heads * head_dim, "num_attention_heads": heads, "num_key_value_heads": heads}
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**CARD.common | sizes | {"num_hidden_layers": 2})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return heads * BLOCK_SIZE * head_dim


@cache
def exact(name: str) -> Any:
    return opened(name, torch.float32)


class Routers:
    """How close a model's routers were, at the last token they saw, to choosing another expert."""

    def __init__(self, model: Any) -> None:
        self.margin = float("inf")
        self._per_token: int = getattr(model.config, "num_experts_per_tok", 0)
        for name, part in model.named_modules():
            if name.endswith("mlp.gate"):
                part.register_forward_pre_hook(self._look)

    def _look(self, gate: Any, args: tuple[Tensor, ...]) -> None:
        last = args[0].reshape(-1, gate.weight.shape[1])[-1]
        liked = (gate.weight @ last).topk(self._per_token + 1).values
        self.margin = min(self.margin, float(liked[-2] - liked[-1]))


@cache
def reference(name: str, shared: bool = False) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens of each prompt, and how far apart the two best logits were.

    Where a choice of experts hung on a rounding nothing can be said of the token: the distance is put down as 0.
    """
    model, found = opened(name, torch.float32), []
    routers = Routers(model)
    with torch.inference_mode():
        for prompt in SHARING if shared else PROMPTS:
            read, past = torch.tensor([prompt]), None
            tokens: list[int] = []
            gaps: list[float] = []
            while len(tokens) < NUM_NEW:
                routers.margin = float("inf")
                result = model(read, past_key_values=past, use_cache=True)
                past = result.past_key_values
                best = result.logits[0, -1].float().topk(2)
                tokens.append(int(best.indices[0]))
                gaps.append(float(best.values[0] - best.values[1]) if routers.margin > TIE else 0.0)
                read = torch.tensor([[tokens[-1]]])
            found.append((tokens, gaps))
    return found


def first_gaps(found: Sequence[list[int]], expected: Sequence[tuple[list[int], list[float]]]) -> list[float]:
    """Of each output that differs: how far the two best logits of the reference were apart where it first does."""
    gaps = []
    for tokens, (right, apart) in zip(found, expected, strict=True):
        assert len(tokens) == len(right)
        first = next(
            (at for at, (one, two) in enumerate(zip(tokens, right, strict=True)) if one != two), None
        )
        if first is not None:
            gaps.append(apart[first])
    return gaps


@contextmanager
def engine(name: str, **options: Any) -> Iterator[LLM]:
    llm = LLM(saved(name), **ENGINE | options)
    yield llm
    assert llm.loaded.engine.last_error is None, repr(llm.loaded.engine.last_error)


def tokens_of(
    llm: LLM, prompts: Sequence[list[int]], params: SamplingParams | list[SamplingParams] = GREEDY
) -> list[list[int]]:
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def generate(name: str, prompts: Sequence[list[int]] = PROMPTS, **options: Any) -> list[list[int]]:
    with engine(name, **options) as llm:
        return tokens_of(llm, prompts)


def log_probabilities(output: Any, vocab_size: int) -> Tensor:
    """What an output that asked for all logprobs says of every token behind the first: [tokens, vocabulary]."""
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    table = torch.full((len(entries), vocab_size), float("nan"), dtype=torch.float64)
    for line, entry in zip(table, entries, strict=True):
        line[list(entry)] = torch.tensor([found.logprob for found in entry.values()], dtype=torch.float64)
    return table


def predicted(model: Any, tokens: list[int], device: str) -> Tensor:
    """The same of a model of transformers that reads the tokens at once."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens[:-1]], device=device)).logits[0]
    return logits.double().log_softmax(-1).cpu()
