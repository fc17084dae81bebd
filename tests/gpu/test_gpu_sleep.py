"""Models that sleep, on the card: the driver gets the memory of one that is alone, slabs of several are lent, answers
after a wake are those before, whatever the weights are and wherever memory lies then. Weights are made up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a GPU of compute capability 8.9", allow_module_level=True)

from paceline import LLM, SamplingParams
from paceline.config.engine import PreemptionCosts
from paceline.config.model_set import ModelShare
from paceline.core.standing import DEVICE_LOST, WEIGHTS_DROPPED, WEIGHTS_KEPT
from paceline.engine.engine import Engine
from paceline.engine.slab_trade import SlabTrade, broken_slabs
from paceline.factory import LoadedModel, load_model
from paceline.kv.tiers import HOST
from paceline.llm.arguments import split_arguments
from paceline.models.files.open import open_checkpoint
from paceline.process.engine_main import share_memory, slab_market
from paceline.runner.gpu.runner import GPURunner
from tests.adapter_folders import ALL_SEVEN, adapter_arrays, write_adapter

LEVELS = (WEIGHTS_KEPT, WEIGHTS_DROPPED)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[(11 * index * step) % 500 + 3 for index in range(1, 60 * step)] for step in (1, 2, 3)]
DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SHAPES = {"dense": DENSE, "experts": EXPERTS}
KV_BYTES = 1 << 28
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
}
ALONE = OPTIONS | {"kv_cache_memory_bytes": KV_BYTES}
LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 16, "max_loras": 2}
NAMES = [None, "first", "second"]  # of the adapters of three requests


@cache
def folder_of(name: str) -> str:
    folder = mkdtemp()
    (Path(folder) / "config.json").write_text(json.dumps(SHAPES[name]))
    return folder


def adapters(name: str, root: Path) -> dict[str | None, str]:
    spec = open_checkpoint(Path(folder_of(name)), load_format="dummy").spec
    targets = ALL_SEVEN[:4] if spec.experts else ALL_SEVEN
    found: dict[str | None, str] = {}
    for seed, adapter in enumerate(("first", "second")):
        arrays = adapter_arrays(spec, targets, 8, seed=seed, size=0.3)
        found[adapter] = str(write_adapter(root / name / adapter, arrays, rank=8, targets=targets))
    return found


def load_adapters(engine: Engine, name: str, root: Path) -> list[int]:
    """Their numbers, by request."""
    (root / name).mkdir()
    of: dict[str | None, int] = {None: 0}
    for adapter, folder in adapters(name, root).items():
        of[adapter] = engine.adapters.load(str(adapter), Path(folder)).number
    return [of[each] for each in NAMES]


def answers(
    engine: Engine, numbers: Sequence[int] = (0, 0, 0), trade: SlabTrade | None = None
) -> list[list[int]]:
    """`numbers`: of an adapter for each prompt."""
    found: dict[int, list[int]] = {}
    for prompt, adapter in zip(PROMPTS, numbers, strict=True):
        found[engine.add(prompt, GREEDY, adapter=adapter)[0]] = []
    while engine.has_requests or not engine.is_idle:
        if trade is not None:
            trade.settle()
            assert list(broken_slabs(trade)) == []
        for batch in engine.step_overlapped().tokens:
            for number, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
                found[number].append(token)
        assert engine.last_error is None, repr(engine.last_error)
    return list(found.values())


def sleep(loaded: LoadedModel, level: int) -> None:
    assert loaded.sleeper is not None
    loaded.engine.sleep(levels_lost=DEVICE_LOST)
    loaded.sleeper.let_go(level)


def wake(loaded: LoadedModel) -> None:
    assert loaded.sleeper is not None
    loaded.engine.wake(loaded.sleeper.open())


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("quantization", ["auto", "fp8", "int4"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_model_alone_gives_its_memory_back_and_answers_the_same(
    name: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[GPURunner] = []
    capture_again = GPURunner.capture_again

    def noted(self: GPURunner) -> None:
        captured.append(self)
        capture_again(self)

    monkeypatch.setattr(GPURunner, "capture_again", noted)
    loaded = LLM(folder_of(name), **ALONE | {"quantization": quantization}).loaded
    expected = answers(loaded.engine)
    assert expected[0] != expected[1]
    for level in LEVELS:
        before = free_bytes()
        sleep(loaded, level)
        assert free_bytes() - before > 0.9 * KV_BYTES
        # Where memory was there is another's: graphs have to know the new place.
        others = [torch.full((KV_BYTES,), 0xFF, dtype=torch.uint8, device="cuda")]
        others += [torch.full((2 << 20,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(16)]
        wake(loaded)
        assert answers(loaded.engine) == expected
        assert all(bool((each == 0xFF).all()) for each in others)
        del others
    assert captured, "memory was never elsewhere"


def test_prefixes_in_host_memory_are_hit_after_a_sleep() -> None:
    # A quarter of the blocks is kept empty: what others push out goes down.
    options = {"kv_offloading_size": 0.05, "num_blocks": 20, "eviction": "lru"}
    loaded = LLM(folder_of("dense"), **OPTIONS | options).loaded
    engine, state = loaded.engine, loaded.engine.scheduler.state
    # Tiny models are computed sooner than they are copied.
    engine.scheduler.composer.admission.loading._costs = PreemptionCosts(token_s=1.0, block_s=1e-6, step_s=0)
    for budget in state.tiers.budgets:
        budget.most = None
    answers(engine)
    for first in range(24):
        engine.add([first, *PROMPTS[2][1:]], GREEDY)
        while engine.has_requests or not engine.is_idle:
            engine.step_overlapped()
    found: list[list[list[int]]] = []
    for level in LEVELS:
        sleep(loaded, level)
        wake(loaded)
        before = state.counters.found_tokens[HOST]
        found.append(answers(engine))
        assert state.counters.found_tokens[HOST] - before == (64 + 128)
    assert found[0] == found[1]


def test_models_with_experts_and_adapters_lend_their_slabs(tmp_path: Path) -> None:
    entries = []
    for name in SHAPES:
        model, given = split_arguments(folder_of(name), OPTIONS | LORA)
        entries.append((model, given, ModelShare(name=name)))
    memory = share_memory(entries, 3 << 30)
    models = [load_model(*entry[:2], shared=each) for entry, each in zip(entries, memory, strict=True)]
    market = slab_market(models, [share for _, _, share in entries], memory)
    assert market is not None and memory[0] is not None
    trade = SlabTrade(market, [each.engine for each in models])
    trade.begin()
    assert all(market.use(place).adapters > 0 for place in (0, 1))
    numbers = [load_adapters(each.engine, name, tmp_path) for each, name in zip(models, SHAPES, strict=True)]
    expected = [answers(models[place].engine, numbers[place], trade) for place in (0, 1)]
    bytes_of, size = memory[0].device.bytes, market.slab_bytes
    for level in LEVELS:
        for place, other in ((0, 1), (1, 0)):
            sleep(models[place], level)
            trade.slept(place)
            assert market.use(place)[:3] == (0, 0, 0)
            assert not models[place].engine.scheduler.state.adapters.resident
            home = market.owners[place].home
            bytes_of[home.start * size : home.stop * size] ^= 0x5A  # as KV of the other one would
            assert answers(models[other].engine, numbers[other], trade) == expected[other]
            assert trade.make_room(place)
            wake(models[place])
            assert answers(models[place].engine, numbers[place], trade) == expected[place]
