"""Prefixes in host memory, on the card: greedy tokens are the same where a prefix is computed, found on the device or
loaded from the host, and while other rows go on.

Rows are computed one at a time where bytes are compared: in another batch a product may differ in its last bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from paceline import LLM
from paceline.config.engine import PreemptionCosts
from paceline.errors import ConfigError
from paceline.kv.tiers import HOST
from paceline.runner.gpu import kv_pools, slab_memory
from tests.gpu.engine_cases import ENGINE, PROMPTS, engine, first_gaps, reference, saved, tokens_of
from tests.waiting import wait_until

CLOSE = 2e-2
HOST_GIB = 0.25
# Blocks of 64 tokens: of prompts of up to 200 tokens, not all fit on the device at once.
OPTIONS: dict[str, Any] = {"kv_offloading_size": HOST_GIB, "num_blocks": 8, "eviction": "lru"}
CHEAP = PreemptionCosts(token_s=1.0, block_s=1e-6, step_s=0.0)


def always_loads(llm: LLM) -> Any:
    """Tiny models are computed sooner than they are copied; returns the tokens found by level."""
    state = llm.loaded.engine.scheduler.state
    llm.loaded.engine.scheduler.composer.admission.loading._costs = CHEAP
    for budget in state.tiers.budgets:
        budget.most = None
    return state.counters.found_tokens


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8"}], ids=["auto", "fp8"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_tokens_do_not_depend_on_where_a_prefix_comes_from(name: str, options: dict[str, Any]) -> None:
    # A quarter of the blocks is kept empty: a prompt takes no more, so that none is evicted before it was copied.
    with engine(name, **OPTIONS | {"num_blocks": 20} | options) as llm:
        found = always_loads(llm)
        for prompt in PROMPTS[3:9]:
            llm.reset_prefix_cache()
            before = list(found)
            (computed,) = tokens_of(llm, [prompt])
            assert found == before
            (on_device,) = tokens_of(llm, [prompt])
            assert found[0] > before[0] and found[HOST] == before[HOST]
            for other in range(24):
                tokens_of(llm, [[400 + other, *prompt[1:]]])
            (from_host,) = tokens_of(llm, [prompt])
            assert found[HOST] - before[HOST] == (len(prompt) - 1) // 64 * 64
            assert from_host == on_device
            # A hit leaves fewer tokens to compute: products of another size, whose last bits may differ.
            right = [reference(name)[PROMPTS.index(prompt)]]
            gaps = first_gaps([computed], right) + first_gaps([from_host], right)
            assert options or max(gaps, default=0.0) < CLOSE


def test_loads_beside_other_rows_stay_close() -> None:
    with engine("qwen3", **OPTIONS) as llm:
        found = always_loads(llm)
        for _ in range(4):
            gaps = first_gaps(tokens_of(llm, PROMPTS), reference("qwen3"))
            assert max(gaps, default=0.0) < CLOSE
        assert found[HOST] > 0


def test_memory_that_is_pinned_later_is_used_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pools, "FIRST_PLACES", 1)
    monkeypatch.setattr(slab_memory, "PIECE_BYTES", 1)
    with monkeypatch.context() as patched:
        patched.setattr(slab_memory.HostPlaces, "pin_rest", lambda self: None)
        llm = LLM(**_arguments(OPTIONS))
    places = llm.loaded.engine._runner.host_places  # type: ignore[attr-defined]
    found = always_loads(llm)
    assert places.num_pinned < len(places.tensors[0])
    for _ in range(3):
        first = tokens_of(llm, PROMPTS[2:9])
    few = found[HOST]
    places.pin_rest()
    wait_until(lambda: places.num_pinned == len(places.tensors[0]))
    for _ in range(3):
        again = tokens_of(llm, PROMPTS[2:9])
    assert found[HOST] - few > few
    for one in (first, again):
        assert max(first_gaps(one, reference("qwen3")[2:9]), default=0.0) < CLOSE
    assert all(group.is_pinned() for group in places.tensors)


def test_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-offloading-size 100000 is more than 80% of the"):
        LLM(**_arguments({"kv_offloading_size": 100_000.0}))


def _arguments(options: dict[str, Any]) -> dict[str, Any]:
    return {"model": saved("qwen3"), **ENGINE, **options}
