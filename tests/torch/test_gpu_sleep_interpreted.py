"""A model alone with experts and adapters that sleeps, through Triton's interpreter: its memory is given back, and its
answers are the same after it has come back elsewhere. tests/gpu has whole engines on the card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.adapter_folders import adapter_arrays, write_adapter
from tests.torch.interpreted import reason_to_skip

if reason := reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

from dataclasses import replace

from paceline.config.engine import EngineConfig, GroupSpec, KVConfig, SchedulerConfig
from paceline.core.sampling import SamplingParams
from paceline.core.standing import DEVICE_LOST, WEIGHTS_DROPPED, WEIGHTS_KEPT
from paceline.engine.adapters import Adapters
from paceline.engine.engine import Engine
from paceline.factory import build_engine
from paceline.models.files.adapter_files import open_adapter
from paceline.models.files.open import open_checkpoint
from paceline.runner.gpu.adapters import AdapterRoom
from paceline.runner.gpu.build import load_parts
from paceline.runner.gpu.runner import GPURunner
from paceline.runner.gpu.slab_memory import GPUSleeper, OwnHome
from tests.torch.test_gpu_runner_interpreted import CONFIG

DEVICE = torch.device("cpu")
EXPERTS = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
TARGETS = ("q_proj", "v_proj")
GREEDY = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


def answers(engine: Engine, adapters: tuple[int, ...]) -> list[list[int]]:
    found: dict[int, list[int]] = {
        engine.add([5, 9, 30 + number], GREEDY, adapter=number)[0]: [] for number in adapters
    }
    while engine.has_requests or not engine.is_idle:
        for batch in engine.step_overlapped().tokens:
            for number, token in zip(batch.requests.tolist(), batch.tokens.tolist(), strict=True):
                found[number].append(token)
        assert engine.last_error is None, repr(engine.last_error)
    return list(found.values())


def test_a_model_alone_gives_all_its_memory_back_and_answers_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GPURunner, "_prepare", lambda self, graphs: None)
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    checkpoint = open_checkpoint(tmp_path, load_format="dummy")
    spec, home = checkpoint.spec, OwnHome(DEVICE)

    def load(into: object) -> object:
        assert into is home
        return load_parts(checkpoint, DEVICE, torch.float32, home=home)

    parts = load_parts(checkpoint, DEVICE, torch.float32, home=home)
    config = EngineConfig(
        kv=KVConfig(block_size=64, num_blocks=6, groups=(GroupSpec(),)),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=128, max_loras=1),
        depth=1,
    )
    room = AdapterRoom(places=1, max_rank=4)
    room = replace(room, memory=home.beside(room.pool_bytes(spec, torch.float32)))
    runner = GPURunner(config, spec, parts, spec.eos_token_ids, device=DEVICE, adapter_room=room)
    home.blank.append(runner.kv_bytes)
    captured: list[int] = []
    sleeper = GPUSleeper(home, load, runner, lambda: captured.append(len(captured)))
    engine = build_engine(
        config,
        runner,
        make_adapters=lambda scheduler: Adapters(
            scheduler, runner.adapters, lambda folder: open_adapter(folder, spec, 4)
        ),
    )
    arrays = adapter_arrays(spec, TARGETS, 4, seed=1)
    folder = write_adapter(tmp_path / "adapter", arrays, rank=4, targets=TARGETS)
    number = engine.adapters.load("one", folder).number
    experts = runner._decoder._layers[0].experts
    assert experts is not None
    weight = experts.weights.down.q
    expected = answers(engine, (0, number))
    assert expected[0] != expected[1]
    for level in (WEIGHTS_KEPT, WEIGHTS_DROPPED):
        engine.sleep(levels_lost=DEVICE_LOST)
        sleeper.let_go(level)
        memory = [*home._areas.values(), *home.blank]
        assert len(memory) > 6 and all(not each.untyped_storage().nbytes() for each in memory)
        assert not weight.untyped_storage().nbytes(), "stacked experts are views of what the home has"
        others = [torch.full((each.nelement(),), 0xFF, dtype=torch.uint8) for each in memory]
        engine.wake(sleeper.open())
        assert answers(engine, (0, number)) == expected
        del others
    assert captured, "memory was elsewhere"
