"""Whole engines with adapters on the card: greedy tokens against the torch step of the CPU, and the same bytes however
steps are run.

Tokens are equal to those of the CPU, or first differ where its two best logits are closer than what bfloat16 can tell
apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from paceline import LLM, LoRARequest, SamplingParams
from paceline.models.files.open import open_checkpoint

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.adapter_folders import ALL_SEVEN, adapter_arrays, write_adapter
from tests.gpu.engine_cases import ENGINE, GREEDY, PROMPTS, first_gaps, saved
from tests.gpu.test_gpu_engine import CLOSE

RANKS = {"some": (("q_proj", "v_proj"), 4), "all": (ALL_SEVEN, 16), "wide": (ALL_SEVEN, 24)}
ADAPTERS: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 24, "max_loras": 4}
LORA = ENGINE | ADAPTERS | {"max_num_batched_tokens": 512}  # few sizes of steps with prompts
# Prompts of several adapters and of none in each step.
NAMES = [None, "some", "all", None, "wide", "all", "some", "wide", None, "some", "all"]
TWO_BEST = replace(GREEDY, logprobs=2)


@cache
def adapters(model: str) -> dict[str, str]:
    """Folders by name, of adapters that bfloat16 can hold."""
    spec, root = open_checkpoint(Path(saved(model))).spec, Path(mkdtemp())
    fused = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    found = {}
    for seed, (name, (targets, rank)) in enumerate(RANKS.items()):
        if model == "phi3":
            targets = fused[:1] if name == "some" else fused
        if spec.experts:
            targets = tuple(target for target in targets if target in ALL_SEVEN[:4])
        arrays = adapter_arrays(spec, targets, rank, seed=seed, size=0.1)
        # The scaling, 8 / rank, is not a power of two for every rank: written with alpha = rank it is 1.
        held = {key: torch.from_numpy(value).bfloat16().float().numpy() for key, value in arrays.items()}
        found[name] = str(write_adapter(root / name, held, rank=rank, targets=targets, lora_alpha=rank))
    return found


def requests(model: str, names: Sequence[str | None]) -> list[LoRARequest | None]:
    folders, numbers = adapters(model), list(RANKS)
    return [
        None if name is None else LoRARequest(name, 1 + numbers.index(name), folders[name]) for name in names
    ]


def generate(
    model: str, names: Sequence[str | None] = NAMES, params: SamplingParams = GREEDY, **options: Any
) -> list[list[int]]:
    llm = LLM(saved(model), **LORA | options)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=requests(model, names))
    assert llm.loaded.engine.last_error is None, repr(llm.loaded.engine.last_error)
    return [output.outputs[0].token_ids for output in outputs]


@cache
def on_cpu(model: str) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens of the torch step, and how far apart the two best logits were."""
    options = {key: value for key, value in LORA.items() if key not in ("dtype", "kv_cache_memory_bytes")}
    llm = LLM(saved(model), **options | {"device": "cpu", "cpu_backend": "torch", "num_blocks": 512})
    outputs = llm.generate(PROMPTS, TWO_BEST, use_tqdm=False, lora_request=requests(model, NAMES))
    found = []
    for output in outputs:
        (branch,) = output.outputs
        assert branch.logprobs is not None
        best = [sorted((each.logprob for each in entry.values()), reverse=True) for entry in branch.logprobs]
        found.append((list(branch.token_ids), [one - two for one, two, *_ in best]))
    return found


def assert_close(model: str, found: list[list[int]]) -> None:
    gaps = first_gaps(found, on_cpu(model))
    print(
        f"{model}: {len(gaps)} of {len(found)} differ, the logits at most {max(gaps, default=0.0):.2g} apart"
    )
    assert max(gaps, default=0.0) < CLOSE


@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3", "gemma3", "phi3"])
def test_greedy_tokens_are_those_of_the_cpu(model: str) -> None:
    found = generate(model)
    assert_close(model, found)
    assert found != generate(model, [None] * len(NAMES)), "adapters change something, or this says nothing"


def test_adapters_of_a_mixture_are_those_of_its_attention() -> None:
    """No choice of experts is looked at here: only that most of what is said is the same."""
    expected = [tokens for tokens, _ in on_cpu("mixtral")]
    found = generate("mixtral")
    same = sum(one[:8] == two[:8] for one, two in zip(found, expected, strict=True))
    assert same >= len(expected) // 2


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_how_steps_are_run_changes_no_byte(model: str) -> None:
    graphs = generate(model, depth=1)
    assert generate(model, depth=1, enforce_eager=True) == graphs


@pytest.mark.parametrize("budget", [17, 64])
def test_chunks_and_preemption_stay_close(budget: int) -> None:
    assert_close("qwen3", generate("qwen3", max_num_batched_tokens=budget, num_blocks=11))


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_weights_of_fewer_bits_take_adapters(quantization: str) -> None:
    """What is drawn first follows the adapter: the same weights without it say something else more often."""
    found = generate("llama", quantization=quantization)
    plain = generate("llama", [None] * len(NAMES), quantization=quantization)
    right = [tokens for tokens, _ in on_cpu("llama")]
    with_adapter = [index for index, name in enumerate(NAMES) if name is not None]
    hits, misses = (
        sum(said[index][0] == right[index][0] for index in with_adapter) for said in (found, plain)
    )
    assert hits > misses


def test_rows_with_drafts_beside_them() -> None:
    assert_close("llama", generate("llama", speculative_config="ngram"))


def test_rows_with_rules_beside_them() -> None:
    ruled = replace(GREEDY, min_tokens=1, logprobs=3)  # rules that change nothing
    assert_close("llama", generate("llama", params=ruled))


def test_rows_without_adapters_answer_as_an_engine_without() -> None:
    """They use the same graphs."""
    llm = LLM(saved("llama"), **ENGINE | {"max_num_batched_tokens": 512})
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert generate("llama", [None] * len(NAMES)) == [output.outputs[0].token_ids for output in outputs]


def test_nothing_is_compiled_while_serving() -> None:
    from paceline.runner.gpu.compile import late_compilations

    llm = LLM(saved("qwen3"), **LORA)
    before = len(late_compilations)
    llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=requests("qwen3", NAMES))
    llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False, lora_request=requests("qwen3", ["all"]))
    assert late_compilations[before:] == []


def test_places_are_taken_again() -> None:
    """Fewer places than adapters: the scheduler has some wait while others go on."""
    for places in (1, 2):
        assert_close("llama", generate("llama", max_loras=places))
