"""`LLM` and `AsyncLLM` with a dial and a policy that change: the same tokens, other limits, mistakes told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, AsyncLLM, SamplingParams
from paceline.core.dial import DialKind, DialWord
from paceline.errors import ConfigError, InvalidRequest
from tests.model_folder import write_model
from tests.torch.llm_helpers import OPTIONS, is_at_rest

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ["hello there " * 12, "a river", "the sky is " * 9]


def test_a_turned_dial_changes_no_token(folder: Path) -> None:
    llm = LLM(str(folder), **OPTIONS)
    plain = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    status = llm.set_dial(0.0)
    assert status.word is DialWord.FIXED and status.max_rows < llm.loaded.config.scheduler.max_num_seqs
    llm.set_policy("shortest", ageing_s=3.0)
    turned = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    assert turned == plain
    assert llm.dial_status().itl_p99_ms is not None  # it has seen gaps
    assert llm.set_dial().word is DialWord.OFF
    assert is_at_rest(llm.loaded.engine)
    with pytest.raises(InvalidRequest, match="exclude each other"):
        llm.set_dial(0.5, itl_p99_ms=30.0)
    with pytest.raises(ConfigError, match="is not known"):
        llm.set_policy("sideways")


def test_a_dial_from_the_start_has_costs_measured(folder: Path) -> None:
    llm = LLM(str(folder), target_itl_p99_ms=50.0, **OPTIONS)
    assert llm.loaded.config.scheduler.step_costs is not None
    assert llm.dial_status().step_target_ms is not None
    assert len(llm.generate("hi", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 24


def test_an_engine_in_a_thread_is_steered_between_steps(folder: Path) -> None:
    llm = AsyncLLM(str(folder), **OPTIONS)

    async def test() -> None:
        stream = llm.generate(PROMPTS[0], GREEDY)
        await anext(stream)
        status = await llm.set_dial(ttft_p99_ms=500.0)
        assert status.setting.kind is DialKind.TTFT and (await llm.dial_status()).setting == status.setting
        await llm.set_policy("fair", tenant_weights="default=2")
        with pytest.raises(ConfigError, match="is not known"):
            await llm.set_policy("sideways")
        last = [output async for output in stream][-1]
        assert len(last.outputs[0].token_ids) == 24

    try:
        asyncio.run(asyncio.wait_for(test(), 60))
    finally:
        llm.shutdown()


def test_a_model_with_windows_can_be_timed_for_a_pace(tmp_path: Path) -> None:
    """Its layers have two groups of blocks, also on the small engine that is timed."""
    layers = ["sliding_attention", "full_attention"]
    gemma: dict[str, Any] = {
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 16,
        "layer_types": layers,
        "query_pre_attn_scalar": 16,
        "sliding_window": 24,
    }
    llm = LLM(str(write_model(tmp_path, **gemma)), step_target_ms=50, **OPTIONS)
    (output,) = llm.generate(["hello"], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2
