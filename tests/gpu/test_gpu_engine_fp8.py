"""Whole engines on the card with keys and values of eight bits.

Greedy tokens are those of the float32 reference, or first differ where its two best logits are closer than what three
bits of a fraction can tell apart. How steps are run, chunks, swaps and what lies in unused blocks change nothing
that they do not change with 16 bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("transformers")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a GPU of compute capability 8.9", allow_module_level=True)

from tests.gpu.engine_cases import ENGINE, GREEDY, PROMPTS, SHARED, SHARING, generate, saved, tokens_of
from tests.gpu.test_gpu_engine import assert_close

CLOSE = 5e-2  # two logits that eight bits may swap: 0.016 was the largest of 40 in float32 arithmetic


def engine(**options: Any) -> LLM:
    return LLM(saved("qwen3"), **ENGINE | {"kv_cache_dtype": "fp8"} | options)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "phi3"])
def test_greedy_tokens_are_close_to_those_of_transformers(name: str) -> None:
    assert_close(name, generate(name, kv_cache_dtype="fp8"), close=CLOSE)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_types_of_the_arithmetic(dtype: str) -> None:
    assert_close("qwen3", generate("qwen3", kv_cache_dtype="fp8", dtype=dtype), close=CLOSE)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_how_steps_are_run_changes_no_byte(name: str) -> None:
    prompts = PROMPTS[:-2]
    graphs = generate(name, prompts, depth=1, kv_cache_dtype="fp8_e4m3")
    assert generate(name, prompts, depth=1, enforce_eager=True, kv_cache_dtype="fp8") == graphs
    assert generate(name, prompts, depth=0, kv_cache_dtype="fp8") == graphs
    assert generate(name, prompts, depth=2, kv_cache_dtype="fp8") == graphs


def test_a_prefix_that_is_found_gives_the_same_bytes() -> None:
    """Blocks hold what was rounded, and a request that computes the rest reads it from there, found or just written."""
    llm = engine(max_num_batched_tokens=128)
    prompt = [*SHARED[:128], 41, 42, 43]
    tokens_of(llm, [[*SHARED[:128], 99]])
    found = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
    assert found.num_cached_tokens == 128
    # Here the same prompt writes them itself, in a step that ends where the other's beginning was found.
    alone = engine(max_num_batched_tokens=128, enable_prefix_caching=False)
    assert tokens_of(alone, [prompt])[0] == found.outputs[0].token_ids


@pytest.mark.parametrize("budget", [17, 64])
def test_chunks_and_preemption_stay_close(budget: int) -> None:
    found = generate("qwen3", max_num_batched_tokens=budget, num_blocks=11, kv_cache_dtype="fp8")
    assert_close("qwen3", found, close=CLOSE)


def test_swapped_blocks_come_back() -> None:
    options: dict[str, Any] = {"num_blocks": 11, "num_host_blocks": 32, "preemption": "swap"}
    assert_close("qwen3", generate("qwen3", kv_cache_dtype="fp8", **options), close=CLOSE)


def test_a_shared_beginning_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import paceline.runner.gpu.host_rows as rows

    monkeypatch.setattr(rows, "SHORTEST_SHARED", 128)
    monkeypatch.setattr(rows, "LEAST_SPARED", 0)
    assert_close("qwen3", generate("qwen3", SHARING, kv_cache_dtype="fp8"), shared=True, close=CLOSE)


def test_what_lies_in_unused_blocks_changes_nothing() -> None:
    plain = tokens_of(engine(), PROMPTS)
    llm = engine()
    runner: Any = llm.loaded.engine._runner
    for layer in runner._pools.layers:
        assert layer.keys.dtype == layer.values.dtype == torch.float8_e4m3fn
        for pool in (layer.keys, layer.values):
            pool.view(torch.uint8).fill_(0x7F)
            assert pool[0, 0, 0].float().isnan().all()
    assert tokens_of(llm, PROMPTS) == plain


def test_twice_as_many_blocks_fit() -> None:
    eight, sixteen = engine(), engine(kv_cache_dtype="auto")
    assert eight.loaded.config.kv.num_blocks == 2 * sixteen.loaded.config.kv.num_blocks
    assert eight.loaded.hardware.kv_bytes == sixteen.loaded.hardware.kv_bytes
    assert (eight.loaded.hardware.kv_dtype, sixteen.loaded.hardware.kv_dtype) == ("fp8_e4m3", "bfloat16")
    assert eight.loaded.hardware.dtype == "bfloat16"


def test_nothing_is_compiled_while_serving() -> None:
    from paceline.runner.gpu.compile import late_compilations

    llm = engine()
    before = len(late_compilations)
    for params in (GREEDY, SamplingParams(max_tokens=6, temperature=0.7, seed=1, top_p=0.9, ignore_eos=True)):
        llm.generate(PROMPTS, params, use_tqdm=False)
        llm.generate(PROMPTS[:1], params, use_tqdm=False)
    assert late_compilations[before:] == []
