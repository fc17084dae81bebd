"""Prefixes on a disk, on the card: greedy tokens are the same where a prefix is found on the device and where it comes
from the disk after a restart. Rows are computed one at a time: see test_gpu_levels.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from paceline import LLM
from paceline.config.engine import PreemptionCosts
from paceline.kv.tiers import DISK
from paceline.runner.stores.store_level import StoreLevel
from tests.gpu.engine_cases import ENGINE, PROMPTS, saved, tokens_of


def cheap_disk(_: StoreLevel, costs: PreemptionCosts) -> PreemptionCosts:
    """Tiny models are computed sooner than they are read."""
    return replace(costs, token_s=10.0, disk_block_s=1e-4)


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8"}, {"kv_offloading_size": 0.01}], ids=str)
def test_tokens_are_the_same_from_the_disk_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(StoreLevel, "with_rates", cheap_disk)
    given = {
        "model": saved("qwen3"),
        **ENGINE,
        "kv_disk_dir": str(tmp_path),
        "kv_disk_size": 1 << 28,
        **options,
    }
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 64]
    with LLM(**given) as llm:
        for prompt in prompts:
            tokens_of(llm, [prompt])
        on_device = [tokens_of(llm, [prompt]) for prompt in prompts]
    num_found = 0
    with LLM(**given) as llm:
        found = llm.loaded.engine.scheduler.state.counters.found_tokens
        for prompt, expected in zip(prompts, on_device, strict=True):
            before = sum(found)
            from_disk = tokens_of(llm, [prompt])
            # What is computed instead has products of another size, whose last bits may differ.
            if sum(found) - before == (len(prompt) - 1) // 64 * 64:
                assert from_disk == expected
                num_found += found[DISK] > 0
    # A host need not have evicted anything.
    assert num_found or "kv_offloading_size" in options
